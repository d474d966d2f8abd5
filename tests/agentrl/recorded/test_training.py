"""What trains from recorded traces: demonstrations, pairs, tasks, recorded tools; redaction."""

from __future__ import annotations

import json
import logging
from base64 import b64encode
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from agentrl.cli.main import cli
from agentrl.core.config import load
from agentrl.core.errors import ConfigError
from agentrl.core.types import NewRollout, Transition, float32, int32
from agentrl.recorded.export import export_traces
from agentrl.recorded.importing import RUN, Recorded, import_traces
from agentrl.recorded.messages import content_text
from agentrl.recorded.project import policy_names, warmup_size, write_project
from agentrl.recorded.redact import Redactor
from agentrl.recorded.tools import RecordedTools
from agentrl.recorded.training import Condition, Training, Where, training_of, usual_where
from agentrl.store import open_store
from tests.agentrl.recorded.builders import Row, llm, question, run, user, write
from tests.runners.gateway.images.pictures import picture

GOOD = Where.read(["correct>=1"])


async def trained(tmp_path: Path, *traces: list[Row], where: Where = GOOD) -> Training:
    url = f"sqlite:///{tmp_path}/traces.db"
    await import_traces(write(tmp_path / "traces.jsonl", *traces), url)
    async with open_store(url, readonly=True) as store:
        return await training_of(store, where)


async def test_only_good_traces_are_imitated_by_role(tmp_path: Path) -> None:
    made = await trained(
        tmp_path,
        question(1, "one", "1", score=1.0),
        question(2, "two", "3", score=0.0),
        question(3, "three", "3"),
        question(4, "ONE ", "1", score=1.0),
    )
    shown = [(row["role"], row["messages"][-1]["content"]) for row in made.demonstrations]
    assert sorted(shown) == [("planner", "look")] * 2 + [("writer", "1")] * 2
    assert made.left_out["traces that are not correct>=1"] == 1
    assert made.left_out["traces without the feedback"] == 1
    assert [task["input"] for task in made.tasks] == ["one"]  # the fourth is the same task
    assert made.tasks[0]["expected"] == "1"


async def test_held_out_tasks_are_the_latest_and_leak_nothing(tmp_path: Path) -> None:
    traces = [question(n, f"task {n}", f"answer {n}", score=1.0) for n in range(1, 11)]
    again = question(11, "task 1", "answer 1", score=1.0)  # late, but of a task that is not
    made = await trained(tmp_path, *traces, again)
    assert [task["input"] for task in made.heldout] == ["task 9", "task 10"]
    assert [task["input"] for task in made.tasks] == [f"task {n}" for n in range(1, 9)]
    told = msgspec.json.encode([made.demonstrations, made.pairs, made.tasks]).decode()
    assert not any(word in told for word in ("task 9", "answer 9", "task 10", "answer 10"))
    assert made.left_out["traces of held-out tasks"] == 2


async def test_pairs_come_from_feedback_retries_and_edits(tmp_path: Path) -> None:
    retried = [
        run("t3", "chain", inputs={"input": "x"}, outputs={"output": "y"}),
        llm("t3.1", "a", user("q"), {"content": "no"}, start_time=1.0e9, error="refused"),
        llm("t3.2", "a", user("q"), {"content": "yes"}, start_time=1.1e9),
    ]
    edited = [
        run("t4", "chain", inputs={"input": "z"}, outputs={"output": "w"}),
        llm("t4.1", "a", user("r"), {"content": "w"}),
        {"key": "edit", "run_id": "t4.1", "score": None, "correction": {"content": "better"}},
    ]
    made = await trained(
        tmp_path, question(1, "one", "1", score=1.0), question(2, "one", "2", score=0.0),
        retried, edited,
    )  # fmt: skip
    told = {(p["why"], p["chosen"][0]["content"], p["rejected"][0]["content"]) for p in made.pairs}
    assert told == {("feedback", "1", "2"), ("retry", "yes", "no"), ("edit", "better", "w")}
    assert all(pair["prompt"] for pair in made.pairs)


