"""Valid exports that are easily read wrongly, and files that cannot be read."""

from __future__ import annotations

import base64
import csv
import gzip
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.images import SCHEME
from agentrl.core.types import Trace
from agentrl.recorded.importing import Imported, import_traces
from agentrl.recorded.nodes import Issues, Node
from agentrl.recorded.tree import tree_of
from tests.agentrl.recorded.builders import Row, imported, llm, run, user
from tests.runners.gateway.images.pictures import picture

FIXTURES = Path(__file__).with_name("fixtures")


async def of_rows(out: Path, *rows: Row) -> tuple[Imported, Trace]:
    path = out / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done, (trace,) = await imported(path, out)
    return done, trace


def to_csv(path: Path, rows: list[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*dict.fromkeys(key for row in rows for key in row)])
        writer.writeheader()
        for row in rows:
            texts = {k: json.dumps(v) if isinstance(v, dict | list) else v for k, v in row.items()}
            writer.writerow(texts)


@pytest.mark.parametrize("zipped", [False, True])
async def test_langfuse_exports_in_csv_are_read(zipped: bool, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    about = {"trace_id": "t", "project_id": "p", "level": "DEFAULT"}
    at = {"start_time": "2026-01-01 00:00:01.500000", "end_time": "2026-01-01 00:00:02"}
    called = {"provided_model_name": "big", "usage_details": {"input": 7}, "total_cost": "0.25"}
    observations = [
        about | at | {"id": "a", "type": "SPAN", "name": "shop", "input": {"q": "x, y"}},
        about | at | called | {"id": "b", "type": "GENERATION", "parent_observation_id": "a",
         "input": user("q"), "output": {"role": "assistant", "content": 'say "a"\nb'},
         "metadata": {"langgraph_node": "seller"}},
    ]  # fmt: skip
    to_csv(source / "observations.csv", observations)
    score = {"id": "s", "trace_id": "t", "name": "correct", "value": 1, "data_type": "BOOLEAN"}
    to_csv(source / "scores.csv", [score])
    if zipped:
        for path in [*source.iterdir()]:
            (source / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    done, (trace,) = await imported(source, tmp_path)
    assert done.issues.lines() == []
    (call,) = trace.transitions
    assert (call.role, call.policy) == ("seller", "big")
    assert call.answer == {"role": "assistant", "content": 'say "a"\nb'}
    assert call.started == 1767225601.5
    assert trace.rollout.task["input"] == {"q": "x, y"}
    assert [(row.name, row.value) for row in trace.rollout.rewards] == [("correct", 1.0)]
    assert [span.attributes.get("gen_ai.usage.cost") for span in trace.spans] == [None, 0.25]


def _varint(size: int) -> bytes:
    found = b""
    while size > 127:
        found, size = found + bytes([size & 127 | 128]), size >> 7
    return found + bytes([size])


FRAMES: dict[str, Any] = {
    "collector": lambda body: len(body).to_bytes(4, "big") + body,
    "specification": lambda body: _varint(len(body)) + body,
}


@pytest.mark.parametrize("frame", ["one request", *FRAMES])
async def test_otlp_in_protobuf_is_read(frame: str, tmp_path: Path) -> None:
    from google.protobuf import json_format
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service

    path = tmp_path / "spans.pb"
    lines = (FIXTURES / "openinference.jsonl").read_text().splitlines()
    whole, bodies = service.ExportTraceServiceRequest(), []
    for row in map(json.loads, lines):
        for span in [s for r in row["resourceSpans"] for c in r["scopeSpans"] for s in c["spans"]]:
            for key in {"traceId", "spanId", "parentSpanId"} & span.keys():
                span[key] = base64.b64encode(bytes.fromhex(span[key])).decode()
        request = json_format.ParseDict(row, service.ExportTraceServiceRequest())
        whole.MergeFrom(request)
        bodies.append(request.SerializeToString())
    if frame == "one request":
        path.write_bytes(whole.SerializeToString())
    else:
        path.write_bytes(b"".join(map(FRAMES[frame], bodies)))
    done, traces = await imported(path, tmp_path)
    assert done.issues.lines() == []
    (tmp_path / "traces.db").unlink()
    _, expected = await imported(FIXTURES / "openinference.jsonl", tmp_path)
    assert [t.rollout.id for t in traces] == [t.rollout.id for t in expected]
    assert [t.transitions[-1].answer for t in traces]


async def test_files_that_cannot_be_read_are_sentences(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    good = (FIXTURES / "langsmith.jsonl").read_bytes()
    (source / "good.jsonl").write_bytes(good)
    (source / "a.parquet").write_bytes(b"PAR1 no")
    zipped = bytearray(gzip.compress(good))
    zipped[len(zipped) // 2 :] = bytes(255 - byte for byte in zipped[len(zipped) // 2 :])
    (source / "b.jsonl.gz").write_bytes(zipped)
    (source / "c.pb").write_bytes(b"\x00\x00\x01\x00cut")
    (source / "d.csv").write_text("a,b\n1\n")
    (source / "e.zip").write_bytes(b"PK")
    with sqlite3.connect(source / "opencode.db") as database:
        database.execute("create table session (id, parent_id, version, time_created)")
        database.execute("create table message (id, session_id, data, time_created)")
        database.execute("create table part (id, message_id, data)")
        database.execute("insert into session values ('s', null, '1', 1)")
        database.execute("""insert into message values ('m', 's', '{"time": 3}', 1)""")
        database.execute("""insert into part values ('p', 'm', '{"type": "tool", "state": 3}')""")
    done, traces = await imported(source, tmp_path)
    assert len(traces) >= 2
    assert done.issues.counts["a file of a kind that is not read is left out"] == 1
    assert done.issues.counts["a file cannot be read"] == 4
    shown = [text.partition(":")[0] for text in done.issues.examples["a file cannot be read"]]
    assert shown == ["a.parquet", "b.jsonl.gz", "c.pb"]  # and d.csv


async def test_a_json_file_with_half_a_character_is_read(tmp_path: Path) -> None:
    row = run("t", "chain", inputs={"input": "x\ud83d"}, outputs={"output": "y"})
    (tmp_path / "a.json").write_text(json.dumps([row]))
    done, (trace,) = await imported(tmp_path / "a.json", tmp_path)
    assert done.issues.lines() == []
    assert trace.rollout.task["input"] == "x?"


async def test_json_that_is_wrong_is_not_read_on(tmp_path: Path) -> None:
    from agentrl.recorded import sources

    class Text:
        asked = 0

        def read(self, size: int) -> str:
            self.asked += 1
            return '{"a": wrong, "b": "' + "x" * size if self.asked == 1 else "x" * size

    text, issues = Text(), Issues()
    assert [*sources._values(tmp_path / "a.json", text, issues)] == []  # type: ignore[arg-type]
    assert text.asked == 1
    assert "a.json" in issues.lines()[0]


async def test_lines_of_transcripts_elsewhere_are_left_out(tmp_path: Path) -> None:
    chat = {"messages": [*user("a"), {"role": "assistant", "content": "b"}]}
    line = {"type": "session_meta", "payload": {}}
    rows = [{**chat, "id": str(number)} for number in range(25)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, line]))
    done, _ = await imported(path, tmp_path)
    assert done.issues.counts["a line of codex is not in a transcript and is left out"] == 1


async def test_feedback_about_nothing_is_left_out(tmp_path: Path) -> None:
    rows = [
        run("t", "chain", inputs={"input": "x"}, outputs={"output": "y"}),
        {"key": "correct", "run_id": "elsewhere", "score": 1},
        {"key": "correct", "run_id": "lost", "trace_id": "t", "score": 1},
    ]
    done, trace = await of_rows(tmp_path, *rows)
    assert trace.rollout.rewards == []
    assert {*done.issues.counts} == {
        "feedback is about no trace of the source and is left out",
        "feedback is about a step that was not recorded and is left out",
    }


async def test_feedback_is_counted_once_and_by_person(tmp_path: Path) -> None:
    root = run("t", "chain", inputs={"input": "x"}, feedback_stats={"correct": {"n": 1, "avg": 1}})
    first, second = ({"id": id, "key": "correct", "run_id": "t", "score": 1} for id in "ab")
    _, trace = await of_rows(tmp_path, root, first, first)
    assert [row.value for row in trace.rollout.rewards] == [1.0]
    done, trace = await of_rows(tmp_path, root, second | {"score": 0})
    assert done.traces == 0
    assert sorted(row.value for row in trace.rollout.rewards) == [0.0, 1.0]


async def test_a_category_without_a_number_is_no_zero(tmp_path: Path) -> None:
    span = {"id": "a", "traceId": "t", "type": "SPAN", "name": "a"}
    score: Row = {"id": "s", "traceId": "t", "name": "kind", "dataType": "CATEGORICAL"}
    score |= {"value": 0, "stringValue": "rude"}
    named = score | {"id": "r", "name": "rated", "configId": "c", "value": 2}
    _, trace = await of_rows(tmp_path, span, score, named)
    assert [(row.name, row.value) for row in trace.rollout.rewards] == [("rated", 2.0)]


async def test_langfuse_traces_keep_their_own_input(tmp_path: Path) -> None:
    call = {"id": "a", "type": "GENERATION", "name": "m", "input": user("long prompt"),
            "output": "said"}  # fmt: skip
    row = {"id": "t", "name": "shop", "input": "a rug?", "output": "35", "observations": [call]}
    _, trace = await of_rows(tmp_path, row)
    assert (trace.rollout.task["input"], trace.rollout.result) == ("a rug?", "35")
    assert [span.name for span in trace.spans] == ["shop", "m"]


async def test_answers_of_tools_are_not_taken_for_tools(tmp_path: Path) -> None:
    answer = {"role": "tool", "tool_call_id": "c", "content": '{"name": "a", "parameters": {}}'}
    called = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    asked = [*user("q"), {"role": "assistant", "content": None, "tool_calls": [called]}, answer]
    row = {"id": "a", "traceId": "t", "type": "GENERATION", "input": asked, "output": "yes"}
    _, trace = await of_rows(tmp_path, row)
    assert [m["role"] for m in trace.transitions[0].messages] == ["user", "assistant", "tool"]
    assert trace.transitions[0].tools == []


def otel(id: str, **known: Any) -> Row:
    context = {"trace_id": "1" * 32, "span_id": id * 16}
    return {"name": "chat", "context": context, "attributes": known}


async def test_of_several_choices_the_first_is_the_answer(tmp_path: Path) -> None:
    def said(text: str) -> Row:
        parts = [{"type": "text", "content": text}]
        return {"role": "assistant", "parts": parts, "finish_reason": "length"}

    known = {
        "gen_ai.operation.name": "chat",
        "gen_ai.input.messages": json.dumps([{"role": "user", "parts": []}]),
        "gen_ai.output.messages": json.dumps([said("one"), said("two")]),
    }
    _, trace = await of_rows(tmp_path, otel("2", **known))
    (call,) = trace.transitions
    assert call.answer == {"role": "assistant", "content": "one"}
    assert call.finish == "length"


async def test_items_of_a_response_are_one_answer(tmp_path: Path) -> None:
    out = "llm.output_messages"
    known = {
        "openinference.span.kind": "LLM",
        "output.value": json.dumps({"object": "response", "output": []}),
        "llm.input_messages.0.message.role": "user",
        "llm.input_messages.0.message.content": "q",
        f"{out}.0.message.role": "assistant",
        f"{out}.0.message.content": "I look.",
        f"{out}.1.message.role": "assistant",
        f"{out}.1.message.tool_calls.0.tool_call.id": "c",
        f"{out}.1.message.tool_calls.0.tool_call.function.name": "find",
        f"{out}.1.message.tool_calls.0.tool_call.function.arguments": "{}",
    }
    _, trace = await of_rows(tmp_path, otel("2", **known))
    answer = trace.transitions[0].answer or {}
    assert answer["content"] == "I look."
    assert [call["function"]["name"] for call in answer["tool_calls"]] == ["find"]


async def test_responses_of_langsmith_keep_instructions(tmp_path: Path) -> None:
    said = [{"type": "message", "role": "assistant",
             "content": [{"type": "output_text", "text": "a"}]}]  # fmt: skip
    outputs = {"object": "response", "output": said, "status": "incomplete",
               "incomplete_details": {"reason": "max_output_tokens"}}  # fmt: skip
    row = run("t", "llm", inputs={"input": "q", "instructions": "Be kind."}, outputs=outputs)
    _, trace = await of_rows(tmp_path, row)
    (call,) = trace.transitions
    assert call.messages == [{"role": "system", "content": "Be kind."}, *user("q")]
    assert call.finish == "max_output_tokens"
    assert (trace.rollout.task["input"], trace.rollout.result) == ("q", "a")


async def test_a_custom_tool_call_keeps_name_and_input(tmp_path: Path) -> None:
    called = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "--- a"}}
    _, trace = await of_rows(
        tmp_path, llm("t", "a", user("q"), {"content": None, "tool_calls": [called]})
    )
    (call,) = (trace.transitions[0].answer or {})["tool_calls"]
    assert call["function"] == {"name": "patch", "arguments": '{"input": "--- a"}'}


