"""Corrections for the sampler against verl's `rollout_corr_helper`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.algorithms.objective.core import Algo, Gate
from agentrl.algorithms.objective.ratios import InRange, RatioInRange
from agentrl.algorithms.presets.registry import make

from .batches import Rollouts, rollouts
from .test_verl_losses import AVERAGES, ours, theirs

REASON = "verl is not installed: run `make test-engines`"
helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper", reason=REASON)

SEEDS = range(4)
# verl's level and threshold -> our modifier and options.
WEIGHTS: list[tuple[str, float | str, str, dict[str, float]]] = [
    ("token", 1.3, "tis", {"tis_cap": 1.3}),
    ("sequence", 1.3, "seq-tis", {"seq_tis_cap": 1.3}),
    ("token", "0.7_1.4", "icepop", {"icepop_low": 0.7, "icepop_high": 1.4}),
    ("sequence", "1e-9_1.5", "mis", {"mis_cap": 1.5}),
    ("token", 1e9, "decoupled", {}),
]


def near(bound: float) -> InRange:
    """Where d^2 / 2 <= bound."""
    return InRange(math.exp(-math.sqrt(2 * bound)), math.exp(math.sqrt(2 * bound)))


# verl's rejections and thresholds -> our gates. k1 is -d: its bounds hold for the inverse ratio.
MASKS: dict[str, tuple[str, tuple[Gate, ...]]] = {
    "token_k1": ("0.8_1.5", (Gate(InRange(1 / 1.5, 1 / 0.8), "old", "sampler"),)),
    "token_k2": ("0.1", (Gate(near(0.1), "old", "sampler"),)),
    "seq_sum_k1": ("0.5_2.5", (Gate(InRange(1 / 2.5, 2.0), "old", "sampler", "row", "sum"),)),
    "seq_mean_k1": ("0.9_1.2", (Gate(InRange(1 / 1.2, 1 / 0.9), "old", "sampler", "row"),)),
    "seq_max_k2": (
        "0.3",
        (
            Gate(near(0.3), "old", "sampler", "row", "amax"),
            Gate(near(0.3), "old", "sampler", "row", "amin"),
        ),
    ),
}
NOT_OURS = {
    "token_k3": "a bound on k3 is a band of ratios that is not symmetric: say the band itself",
    "seq_max_k3": "a bound on k3 is a band of ratios that is not symmetric: say the band itself",
    "seq_sum_k2": "pools squares; gates pool log-ratios",
    "seq_mean_k2": "pools squares; gates pool log-ratios",
    "seq_sum_k3": "pools k3 values; gates pool log-ratios",
    "seq_mean_k3": "pools k3 values; gates pool log-ratios",
}


def weight(data: Rollouts, level: str, threshold: float | str) -> Tensor:
    proto, _, _ = helper.compute_rollout_correction_and_rejection_mask(
        data.o, data.b, data.mask, rollout_is=level, rollout_is_threshold=threshold
    )
    found: Tensor = proto.batch["rollout_is_weights"]
    return found


@pytest.mark.parametrize(("level", "threshold", "name", "options"), WEIGHTS)
@pytest.mark.parametrize("host", ["grpo", "gspo"])
def test_a_corrected_loss_is_verls_loss_with_its_weights(
    level: str, threshold: float | str, name: str, options: dict[str, Any], host: str
) -> None:
    bounds = {"clip_low": 0.2, "clip_high": 0.2}
    algo = make(f"{host}+{name}", options | bounds)
    loss = {"grpo": "vanilla", "gspo": "gspo"}[host]
    for seed in SEEDS:
        data = rollouts(seed)
        factor = weight(data, level, threshold)
        expected = theirs(loss, data, data.o, "token-mean", factor, clip_ratio_c=1e9)
        actual = ours(replace(algo, agg=AVERAGES["token-mean"]), data)
        assert torch.allclose(actual, expected, rtol=1e-12)


def test_both_kinds_of_bound_are_reached() -> None:
    data = rollouts(0)
    for level in ("token", "sequence"):
        ratio = weight(data, level, 1e9)[data.sampled]
        assert (ratio > 1.5).any()
        assert (ratio < 0.7).any()


@pytest.mark.parametrize("option", MASKS)
def test_a_rejection_of_verl_is_a_gate_of_zero_and_one(option: str) -> None:
    threshold, gates = MASKS[option]
    algo = Algo(credit=lambda batch: batch.sampler_logprobs, gates=gates, agg=AVERAGES["token-sum"])
    rejected = 0
    for seed in SEEDS:
        data = rollouts(seed)
        data = replace(data, advantage=torch.ones_like(data.mask))
        kept, _ = helper.compute_rollout_rejection_mask(
            data.o - data.b, data.mask, rollout_rs=option, rollout_rs_threshold=threshold
        )
        assert torch.equal(ours(algo, data), kept[data.sampled])
        rejected += int(kept[data.sampled].numel() - kept.sum())
    assert rejected > 0


def test_every_rejection_of_verl_is_compared_or_named() -> None:
    assert set(helper.SUPPORTED_ROLLOUT_RS_OPTIONS) == MASKS.keys() | NOT_OURS.keys()
    assert not MASKS.keys() & NOT_OURS.keys()


def test_seq_mask_tis_is_verls_seq_mean_k1() -> None:
    algo = make("grpo+seq-mask-tis", {"seq_mask_low": 0.9, "seq_mask_high": 1.1})
    mask = algo.gates[-1]
    data = rollouts(1)
    kept, _ = helper.compute_rollout_rejection_mask(
        data.o - data.b,
        data.mask,
        rollout_rs="seq_mean_k1",
        rollout_rs_threshold=f"{1 / 1.1}_{1 / 0.9}",
    )
    alone = Algo(lambda batch: batch.sampler_logprobs, (mask,), agg=AVERAGES["token-sum"])
    ones = replace(data, advantage=torch.ones_like(data.mask))
    assert torch.equal(ours(alone, ones), kept[data.sampled])


# -- differences on purpose ------------------------------------------------------------------------


def test_token_bounds_are_the_inverse_of_verls() -> None:
    """ "0.8_3.0" rejects a trainer that is twice as sure as the sampler and keeps half as sure."""
    ratio = torch.tensor([[2.0, 0.5]], dtype=torch.float64)
    kept, _ = helper.compute_rollout_rejection_mask(
        ratio.log(), torch.ones_like(ratio), rollout_rs="token_k1", rollout_rs_threshold="0.8_3.0"
    )
    assert kept.tolist() == [[0.0, 1.0]]
    assert InRange(0.8, 3.0)(ratio[0].log(), ratio[0], {}).tolist() == [1.0, 0.0]


def test_rejected_tokens_stay_in_the_denominator_unlike_verl() -> None:
    """A gate never changes the weight of the tokens that pass it, so how much is rejected changes
    the size of the update and not its direction."""
    data = rollouts(0)
    kept, _ = helper.compute_rollout_rejection_mask(
        data.o - data.b, data.mask, rollout_rs="token_k2", rollout_rs_threshold="0.1"
    )
    algo = make("grpo", {})
    algo = replace(algo, gates=(*algo.gates, *MASKS["token_k2"][1]), agg=AVERAGES["token-mean"])
    rejected = replace(data, mask=kept)
    expected = torch.zeros_like(data.mask)
    expected[kept.bool()] = theirs("vanilla", rejected, data.o, "token-mean", clip_ratio_c=1e9)
    share = kept.sum() / data.mask.sum()
    assert 0 < share < 1
    assert torch.allclose(ours(algo, data), expected[data.sampled] * share, rtol=1e-12)


def test_icepop_and_mis_are_one_gate_at_two_levels() -> None:
    """IcePop in two factors, a weight and a mask."""
    icepop, mis = (make(f"grpo+{name}", {}).gates for name in ("icepop", "mis"))
    tokens = [gate for gate in icepop if (gate.num, gate.den) == ("old", "sampler")]
    assert [gate.by for gate in tokens] == [None] * len(tokens)
    assert isinstance(mis[-1].fn, RatioInRange)
    assert (mis[-1].by, mis[-1].how) == ("row", "sum")
    lr = torch.tensor([0.1, 0.49, 0.51, 1.0, 4.9, 5.1, 90.0], dtype=torch.float64).log()
    given: Any = (lr, torch.ones_like(lr), None)
    found = torch.stack([gate.fn(*given) for gate in tokens]).prod(0)
    assert torch.equal(found, RatioInRange(0.5, 5.0)(*given))
