"""Imports of what real SDKs and harnesses wrote (`record.py`), and of damaged files."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agentrl.cli.main import cli
from agentrl.core.data_files import write_rows
from agentrl.core.errors import ConfigError
from agentrl.recorded.formats import FORMATS
from agentrl.recorded.importing import RUN
from agentrl.recorded.nodes import MAX_FIELD_CHARS
from tests.agentrl.recorded.builders import imported

FIXTURES = Path(__file__).with_name("fixtures")
CALL = {"product": "rug"}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


GRAPH = ["planner", "seller", "seller"]
SPANS = {"openinference": GRAPH, "langsmith": GRAPH, "langfuse": GRAPH, "console": GRAPH,
         "agents": ["seller"] * 2}  # fmt: skip


@pytest.mark.parametrize("name", SPANS)
async def test_the_tree_of_an_sdk_keeps_roles_and_calls(name: str, tmp_path: Path) -> None:
    done, traces = await imported(FIXTURES / f"{name}.jsonl", tmp_path)
    assert done.issues.lines() == []
    assert [[call.role for call in trace.transitions] for trace in traces] == [SPANS[name]] * 2
    last = next(t for t in traces if "rug" in str(t.rollout.task)).transitions[-1]
    said = [message["role"] for message in last.messages]
    assert said[-3:] == ["user", "assistant", "tool"]
    (call,) = last.messages[-2]["tool_calls"]
    assert call["function"]["name"] == "look_up"
    assert json.loads(call["function"]["arguments"]) == CALL
    assert last.messages[-1] | {"name": "look_up"} == {
        "role": "tool", "tool_call_id": call["id"], "content": "35", "name": "look_up",
    }  # fmt: skip
    assert last.answer == {"role": "assistant", "content": "It costs 35."}
    assert not any(call.exact or call.prompt or call.completion for call in traces[0].transitions)
    assert last.policy.startswith("gpt-scripted")
    if name != "agents":  # its spans do not have the tools
        assert last.tools[0]["function"]["parameters"]["required"] == ["product"]
    (tool,) = [span for span in traces[0].spans if span.kind == "tool"]
    assert tool.attributes["gen_ai.tool.name"] == "look_up"
    assert [span.parent for span in traces[0].spans].count(None) == 1
    assert last.started > 1.7e9


@pytest.mark.parametrize("name", ["genai", "genai_numbered"])
async def test_both_forms_of_the_conventions_say_the_same(name: str, tmp_path: Path) -> None:
    _, (trace,) = await imported(FIXTURES / f"{name}.jsonl", tmp_path)
    assert [call.role for call in trace.transitions] == ["seller"] * 4
    first, second = trace.transitions[:2]
    assert first.messages[0] == {"role": "system", "content": "You sell."}
    assert first.answer
    assert second.answer
    assert first.answer["tool_calls"] == second.messages[2]["tool_calls"]
    assert second.answer["content"] == "It costs 35."
    assert first.tools[0]["function"]["name"] == "look_up"
    assert first.sampling.temperature == 0.5


async def test_the_events_of_the_oldest_form_are_read(tmp_path: Path) -> None:
    events = [
        {"name": "gen_ai.user.message", "attributes": {"content": "Hi"}},
        {"name": "gen_ai.choice", "attributes": {"message": '{"content": "Hello"}'}},
    ]
    span = {"name": "chat", "context": {"trace_id": "0x" + "1" * 32, "span_id": "0x" + "2" * 16},
            "attributes": {"gen_ai.operation.name": "chat"}, "events": events}  # fmt: skip
    _, (trace,) = await imported(write(tmp_path / "a.jsonl", span), tmp_path)
    assert trace.transitions[0].messages == [{"role": "user", "content": "Hi"}]
    assert trace.transitions[0].answer == {"role": "assistant", "content": "Hello"}


async def test_calls_without_content_are_counted(tmp_path: Path) -> None:
    done, (trace,) = await imported(FIXTURES / "genai_without_content.jsonl", tmp_path)
    assert trace.transitions == []
    (line,) = done.issues.lines()
    assert line.startswith(
        "a model call has no messages or no answer, and is a span only (4 times)"
    )


HARNESSES = {
    "codex": "exec_command",
    "claude": "Bash",
    "opencode": "bash",
    "qwen": "run_shell_command",
}


@pytest.mark.parametrize("name", HARNESSES)
async def test_a_transcript_is_calls_and_tools(name: str, tmp_path: Path) -> None:
    done, (trace,) = await imported(FIXTURES / f"{name}.jsonl", tmp_path)
    assert done.issues.lines() == []
    assert "test_calc.py in this repository fails" in str(trace.rollout.task["input"])
    calls = trace.transitions
    assert [len((call.answer or {}).get("tool_calls") or ()) for call in calls] == [1, 1, 0]
    assert calls[-1].answer == {"role": "assistant", "content": "The test passes now."}
    assert [call.messages for call in calls[:2]] == [
        calls[2].messages[: len(c.messages)] for c in calls[:2]
    ]
    used = [span for span in trace.spans if span.kind == "tool"]
    assert {span.attributes["gen_ai.tool.name"] for span in used} == {HARNESSES[name]}
    assert "unittest" in str(used[0].attributes["gen_ai.tool.call.arguments"])
    assert "AssertionError" in str(used[0].attributes["gen_ai.tool.call.result"])
    assert trace.rollout.result == "The test passes now."


async def test_atif_of_harbor_keeps_thoughts_and_cost(tmp_path: Path) -> None:
    _, (trace,) = await imported(FIXTURES / "atif.jsonl", tmp_path)
    first, second = trace.transitions
    assert (first.role, first.policy) == ("seller", "gpt-scripted")
    assert second.answer == {
        "role": "assistant",
        "reasoning_content": "35.",
        "content": "It costs 35.",
    }
    assert second.messages[-1] == {"role": "tool", "tool_call_id": "c1", "content": "35"}
    (span,) = [one for one in trace.spans if one.id == first.span]
    assert span.attributes["gen_ai.usage.cost"] == 0.1


async def test_copied_and_joined_steps_are_no_calls(tmp_path: Path) -> None:
    row = json.loads((FIXTURES / "atif.jsonl").read_text())
    row["steps"][2]["is_copied_context"] = True
    row["steps"][3]["llm_call_count"] = 3
    row["schema_version"] = "ATIF-v9.9"
    done, (trace,) = await imported(write(tmp_path / "a.json", row), tmp_path)
    assert trace.transitions == []
    assert done.issues.lines() == ["the version ATIF-v9.9 is not known; it is read as ATIF-v1.8"]


async def test_stored_completions_are_traces_of_one_call(tmp_path: Path) -> None:
    _, traces = await imported(FIXTURES / "completions.jsonl", tmp_path)
    assert len(traces) == 2
    (call,) = traces[0].transitions
    assert (call.role, call.finish) == ("seller", "tool_calls")
    assert call.messages == [{"role": "user", "content": "What does a rug cost?"}]


async def test_feedback_is_a_reward_of_what_it_is_about(tmp_path: Path) -> None:
    run = {"id": "r", "trace_id": "r", "run_type": "chain", "name": "a", "inputs": {"input": "1"}}
    llm = {"id": "c", "trace_id": "r", "parent_run_id": "r", "run_type": "llm", "name": "m",
           "inputs": {"messages": [{"role": "user", "content": "1"}]},
           "outputs": {"message": {"role": "assistant", "content": "2"}}}  # fmt: skip
    notes = [
        {"key": "good", "run_id": "r", "score": True},
        {"key": "good", "run_id": "c", "score": 0.5, "comment": "half"},
        {"key": "kind", "run_id": "r", "score": None, "value": "rude"},
    ]
    done, (trace,) = await imported(write(tmp_path / "a.jsonl", run, llm, *notes), tmp_path)
    told = {(row.scope.value, row.value, row.note) for row in trace.rollout.rewards}
    assert told == {("rollout", 1.0, ""), ("transition", 0.5, "half")}
    assert done.issues.counts["feedback without a number is kept with its span and trains nothing"]
    assert trace.spans[0].attributes["feedback.kind"] == "rude"


async def test_a_second_import_adds_only_new_feedback(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    lines = (FIXTURES / "langsmith.jsonl").read_text().splitlines(keepends=True)
    (source / "runs.jsonl").write_text("".join(lines[:-2]))
    first, _ = await imported(source, tmp_path)
    (source / "feedback.jsonl").write_text("".join(lines[-2:]))
    second, traces = await imported(source, tmp_path)
    third, again = await imported(source, tmp_path)
    assert (first.traces, second.traces, second.known, third.traces) == (2, 0, 2, 0)
    assert [len(trace.rollout.rewards) for trace in traces] == [1, 1]
    assert traces == again


async def test_an_import_that_was_killed_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentrl.recorded import importing

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(importing, "_outcome", killed)
        with pytest.raises(KeyboardInterrupt):
            await imported(FIXTURES / "langsmith.jsonl", tmp_path)
    done, traces = await imported(FIXTURES / "langsmith.jsonl", tmp_path)
    assert done.traces == len(traces) == 2
    assert [len(trace.transitions) for trace in traces] == [3, 3]


async def test_cut_off_files_are_read_up_to_there(tmp_path: Path) -> None:
    lines = (FIXTURES / "langsmith.jsonl").read_text()
    source = tmp_path / "source"
    source.mkdir()
    (source / "cut.jsonl").write_text(lines[:-3])
    array = "[" + ",".join(lines.splitlines()[:7]) + "]"
    (source / "array.json").write_text(array[:-300])
    (source / "no.json").write_text('{"what": 1} nonsense')
    done, traces = await imported(source, tmp_path)
    assert len(traces) == 2
    told = "\n".join(done.issues.lines())
    assert "a line is no JSON, such as one that was cut off, and is left out: cut.jsonl:16" in told
    assert "a file is truncated or not JSON from some point on" in told
    assert "a row is of no known format and is left out: no.json: what" in told


def span(id: str, parent: str = "", **more: Any) -> dict[str, Any]:
    about = {"id": id, "traceId": "t", "parentObservationId": parent or None, "type": "SPAN"}
    return about | {
        "name": id,
        "startTime": 1_700_000_000_000,
        "endTime": 1_700_000_001_000,
        **more,
    }


SHAPES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "orphan": ([span("a"), span("b", "lost")], "parent is not in the recording"),
    "cycle": ([span("a"), span("b", "c"), span("c", "b")], "each other's parents"),
    "only a cycle": ([span("b", "c"), span("c", "b")], "each other's parents"),
    "two roots": ([span("a"), span("b")], "several roots"),
    "ends early": ([span("a", endTime=1_600_000_000_000)], "ends before it starts"),
    "starts early": ([span("a"), span("b", "a", startTime=1_600_000_000_000)], "before its parent"),
}


@pytest.mark.parametrize("name", SHAPES)
async def test_a_broken_tree_is_a_sentence_and_a_trace(name: str, tmp_path: Path) -> None:
    rows, sentence = SHAPES[name]
    done, (trace,) = await imported(write(tmp_path / "a.jsonl", *rows), tmp_path)
    assert sentence in "\n".join(done.issues.lines())
    assert [one.parent for one in trace.spans].count(None) == 1
    assert len(trace.spans) >= len(rows)


async def test_long_fields_and_strange_values_are_stored(tmp_path: Path) -> None:
    script = "<script>alert(1)</script>\0\ud800"
    row = span(
        "a", input={"text": "x" * 10**6, "number": 2**70, "nan": float("nan")}, output=script
    )
    done, (trace,) = await imported(write(tmp_path / "a.jsonl", row), tmp_path)
    assert len(trace.rollout.task["input"]["text"]) < MAX_FIELD_CHARS + 20
    assert trace.rollout.task["input"]["number"] == str(2**70)
    assert trace.rollout.result.startswith("<script>alert(1)</script>")
    assert "was cut off" in done.issues.lines()[0]


async def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("no")
    with pytest.raises(ConfigError, match="is no file, and no folder with files of"):
        await imported(tmp_path, tmp_path)


def test_every_format_says_what_it_loses() -> None:
    assert all(
        one.lost and one.version and (one.spans or one.whole or one.lines) for one in FORMATS
    )


def test_scripts_in_fields_are_only_text_in_view(tmp_path: Path) -> None:
    script = "<script>alert(1)</script>"
    row = span("a", type="GENERATION", name=script, input=script, output=script, model=script)
    asyncio.run(imported(write(tmp_path / "a.jsonl", row), tmp_path))
    page = str(tmp_path / "page.html")
    command = ["view", str(tmp_path / "traces.db"), "--run", RUN, "--export", page]
    assert "1 of 1 rollouts" in CliRunner().invoke(cli, command).output
    assert script not in Path(page).read_text()


async def test_bulk_exports_in_parquet_are_read(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    lines = (FIXTURES / "langsmith.jsonl").read_text().splitlines()
    runs = [row for row in map(json.loads, lines) if "run_type" in row]
    columns = ("id", "trace_id", "parent_run_id", "run_type", "name", "start_time", "end_time")
    texts = ("inputs", "outputs", "extra")
    rows = [
        {name: run[name] for name in columns} | {name: json.dumps(run[name]) for name in texts}
        for run in runs
    ]
    write_rows(rows, tmp_path / "runs.parquet")
    _, whole = await imported(FIXTURES / "langsmith.jsonl", tmp_path)
    (tmp_path / "traces.db").unlink()
    _, traces = await imported(tmp_path / "runs.parquet", tmp_path)
    assert [[c.messages for c in t.transitions] for t in traces] == [
        [c.messages for c in t.transitions] for t in whole
    ]
    assert [t.transitions[-1].role for t in traces] == ["seller", "seller"]


async def test_data_frames_of_phoenix_are_read(tmp_path: Path) -> None:
    rows = []
    for line in (FIXTURES / "console.jsonl").read_text().splitlines():
        one = json.loads(line)
        about = {f"context.{key}": value for key, value in one["context"].items()}
        about |= {f"attributes.{key}": value for key, value in one["attributes"].items()}
        rows.append({k: one[k] for k in ("name", "parent_id", "start_time", "end_time")} | about)
    note = {"span_id": json.loads(line)["context"]["span_id"], "name": "good"}
    note |= {"annotator_kind": "HUMAN", "result": {"score": 0.5, "label": "half"}}
    _, traces = await imported(write(tmp_path / "a.jsonl", {"data": rows}, note), tmp_path)
    assert [[call.role for call in trace.transitions] for trace in traces] == [GRAPH] * 2
    assert sorted(r.value for t in traces for r in t.rollout.rewards) == [0.5]


SUBJECT = {"kind": "trace", "id": "t"}


async def test_scores_of_langfuse_of_every_kind_are_read(tmp_path: Path) -> None:
    about = {"id": "s", "traceId": "t"}
    scores = [
        about | {"name": "number", "dataType": "NUMERIC", "value": 0.25},
        about | {"name": "yes", "dataType": "BOOLEAN", "value": 1},
        about | {"name": "kind", "dataType": "CATEGORICAL", "value": None, "stringValue": "rude"},
        {
            "name": "new",
            "dataType": "NUMERIC",
            "value": 2.0,
            "subject": {"kind": "trace", "id": "t"},
        },
    ]
    rows = [span("a"), *scores]
    _, (trace,) = await imported(write(tmp_path / "a.jsonl", *rows), tmp_path)
    assert {row.name: row.value for row in trace.rollout.rewards} == {
        "number": 0.25, "yes": 1.0, "new": 2.0,
    }  # fmt: skip
    assert trace.spans[0].attributes["feedback.kind"] == "rude"


async def test_an_openai_trace_by_responses_is_read(tmp_path: Path) -> None:
    output = [
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "function_call", "id": "f", "call_id": "c", "name": "find", "arguments": "{}"},
    ]
    asked = [
        {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
        {"type": "function_call", "call_id": "b", "name": "find", "arguments": '{"a":1}'},
        {"type": "function_call_output", "call_id": "b", "output": "7"},
    ]
    response = {"output": output, "model": "m", "instructions": "Be kind.",
                "tools": [{"type": "function", "name": "find", "parameters": {}}]}  # fmt: skip
    data = {"type": "response", "response": response, "input": asked}
    row = {"object": "trace.span", "id": "s", "trace_id": "t", "span_data": data}
    _, (trace,) = await imported(write(tmp_path / "a.jsonl", row), tmp_path)
    (call,) = trace.transitions
    assert [one["role"] for one in call.messages] == ["system", "user", "assistant", "tool"]
    assert call.messages[2]["tool_calls"][0]["function"]["arguments"] == '{"a":1}'
    assert call.answer
    assert call.answer["reasoning_content"] == "Hm."
    assert call.answer["tool_calls"][0]["id"] == "c"
    assert call.tools[0]["function"]["name"] == "find"


CHANGES: list[Any] = [
    None,
    0,
    2**70,
    "",
    [],
    {},
    [None],
    True,
    "\ud800",
    [{"type": 5}],
    {"role": 3},
]


def changed(value: Any, drawn: random.Random, share: float) -> Any:
    if drawn.random() < share:
        return drawn.choice(CHANGES)
    if isinstance(value, dict):
        return {key: changed(one, drawn, share) for key, one in value.items()}
    return [changed(one, drawn, share) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("seed", range(3))
async def test_rows_of_wrong_types_stop_no_import(seed: int, tmp_path: Path) -> None:
    drawn, source = random.Random(seed), tmp_path / "source"
    source.mkdir()
    for file in FIXTURES.glob("*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        write(source / file.name, *(changed(row, drawn, 0.01) for row in rows))
    whole = (FIXTURES / "completions.jsonl").read_text().splitlines()[0]
    write(source / "whole.jsonl", json.loads(whole))
    done, traces = await imported(source, tmp_path)
    assert done.issues.lines()
    assert any("rug" in str(trace.rollout.task) for trace in traces)
