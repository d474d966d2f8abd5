"""What a critic learns: returns of every credit that reads one, and the clipped loss."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from agentrl.algorithms.credit.calls import CallRewards
from agentrl.algorithms.credit.core import CriticValues, Gae, TokenKLPenalty, WeightedSum, Whiten
from agentrl.algorithms.objective import core as objective
from agentrl.algorithms.objective import values as targets
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.objective.ratios import LearnerOutput
from agentrl.algorithms.objective.values import ValueTerms
from agentrl.algorithms.presets import registry
from agentrl.algorithms.presets.calls import BiLevelGae, HiperGae
from agentrl.core.errors import TrainingError
from tests.algorithms.credit.test_calls import near
from tests.algorithms.worlds import NAN, Call, Play, world

EVERY: tuple[LearnerOutput, ...] = ("old", "sampler", "reference", "values")


def known(x: Tensor) -> list[float | None]:
    return [None if math.isnan(value) else round(value, 9) for value in x.tolist()]


def test_token_returns_are_those_of_the_catalogue() -> None:
    # A2: r = [0, 0, 1], V = [.5, .6, .7], gamma 1, lambda .95.
    batch = world(Play([Call(tokens=3)], outcome=1.0), values=[0.5, 0.6, 0.7])
    algo = registry.make("ppo", {}, supplies=EVERY)
    assert known(Gae(CriticValues())(batch)) == [0.46575, 0.385, 0.3]
    assert known(targets.returns(algo, batch)) == [0.96575, 0.985, 1.0]
    assert known(objective.compute_advantages(algo, batch)) != [0.46575, 0.385, 0.3]


def test_step_returns_are_learned_at_first_tokens() -> None:
    # D1: r = [0, 1], V = [.4, .5], gamma .9, lambda .8; later tokens' values are nobody's.
    play = Play([Call(tokens=2), Call(tokens=3)], outcome=1.0)
    batch = world(play, values=[0.4, 9.0, 0.5, 9.0, 9.0])
    algo = registry.make("agent-r1", {"gamma": 0.9, "lam": 0.8}, supplies=EVERY)
    assert known(targets.returns(algo, batch)) == [0.81, None, 1.0, None, None]


def test_bilevel_returns_are_learned_at_every_token() -> None:
    # D8: r = [0, .5, 0, 1], V = [.1, .2, .3, .4], calls (0, 1) and (2, 3), gamma_high .95.
    calls = [Call(tokens=2, rewards={"p": 0.5}), Call(tokens=2, rewards={"p": 1.0})]
    batch = world(Play(calls, outcome=1.0), values=[0.1, 0.2, 0.3, 0.4])
    options = {"reward": "transition:p", "gamma_high": 0.95}
    algo = registry.make("ragen", options, supplies=EVERY)
    # The advantages are 1.35, 1.25, .7, .6.
    assert known(targets.returns(algo, batch)) == [1.45, 1.45, 1.0, 1.0]


def test_subgoals_and_what_pursues_them_are_learned_apart() -> None:
    """D20, with the critic's values, where the subgoals are calls of their own."""
    calls = [Call(role=r, tokens=2) for r in ("planner", "agent", "agent", "planner", "agent")]
    first = [0.5, 0.4, 0.5, 0.6, 0.7]
    batch = world(Play(calls, outcome=1.0), values=[v for x in first for v in (x, 9.0)])
    algo = registry.make("hiper", {"gamma": 0.9}, supplies=EVERY)
    target = targets.returns(algo, batch).view(5, 2)
    assert target[:, 1].isnan().all()
    advantage = target[:, 0] - torch.tensor(first, dtype=torch.float64)
    assert known(advantage) == pytest.approx([0.31, 0.086, 0.04, 0.4, 0.3])
    high, low = torch.tensor([0.31, 0.4]), torch.tensor([0.086, 0.04, 0.3])
    white = torch.cat([(x - x.mean()) / x.std() for x in (high, low)])[[0, 2, 3, 1, 4]]
    torch.testing.assert_close(algo.credit(batch)[::2].float(), white, rtol=1e-4, atol=1e-4)
    with pytest.raises(TrainingError, match="role 'planer'; did you mean 'planner'"):
        targets.returns(registry.make("hiper", {"planner": "planer"}, supplies=EVERY), batch)


def test_a_temporal_difference_is_learned_and_credited() -> None:
    """D9."""
    batch = world(Play([Call(), Call()], outcome=1.0), values=[0.5, 0.6])
    algo = registry.make("archer", {"gamma": 0.95}, supplies=EVERY)
    assert known(targets.returns(algo, batch)) == pytest.approx([0.57, 1.0])
    assert known(algo.credit(batch)) == pytest.approx([0.07, 0.4])