async def test_answers_of_weight_zero_are_not_imitated(tmp_path: Path) -> None:
    talk = [*user("a"), {"role": "assistant", "content": "b", "weight": 0},
            *user("c"), {"role": "assistant", "content": "d", "weight": 1}]  # fmt: skip
    _, trace = await of_rows(tmp_path, {"messages": talk})
    assert [(call.answer or {})["content"] for call in trace.transitions] == ["d"]


async def test_weights_and_indices_are_those_of_their_messages(tmp_path: Path) -> None:
    """Results of tools within a message become messages; a system prompt comes before."""
    call = {"type": "tool_use", "id": "c", "name": "find", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "r"}
    talk = [
        *user("q"),
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
        {"role": "assistant", "content": "bad", "weight": 0},
        *user("more"),
        {"role": "assistant", "content": "ok", "weight": 1},
    ]
    (folder := tmp_path / "a").mkdir()
    _, trace = await of_rows(folder, {"messages": talk})
    assert [(call.answer or {})["content"] for call in trace.transitions] == [None, "ok"]
    assert trace.transitions[1].messages[4] == {"role": "assistant", "content": "bad"}
    (folder := tmp_path / "b").mkdir()
    pair = [*user("q"), {"role": "assistant", "content": "a"}]
    _, trace = await of_rows(folder, {"system": "Be kind.", "messages": pair * 2, "imitate": [1]})
    assert [len(call.messages) for call in trace.transitions] == [2]


