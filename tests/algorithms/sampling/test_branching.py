"""Which calls are sampled anew."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from agentrl.algorithms.sampling.replays import (
    Replays,
    branch_points,
    branches,
    choose_branch_points,
    replay_metrics,
)
from agentrl.core.config import RunConfig, resolve
from agentrl.core.config.learning import BranchingConfig
from agentrl.core.errors import ConfigError
from agentrl.core.types import (
    Branch,
    Purpose,
    Reward,
    Rollout,
    RolloutState,
    Sampling,
    float32,
    int32,
)
from tests import factories


def rollout(name: str, *surprises: float, **changed: Any) -> Rollout:
    """A rollout whose calls are of one token each, as surprising as given."""
    calls = [
        factories.call(f"{name}{i}", attempt=name, index=i, logprob=-surprise)
        for i, surprise in enumerate(surprises)
    ]
    known = {"task": {"input": "x"}, "step": 3, "rewards": [Reward(value=1.0)]}
    return factories.rollout(name, calls, **known | changed)


def config(**branching: Any) -> RunConfig:
    return resolve({"algorithm": {"group_size": 4, "branching": branching}}, source="test")


def asked(config: RunConfig, *rollouts: Rollout) -> list[tuple[str, int]]:
    made = branches(config, rollouts)
    return [(row.branch.rollout, row.branch.calls) for row in made if row.branch]


def test_a_branch_from_every_call_but_the_first() -> None:
    rollouts = [rollout("a", 1, 1, 1), rollout("b", 1, 1), rollout("c", 1)]
    every = [("a", 1), ("a", 1), ("a", 2), ("a", 2), ("b", 1), ("b", 1)]
    assert asked(config(kind="mc", width=2), *rollouts) == every
    assert asked(config(), *rollouts[:0]) == []


def test_the_least_certain_calls_of_each_rollout_or_of_the_group() -> None:
    rollouts = [rollout("a", 9, 4, 5, 3), rollout("b", 9, 1, 2)]
    assert asked(config(kind="mc", calls=1), *rollouts) == [("a", 2), ("b", 2)]
    assert asked(config(kind="tree", calls=2), *rollouts) == [("a", 1), ("a", 2)]


def test_a_branch_is_a_rollout_of_the_group_beyond_its_own() -> None:
    seats = {"player_0": "policy@000010"}
    first, second = branches(config(kind="mc"), [rollout("a", 1, 1, 1, seats=seats)])
    assert (first.id, first.index, first.group) == ("g/0004", 4, "g")
    assert (second.id, second.index, second.step) == ("g/0005", 5, 3)
    assert first.seats == second.seats == seats
    assert second.branch == Branch(rollout="a", calls=2)
    assert (second.task, second.priority, second.purpose) == ({"input": "x"}, 1, Purpose.TRAIN)


def call(row: Rollout, number: int, **changed: Any) -> Rollout:
    calls = list(row.transitions)
    calls[number] = replace(calls[number], **changed)
    return replace(row, transitions=calls)


@pytest.mark.parametrize(
    ("changed", "left"),
    [
        ({"finish": "cut"}, [1]),  # may be sampled anew, but not be repeated
        ({"sampling": Sampling(temperature=0.0)}, [2]),
        ({"policy": "judge"}, [2]),
        ({"exact": False, "logprobs": float32()}, [2]),
        ({"completion": int32(), "logprobs": float32()}, [2]),
    ],
)
def test_calls_that_cannot_be_sampled_anew(changed: Any, left: list[int]) -> None:
    assert [fork.calls for fork in branch_points(call(rollout("a", 1, 1, 1), 1, **changed))] == left


def test_a_rollout_that_is_not_learned_from_has_no_branches() -> None:
    failed = rollout("a", 1, 1, state=RolloutState.FAILED, rewards=[])
    assert list(branch_points(failed)) == []
    assert list(branch_points(rollout("a", 1, 1, purpose=Purpose.EVAL))) == []


def test_equally_certain_calls_are_taken_in_order() -> None:
    found = [list(branch_points(rollout(name, 1, 1, 1))) for name in "ab"]
    few = choose_branch_points(BranchingConfig(kind="tree", calls=3), found)
    assert [(fork.rollout, fork.calls) for fork in few] == [("a", 1), ("a", 2), ("b", 1)]


def test_branches_that_went_astray_are_counted() -> None:
    branch = Branch(rollout="a", calls=2)
    whole = call(call(rollout("b", 1, 1, 1), 0, repeats="a0"), 1, repeats="a1")
    astray = call(rollout("c", 1, 1), 0, repeats="a0")
    rows = [rollout("a", 1, 1, 1), *(replace(row, branch=branch) for row in (whole, astray))]
    found = replay_metrics([factories.group(*rows)])
    assert found == {"branches": 2, "branches/diverged": 1, "calls/repeated": 3}
    assert replay_metrics([factories.group(*rows[:1])]) == {}


async def test_a_step_reports_its_branches() -> None:
    whole = call(call(rollout("b", 1, 1, 1), 0, repeats="a0"), 1, repeats="a1")
    rows = [rollout("a", 1, 1, 1), replace(whole, branch=Branch(rollout="a", calls=2))]
    groups = [factories.group(*rows)]
    kept, metrics = await Replays().complete(groups)
    assert kept == groups
    assert metrics == {"branches": 1, "branches/diverged": 0, "calls/repeated": 2}


@pytest.mark.parametrize(
    ("branching", "why"),
    [
        ({"width": 2}, "have no effect without"),
        ({"kind": "tree"}, "needs `calls`"),
        ({"kind": "mcts"}, "branching.kind"),
        ({"kind": "mc", "depth": 1}, "algorithm.branching.depth"),
    ],
)
def test_settings_that_cannot_matter_are_refused(branching: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        config(**branching)
