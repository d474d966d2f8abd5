"""An adaptive coefficient of the KL penalty that keeps the KL to the reference at a target.

beta <- beta * (1 + clip(KL / target - 1, -0.2, 0.2) * min(1, rollouts / horizon)), arXiv
1909.08593. The KL is the mean of sampler - reference per token, an unbiased estimate for the
sampling policy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from agentrl.algorithms.credit.core import TokenKLPenalty
from agentrl.algorithms.credit.parts import map_records, nested_records
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.objective.core import Algo
from agentrl.errors import ConfigError
from agentrl.types import Json


@dataclass(slots=True)
class KlController:
    """Adapts beta. target: nats per token. horizon: rollouts."""

    beta: float
    target: float
    horizon: int

    def observe(self, kl: float, rollouts: int) -> None:
        """Adapt beta after a step on `rollouts` rollouts with this KL to the reference."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        # A larger factor could make beta negative and so reward leaving the reference.
        self.beta *= 1 + error * min(1.0, rollouts / self.horizon)

    def tuned(self, algo: Algo) -> Algo:
        """The algorithm with the current beta in its penalty."""

        def change(part: Any) -> Any:
            return TokenKLPenalty(self.beta) if isinstance(part, TokenKLPenalty) else part

        penalties = tuple(
            replace(each, beta=self.beta) if each.den == "reference" else each
            for each in algo.penalties
        )
        return replace(algo, credit=map_records(algo.credit, change), penalties=penalties)

    def dump(self) -> Json:
        return self.beta

    def restore(self, data: Json) -> None:
        """Load the output of `dump`. Raises msgspec.ValidationError for anything else."""
        self.beta = msgspec.convert(data, float)


def make_kl_controller(algo: Algo, target: float, horizon: int) -> KlController:
    """A controller that starts at the algorithm's beta. Raises ConfigError unless it has one."""
    betas = [reg.beta for reg in algo.penalties if reg.den == "reference"]
    betas += [part.beta for part in nested_records(algo.credit) if isinstance(part, TokenKLPenalty)]
    if len(betas) != 1:
        raise ConfigError(
            f"reference.target: algorithm.preset = {algo.name!r} has {len(betas)} KL penalties to "
            "the reference, and exactly one can be adapted; set one of its coefficients"
        )
    return KlController(betas[0], target, horizon)


class UpdatableReference(Protocol):
    """A reference model that can be replaced by a copy of the policy."""

    def finish(self, step: int) -> None:
        """Called after training step `step`."""


@dataclass(frozen=True, slots=True)
class ReferenceControl:
    """The reference model and its KL coefficient, both possibly updated during the run."""

    reference: UpdatableReference | None = None  # None: not read, or the model without its adapter
    kl: KlController | None = None  # None: constant coefficient

    def observe(self, batch: Batch | None, rollouts: int) -> dict[str, float]:
        """Update the coefficient after a training step on `rollouts` rollouts.

        batch: with reference log-probs; None if the algorithm reads none. Returns the metrics
        reference/drift (if the batch has tokens) and reference/beta (before the update)."""
        metrics = {}
        if batch is not None and batch.n_tokens:
            metrics["reference/drift"] = kl_to_reference(batch)
        if self.kl is not None:
            metrics["reference/beta"] = self.kl.beta
            if "reference/drift" in metrics:
                self.kl.observe(metrics["reference/drift"], rollouts)
        return metrics

    def finish(self, step: int) -> None:
        """Called after the policy's training step `step`, before its checkpoint: updates the
        reference."""
        if self.reference is not None:
            self.reference.finish(step)


def kl_to_reference(batch: Batch) -> float:
    """Mean of sampler - reference over the tokens of a nonempty batch, in nats."""
    return float((batch.behaviour.double() - batch.reference.double()).mean())