def claude(uuid: str, parent: str | None, role: str, text: str, **more: Any) -> Row:
    message = {"role": role, "content": [{"type": "text", "text": text}], "id": uuid, "model": "m"}
    about = {"type": role, "sessionId": "s", "uuid": uuid, "parentUuid": parent}
    return about | {"message": message | more.pop("message", {})} | more


async def test_claude_code_goes_back_and_begins_anew(tmp_path: Path) -> None:
    summary = {"type": "system", "subtype": "compact_boundary", "sessionId": "s", "uuid": "e"}
    rows = [
        claude("z", None, "user", "Caveat", isMeta=True),
        claude("a", "z", "user", "first"),
        claude("b", "a", "assistant", "one"),
        claude("c", "b", "user", "wrong way"),
        claude("d", "c", "assistant", "two"),
        claude("c2", "b", "user", "other way"),
        claude("d2", "c2", "assistant", "three"),
        claude("d3", "d2", "assistant", "No response.", message={"model": "<synthetic>"}),
        summary | {"parentUuid": None},
        claude("f", "e", "user", "summary", isCompactSummary=True),
        claude("g", "f", "assistant", "four"),
    ]
    _, trace = await of_rows(tmp_path, *rows)
    shown = [[m["content"] for m in call.messages] for call in trace.transitions]
    assert shown == [
        ["Caveat", "first"],
        ["Caveat", "first", "one", "wrong way"],
        ["Caveat", "first", "one", "other way"],
        ["summary"],
    ]
    assert trace.rollout.task["input"] == "first"


