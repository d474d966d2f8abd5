from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console

from agentrl import transcript
from agentrl.core.config import resolve
from agentrl.core.otlp import DIFF
from agentrl.core.types import (
    Branch,
    ErrorKind,
    Failure,
    NewRollout,
    Outcome,
    Purpose,
    Reward,
    RolloutState,
    Span,
    StepRow,
    Trace,
    Transition,
)
from agentrl.store import open_store, unknown_rollout
from agentrl.transcript import MAX_MESSAGES, render_trace, state_in_words
from tests import factories

CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "function": {"name": "query", "arguments": '{"sql": "SELECT 1"}'}}],
}
OPENING = [{"role": "system", "content": "Be exact."}, {"role": "user", "content": "What is one?"}]


def transition(index: int, messages: list[dict], answer: dict) -> Transition:
    about = {"attempt": "a" * 32, "index": index, "messages": messages, "answer": answer}
    return factories.call(f"t{index}", (1, 2, 3), (4, 5), logprob=-0.5, version=3, **about)


def printed(
    failure: Failure | None = None,
    *,
    echoed: dict[str, Any] = CALL,
    spans: Sequence[Span] = (),
    longest: int | None = None,
    id: str = "staff/train/g0000001/0002",
    rewards: Sequence[Reward] = (Reward(value=1.0), Reward(name="[/b]", value=0.5)),
    **more: Any,
) -> str:
    second = [*OPENING, echoed, {"role": "tool", "content": "1", "tool_call_id": "c1"}]
    rollout = factories.rollout(
        id,
        run="staff",
        group="staff/train/g0000001",
        index=2,
        task={"input": "What is one?"},
        state=RolloutState.FAILED if failure else RolloutState.SUCCEEDED,
        attempts=2,
        attempt="a" * 32,
        result="1",
        failure=failure,
        seconds=0.25,
        rewards=[] if failure else rewards,
        **more,
    )
    transitions = [
        transition(0, OPENING, CALL),
        transition(1, second, {"role": "assistant", "content": "one"}),
    ]
    trace = Trace(rollout=rollout, attempt="a" * 32, transitions=transitions, spans=[*spans])
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(render_trace(trace, longest))
    console.file.close()
    return console.export_text()


def test_a_long_id_cuts_off_nothing_of_what_became_of_it() -> None:
    id = "mine-eval-20261126-192522-of-another-day/eval/000000/sampled/0000"
    text = printed(id=id)
    first, second, *_ = text.splitlines()
    assert f" {id} " in first
    assert "succeeded, outcome 1, [/b] 0.5, 0.25 s, attempt 2" in second


async def test_who_names_a_run_for_a_rollout_is_told_one(tmp_path: Path) -> None:
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        await store.open_run("mine", {})
        assert "ids look like run/train/" in await unknown_rollout(store, "mine")
        new = NewRollout(id="mine/train/g0000000/0000", run="mine", group="g", index=0, task={})
        await store.enqueue([new])
        (attempt,) = await store.claim(1, runner="w", run="mine", lease=9.0, timeout=1.0)
        await store.finish([Outcome(attempt=attempt.id, fence=attempt.fence, result="1")])
        said = await unknown_rollout(store, "mine")
        assert said.startswith("'mine' is a run, not a rollout: its newest one is mine/train/g0000")
        assert (await unknown_rollout(store, "mine/9")).startswith("there is no rollout 'mine/9': ")
        assert "ids look like" in await unknown_rollout(store, "other/train/g0000000/0000")


def test_an_answer_that_the_agent_wrote_down_differently_is_shown_once() -> None:
    text = printed(echoed={key: value for key, value in CALL.items() if value is not None})
    assert text.count("What is one?") == text.count("SELECT 1") == 1


def test_a_call_says_which_versions_made_its_tokens() -> None:
    assert "[agent v3, 3 + 2 tokens, stop]" in printed()
    mixed = structs.replace(transition(0, [], CALL), spans=[(0, 3), (1, 5)])
    assert mixed.versions == "v3→v5@1"
    assert structs.replace(mixed, version=None, spans=[]).versions == ""


def test_long_messages_are_cut_where_it_is_asked_for() -> None:
    text = printed(longest=5)
    assert "Be ex ... (4 characters more)" in text
    assert 'query({"sql ... (' in text


def test_a_call_with_many_messages_shows_the_last_ones() -> None:
    messages = [{"role": "user", "content": f"row {n}"} for n in range(MAX_MESSAGES + 30)]
    calls = [transition(0, messages, CALL)]
    trace = Trace(rollout=factories.rollout("r"), attempt="a" * 32, transitions=calls, spans=[])
    console = Console(width=100)
    with console.capture() as output:
        console.print(render_trace(trace, 100))
    assert "... 30 messages before these" in output.get()
    assert "row 29" not in output.get()
    assert "row 30" in output.get()


