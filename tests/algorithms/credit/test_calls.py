"""Credit over calls: potentials, and what is missing. Numbers: `tests/golden/credit.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from agentrl.algorithms.credit.calls import (
    FirstTokenValues,
    PotentialShaping,
    Returns,
    StepGae,
    TurnDiscount,
    ValuesFromReward,
    call_rewards,
)
from agentrl.algorithms.credit.core import Credit, CriticValues, GroupRelative, Whiten
from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.presets.replays import BranchAdvantage
from agentrl.algorithms.presets.states import SameStateRelative
from agentrl.core.errors import TrainingError
from tests.algorithms.worlds import NAN, Call, Play, calls_without_tokens, world


def near(values: Tensor, expected: Sequence[float], within: float = 5e-7) -> None:
    assert values.tolist() == pytest.approx(list(expected), abs=within, nan_ok=True)


def steps(*rewards: float, name: str = "p", **more: Sequence[float]) -> list[Call]:
    """One call per reward, with more rewards by name."""
    return [
        Call(rewards={name: r} | {key: column[i] for key, column in more.items()})
        for i, r in enumerate(rewards)
    ]


# -- potentials ------------------------------------------------------------------------------------


def test_potential_based_shaping() -> None:
    """D13."""
    calls = steps(0.2, 0.5, 0.9, name="phi")
    near(PotentialShaping("transition:phi")(world(Play(calls))), [0.3, 0.4, -0.9])
    calls[-1].truncated = True  # nothing says how it would have ended: its potential stays
    near(PotentialShaping("transition:phi")(world(Play(calls))), [0.3, 0.4, 0.0])
    gap = [calls[0], Call(), *calls[1:]]
    near(PotentialShaping("transition:phi")(world(Play(gap))), [0.3, NAN, 0.4, 0.0])


def test_potentials_do_not_bias_truncated_rollouts() -> None:
    """Every rollout of two binary choices, all cut off and all with an outcome."""
    theta = torch.tensor([0.3, -0.4, 0.9], dtype=torch.float64)  # of the first, and of each second
    exact, shaped = torch.zeros(3), torch.zeros(3)
    for first, second in product((0, 1), (0, 1)):
        logits = [(theta[0], first), (theta[1 + first], second)]
        p = math.prod(torch.sigmoid(x if chosen else -x) for x, chosen in logits)
        score = torch.zeros(3, dtype=torch.float64)
        for at, (x, chosen) in zip((0, 1 + first), logits, strict=True):
            score[at] = chosen - torch.sigmoid(x)
        calls = steps(0.2, 0.5 - first, name="phi")
        calls[-1].truncated = True
        batch = world(Play(calls, outcome=float(first + second)))
        potential = Returns(PotentialShaping("transition:phi"))(batch)
        exact = exact + p * score * (first + second)
        of_call = torch.tensor([potential[0], *(potential[1],) * 2])
        shaped = shaped + p * score * (first + second + of_call)
    assert torch.allclose(shaped, exact, rtol=1e-12, atol=1e-12)


# -- what is missing -------------------------------------------------------------------------------


def test_a_role_receives_its_reward_at_its_last_call() -> None:
    calls = [Call(role="a"), Call(role="b"), Call(role="a")]
    batch = world(Play(calls, tact={"a": 1.0}), Play(calls[:2], tact={"a": 2.0, "b": 3.0}))
    near(call_rewards(batch, "role:tact"), [NAN, NAN, 1, 2, 3])
    near(Returns("role:tact")(batch), [1, 1, 1, 5, 3])


@pytest.mark.parametrize(
    "credit",
    [GroupRelative(Returns()), Whiten(TurnDiscount(GroupRelative(), 0.9)), SameStateRelative(),
     GroupRelative(BranchAdvantage(), base="none")],
)  # fmt: skip
def test_a_rollout_without_its_reward_is_missing_not_zero(credit: Credit) -> None:
    lost, whole = Play([Call("s")] * 2), [Play([Call("s")], outcome=o) for o in (1.0, 0.0)]
    assert credit(world(lost, *whole))[:2].isnan().all()
    near(credit(world(lost, *whole))[2:], credit(world(*whole)).tolist())


def test_what_the_data_does_not_have_is_refused() -> None:
    batch = world(Play(steps(0, 1, v=[0.4, NAN])))
    with pytest.raises(TrainingError, match="step 0: 1 of 2 calls have no value 'transition:v'"):
        StepGae(ValuesFromReward("transition:v"), "transition:p")(batch)
    with pytest.raises(TrainingError, match="needs the values of a critic for 2 tokens"):
        GroupRelative(StepGae(FirstTokenValues(CriticValues()), "transition:p"))(batch)


def test_the_value_of_a_call_is_that_before_its_first_token() -> None:
    batch = world(Play([Call(tokens=2), Call(tokens=0), Call()]), values=[0.3, 0.9, 0.5])
    near(FirstTokenValues(CriticValues())(batch), [0.3, NAN, 0.5])


def test_calls_without_tokens_are_no_decisions_of_a_critic() -> None:
    """What such a call received counts for the one before, and it is in no statistic."""
    bare, joined, other, values = calls_without_tokens()
    worlds = world(bare, other, values=values), world(joined, other, values=values)
    for lam in (0.0, 0.8):
        steps = StepGae(FirstTokenValues(CriticValues()), "transition:p", 1.0, lam)
        near(steps(worlds[0])[[0, 2, 3]], steps(worlds[1]).tolist())
        assert steps(worlds[0])[1].isnan()
        credit = GroupRelative(steps, by=("all",), norm="std")
        near(credit(worlds[0]), credit(worlds[1]).tolist())
        near(steps.returns(worlds[0]), steps.returns(worlds[1]).tolist())


@pytest.mark.parametrize(
    "credit",
    [GroupRelative(Returns()), TurnDiscount(GroupRelative(), 0.5), SameStateRelative(depth=2),
     GroupRelative(BranchAdvantage())],
)  # fmt: skip
def test_an_empty_batch_has_no_credit(credit: Credit) -> None:
    empty = world(Play([], outcome=1.0), Play([Call(tokens=0)], outcome=0.0))
    assert credit(empty).shape == (0,)


def test_potentials_of_no_rollouts() -> None:
    nothing = build_batch([], reward_names=("outcome", "transition:phi"))
    assert PotentialShaping("transition:phi")(nothing).shape == (0,)
