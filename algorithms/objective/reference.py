"""The reference model of a policy during a run, and how far the policy is from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.objective.core import Algo


class FrozenModel(Protocol):
    """A model of a learner that does not learn."""

    def finish(self, step: int) -> None:
        """Called after training step number `step`: copies the policy if it is time."""


@dataclass(frozen=True, slots=True)
class ReferenceControl:
    """The reference model, which may be updated during the run."""

    reference: FrozenModel | None = None  # None: not read, or the model without its adapter

    def tuned(self, algo: Algo) -> Algo:
        """The algorithm with the coefficient that its KL penalty has now."""
        return algo

    def observe(self, batch: Batch | None, rollouts: int) -> dict[str, float]:
        """Called after a training step on `rollouts` rollouts.

        batch: with reference log-probs; None if the algorithm reads none. Returns the metric
        reference/drift, if the batch has tokens."""
        if batch is None or not batch.n_tokens:
            return {}
        return {"reference/drift": kl_to_reference(batch)}

    def finish(self, step: int) -> None:
        """Called after the policy's training step `step`, before its checkpoint: updates the
        reference."""
        if self.reference is not None:
            self.reference.finish(step)


def kl_to_reference(batch: Batch) -> float:
    """Mean of sampler - reference over the tokens of a nonempty batch, in nats."""
    return float((batch.behaviour.double() - batch.reference.double()).mean())
