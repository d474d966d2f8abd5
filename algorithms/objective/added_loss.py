"""What an algorithm's loss of whole rollouts, such as one of pairs, must have: see `Algo.side`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from agentrl.algorithms.data.batch import Batch


class AddedTerms(Protocol):
    """The constants of the loss in one optimizer step."""

    @property
    def count(self) -> int:
        """The number of its examples; 0: it has no gradient."""

    def coefficients(self, current: Tensor, index: Tensor) -> Tensor:
        """psi float64 [n] of a micro-batch of whole units. current [n]: log-probs of the
        tokens `index`."""

    def metrics(self, current: Tensor) -> dict[str, float]:
        """Metrics of the step. current [N]: log-probs before the update."""


class AddedLoss(Protocol):
    """A loss that is added to the policy gradient."""

    @property
    def reference(self) -> bool:
        """Whether it reads the log-probs of the reference."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Further rewards that it reads, which rollouts may lack."""

    def terms(self, batch: Batch, reference: Tensor | None) -> AddedTerms:
        """reference: its log-probs [N], if it reads them."""

    def row_unit(self, batch: Batch) -> Tensor:
        """Ids of the rows, int64 [R]; rows with one id must be in one micro-batch."""

    def sampled(self, batch: Batch) -> Tensor:
        """Whether each token was sampled after its prompt, bool [N]."""