async def test_of_two_results_only_one_has_failed(tmp_path: Path) -> None:
    calls = [{"type": "tool_use", "id": id, "name": "f", "input": {}} for id in "xy"]
    results = [
        {"type": "tool_result", "tool_use_id": "x", "content": "no", "is_error": True},
        {"type": "tool_result", "tool_use_id": "y", "content": "yes"},
    ]
    rows = [
        claude("a", None, "user", "q"),
        claude("b", "a", "assistant", "", message={"content": calls}),
        claude("c", "b", "user", "", message={"content": results}),
    ]
    _, trace = await of_rows(tmp_path, *rows)
    assert [span.ok for span in trace.spans if span.kind == "tool"] == [False, True]


async def test_a_session_without_an_answer_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(claude("a", None, "user", "q")) + "\n")
    done = await import_traces(tmp_path / "a.jsonl", f"sqlite:///{tmp_path}/traces.db")
    assert done.traces == 0
    assert done.issues.counts["a conversation has no answer of a model and is left out"] == 1


async def test_images_named_by_digests_stop_no_import(tmp_path: Path) -> None:
    part = {"type": "image_url", "image_url": {"url": SCHEME + "0" * 64}}
    asked = [{"role": "user", "content": [part]}]
    done, trace = await of_rows(tmp_path, llm("t", "a", asked, {"content": "b"}))
    assert trace.transitions[0].messages[0]["content"] == [{"type": "text", "text": "[image]"}]
    assert done.issues.counts["an image is named by its digest alone and is a text"] == 1


