"""The learner protocol: four verbs suffice for every algorithm, because one loss exists.

loss = - sum_t sg[psi_t] * log pi_t
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
from torch import Tensor

from agentrl.algorithms.batch import Batch

Psi = Callable[[Tensor, Tensor], Tensor]
"""(current log-probs [n], token indices int64 [n]) -> psi [n]. Called once per micro-batch with
whole rows; detached input, detached output. Indices point into the batch's token level."""


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one optimizer step did."""

    loss: float
    grad_norm: float
    logprobs: Tensor  # float32 [N]: log-probs before the update, in token order
    tokens: int  # tokens forwarded, context included
    applied: bool  # false when the gradient was not finite and the update was skipped


class Learner(Protocol):
    """Owns weights, optimizer and their random state. One caller at a time."""

    def logprobs(self, batch: Batch) -> Tensor:
        """Log-probs of every action token at its sampling temperature, float32 [N], no graph."""
        ...

    def step(self, batch: Batch, psi: Psi, *, lr: float) -> StepReport:
        """One forward, backward and update on psi. A non-finite gradient changes nothing."""
        ...

    def save(self, directory: Path) -> None:
        """Write a resumable checkpoint: an ordinary Hugging Face directory plus optimizer state."""
        ...

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote. Raises PolicyError for another model or a half-written one."""
        ...
