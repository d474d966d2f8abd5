"""Targets and loss of the critic.

L = coefficient * sum_t u_t * max((v - R)^2, (clip(v, old - c, old + c) - R)^2) / 2, arXiv
1707.06347. R is the return of the credit that reads the critic, before whitening, with the values
that the advantages of the batch were computed with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from agentrl.algorithms.credit.core import Column, CriticValues, nested_records
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.objective.core import Algo
from agentrl.core.errors import TrainingError


@runtime_checkable
class FromValues(Protocol):
    """A credit that reads values and defines their targets."""

    @property
    def value(self) -> Column: ...

    def returns(self, batch: Batch) -> Tensor:
        """Targets of `value`, float64 [N], NaN = no target."""


@dataclass(frozen=True, slots=True)
class ValueTerms:
    """Targets of the critic in one optimizer step; the loss is the weighted sum of
    max((v - returns)^2, (old + clamp(v - old, -clip, clip) - returns)^2) / 2."""

    returns: Tensor  # float64 [N], computed with `old`
    old: Tensor  # float64 [N], the values that credit was computed with
    weight: Tensor  # float64 [N], 0: not in the loss; sums to 1
    clip: float = inf


def returns(algo: Algo, batch: Batch) -> Tensor:
    """The critic's target before each token, float64 [N]; NaN if the reward is missing or no credit
    reads a value there. Raises TrainingError for two targets of one value."""
    parts = [part for part in nested_records(algo.credit) if isinstance(part, FromValues)]
    reading = dict.fromkeys(part for part in parts if _reads_critic(part.value))
    targets = torch.full((batch.n_tokens,), torch.nan, dtype=torch.float64)
    for part in reading:
        target = part.returns(batch).detach()
        if not (targets.isnan() | target.isnan()).all():
            raise TrainingError(
                f"algorithm {algo.name!r} reads one critic in {len(reading)} different ways, so "
                "the critic's targets are ambiguous; set `value` to a reward in all but one of them"
            )
        targets = torch.where(target.isnan(), targets, target)
    return targets


def _reads_critic(value: object) -> bool:
    return any(isinstance(part, CriticValues) for part in nested_records(value))


def critic_terms(algo: Algo, batch: Batch, *, clip: float) -> ValueTerms:
    """Terms of a batch with values, for an algorithm that reads a critic."""
    return value_terms(returns(algo, batch), batch.values, clip=clip)


def value_terms(target: Tensor, old: Tensor, *, clip: float) -> ValueTerms:
    """Terms of one optimizer step, with equal weights for all known returns [N]."""
    has_target = ~target.isnan()
    weight = has_target.double() / has_target.sum().clamp(min=1)
    return ValueTerms(torch.where(has_target, target, 0.0), old.double(), weight, clip)


def value_loss(terms: ValueTerms, v: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Summed loss, its gradient d L / d v [n], and a bool mask [n] of clipped tokens, at values v
    [n] of the tokens `index` [n]. Float64 on the CPU, detached, without the coefficient."""
    value = v.detach().double().cpu()
    target, old, weight = terms.returns[index], terms.old[index], terms.weight[index]
    clipped_value = old + (value - old).clamp(-terms.clip, terms.clip)
    error, clipped_error = (value - target).square(), (clipped_value - target).square()
    clipped = clipped_error > error
    loss = (weight * torch.maximum(error, clipped_error)).sum() / 2
    return loss, torch.where(clipped, 0.0, weight * (value - target)), clipped & (weight > 0)


def select_tokens(terms: ValueTerms, tokens: Tensor) -> ValueTerms:
    """The terms of the tokens with these indices; their weights are renormalised to sum to 1."""
    weight = terms.weight[tokens]
    weight = weight / total if (total := weight.sum()) > 0 else weight
    return replace(terms, returns=terms.returns[tokens], old=terms.old[tokens], weight=weight)


def value_metrics(terms: ValueTerms) -> dict[str, float]:
    """critic/value_mean, critic/return_mean and critic/explained_variance over the tokens that the
    critic learns from; empty if there are none. Explained variance is 1 - var(return - value) /
    var(return), or 0 if all returns are equal."""
    live = terms.weight > 0
    if not live.any():
        return {}
    target, old = terms.returns[live], terms.old[live]
    spread = target.var(correction=0)
    noise = 1e-12 * target.square().mean()  # rounding error
    residual = (target - old).var(correction=0)
    return {
        "critic/value_mean": float(old.mean()),
        "critic/return_mean": float(target.mean()),
        "critic/explained_variance": float(1 - residual / spread) if spread > noise else 0.0,
    }
