"""Other gates and corrections against their published losses."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.algorithms.presets.padded import (
    CHECKS,
    PPO,
    Case,
    Surrogate,
    centred,
    constant,
    raw,
    row_means,
    row_sums,
    sequence_clip,
    tokens,
    weighted,
    whiten,
    zscore,
)
from tests.algorithms.presets.plays import checked


def sapo(p: Tensor, o: Tensor, b: Tensor, a: float) -> Tensor:
    tau = 1.0 if a > 0 else 1.05
    return -(4 / tau) * (tau * ((p - o).exp() - 1)).sigmoid() * a


def vespo(p: Tensor, o: Tensor, b: Tensor, a: float) -> Tensor:
    k, scale = (2, 3) if a >= 0 else (3, 2)
    w = (p - o).sum().detach().exp()
    return -(w**k) * math.e ** (scale * (1 - w)) * a * p


def dppo(p: Tensor, o: Tensor, b: Tensor, a: float) -> Tensor:
    losses = []
    for now, sampled in zip(p, b, strict=True):
        pi, mu = math.exp(now.item()), math.exp(sampled.item())
        far = abs(pi - mu) > 0.15 and (pi - mu) * a > 0
        losses.append(now * 0 if far else -min(pi / mu, 20.0) * a * now)
    return torch.stack(losses)


def minirl(p: Tensor, o: Tensor, b: Tensor, a: float) -> Tensor:
    losses = []
    for now, old, sampled in zip(p, o, b, strict=True):
        rho = math.exp(now.item() - old.item())
        inside = rho <= 1.2 if a >= 0 else rho >= 0.8
        losses.append(-((now - sampled).exp()) * a * inside)
    return torch.stack(losses)


def kimi(p: Tensor, o: Tensor, b: Tensor, a: float) -> Tensor:
    return -(a * p - 0.05 * (p - o) ** 2)


def dppo_kl(p: Tensor, o: Tensor, b: Tensor, a: float) -> Tensor:
    losses = []
    for now, sampled in zip(p, b, strict=True):
        pi, mu = math.exp(now.item()), math.exp(sampled.item())
        kl = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
        far = kl > 0.01 and (pi - mu) * a > 0
        losses.append(now * 0 if far else -min(pi / mu, 20.0) * a * now)
    return torch.stack(losses)


def gmpo(p: Tensor, o: Tensor, b: Tensor, a: float) -> Tensor:
    held = torch.minimum((p - o) * (1 if a >= 0 else -1), torch.tensor(0.2, dtype=p.dtype))
    return -(held * (1 if a >= 0 else -1)).mean().exp().expand(p.numel()) * a


def opsm(surrogate: Surrogate) -> Surrogate:
    def loss(p: Tensor, o: Tensor, b: Tensor, a: float) -> Tensor:
        drop = a < 0 and (b - p).mean().item() > 0.1
        return surrogate(p, o, b, a) * (not drop)

    return loss


CASES: dict[str, Case] = {
    "luspo": (zscore, sequence_clip(3e-4, 4e-4), row_sums, {}),
    "sapo": (zscore, sapo, row_means, {}),
    "vespo": (zscore, vespo, row_means, {}),
    "dppo-tv": (centred, dppo, constant, {}),
    "minirl": (centred, minirl, tokens, {}),
    "kimi": (centred, kimi, tokens, {}),
    "gmpo": (zscore, gmpo, row_means, {"log_low": 0.2, "log_high": 0.2}),
    "dppo-kl": (centred, dppo_kl, constant, {"low": 0.01, "high": 0.01}),
    "grpo+seq-tis": (zscore, weighted(PPO, lambda d: min(d.sum().exp(), 2)), row_means, {}),
    "grpo+mis": (
        zscore,
        weighted(PPO, lambda d: d.sum().exp() * (d.sum().exp() <= 1.2)),
        row_means,
        {"mis_cap": 1.2},
    ),
    "grpo+seq-mask-tis": (
        zscore,
        weighted(PPO, lambda d: d.exp().clamp(max=2) * (0.95 <= d.mean().exp() <= 1.05)),
        row_means,
        {"seq_mask_low": 0.95, "seq_mask_high": 1.05},
    ),
    "reinforce+++tis+opsm": (
        whiten(raw),
        opsm(weighted(PPO, lambda d: d.exp().clamp(max=1.1))),
        tokens,
        {"tis_cap": 1.1},
    ),
}


test_its_loss_is_the_published_one = checked(CASES, CHECKS)