async def test_numbers_without_bound_stop_no_import(tmp_path: Path) -> None:
    row = llm("t", "a", user("q"), {"content": "b"})
    row["extra"]["invocation_params"] = {"max_tokens": 1e299, "temperature": 10**400}
    _, trace = await of_rows(tmp_path, row)
    assert trace.transitions[0].sampling.max_tokens is None


class Id(str):
    """An id that counts its comparisons."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Id.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_deep_and_wide_trees_take_linear_time() -> None:
    count = 1000
    deep = [Node("t", Id(n), Id(n + 1), "a") for n in range(count)] + [Node("t", Id(count))]
    wide = [Node("t", Id(f"w{n}"), Id(f"lost{n}"), "a") for n in range(count)]
    tree = tree_of([*deep, *wide], Issues())
    assert tree
    assert len(tree.nodes) == 2 * count + 1
    assert Id.compared < 100 * count


async def test_langfuse_keeps_the_system_prompt_and_data(tmp_path: Path) -> None:
    about = {"type": "GENERATION", "traceId": "t", "id": "o", "name": "g"}
    body = {"system": "Be kind.", "messages": user("q"), "tools": [{"name": "find"}]}
    _, trace = await of_rows(tmp_path, about | {"input": body, "output": '{"city": "Paris"}'})
    (call,) = trace.transitions
    assert call.messages == [{"role": "system", "content": "Be kind."}, *user("q")]
    assert [tool["function"]["name"] for tool in call.tools] == ["find"]
    assert (call.answer or {})["content"] == '{"city": "Paris"}'


async def test_numbered_attributes_keep_thoughts_and_results(tmp_path: Path) -> None:
    """OpenInference of Anthropic, and OpenLLMetry, whose thoughts are a choice of their own."""
    asked, said = "llm.input_messages", "llm.output_messages.0.message"
    oi = {
        "openinference.span.kind": "LLM",
        f"{asked}.0.message.role": "user",
        f"{asked}.0.message.content": '[{"a": 1}]',
        f"{said}.role": "assistant",
        f"{said}.content": "ok",
        f"{said}.contents.0.message_content.type": "reasoning",
        f"{said}.contents.0.message_content.text": "hm",
    }
    result = [{"type": "tool_result", "tool_use_id": "c", "content": "r"}]
    lm = {
        "llm.request.type": "chat",
        "gen_ai.prompt.0.role": "user",
        "gen_ai.prompt.0.content": json.dumps(result),
        "gen_ai.completion.0.role": "thinking",
        "gen_ai.completion.0.content": "hm",
        "gen_ai.completion.1.role": "assistant",
        "gen_ai.completion.1.content": "ok",
        "gen_ai.completion.1.finish_reason": "max_tokens",
    }
    _, trace = await of_rows(tmp_path, otel("2", **oi), otel("3", **lm))
    calls = {call.span: call for call in trace.transitions}
    for call in calls.values():
        answer = {"role": "assistant", "content": "ok", "reasoning_content": "hm"}
        assert call.answer == answer
    assert calls["3" * 16].finish == "max_tokens"
    assert calls["2" * 16].messages == user('[{"a": 1}]')  # a text that happens to be JSON
    assert calls["3" * 16].messages == [{"role": "tool", "tool_call_id": "c", "content": "r"}]


async def test_what_numbered_attributes_lack_is_read_from_the_output(tmp_path: Path) -> None:
    """OpenInference leaves out thoughts and invalid calls of LangChain."""
    kwargs = {
        "type": "ai",
        "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "ok"}],
    }
    output = {"generations": [[{"text": "ok", "message": {"lc": 1, "kwargs": kwargs}}]]}
    known = {
        "openinference.span.kind": "LLM",
        "llm.input_messages.0.message.role": "user",
        "llm.input_messages.0.message.content": "q",
        "llm.output_messages.0.message.role": "assistant",
        "llm.output_messages.0.message.content": "ok",
        "output.value": json.dumps(output),
    }
    _, trace = await of_rows(tmp_path, otel("2", **known))
    answer = {"role": "assistant", "content": "ok", "reasoning_content": "hm"}
    assert trace.transitions[0].answer == answer


@pytest.mark.parametrize(
    ("asked", "answered", "kind"),
    [
        ("llm.input_messages.{}.message", "llm.output_messages.0.message", "openinference"),
        ("gen_ai.prompt.{}", "gen_ai.completion.0", "openllmetry"),
    ],
)
async def test_a_call_without_its_first_messages_is_no_call(
    asked: str, answered: str, kind: str, tmp_path: Path
) -> None:
    """SDKs discard the oldest attributes of a span beyond their limit."""
    known = (
        {"openinference.span.kind": "LLM"}
        if kind == "openinference"
        else {"llm.request.type": "chat"}
    )
    for number in range(22, 25):
        known[f"{asked.format(number)}.role"] = "user"
        known[f"{asked.format(number)}.content"] = f"question {number}"
    known |= {f"{answered}.role": "assistant", f"{answered}.content": "ok"}
    done, trace = await of_rows(tmp_path, otel("2", **known))
    assert trace.transitions == []
    assert any("has lost messages to its SDK's limit" in line for line in done.issues.lines())


async def test_rows_of_the_hub_are_chats(tmp_path: Path) -> None:
    """ShareGPT's calls and `system`; SWE-smith's messages, which are a text of JSON."""
    talk = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "find", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "r"},
        {"from": "gpt", "value": "ok"},
    ]
    (folder := tmp_path / "a").mkdir()
    _, trace = await of_rows(folder, {"conversations": talk, "system": "Be kind."})
    first, last = trace.transitions
    assert first.messages == [{"role": "system", "content": "Be kind."}, *user("q")]
    (call,) = (first.answer or {})["tool_calls"]
    assert call["function"] == {"name": "find", "arguments": '{"a": 1}'}
    assert last.messages[-1] == {"role": "tool", "tool_call_id": call["id"], "content": "r"}
    (folder := tmp_path / "b").mkdir()
    swe = [*user("q"), {"role": "assistant", "content": "ok"}]
    _, trace = await of_rows(folder, {"messages": json.dumps(swe), "resolved": True})
    assert [(r.name, r.value) for r in trace.rollout.rewards] == [("resolved", 1.0)]


async def test_parts_that_no_model_is_shown_are_left_out_with_a_line(tmp_path: Path) -> None:
    """The search of a server's own tool, in an answer and alone in the history."""
    search = {"type": "web_search_call", "id": "w", "status": "completed"}
    said = {"type": "message", "role": "assistant",
            "content": [{"type": "output_text", "text": "ok"}]}  # fmt: skip
    row = run("t", "llm", inputs={"input": [*user("q"), search, *user("more")]},
              outputs={"object": "response", "output": [search, said]})  # fmt: skip
    done, trace = await of_rows(tmp_path, row)
    (call,) = trace.transitions
    assert call.messages == [*user("q"), *user("more")]
    assert call.answer == {"role": "assistant", "content": "ok"}
    (line,) = [line for line in done.issues.lines() if "neither text nor a readable image" in line]
    assert "(2 times): web_search_call" in line


