"""Sampling from many distributions at once, by pure functions.

A token is the inverse of the cumulative distribution at one uniform number, which depends only on
the call's seed and its number of tokens: other calls of the batch cannot influence it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

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
    device = logits_BV.device
    greedy = temperature == 0
    logprobs = _logprobs(logits_BV, temperature)
    if greedy.all():
        tokens = logprobs.argmax(dim=-1)
    else:
        weights = _filtered(logprobs.exp(), top_p, top_k)
        # float64: the cumulative sum of a large vocabulary in float32 loses its rare tokens
        cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
        target = torch.from_numpy(uniform).to(device)[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, target, right=True)[:, 0]
        tokens = tokens.clamp_(max=logprobs.shape[-1] - 1)
        if greedy.any():
            mask = torch.from_numpy(greedy).to(device)
            tokens = torch.where(mask, logprobs.argmax(dim=-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def likeliest(logits_BV: Tensor, temperature: Floats, top: Ints) -> list[list[tuple[int, float]]]:
    """The `top` most likely tokens of each row and their log-probs, as those of `sample`."""
    values, tokens = _logprobs(logits_BV, temperature).topk(int(top.max()), dim=-1)
    rows = zip(tokens.tolist(), values.clamp(min=IMPOSSIBLE).tolist(), top.tolist(), strict=True)
    return [list(zip(ids, found, strict=True))[:count] for ids, found, count in rows]


def _logprobs(logits_BV: Tensor, temperature: Floats) -> Tensor:
    scaled = logits_BV.float()
    if (temperature != 1).any():
        scale = np.where(temperature == 0, 1.0, temperature).astype(np.float32)
        scaled = scaled / torch.from_numpy(scale).to(logits_BV.device)[:, None]
    return torch.log_softmax(scaled, dim=-1)


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