def test_what_changed_in_the_workspace_is_shown() -> None:
    diff = "--- a/calc.py\n+++ b/calc.py\n-    return a - b\n+    return a + b\n"
    span = Span(
        id="a" * 16,
        attempt="a" * 32,
        parent=None,
        name="attempt",
        kind="agent",
        start=0,
        end=1,
        ok=True,
        attributes={DIFF: diff},
    )
    assert "+    return a + b" in printed(spans=[span])


def test_what_it_repeats() -> None:
    assert "repeats" not in printed()
    branch = printed(branch=Branch(rollout="r/7", calls=2))
    assert "repeats   r/7" in branch
    assert "without" not in branch
    replay = Branch(rollout="r/7", calls=2, without=["critic", "planner"])
    assert "repeats   r/7 without critic, planner" in printed(branch=replay)


def test_who_plays_which_role() -> None:
    assert "seats" not in printed()
    seats = {"player_0": "policy", "player_1": "policy@000010"}
    assert "seats     player_0: policy, player_1: policy@000010" in printed(seats=seats)


async def test_a_prompt_has_its_own_lines_and_tokens_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in a pipe, for which the console has 80 columns; a call may have no token ids."""
    calls = [
        factories.call("t0", range(100), (4, 5), answer=CALL),
        factories.call("t1", (), (), exact=False, index=1, answer=CALL),
    ]
    trace = Trace(rollout=factories.rollout("r"), attempt="a", transitions=calls, spans=[])

    class Stored:
        async def trace(self, rollout: str, *, first: int, limit: int) -> Trace:
            return trace

        async def run(self, run: str) -> None:
            return None

    @asynccontextmanager
    async def opened(url: str, **_: Any) -> AsyncIterator[Stored]:
        yield Stored()

    monkeypatch.setattr(transcript, "open_store", opened)
    await transcript.show_rollout("sqlite:///store.db", "r", prompts=True)
    first, ids, second = capsys.readouterr().out.splitlines()
    assert "100 + 2 tokens: token ids, because " in first
    assert ids.split() == [*map(str, range(100)), "4", "5"]
    assert second.startswith("call 1, agent: its tokens are not known")


@pytest.mark.parametrize(
    ("state", "outcome", "words"),
    [("succeeded", 1.0, "succeeded"), ("succeeded", 0.0, "completed"),
     ("succeeded", nan, "completed"), ("failed", nan, "failed"), ("failed", 0.5, "failed")],
)  # fmt: skip
def test_the_words_for_a_state_do_not_contradict_the_outcome(
    state: str, outcome: float, words: str
) -> None:
    rewards = [] if isnan(outcome) else [Reward(value=outcome)]
    given: Any = {"attempt": "a", "rewards": rewards, "state": RolloutState(state)}
    assert state_in_words(factories.rollout("g/0", **given)) == words


# -- what the report of a run shows of its rollouts ------------------------------------------------


async def test_the_best_example_has_not_failed(tmp_path: Path) -> None:
    """By `agent.error_reward` it has an outcome all the same. Less than 1 of 1 is no success."""
    config = resolve({"name": "r", "output": str(tmp_path)}, source="test")
    steps = [StepRow(run="r", step=0, metrics={"eval/score": 0.5}, committed=True, at=0.0)]
    async with open_store(config.store) as store:
        await store.open_run("r", {})
        for index, (failure, value) in enumerate(
            ((True, 1.0), (False, 0.0), (False, 0.01), (False, 0.5))
        ):
            one = NewRollout(
                id=f"r/eval/000000/score/{index:04d}", run="r", group="r/eval/000000/score",
                index=index, task={}, purpose=Purpose.EVAL,
            )  # fmt: skip
            await store.enqueue([one])
            (attempt,) = await store.claim(1, runner="w", lease=60.0, run="r")
            why = Failure(kind=ErrorKind.AGENT, message="no") if failure else None
            rewards = [Reward(value=value)]
            done = Outcome(attempt=attempt.id, fence=attempt.fence, failure=why, rewards=rewards)
            await store.finish([done])
        found = await transcript.find(store, config, steps)
    ids = {title.partition(", after")[0]: one.id[-1] for title, one in found.items()}
    assert ids == {"Best, 0.5 of 1": "3", "A failure": "1"}
    assert transcript.best_title(1.0, share=True) == "A success"
    assert transcript.best_title(0.5, share=False) == "A success"
    assert transcript.best_title(0.014, share=True) == "Best, 0.014 of 1"
