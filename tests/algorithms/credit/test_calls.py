"""Credit over calls: the worked numbers of the literature, and what is missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
from agentrl.algorithms.credit.core import CriticValues, GroupRelative, Whiten, weighted_sum
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.presets.registry import make
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


# -- worked numbers of the catalogue ---------------------------------------------------------------


def test_step_mdp() -> None:
    """D1."""
    batch = world(Play(steps(0, 1, v=[0.4, 0.5])))
    near(StepGae(ValuesFromReward("transition:v"), "transition:p", 0.9, 0.8)(batch), [0.41, 0.5])


def test_every_call_of_a_rollout_gets_its_advantage() -> None:
    """D2: rollout-level statistics, and those over calls that let busy rollouts dominate."""
    batch = world(Play([Call()] * 3, outcome=1.0), Play([Call()], outcome=0.0))
    near(GroupRelative()(batch), [0.5, 0.5, 0.5, -0.5])
    near(GroupRelative(at="transition")(batch), [0.25, 0.25, 0.25, -0.75])


def test_discounted_returns() -> None:
    """D3."""
    near(Returns("transition:p", 0.9)(world(Play(steps(0, 0, 1)))), [0.81, 0.9, 1])
    near(Returns(gamma=0.9)(world(Play([Call()] * 3, outcome=1.0))), [0.81, 0.9, 1])


def test_mt_grpo() -> None:
    """D6: the turn reward is of the call before the tool result."""
    plays = [
        Play([Call(rewards={"turn": turn}), Call()], outcome=outcome)
        for turn, outcome in [(1.0, 1.0), (0.0, 1.0), (0.0, 0.0), (0.0, 0.0)]
    ]
    batch = world(*plays)
    for eps, best in [(0.0, 2.366025), (1e-4, 2.365575)]:
        turn = GroupRelative("transition:turn", by=("group", "turn"), norm="std", eps=eps)
        advantage = weighted_sum((GroupRelative(norm="std", eps=eps), 1.0), (turn, 1.0))(batch)
        assert advantage[0].item() == pytest.approx(best, abs=5e-7)
    turn = GroupRelative("transition:turn", by=("group", "turn"), norm="std", eps=0)
    advantage = weighted_sum((GroupRelative(norm="std", eps=0), 1.0), (turn, 1.0))(batch)
    near(advantage[1::2], [0.866025, 0.866025, -0.866025, -0.866025])
    near(advantage[2::2], [0.366025, -1.366025, -1.366025])


def test_mt_grpo_compares_by_sums_without_tool_calls() -> None:
    plays = [
        Play([Call(rewards={"turn": 1.0}), Call()], outcome=1.0),
        Play([Call(rewards={"turn": 0.0}), Call()], outcome=0.0),
        Play([Call()], outcome=1.0),
    ]
    advantage = make("mt-grpo", {}).credit(world(*plays))
    # Outcomes 1, 0, 1; turns 1, 0; sums 2, 0, 1.
    expected = [0.57735 + 0.707107, 0.57735, -1.154701 - 0.707107, -1.154701, 0.0]
    near(advantage, expected, within=5e-6)
    halved = make("mt-grpo", {"weight": 0.5}).credit(world(*plays))  # sums 1.5, 0, 1
    near(halved[-1:], [0.218218], within=5e-6)


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


def test_values_from_fresh_continuations() -> None:
    """D16: V .25 -> .75."""
    batch = world(Play(steps(0, 0.75, v=[0.25, 0.75])))
    near(StepGae(ValuesFromReward("transition:v"), "transition:p", 1.0, 0.0)(batch), [0.5, 0.0])


def test_tree_grpo() -> None:
    """D17: two trees of two rollouts."""
    plays = [
        Play([Call(node=tree), Call()], outcome=outcome)
        for tree, outcome in [("A", 1.0), ("A", 0.0), ("B", 1.0), ("B", 1.0)]
    ]
    intra = GroupRelative(by=("group", "tree"), norm="std", eps=0)
    near(intra(world(*plays))[::2], [0.707107, -0.707107, 0, 0])
    both = weighted_sum((GroupRelative(norm="std", eps=0), 1.0), (intra, 1.0))
    near(both(world(*plays))[::2], [1.207107, -2.207107, 0.5, 0.5])


def test_dr_mas() -> None:
    """E11: statistics of a role over its calls; and one entry per rollout instead."""
    plays = [
        Play([Call(role="a"), *[Call(role="b")] * 3], outcome=1.0),
        Play([Call(role="a"), Call(role="b")], outcome=0.0),
    ]
    batch = world(*plays)
    near(
        GroupRelative(at="transition", by=("group", "role"))(batch),
        [0.5, 0.25, 0.25, 0.25, -0.5, -0.75],
    )
    near(GroupRelative(at="role", by=("group", "role"))(batch), [0.5, 0.5, 0.5, 0.5, -0.5, -0.5])


def test_at_grpo() -> None:
    """E12: same task, role and turn."""
    plays = [
        Play([Call(role=role, rewards={"p": p}) for role, p in turns])
        for turns in ([("a", 1.0), ("b", 0.0)], [("a", 0.0), ("a", 1.0)], [("b", 1.0), ("b", 1.0)])
    ]
    credit = GroupRelative("transition:p", by=("group", "role", "turn"))
    near(credit(world(*plays)), [0.5, -0.5, -0.5, 0, 0, 0.5])


def test_fading_to_the_start() -> None:
    """E1: the centred outcome times gamma to the number of calls still to come."""
    batch = world(Play([Call(tokens=2)] * 3, outcome=1.0), Play([Call()], outcome=0.0))
    near(TurnDiscount(GroupRelative(), 0.5)(batch), [0.125, 0.125, 0.25, 0.25, 0.5, 0.5, -0.5])


# -- what is missing -------------------------------------------------------------------------------


def test_a_role_receives_its_reward_at_its_last_call() -> None:
    calls = [Call(role="a"), Call(role="b"), Call(role="a")]
    batch = world(Play(calls, tact={"a": 1.0}), Play(calls[:2], tact={"a": 2.0, "b": 3.0}))
    near(call_rewards(batch, "role:tact"), [NAN, NAN, 1, 2, 3])
    near(Returns("role:tact")(batch), [1, 1, 1, 5, 3])


def a_missing_reward_is_not_zero(credit: Callable[[Batch], Tensor]) -> None:
    lost, whole = Play([Call("s")] * 2), [Play([Call("s")], outcome=o) for o in (1.0, 0.0)]
    assert credit(world(lost, *whole))[:2].isnan().all()
    near(credit(world(lost, *whole))[2:], credit(world(*whole)).tolist())


def test_a_rollout_without_its_reward_is_missing_not_zero() -> None:
    a_missing_reward_is_not_zero(GroupRelative(Returns()))
    a_missing_reward_is_not_zero(Whiten(TurnDiscount(GroupRelative(), 0.9)))


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


def an_empty_batch_has_no_credit(credit: Callable[[Batch], Tensor]) -> None:
    empty = world(Play([], outcome=1.0), Play([Call(tokens=0)], outcome=0.0))
    assert credit(empty).shape == (0,)


def test_empty_batches_have_no_credit() -> None:
    an_empty_batch_has_no_credit(GroupRelative(Returns()))
    an_empty_batch_has_no_credit(TurnDiscount(GroupRelative(), 0.5))


def test_potentials_of_no_rollouts() -> None:
    nothing = build_batch([], reward_names=("outcome", "transition:phi"))
    assert PotentialShaping("transition:phi")(nothing).shape == (0,)
