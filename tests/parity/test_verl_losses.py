"""psi against the gradients of verl's own losses, and where we differ from them on purpose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.objective.core import (
    Algo,
    Average,
    Gate,
    KLPenalty,
    kl_gradient,
    kl_value,
    loss_coefficients,
    loss_terms,
    weights,
)
from agentrl.algorithms.objective.ratios import Clip, GivenLogProbs, Truncate
from agentrl.algorithms.presets.registry import make

from .batches import Rollouts, rollouts

REASON = "verl is not installed: run `make test-engines`"
verl = pytest.importorskip("verl.trainer.ppo.core_algos", reason=REASON)
settings = pytest.importorskip("verl.workers.config", reason=REASON)

SEEDS = range(4)
LENGTH = 32.0
AVERAGES = {
    "token-mean": Average(("all",)),
    "token-sum": Average(("all",), "sum"),
    "seq-mean-token-sum": Average(("row",), "sum"),
    "seq-mean-token-sum-norm": Average(("row",), "const", LENGTH),
    "seq-mean-token-mean": Average(("row",)),
}
EXACT, COUNTS = 1e-12, 1e-7  # verl adds 1e-8 to the number of tokens of a row
# verl's loss and settings -> our preset and options, with verl's average for it.
CASES: list[tuple[str, dict[str, Any], str, dict[str, Any], str]] = [
    ("vanilla", {"clip_ratio_c": 1e9}, "grpo", {}, "seq-mean-token-mean"),
    ("vanilla", {"clip_ratio_c": 1e9, "clip_ratio_high": 0.28}, "dapo", {}, "token-mean"),
    ("vanilla", {"clip_ratio_c": 1.5}, "grpo", {"clip_dual": 1.5}, "token-mean"),
    ("vanilla", {"clip_ratio_c": 1e9}, "dr-grpo", {}, "seq-mean-token-sum-norm"),
    ("gspo", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}, "gspo", {}, "seq-mean-token-mean"),
    ("gspo", {}, "gspo", {"clip_low": 0.2, "clip_high": 0.2}, "token-mean"),
    ("gspo", {}, "luspo", {"clip_low": 0.2, "clip_high": 0.2}, "seq-mean-token-sum"),
    ("sapo", {}, "sapo", {}, "seq-mean-token-mean"),
    ("sapo", {"tau_neg": 2.0}, "sapo", {"tau_down": 2.0}, "seq-mean-token-mean"),
    ("gpg", {}, "gpg", {}, "token-mean"),
    ("gpg", {}, "rloo", {}, "seq-mean-token-sum"),
    ("geo_mean", {}, "gmpo", {"log_low": 0.2, "log_high": 0.2}, "seq-mean-token-mean"),
    ("cispo", {}, "cispo", {"low": 0.8, "cap": 1.2}, "token-mean"),
    ("dro", {}, "kimi", {"beta": 0.3}, "token-mean"),
    ("dro", {}, "kimi", {"beta": 0.3}, "seq-mean-token-mean"),
    (
        "dppo_tv",
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15, "clip_ratio_c": 1.5},
        "dppo-tv",
        {"low": 0.1, "high": 0.15, "cap": 1.5},
        "seq-mean-token-sum",
    ),
    (
        "dppo_kl",
        {"clip_ratio_low": 0.02, "clip_ratio_high": 0.05, "clip_ratio_c": 20.0},
        "dppo-kl",
        {"low": 0.02, "high": 0.05},
        "seq-mean-token-sum",
    ),
]
# What verl offers and we do not, and why.
NOT_OURS = {
    "clip_cov": "drops tokens drawn at random from a band of covariances",
    "kl_cov": "adds a penalty to the tokens of highest covariance of each micro-batch",
}


def config(**given: Any) -> Any:
    policy_loss = settings.PolicyLossConfig(dro_beta=0.3, **given.pop("policy_loss", {}))
    return settings.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        loss_scale_factor=LENGTH,
        policy_loss=policy_loss,
        global_batch_info={"loss_scale_factor": LENGTH},
        **given,
    )


def theirs(
    name: str, data: Rollouts, old: Tensor, average: str, weight: Tensor | None = None, **given: Any
) -> Tensor:
    """Minus the gradient of verl's loss in the log-probs, at the sampled tokens."""
    p = data.p.clone().requires_grad_()
    loss, _ = verl.get_policy_loss_fn(name)(
        old_log_prob=old,
        log_prob=p,
        advantages=data.advantage,
        response_mask=data.mask,
        loss_agg_mode=average,
        config=config(**given),
        rollout_is_weights=weight,
    )
    (gradient,) = torch.autograd.grad(loss, p)
    assert not gradient[~data.sampled].any()
    return -gradient[data.sampled]


def ours(algo: Algo, data: Rollouts, old: Tensor | None = None) -> Tensor:
    """psi with the advantages of `data` in place of the algorithm's credit."""

    def given(batch: Batch) -> Tensor:
        return data.advantage[data.sampled]

    batch = data.flat()
    before = (data.o if old is None else old)[data.sampled]
    known = GivenLogProbs(old=before, reference=data.q[data.sampled])
    algo = replace(algo, credit=given, keep=None)
    terms = loss_terms(algo, batch, known)
    return loss_coefficients(algo, terms, data.p[data.sampled], torch.arange(batch.n_tokens))


