"""Failed optimizer steps, which end the run after too many, and what is kept of steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.objective.core import Algo, Terms
from agentrl.errors import TrainingError
from agentrl.types import Credit


class StepRecorder(Protocol):
    """Records the credit of the calls of a training step."""

    def open(self, algo: Algo, batch: Batch) -> None:
        """Begin a step. batch: the whole batch, from which baselines are computed."""

    def record(self, algo: Algo, part: Batch, terms: Terms, logprobs: Tensor) -> None:
        """Record an optimizer step on the batch or a part of it. logprobs: of the policy before the
        step, [N], or of the symbols, [N, K]."""

    def stored(self) -> list[Credit]:
        """The recorded credit, for the commit of the step."""


@dataclass(frozen=True, slots=True)
class Dump:
    """All inputs of psi and the loss of one optimizer step, except the weights."""

    batch: Batch
    terms: Terms
    logprobs: Tensor  # float32 [N], of the policy; NaN also if it was not computed
    loss: float
    grad_norm: float


@dataclass(slots=True)
class BadSteps:
    """Counts consecutive optimizer steps that changed no weight; a restart begins at 0."""

    limit: int
    keep: Callable[[str, Dump], str] | None = None  # (its name, step) -> where its batch is
    streak: int = 0

    def bad(self, step: int, number: int, dump: Dump) -> None:
        """Keep optimizer step `number` of training step `step`, both from 0, and warn.
        Raises TrainingError after `limit` in a row."""
        self.streak += 1
        unknown = int((~dump.logprobs.isfinite()).sum())
        what = (
            f"step {step + 1}: {unknown} of {dump.logprobs.numel()} log-probs of the policy are "
            f"not finite, the loss is {dump.loss:.3g}, the gradient norm {dump.grad_norm:.3g}"
        )
        where = self.keep(f"{step:06d}.{number}", dump) if self.keep else ""
        if self.streak >= self.limit:
            kept = f"; {where}" if where else ""
            raise TrainingError(
                f"{what}, for the {self.streak}. optimizer step in a row{kept}. Continue from "
                "the last checkpoint with a smaller algorithm.lr or policy.dtype = 'float32'"
            )
        kept = f", and {where}" if where else ""
        warnings.warn(f"{what}; it is skipped{kept}", RuntimeWarning, stacklevel=3)