async def test_what_cannot_be_imitated_is_counted(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    cut = question(1, "one", "1", score=1.0)
    cut[1]["outputs"]["choices"][0]["finish_reason"] = "length"
    bare = question(2, "two", "2", score=1.0)
    bare[1]["outputs"]["choices"][0]["message"] |= {"content": None, "tool_calls": [call]}
    failed = question(3, "three", "3", score=1.0)
    failed[2]["error"] = "it broke"
    made = await trained(tmp_path, cut, bare, failed)
    assert {why: n for why, n in made.left_out.items() if why.startswith("conv")} == {
        "conversations with an answer that was cut short": 1,
        "conversations that call tools whose definitions were not recorded": 1,
        "conversations with a call that failed": 1,
    }


@pytest.mark.parametrize(
    ("scores", "message"),
    [([None], "no trace has feedback with a number"), ([3.0], r"which traces are good\?")],
)
async def test_without_clear_feedback_the_user_must_say(
    tmp_path: Path, scores: list[float | None], message: str
) -> None:
    url = f"sqlite:///{tmp_path}/traces.db"
    traces = [question(n, "one", "1", score=score) for n, score in enumerate(scores)]
    await import_traces(write(tmp_path / "traces.jsonl", *traces), url)
    async with open_store(url, readonly=True) as store:
        with pytest.raises(ConfigError, match=message):
            await usual_where(store)


def test_a_condition_is_a_name_an_operator_and_a_number() -> None:
    assert str(Where.read(["a b>=1", "c<-0.5"])) == "a b>=1 and c<-0.5"
    with pytest.raises(ConfigError, match="--where 'good'"):
        Where.read(["good"])


def test_recorded_tools_never_pretend(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        {"name": "price", "arguments": {"of": "rug", "in": "eur"}, "result": "35", "times": 2},
        {"name": "price", "arguments": {"of": "rug", "in": "eur"}, "result": "36", "times": 1},
        {"type": "function", "function": {"name": "price", "description": "It tells."}},
    ]
    (tmp_path / "tools.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tools = RecordedTools(tmp_path / "tools.jsonl")
    assert tools.call("price", '{"in": "eur",  "of": "rug"}') == "35"
    with caplog.at_level(logging.WARNING):
        near = tools.function("price")(of="rugs", **{"in": "eur"})
    assert near == '[not recorded: this is the answer to price({"in":"eur","of":"rug"})]\n35'
    assert tools.call("weight", {}) == "[not recorded: no call of weight is in the traces]"
    assert (tools.exact, tools.nearest, tools.unknown) == (1, 1, 1)
    assert "was not recorded" in caplog.text
    assert tools.function("price").__doc__ == "It tells."


async def test_tool_answers_are_those_that_the_model_saw(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    asked = [*user("q"), {"role": "assistant", "content": None, "tool_calls": [call]},
             {"role": "tool", "tool_call_id": "c", "content": "7"}]  # fmt: skip
    trace = [
        run("t", "chain", inputs={"input": "x"}, outputs={"output": "7"}),
        run("t.0", "tool", "t", name="f", inputs={"input": "1"}, outputs={"output": "seven"}),
        llm("t.1", "a", asked, {"content": "7"}),
    ]
    made = await trained(tmp_path, trace)
    (row,) = made.tools
    assert (row["name"], row["arguments"], row["result"], row["times"]) == ("f", {"a": 1}, "7", 1)


SECRETS = {
    "email": "mail ada.b+x@mail.example.org now",
    "phone": "call +49 (030) 123-4567, please",
    "card": "card 4111 1111 1111 1111",
    "iban": "iban DE89 3704 0044 0532 0130 00",
    "ip": "from 192.168.1.20",
    "key": "key sk-abcdefghij0123456789",
    "/rug-\\d+/": "the rug-17",
}


@pytest.mark.parametrize("rule", SECRETS)
def test_a_rule_takes_out_what_it_is_about_only(rule: str) -> None:
    redactor = Redactor([rule])
    for name, text in SECRETS.items():
        assert (redactor.value(text) != text) == (name == rule), text
    assert redactor.counts == {rule: 1}


def test_fields_are_redacted_inside_of_texts_of_json() -> None:
    redactor = Redactor(["name"])
    assert redactor.value({"a": [{"Name": "Ada", "b": '{"name": "Ada", "c": 1}'}]}) == {
        "a": [{"Name": "[name]", "b": '{"name": "[name]", "c": 1}'}]
    }
    assert redactor.counts == {"name": 2}


def test_look_redacts_for_good(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", question(1, "to a@b.example", "1", score=1.0))
    out, runner = str(tmp_path / "traces.db"), CliRunner()
    assert "1 traces added" in runner.invoke(cli, ["traces", "import", str(source), out]).output
    looked = runner.invoke(cli, ["traces", "look", out, "--redact", "email"]).output
    assert "redacted: 4 of email" in looked
    assert "Where correct>=1: 2 demonstrations" in looked
    again = runner.invoke(cli, ["traces", "import", str(source), out]).output
    assert "0 traces added, 1 were already there" in again
    assert b"a@b.example" not in Path(out).read_bytes()
    told = json.loads(runner.invoke(cli, ["traces", "look", out, "--json"]).output)
    assert (told["traces"], told["demonstrations"]) == (1, {"planner": 1, "writer": 1})


def test_an_import_redacts_before_it_stores(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", question(1, "to a@b.example", "1", score=1.0))
    out = str(tmp_path / "traces.db")
    command = ["traces", "import", str(source), out, "--redact", "email"]
    assert "redacted: 4 of email" in CliRunner().invoke(cli, command).output
    assert b"a@b.example" not in Path(out).read_bytes()


CALL = {"id": "c", "type": "function"}


def test_structure_is_no_field_of_data() -> None:
    tool = {"type": "function", "function": {"name": "find", "parameters": {
        "type": "object", "properties": {"name": {"type": "string"}}}}}  # fmt: skip
    called = CALL | {"function": {"name": "find", "arguments": '{"name": "Ada", "n": 1}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [called]}
    rollout = NewRollout(id="t", run=RUN, group="g", index=0, task={"input": {"name": "Ada"}})
    call = Transition(
        id="c", attempt="", index=0, prompt=int32(), completion=int32(), logprobs=float32(),
        messages=[{"role": "tool", "name": "find", "content": "{'name': 'Ada'}"}],
        answer=answer, tools=[tool],
    )  # fmt: skip
    one = Recorded(rollout, [call], [], [], [], None, None)
    made = Redactor(["name"]).applied(one)
    (kept,) = made.calls
    assert kept.tools == [tool]
    assert kept.messages == [{"role": "tool", "name": "find", "content": "{'name': '[name]'}"}]
    assert kept.answer == answer | {
        "tool_calls": [
            CALL | {"function": {"name": "find", "arguments": '{"name": "[name]", "n": 1}'}}
        ]
    }
    assert made.rollout.task["input"] == {"name": "[name]"}


def test_escaped_letters_and_keys_are_redacted() -> None:
    redactor = Redactor(["/Müller/", "email"])
    assert redactor.value('{"who": "M\\u00fcller"}') == '{"who": "[redacted]"}'
    assert redactor.value('{"who":  "else"}') == '{"who":  "else"}'
    assert redactor.value({"a@b.example": [1]}) == {"[email]": [1]}


def test_redacted_data_do_not_come_back(tmp_path: Path) -> None:
    """Neither as the comment of feedback in a second import, nor as a role or a trace's own id."""
    mail, runner = "a@b.example", CliRunner()
    chat = [*user("q"), {"role": "assistant", "content": "7"}]
    note = {"key": "correct", "run_id": "t1", "score": 1, "comment": f"says {mail}"}
    rows = [*question(1, "one", "1"), note, {"id": mail, "messages": chat, "agent": f"of {mail}"}]
    out = str(tmp_path / "traces.db")
    source = str(write(tmp_path / "in.jsonl", rows))
    for command in (["import", source, out], ["look", out, "--redact", "email"],
                    ["import", source, out]):  # fmt: skip
        assert runner.invoke(cli, ["traces", *command]).exit_code == 0
    runner.invoke(cli, ["traces", "look", out, "--redact", "phone"])  # which compacts the file
    assert mail.encode() not in Path(out).read_bytes()


def test_inputs_that_redaction_makes_equal_are_a_task(tmp_path: Path) -> None:
    traces = [question(n, f"to {n}@b.example", "1", score=1.0) for n in range(2)]
    source, out = str(write(tmp_path / "in.jsonl", *traces)), str(tmp_path / "traces.db")
    CliRunner().invoke(cli, ["traces", "import", source, out])
    command = ["traces", "look", out, "--redact", "email", "--json"]
    assert json.loads(CliRunner().invoke(cli, command).output)["tasks"] == 1


async def test_turns_after_a_held_out_task_are_left_out(tmp_path: Path) -> None:
    long = "what does the blue rug cost today?"
    traces = [question(n, f"task {n}", f"answer {n}", score=1.0) for n in range(1, 9)]
    early, late = question(0, "thanks", "welcome", score=1.0), question(9, long, "35", score=1.0)
    after = question(10, "thanks", "bye", score=1.0)
    after[2]["inputs"]["messages"] = [*user(long), {"role": "assistant", "content": "35"},
                                      *user("thanks")]  # fmt: skip
    made = await trained(tmp_path, early, *traces, late, after)
    assert long in [task["input"] for task in made.heldout]
    assert long not in msgspec.json.encode([made.demonstrations, made.pairs]).decode()
    assert made.left_out["traces that show a held-out task"] == 1


@pytest.mark.parametrize(("name", "usual"), [("user_score", True), ("toxicity_score", False)])
async def test_only_names_that_say_good_need_no_where(
    name: str, usual: bool, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/traces.db"
    rows = [*question(1, "one", "1"), {"key": name, "run_id": "t1", "score": 1}]
    await import_traces(write(tmp_path / "traces.jsonl", rows), url)
    async with open_store(url, readonly=True) as store:
        if usual:
            assert str(await usual_where(store)) == f"{name}>=1"
        else:
            with pytest.raises(ConfigError, match="which traces are good"):
                await usual_where(store)


async def test_a_retry_is_imitated_without_what_failed(tmp_path: Path) -> None:
    trace = [
        run("t", "chain", inputs={"input": "x"}, outputs={"output": "y"}),
        llm("t.1", "a", user("q"), {"content": "no"}, start_time=1.0e9, error="refused"),
        llm("t.2", "a", user("q"), {"content": "yes"}, start_time=1.1e9),
        {"key": "correct", "run_id": "t", "score": 1},
    ]
    made = await trained(tmp_path, trace)
    assert [row["messages"][-1]["content"] for row in made.demonstrations] == ["yes"]
    assert made.left_out["conversations with a call that failed"] == 1


async def test_pairs_of_many_answers_do_not_multiply(tmp_path: Path) -> None:
    good = [question(n, "one", f"good {n}", score=1.0) for n in range(10)]
    bad = [question(n, "one", f"bad {n}", score=0.0) for n in range(10, 30)]
    made = await trained(tmp_path, *good, *bad)
    assert len(made.pairs) == 20
    assert len({str(pair["chosen"]) for pair in made.pairs}) == 10


async def test_an_edited_trace_edits_only_what_it_ended_with(tmp_path: Path) -> None:
    rows = [*question(1, "one", "1"), *question(2, "two", "2")]
    rows[3]["outputs"] = {"output": "put together from both"}
    edit = {"key": "e", "score": None, "correction": {"output": "3"}}
    rows += [edit | {"run_id": trace} for trace in ("t1", "t2")]
    made = await trained(tmp_path, rows)
    assert [(p["chosen"][0]["content"], p["rejected"][0]["content"]) for p in made.pairs] == [
        ("3", "1")
    ]


async def test_answers_that_are_sent_again_count_once(tmp_path: Path) -> None:
    called = CALL | {"function": {"name": "f", "arguments": '{"a":1}'}}
    asked = [*user("q"), {"role": "assistant", "content": None, "tool_calls": [called]},
             {"role": "tool", "tool_call_id": "c", "content": "7"}]  # fmt: skip
    again = [*asked, {"role": "assistant", "content": "7"}, *user("and?")]
    trace = [
        run("t", "chain", inputs={"input": "x"}, outputs={"output": "7"}),
        llm("t.1", "a", asked, {"content": "7"}, start_time=1.0e9),
        llm("t.2", "a", again, {"content": "8"}, start_time=1.1e9),
    ]
    (row,) = (await trained(tmp_path, trace)).tools
    assert row["times"] == 1


async def test_names_of_traces_write_no_code(tmp_path: Path) -> None:
    evil = 'a"""\nraise SystemExit\n"""'
    rows = [*question(1, "one", "1"), {"key": "is good\nsteps = 7", "run_id": "t1", "score": 1}]
    rows[1]["extra"]["metadata"]["langgraph_node"] = evil
    where = Where((Condition("is good\nsteps = 7", ">=", 1.0),))
    made = await trained(tmp_path, rows, where=where)
    assert evil in made.roles
    write_project(tmp_path / "run", made, where, "m", lambda _: SETTINGS)
    assert load(tmp_path / "run/run.toml").steps == 20
    found: dict[str, Any] = {"__file__": str(tmp_path / "run/agent.py")}
    exec((tmp_path / "run/agent.py").read_text(), found)
    assert "raise SystemExit" in found["__doc__"]


SETTINGS = {"model": "m", "dtype": "float32", "rank": 4, "lr": 1e-3, "threads": 1, "context": 512,
            "max_tokens": 16, "concurrency": 4, "timeout": 60}  # fmt: skip


async def test_a_project_of_several_roles_has_a_policy_for_each(tmp_path: Path) -> None:
    traces = [question(n, f"task {n}", f"answer {n}", score=1.0) for n in range(1, 11)]
    made = await trained(tmp_path, *traces)
    files = write_project(tmp_path / "run", made, GOOD, "m", lambda _: SETTINGS)
    assert {"run.toml", "heldout.jsonl"} <= {*files}
    config = load(tmp_path / "run/run.toml")
    assert {name: [*one.roles] for name, one in config.policies.items()} == {
        "planner": ["planner"], "writer": ["writer"],
    }  # fmt: skip
    assert config.warmup.data.endswith("demonstrations.jsonl")
    assert "YOUR AGENT HERE" in (tmp_path / "run/agent.py").read_text()
    with pytest.raises(ConfigError, match=r"has run\.toml, .* already; name another folder"):
        write_project(tmp_path / "run", made, GOOD, "m", lambda _: SETTINGS)


async def test_a_project_needs_a_good_trace(tmp_path: Path) -> None:
    made = await trained(tmp_path, question(1, "one", "1", score=0.0))
    with pytest.raises(ConfigError, match="no trace is good and can be imitated where correct>=1"):
        write_project(tmp_path / "run", made, GOOD, "m", lambda _: SETTINGS)


@pytest.mark.parametrize(
    ("count", "size"), [(20, (8, 30)), (320, (8, 80)), (1000, (25, 80)), (10_000, (32, 400))]
)
def test_a_warm_up_is_sized_by_what_there_is(count: int, size: tuple[int, int]) -> None:
    assert warmup_size(count) == size


def test_roles_of_any_letters_become_names_of_policies() -> None:
    roles = ["the planner", "the-planner", "the planner!", "the_planner_2", "écrivain", "***"]
    names = [*policy_names(roles).values()]
    assert len({*names}) == len(roles)
    assert all(name.replace("_", "").replace("-", "").isalnum() for name in names)


def test_options_that_have_no_effect_are_refused(tmp_path: Path) -> None:
    runner = CliRunner()
    for arguments, message in (
        (["init", str(tmp_path / "a"), "--where", "a>=1"], "--where has no effect"),
        (["init", str(tmp_path / "a"), "--from-traces", "x.db"], "--from-traces needs --model"),
        (["traces", "import"], "name SOURCE and OUT"),
    ):
        assert message in runner.invoke(cli, arguments).output


FORMS = ("otlp", "phoenix", "langsmith", "langfuse", "atif", "chats")


@pytest.mark.parametrize("form", FORMS)
async def test_what_is_exported_can_be_imported_again(form: str, tmp_path: Path) -> None:
    fixture = Path(__file__).with_name("fixtures") / "langsmith.jsonl"
    first, second = tmp_path / "first.db", tmp_path / "second.db"
    await import_traces(fixture, f"sqlite:///{first}")
    out = tmp_path / "out.jsonl"
    assert (await export_traces(f"sqlite:///{first}", RUN, form, out))[0] == 2
    done = await import_traces(out, f"sqlite:///{second}")
    assert done.issues.lines() == []

    async def calls(path: Path) -> list[Any]:
        async with open_store(f"sqlite:///{path}", readonly=True) as store:
            found = await store.calls([row.id for row in await store.rollouts(RUN)])
        every = [call for some in found.values() for call in some]
        told = [
            (c.role, [[m["role"], m["content"]] for m in c.messages], c.answer, c.tools)
            for c in every
        ]
        return sorted(told, key=str)

    assert await calls(first) == await calls(second)
    async with open_store(f"sqlite:///{second}", readonly=True) as store:
        rewards = [r.value for row in await store.rollouts(RUN) for r in row.rewards]
    assert sorted(rewards) in ([0.0, 1.0], [0.0, 0.0, 1.0, 1.0])  # chats: one for each role


@pytest.mark.parametrize("form", FORMS)
async def test_exported_calls_keep_their_order_and_results(form: str, tmp_path: Path) -> None:
    """Also without times, and of results that show an image."""
    url = f"data:image/png;base64,{b64encode(picture()).decode()}"
    seen = [{"type": "text", "text": "r"}, {"type": "image_url", "image_url": {"url": url}}]
    function = {"name": "see", "arguments": "{}"}
    talk = [
        *user("q"),
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": seen},
        {"role": "assistant", "content": "A"},
        *user("more"),
        {"role": "assistant", "content": "B"},
    ]
    first, out = f"sqlite:///{tmp_path}/first.db", tmp_path / "out.jsonl"
    await import_traces(write(tmp_path / "in.jsonl", [{"messages": talk}]), first)
    await export_traces(first, RUN, form, out)
    await import_traces(out, f"sqlite:///{tmp_path}/second.db")
    async with open_store(f"sqlite:///{tmp_path}/second.db", readonly=True) as store:
        (calls,) = (await store.calls([row.id for row in await store.rollouts(RUN)])).values()
    assert [(call.answer or {})["content"] for call in calls] == [None, "A", "B"]
    assert content_text(calls[-1].messages[2]["content"])[0] == "r"


def _said(messages: list[Any]) -> list[Any]:
    return [[one["role"], one["content"]] for one in messages]


def test_langsmiths_own_parser_reads_what_is_exported(tmp_path: Path) -> None:
    schemas = pytest.importorskip("langsmith.schemas")
    source = write(tmp_path / "in.jsonl", question(1, "one", "1", score=1.0))
    store, out = str(tmp_path / "traces.db"), tmp_path / "out.jsonl"
    CliRunner().invoke(cli, ["traces", "import", str(source), store])
    command = ["export", "traces", str(out), "--store", store, "--as", "langsmith"]
    assert "1 traces in 5 lines" in CliRunner().invoke(cli, command).output
    for row in map(json.loads, out.read_text().splitlines()):
        (schemas.Feedback if "key" in row else schemas.Run)(**row)


async def test_the_agent_of_one_role_is_a_loop_with_its_tools(tmp_path: Path) -> None:
    trace = [
        run("t", "chain", inputs={"input": "x"}, outputs={"output": "7"}),
        llm(
            "t.1", "a", [{"role": "system", "content": 'Be "kind".'}, *user("q")], {"content": "7"}
        ),
        {"key": "correct", "run_id": "t", "score": 1},
    ]
    made = await trained(tmp_path, trace)
    write_project(tmp_path / "run", made, GOOD, "m", lambda _: SETTINGS)
    assert not load(tmp_path / "run/run.toml").policies
    text = (tmp_path / "run/agent.py").read_text()
    assert 'SYSTEM = "Be \\"kind\\"."' in text
    compile(text, "agent.py", "exec")
    found: dict[str, Any] = {}
    exec((tmp_path / "run/verifier.py").read_text(), found)
    assert found["verify"]({"expected": {"b": 1, "a": "X"}}, {"a": "x", "b": 1}) == 1.0
    assert found["verify"]({"expected": "7"}, "8") == 0.0


async def test_calls_with_arguments_that_are_no_json_are_not_imitated(tmp_path: Path) -> None:
    invalid = {"name": "find", "args": '{"what": ', "id": "c", "error": "not JSON"}
    said = {"content": "", "invalid_tool_calls": [invalid]}
    tools = {"extra": {"invocation_params": {"tools": [{"name": "find"}]}}}
    trace = [llm("t", "agent", user("a long question"), said, **tools),
             {"key": "correct", "run_id": "t", "score": 1}]  # fmt: skip
    made = await trained(tmp_path, trace)
    assert not made.demonstrations
    assert made.left_out["conversations that call a tool with arguments that are no JSON object"]


async def test_answers_of_a_forked_session_are_imitated_once(tmp_path: Path) -> None:
    """The copy has the answers of the session before the fork."""
    begin = [*user("a long question that is asked"), {"role": "assistant", "content": "A"}]
    rows: list[Row] = [
        {"id": id, "messages": [*begin, *user(text), {"role": "assistant", "content": text}],
         "reward": 1} for id, text in (("s", "one"), ("fork", "two"))
    ]  # fmt: skip
    made = await trained(tmp_path, rows, where=Where.read(["reward>=1"]))
    imitated = [(len(one["messages"]), one["imitate"]) for one in made.demonstrations]
    assert sorted(imitated) == [(4, [1, 3]), (4, [3])]
    assert made.left_out["answers with which another conversation begins, too"] == 1
