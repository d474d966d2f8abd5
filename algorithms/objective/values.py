"""What a critic is to learn: the returns of the credit that reads it, and its loss.

L = coefficient * sum_t u_t * max((v - R)^2, (clip(v, old - c, old + c) - R)^2) / 2, arXiv
1707.06347. R comes from the credit itself, before anything whitens it, with the values that the
advantages of the batch were computed with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from agentrl.algorithms.credit.core import Column, CriticValues, parts_of
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.objective.core import Algo
from agentrl.errors import TrainingError


@runtime_checkable
class FromValues(Protocol):
    """A credit made of values, which can say what these should have been."""

    @property
    def value(self) -> Column: ...

    def returns(self, batch: Batch) -> Tensor:
        """The targets of the values, float64 [N], NaN = none."""
        ...


@dataclass(frozen=True, slots=True)
class ValueTerms:
    """What the critic learns in one optimizer step: the mean, weighted, of
    max((v - returns)^2, (old + clamp(v - old, -clip, clip) - returns)^2) / 2. arXiv 1707.06347."""

    returns: Tensor  # float64 [N], computed with the values that credit was computed with
    old: Tensor  # float64 [N], those values
    weight: Tensor  # float64 [N], 0: not in the loss; sums to 1
    clip: float = inf


def returns(algo: Algo, batch: Batch) -> Tensor:
    """What the critic should have said before each token, float64 [N]; NaN: nothing, because the
    reward is missing or no credit reads it there.

    Raises TrainingError for a credit that reads it in two ways."""
    columns: dict[object, Callable[[Batch], Tensor]] = {}
    for part in parts_of(algo.credit):
        if isinstance(part, FromValues) and _reads_critic(part.value):
            columns.setdefault(part, part.returns)
    if not columns:
        return torch.full((batch.n_tokens,), torch.nan, dtype=torch.float64)
    if len(columns) > 1:
        raise TrainingError(
            f"algorithm {algo.name!r} reads one critic in {len(columns)} different ways, so what "
            "it should learn is not defined; give all but one a reward as its `value`"
        )
    return next(iter(columns.values()))(batch).detach()


def _reads_critic(value: object) -> bool:
    return any(isinstance(part, CriticValues) for part in parts_of(value))


def critic_terms(algo: Algo, batch: Batch, *, clip: float) -> ValueTerms | None:
    """What the critic learns from the whole of a batch with its values, if the algorithm reads
    one."""
    if not algo.critic:
        return None
    return value_terms(returns(algo, batch), batch.values, clip=clip)


def value_terms(target: Tensor, old: Tensor, *, clip: float) -> ValueTerms:
    """Terms of one optimizer step: every known return [N] counts the same."""
    known = ~target.isnan()
    return ValueTerms(
        returns=torch.where(known, target, 0.0),
        old=old.double(),
        weight=known.double() / known.sum().clamp(min=1),
        clip=clip,
    )


def value_loss(terms: ValueTerms, v: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss (a sum over these tokens), its gradient d L / d v [n] and which tokens are clipped, bool
    [n], at values v [n] of tokens index [n]. Float64 on the CPU, detached, before the coefficient.
    """
    now = v.detach().double().cpu()
    target, old, weight = terms.returns[index], terms.old[index], terms.weight[index]
    near = old + (now - old).clamp(-terms.clip, terms.clip)
    free, held = (now - target).square(), (near - target).square()
    clipped = held > free  # the value moved further than it may, away from its old self
    loss = (weight * torch.maximum(free, held)).sum() / 2
    return loss, torch.where(clipped, 0.0, weight * (now - target)), clipped & (weight > 0)


def select_tokens(terms: ValueTerms, tokens: Tensor) -> ValueTerms:
    """The same of tokens with these indices, as a step of its own: their weights sum to 1 again."""
    weight = terms.weight[tokens]
    total = weight.sum()
    return replace(
        terms,
        returns=terms.returns[tokens],
        old=terms.old[tokens],
        weight=weight / total if total > 0 else weight,
    )


def value_metrics(terms: ValueTerms) -> dict[str, float]:
    """critic/value_mean, critic/return_mean and critic/explained_variance, which is 1 minus the
    variance of what is left over that of the returns; 0 where these do not differ. Over the tokens
    that the critic learns from, none if there are none."""
    live = terms.weight > 0
    if not live.any():
        return {}
    target, old = terms.returns[live], terms.old[live]
    spread = target.var(correction=0)
    left = (target - old).var(correction=0)
    return {
        "critic/value_mean": float(old.mean()),
        "critic/return_mean": float(target.mean()),
        "critic/explained_variance": float(1 - left / spread) if spread > 1e-12 else 0.0,
    }
