"""Whole conversations: Harbor's trajectories (ATIF), and rows of plain chats."""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import msgspec

from agentrl.recorded import messages
from agentrl.recorded.formats.transcripts import Trace, Turns
from agentrl.recorded.nodes import Issues, Note, Object, first, number, obj, parsed, rows, usage

LAST_ATIF = (1, 8)


def is_atif(row: Object) -> bool:
    """Whether it is a trajectory of Harbor."""
    return str(row.get("schema_version") or "").startswith("ATIF") and isinstance(
        row.get("steps"), list
    )


def read_atif(row: Object, issues: Issues, name: str = "") -> Iterator[Trace]:
    """A trajectory of Harbor; trajectories of subagents become separate traces."""
    version = str(row["schema_version"])
    if (
        not (match := re.fullmatch(r"ATIF-v(\d+)\.(\d+)", version))
        or (int(match[1]), int(match[2])) > LAST_ATIF
    ):
        issues.add(f"the version {version[:40]} is not known; it is read as ATIF-v1.8")
    agent = obj(row.get("agent"))
    trace = str(first(row, "trajectory_id", "session_id") or name)
    role = str(agent.get("name") or "agent")
    turns = Turns(trace, role, role)
    turns.tools = messages.tools_of(agent.get("tool_definitions"))
    for step in rows(row.get("steps")):
        _step(turns, obj(step), str(agent.get("model_name") or ""))
    total = obj(row.get("final_metrics"))
    about = usage(
        {"input": total.get("total_prompt_tokens"), "output": total.get("total_completion_tokens")},
        total.get("total_cost_usd"),
    )
    done = turns.done(about | {"version": f"{version} {agent.get('version') or ''}".strip()})
    rewards = obj(obj(row.get("extra")).get("rewards"))
    scores = [(str(key), number(value)) for key, value in rewards.items()]
    yield done + [
        Note(trace=trace, node="", name=key, value=value)
        for key, value in scores
        if value is not None
    ]
    for index, inner in enumerate(rows(row.get("subagent_trajectories"))):
        if is_atif(obj(inner)):
            yield from read_atif(obj(inner), issues, f"{trace}-{index}")


def _step(turns: Turns, step: Object, model: str) -> None:
    content = messages.messages_of([{"role": "user", "content": step.get("message")}])
    text = content[0]["content"] if content else ""
    if step.get("source") != "agent":
        turns.at(step.get("timestamp"))
        turns.say({"role": "system" if step.get("source") == "system" else "user", "content": text})
    else:
        turns.model = str(step.get("model_name") or model)
        message: Object = {"role": "assistant", "content": text or ""}
        if thought := step.get("reasoning_content"):
            message["reasoning_content"] = thought
        if called := [obj(call) for call in rows(step.get("tool_calls"))]:
            message["tool_calls"] = [
                messages.tool_call(
                    c.get("tool_call_id"), c.get("function_name"), c.get("arguments")
                )
                for c in called
            ]
            message["content"] = text or None
        counted = obj(step.get("metrics"))
        one_call = not step.get("is_copied_context") and first(step, "llm_call_count") in (None, 1)
        turns.answer(
            message, step.get("timestamp"), usage(counted, counted.get("cost_usd")), exact=one_call
        )
    for result in rows(obj(step.get("observation")).get("results")):
        result = obj(result)
        if result.get("source_call_id"):
            turns.result(
                str(result["source_call_id"]), result.get("content"), step.get("timestamp")
            )
        elif result.get("content"):
            turns.say({"role": "user", "content": messages.content_text(result["content"])})


def is_chat(row: Object) -> bool:
    """Whether it is a row of a chat."""
    return isinstance(parsed(first(row, *CHATS)), list)


CHATS = ("messages", "conversations", "conversation", "trajectory")
FEEDBACK = ("reward", "score", "label", "rating", "resolved")


def read_chat(row: Object, issues: Issues, name: str = "") -> Iterator[Trace]:
    """A row of `messages` (or ShareGPT's `conversations`), with `tools` and a `system` prompt if
    there are any. A number in `reward`, `score`, `label`, `rating` or `resolved`, or in `feedback`,
    is feedback."""
    chat = [{"role": m["from"], **m} if "from" in obj(m) else m for m in rows(first(row, *CHATS))]
    trace = str(first(row, "id", "session_id", "trace_id", "conversation_id") or "")
    trace = trace or sha256(msgspec.json.encode(chat)).hexdigest()[:32]
    turns = Turns(
        trace, str(row.get("name") or "chat"), str(first(row, "role", "agent", "node") or "agent")
    )
    turns.tools = messages.tools_of(row.get("tools"))
    turns.model = str(row.get("model") or "")
    if isinstance(system := row.get("system"), str) and system:
        turns.say({"role": "system", "content": system})
    imitate = row.get("imitate")
    for index, message in enumerate(messages.messages_of(chat)):
        wanted = message.pop("weight", 1) != 0  # OpenAI's files for fine-tuning weigh answers
        if message["role"] == "assistant" and turns.messages:
            wanted = index in imitate if isinstance(imitate, list) else wanted
            turns.answer(message, exact=wanted)
        elif message["role"] == "tool":
            turns.result(message["tool_call_id"], message["content"], name=message.get("name", ""))
        else:
            turns.say(message)
    done = turns.done()
    feedback: dict[str, Any] = {
        key: row[key] for key in FEEDBACK if number(row.get(key)) is not None
    }
    feedback |= {
        key: value for key, value in obj(row.get("feedback")).items() if number(value) is not None
    }
    done += [
        Note(trace=trace, node="", name=key, value=number(value)) for key, value in feedback.items()
    ]
    yield done
