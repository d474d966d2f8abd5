"""Log-probs by model, and gate functions of their ratios: importance weights, clips and masks as a
factor >= 0 of the advantage.

A gate function takes lr [n] (a pooled log-ratio of two models, r = e^lr), the advantages [n] and
the log-probs of n tokens, and returns detached factors [n], which are 1 at r = 1. The loss
-sg[factor * A] * log pi has the gradient of the published surrogate.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields, replace
from math import inf
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from agentrl.core.errors import TrainingError

log = logging.getLogger("agentrl.algorithm")
LOG_LIMIT = 20.0  # |log r| is clamped to this against overflow

Model = Literal["current", "old", "sampler", "reference", "teacher"]
"""Whose log-probs: the current policy's, its before the first update of the batch, those that the
tokens were sampled with, and two frozen models'. Papers write p or pi, o, b or mu, q and t."""
LearnerOutput = Model | Literal["values", "top_tokens", "entropy", "observations"]
ALL_OUTPUTS: tuple[LearnerOutput, ...] = (
    "old", "sampler", "reference", "teacher", "values", "top_tokens", "entropy", "observations",
)  # fmt: skip
"""All that a learner may supply to an algorithm, besides the current log-probs."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Log-probs float64 [n, K] of several tokens at each position, the sampled one first; None: not
    computed."""

    current: Tensor | None = None
    old: Tensor | None = None
    teacher: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LogProbs:
    """The log-probs of n tokens, float64 [n], during an optimizer step."""

    current: Tensor
    old: Tensor  # the current log-probs, in the first step on a batch
    sampler: Tensor
    reference: Tensor | None = None  # None: not computed, as for the teacher
    teacher: Tensor | None = None
    candidates: Candidates = Candidates()

    def at(self, index: Tensor) -> LogProbs:
        """The same for the tokens with these indices."""
        columns = {
            column_field.name: column[index]
            for column_field in fields(self)
            if isinstance(column := getattr(self, column_field.name), Tensor)
        }
        several = fields(self.candidates)
        computed = (
            (column_field.name, getattr(self.candidates, column_field.name))
            for column_field in several
        )
        candidates = Candidates(**{name: x[index] for name, x in computed if x is not None})
        return replace(self, **columns, candidates=candidates)

    def of(self, model: Model) -> Tensor:
        """The log-probs of one model. Raises TrainingError if they are not computed."""
        logprobs: Tensor | None = getattr(self, model)
        if logprobs is None:
            raise TrainingError(f"the log-probs of the {model} are not computed; see `Algo.needs`")
        return logprobs


@dataclass(frozen=True, slots=True)
class GivenLogProbs:
    """The log-probs of a batch that do not change during its optimizer steps, [N], and a weight of
    those that do; None: not computed. Those of the sampler are in the batch."""

    old: Tensor | None = None
    reference: Tensor | None = None
    teacher: Tensor | None = None
    # [N], with which the old policy is interpolated instead: old = sampler + weight * (current -
    # sampler).
    weight_of_current: Tensor | None = None
    old_candidates: Tensor | None = None  # [N, K] of the batch's candidates
    teacher_candidates: Tensor | None = None  # [N, K]

    def at(self, index: Tensor) -> GivenLogProbs:
        """The same for the tokens with these indices."""
        return replace(self, **{name: column[index] for name, column in self.computed().items()})

    def exact(self) -> GivenLogProbs:
        """In float64, on the CPU, without a graph."""
        columns = {name: x.detach().double().cpu() for name, x in self.computed().items()}
        return replace(self, **columns)

    def computed(self) -> dict[str, Tensor]:
        """The computed log-probs, by field."""
        columns = (
            (column_field.name, getattr(self, column_field.name)) for column_field in fields(self)
        )
        return {name: column for name, column in columns if column is not None}

    def during(self, now: Tensor, sampler: Tensor) -> LogProbs:
        """With the current log-probs [n] of the tokens, or those of their candidates [n, K]."""
        several = now.dim() == 2
        current = now[:, 0] if several else now
        if self.weight_of_current is not None:
            old = sampler + self.weight_of_current * (current - sampler)
        else:
            old = current if self.old is None else self.old
        candidates = Candidates(
            now if several else None, self.old_candidates, self.teacher_candidates
        )
        return LogProbs(current, old, sampler, self.reference, self.teacher, candidates)


class GateFn(Protocol):
    """One with the class variable `whole_step` is called with all tokens of an optimizer step that
    are in the loss, in their order."""

    def __call__(self, lr: Tensor, advantage: Tensor, logprobs: LogProbs) -> Tensor: ...


def ratio(lr: Tensor) -> Tensor:
    """r = e^lr, finite for any lr."""
    return lr.clamp(-LOG_LIMIT, LOG_LIMIT).exp()


@dataclass(frozen=True, slots=True)
class Ratio:
    """r: the plain importance weight."""

    def __call__(self, lr: Tensor, advantage: Tensor, logprobs: LogProbs) -> Tensor:
        return ratio(lr)


@dataclass(frozen=True, slots=True)
class TrustRegion:
    """1 inside PPO's one-sided trust region, else 0: r <= 1 + hi where A >= 0, 1 - lo <= r <= dual
    where A < 0. MiniRL, arXiv 2512.01374."""

    lo: float = 0.2
    hi: float = 0.2
    dual: float = inf

    def __call__(self, lr: Tensor, advantage: Tensor, logprobs: LogProbs) -> Tensor:
        r = ratio(lr)
        down = (r >= 1 - self.lo) & (r <= self.dual)
        return torch.where(advantage >= 0, r <= 1 + self.hi, down).double()


@dataclass(frozen=True, slots=True)
class Clip(TrustRegion):
    """r inside the trust region, else 0: PPO's clip (arXiv 1707.06347), clip-higher (2503.14476),
    dual clip (1912.09729)."""

    def __call__(self, lr: Tensor, advantage: Tensor, logprobs: LogProbs) -> Tensor:
        return ratio(lr) * TrustRegion.__call__(self, lr, advantage, logprobs)


@dataclass(frozen=True, slots=True)
class Truncate:
    """r clamped to [lo, hi], both absolute; no token is dropped. CISPO (arXiv 2506.13585), TIS."""

    lo: float = 0.0
    hi: float = 2.0

    def __call__(self, lr: Tensor, advantage: Tensor, logprobs: LogProbs) -> Tensor:
        return ratio(lr).clamp(self.lo, self.hi)


@dataclass(frozen=True, slots=True)
class InRange:
    """1 where lo <= r <= hi, else 0: rejection."""

    is_mask: ClassVar[bool] = True  # not a weight, so it can be combined with a correction
    lo: float
    hi: float

    def __call__(self, lr: Tensor, advantage: Tensor, logprobs: LogProbs) -> Tensor:
        r = ratio(lr)
        return ((r >= self.lo) & (r <= self.hi)).double()


@dataclass(frozen=True, slots=True)
class RatioInRange:
    """r where lo <= r <= hi, else 0: MIS, IcePop."""

    lo: float = 0.5
    hi: float = 5.0

    def __call__(self, lr: Tensor, advantage: Tensor, logprobs: LogProbs) -> Tensor:
        return ratio(lr) * InRange(self.lo, self.hi)(lr, advantage, logprobs)
