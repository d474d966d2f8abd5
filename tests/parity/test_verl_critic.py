"""A critic's targets, the KL penalty to the reference and its controller, against verl's."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.objective.values import returns, value_loss, value_terms
from agentrl.algorithms.presets.registry import make
from agentrl.algorithms.train.kl_target import KlController

from .batches import WHITE, Rollouts, rollouts

REASON = "verl is not installed: run `make test-engines`"
verl = pytest.importorskip("verl.trainer.ppo.core_algos", reason=REASON)
SEEDS = range(4)


def with_reference(data: Rollouts) -> Batch:
    return replace(data.flat(), reference=data.q[data.sampled])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (0.99, 1.0)])
def test_returns_are_those_of_verl_before_anything_is_whitened(gamma: float, lam: float) -> None:
    algo = make("ppo", {"gamma": gamma, "lam": lam}, supplies=("old", "sampler", "values"))
    for seed in SEEDS:
        data = rollouts(seed)
        _, expected = verl.compute_gae_advantage_return(
            data.token_rewards, data.values, data.mask, gamma, lam
        )
        actual = returns(algo, data.flat())
        assert torch.allclose(actual, expected[data.sampled], rtol=1e-12)


@pytest.mark.parametrize("clip", [0.2, 0.5, inf])
def test_the_value_loss_and_its_gradient_are_verls(clip: float) -> None:
    for seed in SEEDS:
        data = rollouts(seed)
        target = data.q + 2
        now = (data.values + 0.5 * data.advantage).requires_grad_()
        expected, share = verl.compute_value_loss(now, target, data.values, data.mask, clip)
        (gradient,) = torch.autograd.grad(expected, now)

        def at(x: Tensor, data: Rollouts = data) -> Tensor:
            return x.detach()[data.sampled]

        terms = value_terms(at(target), at(data.values), clip=clip)
        index = torch.arange(at(now).numel())
        loss, pull, clipped = value_loss(terms, at(now), index)
        assert torch.allclose(loss, expected.detach(), rtol=1e-12)
        assert torch.allclose(pull, gradient[data.sampled], rtol=1e-12)
        assert float(clipped.double().mean()) == pytest.approx(float(share), abs=1e-7)
        assert clipped.any() == (clip != inf)


def test_the_toll_is_verls_penalty_in_the_rewards() -> None:
    """verl's rewards of tokens less 0.1 k1, then its GAE. Both take the sampler's log-probs."""
    options = {"gamma": 1.0, "lam": 0.95, "kl_reward": 0.1}
    algo = make("ppo", options, supplies=("old", "sampler", "reference", "values"))
    for seed in SEEDS:
        data = rollouts(seed)
        rewards = verl.compute_rewards(data.token_rewards, data.b, data.q, 0.1) * data.mask
        expected, _ = verl.compute_gae_advantage_return(rewards, data.values, data.mask, 1.0, 0.95)
        actual = algo.credit(with_reference(data))
        assert torch.allclose(actual, expected[data.sampled], rtol=WHITE, atol=WHITE)


def test_the_strength_of_a_penalty_follows_verls_controller() -> None:
    theirs = verl.get_kl_controller(_Settings())
    ours = KlController(beta=0.2, target=0.05, horizon=1000)
    for kl in np.random.default_rng(0).exponential(0.05, 50):
        theirs.update(float(kl), 64)
        ours.observe(float(kl), 64)
        assert ours.beta == pytest.approx(theirs.value, rel=1e-12)
    assert ours.beta != pytest.approx(0.2, rel=1e-2)


class _Settings:
    type = "adaptive"
    kl_coef = 0.2
    target_kl = 0.05
    horizon = 1000