async def test_an_image_of_a_tool_is_an_image(tmp_path: Path) -> None:
    pixel = base64.b64encode(picture()).decode()
    source = {"type": "base64", "media_type": "image/png", "data": pixel}
    called = {"id": "c", "type": "function", "function": {"name": "see", "arguments": "{}"}}
    result = [{"type": "text", "text": "r"}, {"type": "image", "source": source}]
    talk = [
        *user("q"),
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c", "content": result},
        {"role": "assistant", "content": "ok"},
    ]
    _, trace = await of_rows(tmp_path, {"messages": talk})
    text, image = trace.transitions[-1].messages[-1]["content"]
    assert (text["text"], image["image_url"]["url"][: len(SCHEME)]) == ("r", SCHEME)
    (tool,) = [span for span in trace.spans if span.kind == "tool"]
    assert tool.attributes["gen_ai.tool.call.result"] == "r[image]"


async def test_calls_of_an_answer_of_claude_code_stay_together(tmp_path: Path) -> None:
    """A tool may be done before the lines of the answer's other calls are written. The last line
    has the counts, and why the answer ended."""

    def use(uuid: str, parent: str, id: str, stop: str | None) -> Row:
        content = [{"type": "tool_use", "id": id, "name": "Read", "input": {"id": id}}]
        usage = {"output_tokens": 9 if stop else 1}
        message = {"id": "m1", "content": content, "stop_reason": stop, "usage": usage}
        return claude(uuid, parent, "assistant", "", message=message)

    def result(uuid: str, parent: str, id: str) -> Row:
        content = [{"type": "tool_result", "tool_use_id": id, "content": id}]
        return claude(uuid, parent, "user", "", message={"content": content})

    _, trace = await of_rows(
        tmp_path,
        claude("a", None, "user", "q"),
        use("b", "a", "c1", None),
        result("c", "b", "c1"),
        {
            "type": "attachment",
            "sessionId": "s",
            "uuid": "h",
            "parentUuid": "c",
            "rendered": [{"content": "said by a hook"}],
        },
        use("d", "b", "c2", "max_tokens"),
        result("e", "d", "c2"),
        claude("f", "e", "assistant", "ok"),
    )
    first, last = trace.transitions
    assert [call["id"] for call in (first.answer or {})["tool_calls"]] == ["c1", "c2"]
    assert first.finish == "length"
    assert [m["role"] for m in last.messages] == ["user", "assistant", "tool", "tool", "user"]
    (span,) = [span for span in trace.spans if span.id == first.span]
    assert span.attributes["gen_ai.usage.output_tokens"] == 9