def test_a_call_without_reward_ends_its_turn_all_the_same() -> None:
    """RAGEN's own code finds turns by non-zero rewards and merges the others."""
    calls = [Call(tokens=2, rewards={"p": 0.0}), Call(tokens=2, rewards={"p": 1.0})]
    batch = world(Play(calls), values=[0.1, 0.2, 0.3, 0.4])
    near(BiLevelGae(CriticValues(), "transition:p")(batch), [0.85, 0.75, 0.7, 0.6])


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


PPOS = ("ppo", "agent-r1", "turn-ppo", "pspo", "ragen")


@pytest.mark.parametrize("name", PPOS)
def test_a_critic_learns_the_reward_of_truncated_rollouts(name: str) -> None:
    """Every rollout is worth 1, whatever ended it. A value on top of the reward would be a target
    that runs away from what learns it."""
    algo, values = registry.make(name, {}, supplies=EVERY), [0.0] * 3
    for _ in range(200):
        play = Play([Call(tokens=2), Call(truncated=True)], outcome=1.0)
        target = targets.returns(algo, world(play, values=values))
        values = [v if math.isnan(new) else new for v, new in zip(values, target, strict=True)]
    assert values[-1] == pytest.approx(1.0, abs=1e-12)
    assert values[0] == pytest.approx(1.0, abs=0.06)  # less the discount of one call


@pytest.mark.parametrize("truncated", [True, False])
@pytest.mark.parametrize("name", ["ppo", "agent-r1", "ragen"])
def test_undiscounted_an_advantage_is_outcome_minus_value(name: str, truncated: bool) -> None:
    options = {"lam": 1.0, "gamma": 1.0} | ({"gamma_high": 1.0} if name == "ragen" else {})
    algo = registry.make(name, options, supplies=EVERY)
    values = [0.3, 0.7, 0.2, 0.9]
    calls = [Call(), Call(), Call(truncated=truncated)]
    batch = world(Play(calls, outcome=1.0), Play([Call()], outcome=0.0), values=values)
    advantage = targets.returns(algo, batch) - batch.values
    assert known(advantage) == pytest.approx([0.7, 0.3, 0.8, -0.9])


@pytest.mark.parametrize("name", PPOS)
def test_a_value_stands_for_the_reward_that_a_cut_left_out(name: str) -> None:
    """The last action has nothing to be judged by; what came before leads to where V is known. A
    rollout that ended by itself and has no reward stays missing."""
    gamma = {"gamma_high": 1.0} if name == "ragen" else {"gamma": 1.0}
    algo = registry.make(name, {"lam": 1.0, **gamma}, supplies=EVERY)
    calls, values = [Call(), Call(truncated=True)], [0.2, 0.7, 0.4, 0.5, 0.1]
    batch = world(Play(calls), Play([Call(), Call()]), Play([Call()], outcome=1.0), values=values)
    assert known(targets.returns(algo, batch)) == [0.7, 0.7, None, None, 1.0]


def test_a_token_cost_is_not_counted_twice_by_a_value() -> None:
    algo = registry.make("ppo", {"lam": 1.0, "kl_reward": 0.1}, supplies=EVERY)
    batch = world(Play([Call(tokens=2, truncated=True)]), values=[0.2, 0.7])
    batch = dataclasses.replace(batch, reference=batch.sampler_logprobs.double() - 1)
    assert known(targets.returns(algo, batch)) == [0.6, 0.7]


def test_a_missing_reward_is_no_target() -> None:
    calls = [Call(tokens=2)]
    batch = world(Play(calls, outcome=1.0), Play(calls), values=[0.0] * 4)
    for name in ("ppo", "turn-ppo", "ragen"):
        target = targets.returns(registry.make(name, {}, supplies=EVERY), batch)
        assert target[2:].isnan().all()
        assert not target[0].isnan()


def test_values_that_are_rewards_teach_no_critic() -> None:
    batch = world(Play([Call(rewards={"v": 0.5})], outcome=1.0))
    algo = registry.make("agent-r1", {"value": "transition:v"})
    assert not algo.reads_critic
    assert targets.returns(algo, batch).isnan().all()


def test_two_readings_of_one_critic_are_refused() -> None:
    batch = world(Play([Call()], outcome=1.0), values=[0.0])
    algo = Algo(
        WeightedSum(((Gae(CriticValues()), 1.0), (Gae(CriticValues(), gamma=0.5), 1.0))),
        name="both",
    )
    with pytest.raises(TrainingError, match="reads one critic in 2 different ways"):
        targets.returns(algo, batch)
    twice = Algo(WeightedSum(((Gae(CriticValues()), 1.0), (Gae(CriticValues()), 0.5))))
    assert known(targets.returns(twice, batch)) == [1.0]


