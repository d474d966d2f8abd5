"""Recorded traces: what an import costs and keeps, and what a model learns from them.

make smollm-model && python -m tests.benchmarks.traces --json [--trl PYTHON] [--seed 1 2 3]

`cost` is that of importing 100,000 spans. Every tool call of 300 generated traces of each format is
rendered as Hermes' and Qwen's templates do, from what was recorded and from what was imported.
`training` is that of examples/traces with SmolLM2 (`tests.benchmarks.traces_training`); `--small`
tries it in minutes, and its scores say nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from agentrl.recorded.export import export_traces
from agentrl.recorded.formats import FORMATS
from agentrl.recorded.importing import RUN, import_traces
from agentrl.store import open_store
from tests.benchmarks import traces_training
from tests.benchmarks.report import arguments, report

SPANS, TRACES = 100_000, 300
SECTIONS = ("cost", "formats", "training")
Row = dict[str, Any]
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


def conversation(rng: random.Random) -> list[Row]:
    """A question, one to three calls of a tool with their results, and an answer."""
    words = ["rug", "Ä ö", 'say "so"', "a\nb", "{}", "1.0", "\u2028", "<b>", "x" * 40, ""]
    messages: list[Row] = [{"role": "user", "content": f"question {rng.random()}"}]
    for number in range(rng.randint(1, 3)):
        arguments = {
            "text": rng.choice(words),
            "n": rng.randint(-5, 10**12),
            "deep": [{"a": None}],
            "share": rng.random(),
            "on": rng.random() < 0.5,
        }
        id = f"call_{number}_{rng.randrange(10**9)}"
        function = {"name": "find", "arguments": json.dumps(arguments, ensure_ascii=False)}
        call = {"id": id, "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": id, "content": rng.choice(words) or "-"})
    return [*messages, {"role": "assistant", "content": f"answer {rng.random()}"}]


def rendered(messages: list[Row]) -> list[str]:
    """The tool calls of the assistant as a template writes them."""
    return [
        json.dumps(
            {
                "name": call["function"]["name"],
                "arguments": json.loads(call["function"]["arguments"]),
            },
            ensure_ascii=False,
        )
        for message in messages
        for call in message.get("tool_calls") or ()
    ]


def codex(id: str, messages: list[Row]) -> Iterator[Row]:
    yield {"type": "session_meta", "payload": {"id": id, "cli_version": "0.171.0"}}
    for message in messages:
        if message["role"] == "tool":
            output = {"call_id": message["tool_call_id"], "output": message["content"]}
            yield {"type": "response_item", "payload": {"type": "function_call_output", **output}}
            continue
        for call in message.get("tool_calls") or ():
            item = {"type": "function_call", "call_id": call["id"], **call["function"]}
            yield {"type": "response_item", "payload": item}
        if message["content"]:
            kind = "output_text" if message["role"] == "assistant" else "input_text"
            content = [{"type": kind, "text": message["content"]}]
            item = {"type": "message", "role": message["role"], "content": content}
            yield {"type": "response_item", "payload": item}


def claude(id: str, messages: list[Row]) -> Iterator[Row]:
    for number, message in enumerate(messages):
        content: Any = message["content"]
        if message["role"] == "tool":
            part = {"type": "tool_result", "tool_use_id": message["tool_call_id"]}
            content = [part | {"content": message["content"]}]
        elif calls := message.get("tool_calls"):
            content = [
                {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": call["function"]["name"],
                    "input": json.loads(call["function"]["arguments"]),
                }
                for call in calls
            ]
        elif message["role"] == "assistant":
            content = [{"type": "text", "text": message["content"]}]
        role = "assistant" if message["role"] == "assistant" else "user"
        body = {"role": role, "content": content, "id": f"m{number}", "model": "m"}
        yield {"type": role, "sessionId": id, "uuid": f"{id}-{number}", "message": body}


def qwen(id: str, messages: list[Row]) -> Iterator[Row]:
    for number, message in enumerate(messages):
        kind, part = message["role"], {"text": message["content"]}
        if kind == "tool":
            response = {"output": message["content"]}
            part = {
                "functionResponse": {
                    "id": message["tool_call_id"],
                    "name": "find",
                    "response": response,
                }
            }
        elif calls := message.get("tool_calls"):
            arguments = json.loads(calls[0]["function"]["arguments"])
            part = {"functionCall": {"id": calls[0]["id"], "name": "find", "args": arguments}}
        kind = "tool_result" if kind == "tool" else kind
        content = {"role": "model" if kind == "assistant" else "user", "parts": [part]}
        yield {"type": kind, "sessionId": id, "uuid": f"{id}-{number}", "message": content}


def opencode(id: str, messages: list[Row]) -> Iterator[Row]:
    results = {m["tool_call_id"]: m["content"] for m in messages if m["role"] == "tool"}
    turns_written = []
    for message in messages:
        if message["role"] == "tool":
            continue
        parts: list[Row] = (
            [{"type": "text", "text": message["content"]}] if message["content"] else []
        )
        for call in message.get("tool_calls") or ():
            state = {
                "status": "completed",
                "output": results[call["id"]],
                "input": json.loads(call["function"]["arguments"]),
            }
            parts.append({"type": "tool", "tool": "find", "callID": call["id"], "state": state})
        turns_written.append({"info": {"role": message["role"], "modelID": "m"}, "parts": parts})
    yield {"info": {"id": id, "version": "1.18.33"}, "messages": turns_written}


def agents(id: str, messages: list[Row]) -> Iterator[Row]:
    yield {"object": "trace", "id": id}
    for number, (prompt, answer) in enumerate(turns(messages)):
        data = {"type": "generation", "input": prompt, "output": [answer], "model": "m"}
        at = f"2026-01-01T00:00:{number:02d}+00:00"
        yield {
            "object": "trace.span",
            "id": f"{id}-{number}",
            "trace_id": id,
            "parent_id": None if not number else f"{id}-0",
            "span_data": data,
            "started_at": at,
            "ended_at": at,
        }


def completions(id: str, messages: list[Row]) -> Iterator[Row]:
    for number, (prompt, answer) in enumerate(turns(messages)):
        yield {
            "object": "chat.completion",
            "id": f"{id}-{number}",
            "model": "m",
            "messages": prompt,
            "choices": [{"message": answer, "finish_reason": "stop"}],
            "tools": [TOOL],
            "metadata": {"trace_id": id},
            "created": 1_700_000_000 + number,
        }


def numbered(id: str, messages: list[Row]) -> Iterator[Row]:
    """The older form of the GenAI conventions."""
    spans = []
    for number, (prompt, answer) in enumerate(turns(messages)):
        attributes: Row = {"llm.request.type": "chat", "gen_ai.request.model": "m"}
        for prefix, messages_of in (("gen_ai.prompt", prompt), ("gen_ai.completion", [answer])):
            for index, message in enumerate(messages_of):
                fields_of = {
                    "role": message["role"],
                    "content": message.get("content"),
                    "tool_call_id": message.get("tool_call_id"),
                }
                for at, call in enumerate(message.get("tool_calls") or ()):
                    fields = {"id": call["id"], **call["function"]}
                    fields_of |= {f"tool_calls.{at}.{key}": value for key, value in fields.items()}
                attributes |= {
                    f"{prefix}.{index}.{k}": v for k, v in fields_of.items() if v is not None
                }
        pairs = [{"key": key, "value": {"stringValue": value}} for key, value in attributes.items()]
        spans.append(
            {
                "traceId": id,
                "spanId": f"{number + 1:016x}",
                "name": "chat",
                "attributes": pairs,
                "parentSpanId": f"{1:016x}" if number else "",
                "startTimeUnixNano": str(10**18 + number),
                "endTimeUnixNano": str(10**18 + number),
            }
        )
    yield {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}


def turns(messages: list[Row]) -> Iterator[tuple[list[Row], Row]]:
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            yield messages[:index], message


WRITTEN: dict[str, Callable[[str, list[Row]], Iterator[Row]]] = {
    "codex": codex,
    "claude": claude,
    "qwen": qwen,
    "opencode": opencode,
    "openai agents": agents,
    "openai completions": completions,
    "otlp, numbered": numbered,
}
EXPORTED = {
    "otlp": "otlp",
    "spans": "phoenix",
    "langsmith": "langsmith",
    "langfuse": "langfuse",
    "atif": "atif",
    "chats": "chats",
}


async def kept(folder: Path, count: int = TRACES) -> dict[str, Row]:
    """By format: how many tool calls were recorded, and how many of them are as they were."""
    rng = random.Random(0)
    conversations = {f"{number + 1:032x}": conversation(rng) for number in range(count)}
    sent = sorted(
        text
        for conversation_messages in conversations.values()
        for text in rendered(conversation_messages)
    )
    rows = [
        {"id": id, "messages": conversation_messages, "tools": [TOOL]}
        for id, conversation_messages in conversations.items()
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    await import_traces(folder / "chats.jsonl", f"sqlite:///{folder}/chats.db")
    by_format = {}
    for name, form in EXPORTED.items():
        out = folder / name / "out.jsonl"
        await export_traces(f"sqlite:///{folder}/chats.db", RUN, form, out)
        by_format[name] = await compared(out.parent, folder / f"{name}.db", sent)
    for name, write in WRITTEN.items():
        (folder / name).mkdir()
        for id, conversation_messages in conversations.items():
            lines = "".join(json.dumps(row) + "\n" for row in write(id, conversation_messages))
            (folder / name / f"{id}.jsonl").write_text(lines)
        by_format[name] = await compared(folder / name, folder / f"{name}.db", sent)
    lost = {form.name: list(form.lost) for form in FORMATS}
    return {
        name: counts | {"lost": lost[name.partition(",")[0]]} for name, counts in by_format.items()
    }


async def compared(source: Path, out: Path, sent: list[str]) -> Row:
    await import_traces(source, f"sqlite:///{out}")
    async with open_store(f"sqlite:///{out}", readonly=True) as store:
        calls = await store.calls([row.id for row in await store.rollouts(RUN)])
    answered = [call for rollout_calls in calls.values() for call in rollout_calls]
    imported = sorted(text for call in answered for text in rendered([call.answer or {}]))
    missing = list(sent)
    same = sum(text in missing and (missing.remove(text) is None) for text in imported)
    return {
        "tool_calls": len(sent),
        "the_same": same,
        "claimed_exact": sum(c.exact for c in answered),
    }


def write_spans(path: Path, count: int) -> None:
    """Spans of a graph of six nodes for each trace, as OpenInference records them, shuffled so that
    those of a trace are apart."""
    rng, lines = random.Random(0), list[Row]()
    for number in range(count // 10):
        trace = f"{number + 1:032x}"
        for index in range(10):
            kind = ("AGENT", "CHAIN", "LLM", "TOOL")[min(index, 2 + index % 2)]
            attributes: Row = {
                "openinference.span.kind": kind,
                "input.value": f"question {number}",
                "output.value": f"answer {index}",
                "tool.name": "find",
                "metadata": json.dumps({"langgraph_node": f"node{index % 3}"}),
            }
            if kind == "LLM":
                attributes |= {
                    "llm.input_messages.0.message.role": "user",
                    "llm.input_messages.0.message.content": f"question {number} " * 20,
                    "llm.output_messages.0.message.role": "assistant",
                    "llm.output_messages.0.message.content": f"answer {index} " * 10,
                }
            lines.append(
                {
                    "traceId": trace,
                    "spanId": f"{number * 10 + index + 1:016x}",
                    "name": kind,
                    "parentSpanId": f"{number * 10 + 1:016x}" if index else "",
                    "startTimeUnixNano": str(10**18 + number * 1000 + index),
                    "endTimeUnixNano": str(10**18 + number * 1000 + index + 5),
                    "attributes": [
                        {"key": k, "value": {"stringValue": v}} for k, v in attributes.items()
                    ],
                }
            )
    rng.shuffle(lines)
    rest = iter(lines)
    with path.open("w") as file:
        while batch := [*islice(rest, 200)]:
            file.write(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": batch}]}]}) + "\n")


def cost(folder: Path, count: int = SPANS) -> Row:
    """Seconds and memory of an import in a process of its own. The spans are written by another:
    the memory of a process begins with that of the one which has forked it."""
    written = get_context("spawn").Process(target=write_spans, args=(folder / "spans.jsonl", count))
    written.start()
    written.join()
    command = [sys.executable, "-m", "agentrl", "traces", "import", str(folder / "spans.jsonl")]
    started = time.monotonic()
    imported = subprocess.Popen([*command, str(folder / "spans.db")], stdout=sys.stderr)
    _, status, used = os.wait4(imported.pid, 0)
    assert status == 0
    seconds = time.monotonic() - started
    return {
        "spans": count,
        "seconds": seconds,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "megabytes": used.ru_maxrss / 1024,
        "bytes": (folder / "spans.jsonl").stat().st_size,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--seed", type=int, nargs="+", default=[1, 2, 3], help="of training")
    parser.add_argument("--model", type=Path, default=traces_training.MODEL)
    parser.add_argument("--trl", metavar="PYTHON", help="a Python with TRL, to train beside")
    parser.add_argument("--small", action="store_true", help="little of everything")
    parser.add_argument("--set", nargs="*", default=[], metavar="SETTING=VALUE", help="of the runs")
    parser.add_argument("--folder", type=Path, help="what training writes is kept here")
    options = parser.parse_args()
    if "training" in options.only and not options.model.is_dir():
        raise SystemExit(f"{options.model} is missing: make smollm-model")
    figures: Row = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if "cost" in options.only:
            figures["cost"] = cost(folder, SPANS // 100 if options.small else SPANS)
        if "formats" in options.only:
            figures["formats"] = asyncio.run(
                kept(folder, TRACES // 30 if options.small else TRACES)
            )
        if "training" in options.only:
            training_folder = (options.folder or folder).resolve()
            figures["training"] = traces_training.figures(options, training_folder)
    report(figures, as_json=options.json)


if __name__ == "__main__":
    main()