async def test_claude_code_goes_back_to_a_hook(tmp_path: Path) -> None:
    hook = {"type": "progress", "sessionId": "s", "uuid": "h", "parentUuid": "b"}
    _, trace = await of_rows(
        tmp_path,
        claude("a", None, "user", "q"),
        claude("b", "a", "assistant", "A"),
        hook,
        claude("c", "h", "user", "wrong"),
        claude("d", "c", "assistant", "B"),
        claude("e", "h", "user", "right"),
        claude("f", "e", "assistant", "C"),
    )
    said = [message["content"] for message in trace.transitions[-1].messages]
    assert said == ["q", "A", "right"]


async def test_lines_that_claude_code_has_written_again_count_once(tmp_path: Path) -> None:
    lines = [claude("a", None, "user", "q"), claude("b", "a", "assistant", "A")]
    _, trace = await of_rows(tmp_path, *lines, *lines, claude("c", "b", "user", "more"),
                             claude("d", "c", "assistant", "B"))  # fmt: skip
    assert [(call.answer or {})["content"] for call in trace.transitions] == ["A", "B"]
    assert [m["content"] for m in trace.transitions[-1].messages] == ["q", "A", "more"]


def codex(kind: str, **payload: Any) -> Row:
    return {"type": kind, "timestamp": "2026-01-01T00:00:00Z", "payload": payload}


def said_to_codex(role: str, text: str) -> Row:
    content = [{"type": "output_text" if role == "assistant" else "input_text", "text": text}]
    return codex("response_item", type="message", role=role, content=content)


async def test_turns_that_were_taken_back_in_codex_are_not_shown(tmp_path: Path) -> None:
    _, trace = await of_rows(
        tmp_path,
        codex("session_meta", id="s"),
        said_to_codex("user", "<environment_context>"),
        *(row for text in ("one", "two", "three") for row in (
            said_to_codex("user", text),
            codex("event_msg", type="user_message", message=text),
            said_to_codex("assistant", text.upper()),
        )),
        codex("event_msg", type="thread_rolled_back", num_turns=2),
        said_to_codex("user", "four"),
        codex("event_msg", type="user_message", message="four"),
        said_to_codex("assistant", "FOUR"),
    )  # fmt: skip
    said = [message["content"] for message in trace.transitions[-1].messages]
    assert said == ["<environment_context>", "one", "ONE", "four"]


