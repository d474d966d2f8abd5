"""What counts as a step that had nothing to learn from, and what is said when there were many."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agentrl.algorithms.objective.core import ReferenceControl
from agentrl.algorithms.sampling.collect import Collected
from agentrl.algorithms.sampling.curriculum import DIFFICULTY, Curriculum
from agentrl.algorithms.train import loop
from agentrl.algorithms.train.features import ServedRun
from agentrl.algorithms.train.loop import (
    TrainingLoop,
    check_empty_steps,
    check_failed,
    failure_counts,
    is_empty,
)
from agentrl.algorithms.train.policies import PolicySet
from agentrl.algorithms.train.prepare import Preprocessor, count_unseen_tools
from agentrl.core.config import resolve
from agentrl.core.errors import TrainingError
from agentrl.core.types import (
    EMPTY,
    ErrorKind,
    Failure,
    Group,
    Json,
    Reward,
    RolloutState,
    RunState,
    StepCommit,
)
from agentrl.store import open_store
from agentrl.store.base import Store
from tests import factories
from tests.algorithms.train.test_features import Run
from tests.algorithms.train.test_policy_set import config as team_config
from tests.algorithms.train.test_policy_set import recording, shared
from tests.algorithms.train.test_update import Recorder, group, updater


def alone(groups: list[Group], discarded: list[Group] = []) -> bool:  # noqa: B006 - read only
    learner = updater(Recorder())
    team = PolicySet(learner.config, {"policy": learner})
    return is_empty(team, 0, team.update(0, groups), Collected(groups, discarded, {}))


def broken(made: Group, **changed: Any) -> Group:
    return replace(made, rollouts=[replace(row, **changed) for row in made.rollouts])


def test_a_step_is_empty_where_no_rollout_can_be_used() -> None:
    good, one = group("a", 1.0, 0.0), group("b", 1.0)
    failed = broken(group("c", None, None), state=RolloutState.FAILED)
    calls = [replace(call, exact=False) for call in good.rollouts[0].transitions]
    assert not alone([good])
    assert not alone([group("a", 1.0, 1.0)])  # nothing to compare, and nothing broken
    assert not alone([failed, good])
    assert alone([failed])
    assert alone([one])  # too few to compare
    assert alone([broken(good, transitions=calls)])
    assert alone([], [failed])
    assert not alone([], [group("a", 1.0, 1.0)])  # tasks that are too easy are no fault


def test_of_several_policies_one_that_could_learn_is_enough() -> None:
    made = team_config(team={"schedule": "alternating"}, steps=4)
    whole, _ = recording(made)
    both = shared("g", 1.0, 0.0)
    solver = [
        replace(row, transitions=[call for call in row.transitions if call.policy == "solver"])
        for row in both.rollouts
    ]
    groups = [replace(both, rollouts=solver)]
    assert not is_empty(
        whole, 0, whole.update(0, groups), Collected(groups, [], {})
    )  # the planner's turn
    failed = [broken(both, state=RolloutState.FAILED, rewards=[])]
    assert is_empty(whole, 0, whole.update(0, failed), Collected(failed, [], {}))


class Steps(Run):
    """Gives a loop these groups, one a step, with what it needs beside policies."""

    def __init__(self, curriculum: Curriculum, groups: list[Group]) -> None:
        super().__init__([])
        self.curriculum, self.groups = curriculum, groups
        self.committed: list[StepCommit] = []

    async def collect(self, step: int) -> Collected:
        groups = [self.groups[step]]
        return Collected(groups, [], self.curriculum.claimed(groups))

    async def commit_step(self, commit: StepCommit) -> None:
        self.committed.append(commit)


async def trained(
    tmp_path: Path, groups: list[Group], state: dict[str, Json], step: int = 0, checkpoint: str = ""
) -> tuple[list[str], list[int], dict[str, Json]]:
    """What a process commits that trains from `step` on, with the state of `checkpoint`: names of
    checkpoints, the steps after which references were asked to follow, and the state at its end."""
    settings: dict[str, Any] = {"name": "r", "steps": len(groups), "output": str(tmp_path)}
    config = resolve(settings | {"tasks": {"order": "difficulty"}}, source="test")
    curriculum, followed, taught = Curriculum(config), list[int](), list[str]()

    class Follows:
        def finish(self, step: int) -> None:
            followed.append(step)

    class Learns:
        def learn(self, groups: Sequence[Group]) -> dict[str, float]:
            taught.extend(each.id for each in groups)
            return {}

    made = dataclasses.replace(
        updater(Recorder()),
        reference_control=ReferenceControl(reference=Follows()),
        preprocessor=Preprocessor(trainers=(Learns(),)),
    )
    made.state.parts[DIFFICULTY] = curriculum.difficulty.means
    policies = PolicySet(config, {"policy": made}, made.state)
    policies.restore(state or policies.dump())
    run: Any = Steps(curriculum, groups)
    begun = RunState(run="r", epoch=1, step=step, checkpoint=checkpoint or None, config={})
    live = ServedRun(
        config=config, store=run, state=begun, lock=run, closing=AsyncExitStack(), models=[],
        policies=policies, serving=run,
    )  # fmt: skip
    await TrainingLoop(live, run, run, [curriculum]).run()
    assert set(taught) == {"a"}
    names = [Path(commit.checkpoint or "").name for commit in run.committed]
    return names, followed, json.loads(json.dumps(policies.dump()))


async def test_an_empty_step_changes_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outcomes of calls that cannot be trained teach a curriculum nothing, and a reference that is
    due follows its policy after the next step that trains."""
    monkeypatch.setattr(loop, "settle_groups_ahead", lambda *given: asyncio.sleep(0))
    monkeypatch.setattr(loop, "check_empty_steps", lambda *given: asyncio.sleep(0))
    good, other = group("a", 1.0, 0.0), group("b", 1.0, 1.0)
    calls = [replace(call, exact=False) for call in other.rollouts[0].transitions]
    empty = broken(other, transitions=calls, task={"id": "b"})
    for count in (1, 2):
        groups = [good, *[empty] * count, good]
        whole = await trained(tmp_path / f"{count}", groups, {})
        last = f"{count + 2:06d}"
        assert whole[:2] == (["000001", *[""] * count, last], [*range(count + 2)])
        folder = tmp_path / f"{count}" / "checkpoints"
        kept = {
            name: json.loads((folder / name / "state.json").read_text())
            for name in whole[0]
            if name
        }
        assert not any("b" in entry["state"]["difficulty"] for entry in kept.values())
        killed = await trained(
            tmp_path / f"{count}-killed", groups, kept["000001"]["state"], count + 1,
            "checkpoints/000001",
        )  # fmt: skip
        assert killed == ([last], [*range(1, count + 2)], whole[2])


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        await store.open_run("r", {})
        yield store