def per_row(data: Rollouts) -> Rollouts:
    """With one advantage per row."""
    return replace(data, advantage=data.advantage[:, :1].expand_as(data.mask))


@pytest.mark.parametrize(("theirs_name", "given", "name", "options", "average"), CASES)
def test_psi_is_minus_the_gradient_of_verls_loss(
    theirs_name: str, given: dict[str, Any], name: str, options: dict[str, Any], average: str
) -> None:
    algo = make(name, options)
    sampler = any(gate.den == "sampler" for gate in algo.gates)  # DPPO: against the sampler itself
    for seed in SEEDS:
        data = rollouts(seed)
        # GMPO's clip takes the sign of a whole row's advantage.
        data = per_row(data) if name == "gmpo" else data
        expected = theirs(theirs_name, data, data.b if sampler else data.o, average, **given)
        actual = ours(replace(algo, agg=AVERAGES[average]), data)
        assert expected.abs().max() > 0
        tolerance = COUNTS if name == "gmpo" or average == "seq-mean-token-mean" else EXACT
        assert torch.allclose(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("theirs_name", ["vanilla", "gspo", "dppo_tv", "geo_mean", "cispo"])
def test_the_batches_reach_both_sides_of_each_bound(theirs_name: str) -> None:
    """Or the comparison above would say nothing about the clips."""
    bound = {"up": False, "down": False}
    for data in map(per_row, map(rollouts, SEEDS)):
        tight, loose = (
            theirs(theirs_name, data, data.o, "token-mean", clip_ratio_low=r, clip_ratio_high=r)
            for r in (0.05, 0.9)
        )
        advantage = data.advantage[data.sampled][(loose - tight).abs() > 1e-9]
        bound["up"] |= bool((advantage > 0).any())
        bound["down"] |= bool((advantage < 0).any())
    assert bound == {"up": True, "down": True}


def test_every_loss_of_verl_is_compared_or_named() -> None:
    compared = {name for name, *_ in CASES} | {"bypass_mode"}
    assert set(verl.POLICY_LOSS_REGISTRY) == compared | set(NOT_OURS)
    assert not compared & set(NOT_OURS)


# -- verl's bypass mode: the sampler's log-probs in place of the old policy's ----------------------


def bypass(data: Rollouts, kind: str, average: str, **correction: Any) -> Tensor:
    correction = {"loss_type": kind, "rollout_is": None, **correction}
    return theirs(
        "bypass_mode",
        data,
        data.b,
        average,
        clip_ratio_c=1e9,
        policy_loss={"rollout_correction": correction},
    )


def test_bypass_with_a_clip_is_ppo_against_the_sampler() -> None:
    algo = Algo(credit=lambda batch: batch.sampler_logprobs, gates=(Gate(Clip(), den="sampler"),))
    for seed in SEEDS:
        data = rollouts(seed)
        actual = ours(replace(algo, agg=AVERAGES["token-mean"]), data)
        assert torch.allclose(actual, bypass(data, "ppo_clip", "token-mean"), rtol=EXACT)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_bypass_without_a_clip_is_a_truncated_weight(level: str) -> None:
    gate = Gate(Truncate(0.0, 1.3), den="sampler")
    if level == "sequence":
        gate = replace(gate, by="row", how="sum")
    algo = Algo(
        credit=lambda batch: batch.sampler_logprobs, gates=(gate,), agg=AVERAGES["token-mean"]
    )
    for seed in SEEDS:
        data = rollouts(seed)
        expected = bypass(
            data, "reinforce", "token-mean", rollout_is=level, rollout_is_threshold=1.3
        )
        assert torch.allclose(ours(algo, data), expected, rtol=EXACT)


# -- averages --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", AVERAGES)
def test_weights_are_the_gradient_of_verls_average(mode: str) -> None:
    for seed in SEEDS:
        data = rollouts(seed)
        data.mask[3] = 0  # a row that sampled nothing is in no denominator of either
        losses = data.p.clone().requires_grad_()
        total = verl.agg_loss(losses, data.mask, mode, loss_scale_factor=LENGTH)
        (expected,) = torch.autograd.grad(total, losses)
        unit = torch.arange(len(data.group)).repeat_interleave(data.sampled.sum(1))
        average = AVERAGES[mode]
        unit = unit if average.unit == ("row",) else torch.zeros_like(unit)
        actual = weights(unit, average.inner, average.const)
        tolerance = COUNTS if mode == "seq-mean-token-mean" else 1e-15
        assert torch.allclose(actual, expected[data.sampled], rtol=tolerance, atol=0)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_ranks_that_average_gradients_need_verls_scale_once(mode: str) -> None:
    """Two ranks with verl's global counts, averaged, are our weights over the whole batch."""
    data = rollouts(0)
    whole = torch.autograd.functional.jacobian(
        lambda losses: verl.agg_loss(losses, data.mask, mode), data.p
    )
    counts = {"batch_num_tokens": int(data.mask.sum()), "global_batch_size": len(data.group)}
    split = torch.zeros_like(whole)
    for rank in (slice(0, 4), slice(4, None)):
        split[rank] += 0.5 * torch.autograd.functional.jacobian(
            lambda losses, rank=rank: verl.agg_loss(
                losses, data.mask[rank], mode, dp_size=2, **counts
            ),
            data.p[rank],
        )
    assert torch.allclose(split, whole, rtol=1e-12)


# -- distances -------------------------------------------------------------------------------------

KINDS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3"} | {
    "k3": "k3"
}


