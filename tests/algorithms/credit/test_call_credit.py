"""Credit over calls: the worked numbers of the literature, and naive loops over random rollouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from agentrl.algorithms.credit.call_credit import (
    CallRewards,
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
from agentrl.algorithms.presets.catalogue import make
from agentrl.algorithms.zoo.hierarchy.presets import HiperGae
from agentrl.algorithms.zoo.states.presets import SameStateRelative
from agentrl.algorithms.zoo.teams.roles import RoleFilter
from agentrl.errors import TrainingError
from tests.algorithms.naive import (
    naive_gae,
    naive_histories,
    returns,
    rewards_of,
)
from tests.algorithms.worlds import NAN, Call, Play, calls_without_tokens, random_plays, world

SEEDS = range(8)


def near(values: Tensor, expected: Sequence[float], within: float = 5e-7) -> None:
    assert values.tolist() == pytest.approx(list(expected), abs=within, nan_ok=True)


def per_call(batch: Batch, x: Tensor) -> list[float]:
    """The number that all tokens of a call share."""
    out = []
    for call in range(len(batch.transitions)):
        values = set(x[batch.token_transition == call].nan_to_num(nan=1e9).tolist())
        assert len(values) == 1
        out.append(values.pop())
    return [NAN if value == 1e9 else value for value in out]


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


def test_gigpo() -> None:
    """D4."""
    batch = world(
        Play([Call("s0"), Call("s1")], outcome=1.0), Play([Call("s0"), Call("s2")], outcome=0.0)
    )
    anchors = SameStateRelative(gamma=0.9)
    near(anchors(batch), [0.45, 0, -0.45, 0])
    near(GroupRelative(Returns(gamma=0.9), by=("group", "state"))(batch), [0.45, 0, -0.45, 0])
    near(weighted_sum((GroupRelative(), 1.0), (anchors, 1.0))(batch), [0.95, 0.5, -0.95, -0.5])


def test_hgpo() -> None:
    """D5: the final steps of three rollouts in the same state."""
    plays = [
        Play([Call(before), Call("s")], outcome=outcome)
        for before, outcome in [("a", 1.0), ("a", 0.0), ("c", 1.0)]
    ]
    advantage = SameStateRelative(gamma=1.0, depth=1)(world(*plays))
    near(advantage[1::2], [0.444444, -0.555556, 0.333333])


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


def test_mt_grpo_compares_a_rollout_without_a_tool_call_by_the_sum_of_both() -> None:
    plays = [
        Play([Call(rewards={"turn": 1.0}), Call()], outcome=1.0),
        Play([Call(rewards={"turn": 0.0}), Call()], outcome=0.0),
        Play([Call()], outcome=1.0),
    ]
    advantage = make("mt-grpo", {}).credit(world(*plays))
    # Outcomes 1, 0, 1; turns 1, 0; sums 2, 0, 1.
    expected = [0.57735 + 0.707107, 0.57735, -1.154701 - 0.707107, -1.154701, 0.0]
    near(advantage, expected, within=5e-6)


def test_potential_based_shaping() -> None:
    """D13."""
    calls = steps(0.2, 0.5, 0.9, name="phi")
    near(PotentialShaping("transition:phi")(world(Play(calls))), [0.3, 0.4, -0.9])
    calls[-1].truncated = True  # nothing says how it would have ended: its potential stays
    near(PotentialShaping("transition:phi")(world(Play(calls))), [0.3, 0.4, 0.0])
    gap = [calls[0], Call(), *calls[1:]]
    near(PotentialShaping("transition:phi")(world(Play(gap))), [0.3, NAN, 0.4, 0.0])


def test_potentials_leave_the_gradient_of_truncated_rollouts_with_an_outcome_as_it_is() -> None:
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


def test_hiper() -> None:
    """D20."""
    high, low = [0.5, NAN, 0.6], [0.4, 0.5, 0.7]
    batch = world(Play(steps(0, 0, 1, high=high, low=low)))
    parts = {
        part: HiperGae(
            CallRewards("transition:high"), CallRewards("transition:low"), part, "transition:p", 0.9
        )(batch)
        for part in ("high", "low")
    }
    near(parts["low"], [0.086, 0.04, 0.3])
    near(parts["high"], [0.31, NAN, 0.4])


def test_a_planner_begins_segments_and_takes_no_time() -> None:
    """As D20, where the subgoals are calls of their own and a third role looks on."""
    one = {"p": 0.0}
    calls = [
        Call(role="planner", rewards=one | {"high": 0.5}),
        Call(rewards=one | {"low": 0.4}),
        Call(rewards=one | {"low": 0.5}),
        Call(role="planner", rewards=one | {"high": 0.6}),
        Call(rewards={"low": 0.7}),
        Call(role="judge", rewards={"p": 1.0}),
    ]
    batch = world(Play(calls))
    high, low = CallRewards("transition:high"), CallRewards("transition:low")
    near(HiperGae(high, low, "low", "transition:p", 0.9)(batch), [NAN, 0.086, 0.04, NAN, 0.3, NAN])
    near(HiperGae(high, low, "high", "transition:p", 0.9)(batch), [0.31, NAN, NAN, 0.4, NAN, NAN])


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


# -- naive loops ---------------------------------------------------------------------------------


def agree(name: str, actual: list[float], expected: list[float]) -> None:
    assert actual == pytest.approx(expected, abs=1e-10, nan_ok=True), name


@pytest.mark.parametrize("seed", SEEDS)
def test_against_loops(seed: int) -> None:
    plays = random_plays(seed)
    for play in plays:  # tree nodes belong to a group, states may recur in another
        for call in play.calls:
            call.node = call.node and f"{play.group}:{call.node}"
    batch = world(*plays)
    for name in ("outcome", "p"):
        reward = name if name == "outcome" else "transition:p"
        expected = [g for play in plays for g in returns(rewards_of(play, name), 0.9)]
        agree("returns", Returns(reward, 0.9)(batch).tolist(), expected)
        for std in (False, True):
            credit = SameStateRelative(reward, 0.9, 2, norm="std" if std else "none")
            actual = per_call(batch, credit(batch))
            agree("hgpo", actual, naive_histories(plays, name, 0.9, 2, std))
        gae = StepGae(ValuesFromReward("transition:v"), reward, 0.9, 0.8)(batch).tolist()
        agree("gae", gae, naive_gae(plays, name, 0.9, 0.8))


def test_a_role_receives_its_reward_at_its_last_call() -> None:
    calls = [Call(role="a"), Call(role="b"), Call(role="a")]
    batch = world(Play(calls, tact={"a": 1.0}), Play(calls[:2], tact={"a": 2.0, "b": 3.0}))
    near(call_rewards(batch, "role:tact"), [NAN, NAN, 1, 2, 3])
    near(Returns("role:tact")(batch), [1, 1, 1, 5, 3])


def test_a_rollout_without_its_reward_is_missing_not_zero() -> None:
    lost, whole = Play([Call("s")] * 2), [Play([Call("s")], outcome=o) for o in (1.0, 0.0)]
    credits: list[Callable[[Batch], Tensor]] = [
        SameStateRelative(),
        GroupRelative(Returns()),
        Whiten(TurnDiscount(GroupRelative(), 0.9)),
    ]
    for credit in credits:
        assert credit(world(lost, *whole))[:2].isnan().all()
        near(credit(world(lost, *whole))[2:], credit(world(*whole)).tolist())


def test_what_the_data_does_not_have_is_refused() -> None:
    batch = world(Play(steps(0, 1, v=[0.4, NAN])))
    with pytest.raises(TrainingError, match="step 0: 1 of 2 calls have no value 'transition:v'"):
        StepGae(ValuesFromReward("transition:v"), "transition:p")(batch)
    with pytest.raises(TrainingError, match="needs the values of a critic for 2 tokens"):
        GroupRelative(StepGae(FirstTokenValues(CriticValues()), "transition:p"))(batch)
    with pytest.raises(TrainingError, match=r"none of the 2 calls .* role 'agnt'; did you mean"):
        RoleFilter(("agnt",))(batch)


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


def test_only_chosen_roles_are_trained() -> None:
    batch = world(Play([Call(role="a", tokens=2), Call(role="b")]))
    assert RoleFilter(("b",))(batch).tolist() == [False, False, True]


def test_empty_batches_have_no_credit() -> None:
    empty = world(Play([], outcome=1.0), Play([Call(tokens=0)], outcome=0.0))
    for credit in (
        SameStateRelative(depth=2),
        GroupRelative(Returns()),
        TurnDiscount(GroupRelative(), 0.5),
    ):
        assert credit(empty).shape == (0,)


def test_potentials_of_no_rollouts() -> None:
    nothing = build_batch([], reward_names=("outcome", "transition:phi"))
    assert PotentialShaping("transition:phi")(nothing).shape == (0,)
