"""Sampling from many distributions at once, by pure functions.

A token is the inverse of the cumulative distribution at one uniform number, which depends only on
the call's seed and its number of tokens: other calls of the batch cannot influence it. The inverse
is found in two levels: a sum in float64 over a large vocabulary costs more than its softmax.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BLOCK = 256  # tokens of the vocabulary whose weights are summed before the first level
IMPOSSIBLE = -9999.0  # in place of minus infinity, which JSON does not have
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: NDArray[np.uint64], counters: Ints) -> Floats:
    """The `counters`-th number in [0, 1) of each seed's SplitMix64 stream (Steele et al. 2014)."""
    bits = _mix(_mix(seeds) + _GOLDEN * counters.astype(np.uint64)) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def sample(
    logits_BV: Tensor, temperature: Floats, top_p: Floats, top_k: Ints, uniform: Floats
) -> tuple[Tensor, Tensor]:
    """Sampled tokens, int64 [B], and their log-probs, float32 [B].

    Temperature 0 takes the most likely token. Log-probs are those of the distribution at the
    temperature (at 1 if it is 0), before top-k (0: all) and top-p."""
    greedy = temperature == 0
    weights = torch.softmax(_scaled(logits_BV, temperature), dim=-1, dtype=torch.float32)
    if greedy.all():
        tokens = weights.argmax(dim=-1)
    else:
        tokens = _inverse(_filtered(weights, top_p, top_k), torch.from_numpy(uniform))
        if greedy.any():
            mask = torch.from_numpy(greedy).to(tokens.device)
            tokens = torch.where(mask, weights.argmax(dim=-1), tokens)
    return tokens, weights.gather(1, tokens[:, None])[:, 0].log()


def likeliest(logits_BV: Tensor, temperature: Floats, top: Ints) -> list[list[tuple[int, float]]]:
    """The `top` most likely tokens of each row and their log-probs, as those of `sample`."""
    logprobs = torch.log_softmax(_scaled(logits_BV, temperature), dim=-1, dtype=torch.float32)
    values, tokens = logprobs.topk(int(top.max()), dim=-1)
    rows = zip(tokens.tolist(), values.clamp(min=IMPOSSIBLE).tolist(), top.tolist(), strict=True)
    return [list(zip(ids, found, strict=True))[:count] for ids, found, count in rows]


def _scaled(logits_BV: Tensor, temperature: Floats) -> Tensor:
    """The logits divided by the temperature, in float32; at 1 as they are."""
    if (temperature == 1).all():
        return logits_BV
    scale = np.where(temperature == 0, 1.0, temperature).astype(np.float32)
    return logits_BV.float() / torch.from_numpy(scale).to(logits_BV.device)[:, None]


def _inverse(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Each row's token at which its cumulative weights pass this share of their sum, int64 [B]."""
    device, vocabulary = weights_BV.device, weights_BV.shape[-1]
    whole = vocabulary // BLOCK * BLOCK
    sums = weights_BV[:, :whole].reshape(len(weights_BV), -1, BLOCK).sum(-1)
    blocks = torch.cat([sums, weights_BV[:, whole:].sum(-1, keepdim=True)], -1)
    block, share = _passed(blocks, uniform_B.to(device)[:, None])
    places = block * BLOCK + torch.arange(BLOCK, device=device)
    inside = weights_BV.gather(1, places.clamp(max=vocabulary - 1))
    inside[places >= vocabulary] = 0
    return (block * BLOCK + _passed(inside, share)[0])[:, 0].clamp_(max=vocabulary - 1)


def _passed(weights_BN: Tensor, share_B1: Tensor) -> tuple[Tensor, Tensor]:
    """The index at which cumulative weights pass a share of their sum, int64 [B, 1], and the share
    of that weight which is before this point, float64 [B, 1]."""
    # float64: in float32 the cumulative sum would lose rare tokens
    cumulative = weights_BN.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # A product that is rounded up to the sum would pass no weight.
    goal = torch.minimum(share_B1 * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, goal, right=True).clamp_(max=weights_BN.shape[-1] - 1)
    weight = weights_BN.gather(1, index).double()
    return index, (goal - cumulative.gather(1, index) + weight).div_(weight).clamp_(0, 1)


def _filtered(weights_BV: Tensor, top_p: Floats, top_k: Ints) -> Tensor:
    """Set the weights outside top-k and top-p to 0; top-p is a fraction of the mass after top-k."""
    rows = np.flatnonzero((top_p < 1) | (top_k > 0))
    if not rows.size:
        return weights_BV
    device, vocabulary = weights_BV.device, weights_BV.shape[-1]
    at = torch.from_numpy(rows).to(device)
    ordered, order = weights_BV[at].sort(dim=-1, descending=True, stable=True)
    limit = torch.from_numpy(np.where(top_k > 0, top_k, vocabulary)[rows]).to(device)[:, None]
    ordered[torch.arange(vocabulary, device=device) >= limit] = 0
    mass = torch.from_numpy(top_p[rows]).to(device)[:, None]
    cumulative = ordered.cumsum(dim=-1, dtype=torch.float64)
    # a token stays if those before it have less than the mass, so the first always stays
    ordered[cumulative - ordered >= mass * cumulative[:, -1:]] = 0
    weights_BV[at] = torch.zeros_like(ordered).scatter_(1, order, ordered)
    return weights_BV


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