async def commit(store: Store, step: int, **metrics: float) -> None:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    await store.commit_step(factories.commit(step, metrics=named))


async def test_only_the_last_steps_in_a_row_count(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step, empty in enumerate((True, True, False, True, True)):
        await commit(store, step, **({"rollouts__empty": 8.0} if empty else {"loss": 1.0}))
        await check_empty_steps(store, factories.config(steps=9))
    await commit(store, 5, rollouts__empty=8.0)
    with pytest.raises(TrainingError, match=r"3 steps in a row.*resumes after step 6"):
        await check_empty_steps(store, factories.config(steps=9))
    monkeypatch.setattr(loop, "MAX_EMPTY_STEPS", 4)
    await check_empty_steps(store, factories.config(steps=9))


@pytest.mark.parametrize(
    ("counts", "cause"),
    [
        ({"calls__refused": 4.0, "calls__too_long": 4.0}, r"the model's context\. Look at"),
        ({"calls__refused": 4.0, "calls__too_long": 0.0}, "without token ids"),
        ({}, "agent.path: call the policy"),
    ],
)
async def test_the_cause_where_nothing_failed(
    store: Store, counts: dict[str, float], cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "MAX_EMPTY_STEPS", 1)
    await commit(store, 0, rollouts__empty=4.0, **counts)
    with pytest.raises(TrainingError, match=cause):
        await check_empty_steps(store, factories.config(steps=9))


def test_an_empty_step_commits_its_failures_alone() -> None:
    metrics = {"rollouts": 4.0, "rollouts/failed": 3.0, "rollouts/failed/timeout": 3.0}
    kept = failure_counts({**metrics, "loss": 1.0, "reward/mean": 0.5, "rollouts/usable": 0.0})
    assert kept == metrics | {EMPTY: 4.0}


def test_tools_that_no_prompt_names_are_counted() -> None:
    (call,) = group("a", 1.0).rollouts[0].transitions
    tools = [{"type": "function", "function": {"name": "query"}}]
    blind = [replace(call, id=str(n), role="blind", tools=tools) for n in range(3)]
    seeing = replace(call, role="seeing", tools=tools)
    texts = iter(["user: hi", 'tools: {"name": "query"} user: hi'])
    assert count_unseen_tools([call, *blind, seeing], lambda _: next(texts)) == 3


def step_of(failures: Sequence[tuple[ErrorKind, str]], right: int, **fields: Any) -> Collected:
    """A step with these failures, half of them in a group that was discarded."""
    state = RolloutState.FAILED
    rows = [
        factories.rollout(f"f{i}", state=state, failure=Failure(kind=kind, message=text), **fields)
        for i, (kind, text) in enumerate(failures)
    ]
    rows += [factories.rollout(f"s{i}", rewards=[Reward(1.0)]) for i in range(right)]
    return Collected([factories.group(*rows[::2])], [factories.group(*rows[1::2], id="h")], {})


def lost(count: int, kind: ErrorKind = ErrorKind.VERIFIER) -> list[tuple[ErrorKind, str]]:
    return [(kind, f"EpisodeError: sandbox sb-{i}x7 was lost at 12:0{i}") for i in range(count)]


def test_a_step_whose_rollouts_failed_for_one_cause_ends_the_run() -> None:
    config = factories.config(steps=9)
    with pytest.raises(TrainingError) as caught:
        check_failed(config, step_of(lost(5), 4))
    said = str(caught.value)
    assert said.startswith("5 of the 9 rollouts of a step failed for one cause, verifier_error: ")
    assert "sandbox sb-0x7 was lost" in said
    assert "agentrl show f0" in said
    assert said.endswith("and repeat the command, which resumes")


@pytest.mark.parametrize(
    ("failures", "right"),
    [
        (lost(5), 5),  # no more than half
        (lost(3), 0),  # too few to know
        (lost(5, ErrorKind.LIMIT), 0),  # as the run file asks
        (lost(5, ErrorKind.CANCELLED), 0),
        ([*lost(4), *lost(4, ErrorKind.AGENT)], 1),  # for two causes
        ([(ErrorKind.AGENT, text) for text in ("a", "b", "c", "d", "e")], 1),
    ],
)
def test_a_step_goes_on(failures: list[tuple[ErrorKind, str]], right: int) -> None:
    check_failed(factories.config(steps=9), step_of(failures, right))


def test_failures_that_have_a_reward_are_no_reason_to_stop() -> None:
    scored = step_of(lost(6, ErrorKind.TIMEOUT), 0, rewards=[Reward(0.0)])
    check_failed(factories.config(steps=9), scored)