async def test_codex_keeps_outputs_and_searches(tmp_path: Path) -> None:
    """An output of JSON is not the frame of some versions; a search is said to be left out."""
    outputs = ['{"output": "dist", "name": "x"}', '{"output": "r", "metadata": {"exit_code": 0}}']
    done, trace = await of_rows(
        tmp_path,
        codex("session_meta", id="s"),
        said_to_codex("user", "q"),
        *(row for id, output in zip("ab", outputs, strict=True) for row in (
            codex("response_item", type="function_call", name="sh", arguments="{}", call_id=id),
            codex("response_item", type="function_call_output", call_id=id, output=output),
        )),
        codex("response_item", type="web_search_call", status="completed", action={}),
        said_to_codex("assistant", "ok"),
    )  # fmt: skip
    call = trace.transitions[-1]
    assert [m["content"] for m in call.messages if m["role"] == "tool"] == [outputs[0], "r"]
    assert call.answer == {"role": "assistant", "content": "ok"}
    assert any("web_search_call" in line for line in done.issues.lines())


async def test_bulk_exports_of_langsmith_may_name_parents_in_the_order_alone(
    tmp_path: Path,
) -> None:
    """Otherwise each run were a root: its role and the feedback on the trace would be lost."""
    rows = [
        run("r", "chain", inputs={"input": "q"}, dotted_order="1Zr"),
        run("r-a", "chain", dotted_order="1Zr.2Zr-a", extra={"metadata": {"langgraph_node": "n"}}),
        llm("r-b", "", user("q"), {"content": "ok"}, dotted_order="1Zr.2Zr-a.3Zr-b", extra={}),
        {"key": "correct", "run_id": "r", "score": 1},
    ]
    gone = ("parent_run_id", "trace_id")
    bare = [{key: value for key, value in row.items() if key not in gone} for row in rows]
    done, trace = await of_rows(tmp_path, *bare)
    assert not done.issues.counts
    assert [call.role for call in trace.transitions] == ["n"]
    assert [(r.name, r.scope.value) for r in trace.rollout.rewards] == [("correct", "rollout")]


async def test_images_of_users_of_opencode_are_kept(tmp_path: Path) -> None:
    image = f"data:image/png;base64,{base64.b64encode(picture()).decode()}"
    asked = [{"type": "text", "text": "q"}, {"type": "file", "mime": "image/png", "url": image}]
    talk = [
        {"info": {"role": "user"}, "parts": asked},
        {"info": {"role": "assistant"}, "parts": [{"type": "text", "text": "ok"}]},
    ]
    _, trace = await of_rows(tmp_path, {"info": {"id": "s"}, "messages": talk})
    (call,) = trace.transitions
    assert [part["type"] for part in call.messages[0]["content"]] == ["text", "image_url"]
    assert len(call.images) == 1


async def test_maps_of_parquet_are_objects(tmp_path: Path) -> None:
    """Langfuse's exports have maps of metadata and usage."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = pa.map_(pa.string(), pa.string())
    table = pa.table(
        {
            "id": ["o"],
            "trace_id": ["t"],
            "type": ["GENERATION"],
            "metadata": pa.array([[("langgraph_node", "seller")]], texts),
            "usage_details": pa.array([[("output", 2)]], pa.map_(pa.string(), pa.uint64())),
            "input": [json.dumps(user("q"))],
            "output": ["ok"],
        }
    )
    parquet.write_table(table, tmp_path / "observations.parquet")
    _, (trace,) = await imported(tmp_path / "observations.parquet", tmp_path)
    (call,) = trace.transitions
    assert (call.role, call.messages) == ("seller", user("q"))
    assert trace.spans[0].attributes["gen_ai.usage.output_tokens"] == 2


@pytest.mark.parametrize("form", ["langsmith", "langfuse", "openinference"])
async def test_a_tool_that_caught_its_error_is_a_failed_step(form: str, tmp_path: Path) -> None:
    message = {"type": "tool", "content": "no", "tool_call_id": "c", "status": "error"}
    about = {"type": "TOOL", "traceId": "t", "id": "o", "name": "find"}
    attributes = {"openinference.span.kind": "TOOL", "tool.name": "find"}
    row = {
        "langsmith": run("t", "tool", inputs={}, outputs={"output": message}),
        "langfuse": about | {"output": message},
        "openinference": otel("2", **attributes, **{"output.value": json.dumps(message)}),
    }[form]
    _, trace = await of_rows(tmp_path, row)
    (span,) = trace.spans
    assert (span.ok, span.attributes["gen_ai.tool.call.result"]) == (False, "no")
