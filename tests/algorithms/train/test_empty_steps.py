"""What counts as a step that had nothing to learn from, and what is said when there were many."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agentrl.algorithms.sampling.collect import Collected
from agentrl.algorithms.train.empty_steps import check_empty_steps, failure_counts, is_empty
from agentrl.algorithms.train.policy_set import PolicySet
from agentrl.algorithms.train.prepare import count_unseen_tools
from agentrl.config import RunConfig, resolve
from agentrl.errors import TrainingError
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.types import EMPTY, Group, RolloutState, StepCommit
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
    assert alone([one])  # fewer than `min_group`
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


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        await store.open_run("r", {})
        yield store


def run_config(**settings: Any) -> RunConfig:
    return resolve({"name": "r", "steps": 9} | settings, source="test")


async def commit(store: Store, step: int, **metrics: float) -> None:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    await store.commit_step(
        StepCommit(
            run="r", epoch=1, step=step, groups=[], versions={}, checkpoint=None, metrics=named
        )
    )


async def test_only_the_last_steps_in_a_row_count(store: Store) -> None:
    for step, empty in enumerate((True, True, False, True, True)):
        await commit(store, step, **({"rollouts__empty": 8.0} if empty else {"loss": 1.0}))
        await check_empty_steps(store, run_config())
    await commit(store, 5, rollouts__empty=8.0)
    with pytest.raises(TrainingError, match=r"3 steps in a row.*resumes after step 6"):
        await check_empty_steps(store, run_config())
    await check_empty_steps(store, run_config(max_empty_steps=4))


@pytest.mark.parametrize(
    ("counts", "cause"),
    [
        ({"calls__refused": 4.0, "calls__too_long": 4.0}, r"the model's context\. Look at"),
        ({"calls__refused": 4.0, "calls__too_long": 0.0}, "without token ids"),
        ({}, "algorithm.min_group"),
    ],
)
async def test_the_cause_where_nothing_failed(
    store: Store, counts: dict[str, float], cause: str
) -> None:
    await commit(store, 0, rollouts__empty=4.0, **counts)
    with pytest.raises(TrainingError, match=cause):
        await check_empty_steps(store, run_config(max_empty_steps=1))


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
