"""Advantages against verl's own estimators, and where we differ from them on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl.algorithms.presets.registry import library_presets, make

from .batches import WHITE, Rollouts, rollouts

REASON = "verl is not installed: run `make test-engines`"
verl = pytest.importorskip("verl.trainer.ppo.core_algos", reason=REASON)
AlgoConfig = pytest.importorskip("verl.trainer.config", reason=REASON).AlgoConfig

SEEDS = range(4)
GREEDY = (1, 4, 9)  # one rollout of each group

# verl's estimator -> our presets and options, what verl is given besides, and the tolerance.
Case = tuple[str, dict[str, Any], str, dict[str, Any], float]
CASES: list[Case] = [
    ("gae", {"gamma": 1.0, "lam": 0.95}, "ppo", {}, WHITE),
    ("gae", {"gamma": 0.9, "lam": 0.5}, "ppo", {"gamma": 0.9, "lam": 0.5}, WHITE),
    ("grpo", {}, "grpo", {}, 1e-12),
    ("grpo", {"norm_adv_by_std_in_grpo": False}, "grpo", {"std": False}, 1e-12),
    ("grpo", {"norm_adv_by_std_in_grpo": False}, "dr-grpo", {}, 1e-12),
    ("grpo_vectorized", {}, "grpo", {}, WHITE),
    ("grpo_vectorized", {"norm_adv_by_std_in_grpo": False}, "dr-grpo", {}, WHITE),
    ("grpo_passk", {"config": {"norm_adv_by_std_in_grpo": True}}, "best-of", {}, 1e-12),
    ("grpo_passk", {"config": {"norm_adv_by_std_in_grpo": False}}, "best-of", {"std": False}, 0),
    ("reinforce_plus_plus", {}, "reinforce++", {}, WHITE),
    ("reinforce_plus_plus", {"config": {"gamma": 0.9}}, "reinforce++", {"gamma": 0.9}, WHITE),
    ("reinforce_plus_plus_baseline", {}, "reinforce++-baseline", {}, WHITE),
    ("rloo", {}, "rloo", {}, 1e-12),
    ("rloo_vectorized", {}, "rloo", {}, 1e-12),
    ("opo", {}, "opo", {}, 1e-12),
    ("gpg", {}, "gpg", {}, 1e-12),
    ("remax", {}, "remax", {}, 1e-12),
    ("gdpo", {}, "gdpo", {"rewards": {"outcome": 1.0, "style": 0.5}}, WHITE),
]
# What verl offers and we do not, and why.
NOT_OURS = {
    "optimal_token_baseline": "reads the sum of squares of every token's whole distribution",
    "tir_optimal_token_baseline": "reads the sum of squares of every token's whole distribution",
}


def theirs(name: str, data: Rollouts, **options: Any) -> Tensor:
    """verl's advantages, at the sampled tokens."""
    accepted: dict[str, Any] = {
        "token_level_rewards": data.token_rewards,
        "response_mask": data.mask,
        "index": np.array(data.group),
        "config": {},
    }
    if name == "gae":
        accepted = {key: accepted[key] for key in ("token_level_rewards", "response_mask")}
        accepted["values"] = data.values
    if name == "remax":
        best = {data.group[row]: data.reward[row] for row in GREEDY}
        accepted["reward_baselines"] = torch.stack([best[group] for group in data.group])
    if name == "gdpo":
        accepted["config"] = {
            "gdpo_reward_keys": ["outcome", "style"],
            "gdpo_reward_weights": [1.0, 0.5],
        }
        accepted["non_tensor_batch"] = {
            "outcome": data.reward.numpy(),
            "style": data.style.numpy(),
        }
        accepted["batch"] = {
            "prompts": torch.zeros(len(data.group), 1),
            "attention_mask": torch.ones(len(data.group), 1 + data.mask.shape[1]).long(),
        }
    if name == "reinforce_plus_plus":
        options["config"] = AlgoConfig(**{"gamma": 1.0, **options.get("config", {})})
    advantage, _ = verl.get_adv_estimator_fn(name)(**(accepted | options))
    return advantage[data.sampled].double()


def ours(name: str, data: Rollouts, **options: Any) -> Tensor:
    algo = make(name, options, supplies=("old", "sampler", "reference", "values"))
    return algo.credit(data.flat(GREEDY if algo.needs_greedy else ()))