@pytest.mark.parametrize("value", [NAN, math.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    batch = world(Play([Call(tokens=2)], outcome=1.0), values=[0.5, value])
    with pytest.raises(TrainingError, match="1 of 2 values of the critic are NaN or infinite"):
        targets.returns(Algo(Gae(CriticValues())), batch)


def naive_loss(terms: ValueTerms, v: Tensor) -> Tensor:
    near = torch.clamp(v, terms.old - terms.clip, terms.old + terms.clip)
    free, held = (v - terms.returns) ** 2, (near - terms.returns) ** 2
    return 0.5 * (terms.weight * torch.maximum(free, held)).sum()


@pytest.mark.parametrize("clip", [0.2, math.inf])
def test_the_gradient_of_the_value_loss_is_autograd_s(clip: float) -> None:
    torch.manual_seed(0)
    target, old = torch.randn(200).double(), torch.randn(200).double()
    target[::7] = NAN
    terms = targets.value_terms(target, old, clip=clip)
    assert float(terms.weight.sum()) == pytest.approx(1.0)
    v = (old + 0.4 * torch.randn(200).double()).requires_grad_()
    expected = naive_loss(terms, v)
    (gradient,) = torch.autograd.grad(expected, v)
    loss, ours, clipped = targets.value_loss(terms, v, torch.arange(200))
    torch.testing.assert_close(loss, expected.detach(), atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(ours, gradient, atol=1e-12, rtol=1e-10)
    assert bool(clipped.any()) == (clip < 1)
    assert not clipped[::7].any()
    # In two micro-batches, in any order, it is the same sum.
    order = torch.randperm(200)
    first = targets.value_loss(terms, v[order[:70]], order[:70])
    second = targets.value_loss(terms, v[order[70:]], order[70:])
    torch.testing.assert_close(first[0] + second[0], loss, atol=1e-12, rtol=1e-10)


def test_a_minibatch_is_a_mean_of_its_own() -> None:
    target = torch.tensor([1.0, NAN, 2.0, 3.0]).double()
    terms = targets.value_terms(target, torch.zeros(4), clip=0.2)
    assert terms.weight.tolist() == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])
    part = targets.select_tokens(terms, torch.tensor([0, 1, 2]))
    assert part.weight.tolist() == pytest.approx([0.5, 0, 0.5])
    assert part.returns.tolist() == [1.0, 0.0, 2.0]
    assert targets.select_tokens(terms, torch.tensor([1])).weight.tolist() == [0.0]


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-6, 1e-9, 1e9])
def test_whitening_and_explained_variance_have_no_scale(scale: float) -> None:
    returns = scale * torch.tensor([1.0, 0.0, 0.5, -2.0]).double()
    white = Whiten(lambda _: returns)(world(Play([Call(1)] * 4)))
    assert torch.allclose(white, (returns - returns.mean()) / returns.std(), rtol=2e-6)
    metrics = targets.value_metrics(targets.value_terms(returns, returns / 2, clip=0.2))
    assert metrics["critic/explained_variance"] == pytest.approx(0.75)


def test_explained_variance() -> None:
    target = torch.tensor([0.0, 1.0, 2.0, NAN]).double()
    perfect = targets.value_metrics(targets.value_terms(target, target.nan_to_num(), clip=0.2))
    assert perfect["critic/explained_variance"] == pytest.approx(1.0)
    assert perfect["critic/return_mean"] == pytest.approx(1.0)
    blind = targets.value_metrics(targets.value_terms(target, torch.zeros(4), clip=0.2))
    assert blind["critic/explained_variance"] == pytest.approx(0.0)
    half = targets.value_metrics(targets.value_terms(target, target.nan_to_num() / 2, clip=0.2))
    assert half["critic/explained_variance"] == pytest.approx(0.75)
    same = targets.value_metrics(targets.value_terms(torch.ones(2), torch.zeros(2), clip=0.2))
    assert same["critic/explained_variance"] == 0.0
    assert (
        targets.value_metrics(targets.value_terms(torch.full((1,), NAN), torch.zeros(1), clip=1))
        == {}
    )


def test_the_toll_is_paid_by_every_token() -> None:
    batch = world(Play([Call(tokens=2), Call(tokens=1)], outcome=1.0), values=[0.0] * 3)
    batch = dataclasses.replace(batch, reference=torch.tensor([-1.5, -1.0, -0.5]).double())
    # b is -1 everywhere, so b - q = [.5, 0, -.5], and the penalty at beta .1 [.05, 0, -.05].
    algo = registry.make("ppo", {"kl_reward": 0.1, "lam": 1.0}, supplies=EVERY)
    assert "reference" in algo.needs
    assert known(targets.returns(algo, batch)) == [1.0, 1.05, 1.05]
    togo = registry.make("reinforce++", {"kl_reward": 0.1}, supplies=EVERY)
    assert "reference" in togo.needs
    assert "reference" not in registry.make("reinforce++", {}).needs
    with pytest.raises(TrainingError, match=r"reference model for .*there are none"):
        TokenKLPenalty(0.1)(world(Play([Call()], outcome=1.0)))
