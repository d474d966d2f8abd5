"""The learner protocol. Its few methods suffice for every algorithm, because there is one loss.

loss = - sum_t sg[psi_t] * log pi_t - sum_t eta_t * H_t

plus, with a critic, the squared error of its values.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

import msgspec
from torch import Tensor

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.objective.values import ValueTerms

Psi = Callable[[Tensor, Tensor], Tensor]
"""(current log-probs [n], token indices int64 [n]) -> psi [n]. Called once per micro-batch with
whole rows; detached input, detached output. Indices point into the batch's token level. Of a batch
with `symbols` the log-probs are those of the symbols, [n, K], the sampled token's first."""

Supply = Literal["o", "b", "q", "t", "v", "k", "e"]
Scored = Literal["o", "q", "t"]
"""Whose log-probs: of the current policy, the reference model or the teacher."""


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one optimizer step did."""

    loss: float
    grad_norm: float
    logprobs: Tensor  # float32 [N]: log-probs before the update, in token order
    tokens: int  # tokens forwarded, context included
    applied: bool  # false: the gradient was not finite and the update was skipped
    entropy: Tensor | None = (
        None  # float32 [N], nats, before each token, if the learner computes it
    )
    symbols: Tensor | None = None  # float32 [N, K]: also those of the batch's symbols, if any
    metrics: dict[str, float] = {}  # more of this learner's own, by their full names

    @property
    def current(self) -> Tensor:
        """What psi was given, [N] or [N, K]."""
        return self.logprobs if self.symbols is None else self.symbols


class Learner(Protocol):
    """Owns weights, optimizer and their random state. One caller at a time."""

    supplies: frozenset[Supply]
    """What it can compute besides the current log-probs: streams, values (v), the most probable
    tokens (k), and the gradient of the entropy (e)."""

    def logprobs(self, batch: Batch, of: Scored = "o") -> Tensor:
        """Log-probs of every action token at its sampling temperature, float32 [N], no graph."""
        ...

    def values(self, batch: Batch) -> Tensor:
        """The critic's value of the state before every action token, float64 [N], no graph."""
        ...

    def top(self, batch: Batch, k: int) -> tuple[Tensor, Tensor]:
        """Every action token and the k - 1 most probable others in its place, int64 [N, K], and
        their log-probs, float32 [N, K], at its temperature, no graph. K: k, or the vocabulary."""
        ...

    def step(
        self,
        batch: Batch,
        psi: Psi,
        *,
        lr: float,
        critic: ValueTerms | None = None,
        eta: Tensor | None = None,
    ) -> StepReport:
        """One forward, backward and update on psi and, where it is given, eta [N]. A non-finite
        gradient changes nothing."""
        ...

    def save(self, directory: Path) -> None:
        """Write a resumable checkpoint: an ordinary Hugging Face directory plus optimizer state."""
        ...

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote. Raises PolicyError for another model or a half-written one."""
        ...