@pytest.mark.parametrize(("theirs_name", "given", "name", "options", "tolerance"), CASES)
def test_advantages_are_those_of_verl(
    theirs_name: str, given: dict[str, Any], name: str, options: dict[str, Any], tolerance: float
) -> None:
    for seed in SEEDS:
        data = rollouts(seed)
        expected, actual = theirs(theirs_name, data, **given), ours(name, data, **options)
        trained = ~actual.isnan()  # the greedy rollout that ReMax compares with is not
        assert trained.all() == (name != "remax")
        assert expected[trained].abs().sum() > 0
        assert torch.allclose(actual[trained], expected[trained], rtol=tolerance, atol=tolerance)


def test_every_estimator_of_verl_is_compared_or_named() -> None:
    compared = {name for name, *_ in CASES}
    assert set(verl.ADV_ESTIMATOR_REGISTRY) == compared | set(NOT_OURS)
    assert not compared & set(NOT_OURS)
    assert {estimator.value for estimator in verl.AdvantageEstimator} == compared | set(NOT_OURS)
    assert {name for _, _, name, _, _ in CASES} <= set(library_presets()[0])


# -- differences on purpose ------------------------------------------------------------------------

SOLO = {"grpo": "grpo", "rloo": "rloo", "opo": "opo", "gpg": "gpg"}


@pytest.mark.parametrize(("theirs_name", "name"), SOLO.items())
def test_a_group_of_one_gets_nothing_unlike_verl(theirs_name: str, name: str) -> None:
    """There is nobody to compare it with, so it teaches nothing."""
    data = rollouts(0, group=(0,), reward=[0.7])
    raw = theirs(theirs_name, data)
    assert torch.allclose(raw, torch.full_like(raw, 0.7))
    assert not ours(name, data).any()


def test_a_group_of_one_is_an_error_of_verls_pass_at_k() -> None:
    data = rollouts(0, group=(0,), reward=[0.7])
    with pytest.raises(ValueError, match="at least 2 samples"):
        theirs("grpo_passk", data)
    assert not ours("best-of", data).any()


def test_a_group_of_one_gets_nothing_from_verls_rloo() -> None:
    data = rollouts(0, group=(0,), reward=[0.7])
    assert not theirs("rloo_vectorized", data).any()
    assert not ours("rloo", data).any()


def test_equal_rewards_are_noise_in_verl_and_nothing_here() -> None:
    """Eight float32 rewards of 0.9 have a mean that is off by 6e-8, which verl divides by 1e-6."""
    data = rollouts(0, group=(0,) * 8, reward=[0.9] * 8)
    scores = data.token_rewards.float()
    noise = theirs("grpo", data, token_level_rewards=scores)
    assert noise.abs().min() > 0.05
    assert not ours("grpo", data).any()


def test_gpg_scales_by_groups_that_differ_unlike_verl() -> None:
    """Six rollouts, four of them in a group that teaches: 1.5, not 6 / 3 rewards that are not 0."""
    data = rollouts(0, group=(0, 0, 0, 0, 1, 1), reward=[1.0, 0, 0, 0, 1, 1])
    first = data.flat().token_row == 0
    assert torch.allclose(theirs("gpg", data)[first], torch.tensor(1.5, dtype=torch.float64))
    assert torch.allclose(ours("gpg", data)[first], torch.tensor(1.125, dtype=torch.float64))


def test_an_empty_rollout_counts_in_the_statistics_of_both() -> None:
    group: tuple[int, ...] = (0, 0, 0)
    data = rollouts(0, group=group, reward=[1.0, 0.0, 0.0])
    data.mask[2] = 0
    scores = torch.zeros_like(data.mask)
    scores[0, 0] = 1.0  # a row without sampled tokens cannot carry a reward in verl: here it is 0
    expected = theirs("grpo", data, token_level_rewards=scores)
    assert torch.allclose(ours("grpo", data), expected, rtol=1e-12)


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce++-baseline", "opo"])
def test_the_order_of_the_rollouts_does_not_matter_to_either(name: str) -> None:
    pairs: dict[str, Callable[[Rollouts], Tensor]] = {
        "ours": lambda data: ours(name, data),
        "verl": lambda data: theirs(
            {"reinforce++-baseline": "reinforce_plus_plus_baseline"}.get(name, name), data
        ),
    }
    data = rollouts(0)
    order = torch.randperm(len(data.group), generator=torch.Generator().manual_seed(1))
    moved = Rollouts(
        **{
            field: getattr(data, field)[order]
            for field in ("mask", "p", "o", "b", "q", "advantage", "values", "reward", "style")
        },
        group=tuple(data.group[i] for i in order.tolist()),
    )
    for advantages in pairs.values():
        padded = torch.zeros_like(data.mask)
        padded[data.sampled] = advantages(data)
        assert torch.allclose(padded[order][moved.sampled], advantages(moved), atol=1e-9)