@pytest.mark.parametrize(("kind", "our_kind"), KINDS.items())
def test_penalties_have_verls_values_and_gradients(kind: str, our_kind: Any) -> None:
    for seed in SEEDS:
        data = rollouts(seed)
        p = data.p.clone().requires_grad_()
        value = verl.kl_penalty(p, data.q, kind)
        (gradient,) = torch.autograd.grad(value.sum(), p)
        d = data.p - data.q
        assert torch.allclose(kl_value(d, our_kind), value.detach(), rtol=1e-12, atol=1e-13)
        assert torch.allclose(kl_gradient(d, our_kind), gradient, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", ["k1+", "k3+", "abs+", "low_var_kl+", "kl+"])
def test_verls_straight_through_penalties_are_k2(kind: str) -> None:
    data = rollouts(0)
    p = data.p.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(verl.kl_penalty(p, data.q, kind).sum(), p)
    assert torch.allclose(kl_gradient(data.p - data.q, "k2"), gradient, rtol=1e-12)


@pytest.mark.parametrize(("kind", "our_kind"), KINDS.items())
def test_a_loss_with_a_penalty_is_verls_loss_plus_its_penalty(kind: str, our_kind: Any) -> None:
    algo = make("grpo", {}, supplies=("old", "sampler", "reference"))
    algo = replace(algo, penalties=(KLPenalty(our_kind, 0.04),), agg=AVERAGES["token-mean"])
    for seed in SEEDS:
        data = rollouts(seed)
        p = data.p.clone().requires_grad_()
        penalty = verl.agg_loss(verl.kl_penalty(p, data.q, kind), data.mask, "token-mean")
        (gradient,) = torch.autograd.grad(0.04 * penalty, p)
        expected = theirs("vanilla", data, data.o, "token-mean", clip_ratio_c=1e9)
        expected = expected - gradient[data.sampled]
        assert torch.allclose(ours(algo, data), expected, rtol=1e-10, atol=1e-13)


# -- differences on purpose ------------------------------------------------------------------------


def test_k3_pulls_back_where_verls_has_no_gradient() -> None:
    """verl clamps the estimate to 10: the gradient is lost exactly where it is needed."""
    far = torch.tensor([-4.0], dtype=torch.float64)
    p = far.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(verl.kl_penalty(p, torch.zeros(1), "k3").sum(), p)
    assert gradient == 0
    assert torch.allclose(kl_gradient(far, "k3"), 1 - (-far).exp())


def test_a_correction_weighs_only_the_reward_unlike_verls_dro() -> None:
    """Every host is corrected alike here: a gate is a factor of the advantage."""
    data = rollouts(0)
    weight = (data.o - data.b).exp().clamp(max=2.0)
    algo = replace(make("kimi+tis", {"beta": 0.3}), agg=AVERAGES["token-mean"])
    both = theirs("dro", data, data.o, "token-mean", weight)
    tokens = data.mask.sum()
    once = weight * data.advantage - 0.3 * (data.p - data.o)
    assert torch.allclose(ours(algo, data), (once / tokens)[data.sampled], rtol=1e-10)
    assert not torch.allclose(ours(algo, data), both, rtol=1e-3)


def test_empty_rows_shrink_verls_gmpo_and_nothing_here() -> None:
    data = per_row(rollouts(0))
    data.mask[3] = 0
    algo = make("gmpo", {"log_low": 0.2, "log_high": 0.2})
    rows = len(data.group)
    expected = theirs("geo_mean", data, data.o, "token-mean") * rows / (rows - 1)
    assert torch.allclose(ours(algo, data), expected, rtol=COUNTS, atol=COUNTS)


def test_cispos_bounds_are_absolute_unlike_verls() -> None:
    data = rollouts(0)
    algo = replace(make("cispo", {"low": 0.2, "cap": 0.2}), agg=AVERAGES["token-mean"])
    assert not torch.allclose(ours(algo, data), theirs("cispo", data, data.o, "token-mean"))


def test_dual_clip_is_on_by_default_in_verl_and_a_choice_here() -> None:
    data = rollouts(0)
    wild = replace(data, p=data.o + 2.0, advantage=-torch.ones_like(data.mask))
    algo = replace(make("grpo", {}), agg=AVERAGES["token-mean"])
    assert not theirs("vanilla", wild, wild.o, "token-mean").any()
    assert ours(algo, wild).all()
