"""An adaptive coefficient of the KL penalty to the reference, which keeps their KL at a target.

beta <- beta * (1 + clip(KL / target - 1, -0.2, 0.2) * rollouts / horizon), arXiv 1909.08593; more
rollouts than the horizon count as that many. The KL is the mean of b - q per token, which estimates
it without bias for the policy that was sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from agentrl.algorithms.credit.core import TokenKLPenalty
from agentrl.algorithms.credit.parts import map_parts, parts_of
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.objective.core import Algo
from agentrl.errors import ConfigError
from agentrl.types import Json


@dataclass(slots=True)
class KlController:
    """Owns beta. target in nats per token, horizon in rollouts."""

    beta: float
    target: float
    horizon: int

    def observe(self, kl: float, rollouts: int) -> None:
        """Adapt beta after a step on so many rollouts, which had this KL to the reference."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        # A larger share could make beta negative, which would pay for leaving the reference.
        self.beta *= 1 + error * min(1.0, rollouts / self.horizon)

    def tuned(self, algo: Algo) -> Algo:
        """The algorithm with the present beta in its penalty."""

        def change(part: Any) -> Any:
            return TokenKLPenalty(self.beta) if isinstance(part, TokenKLPenalty) else part

        penalties = tuple(
            replace(reg, beta=self.beta) if reg.den == "q" else reg for reg in algo.penalties
        )
        return replace(algo, credit=map_parts(algo.credit, change), penalties=penalties)

    def dump(self) -> Json:
        return self.beta

    def restore(self, data: Json) -> None:
        """Take over what `dump` wrote. Raises msgspec.ValidationError for anything else."""
        self.beta = msgspec.convert(data, float)


def make_kl_controller(algo: Algo, target: float, horizon: int) -> KlController:
    """Begins with the beta of the algorithm. Raises ConfigError if it has none, or two."""
    betas = [reg.beta for reg in algo.penalties if reg.den == "q"]
    betas += [part.beta for part in parts_of(algo.credit) if isinstance(part, TokenKLPenalty)]
    if len(betas) != 1:
        raise ConfigError(
            f"reference.target: algorithm.preset = {algo.name!r} has {len(betas)} penalties on "
            "leaving the reference, and one is adapted; set one of its coefficients"
        )
    return KlController(betas[0], target, horizon)


class UpdatableReference(Protocol):
    """A reference model that may be replaced by a copy of the policy."""

    def finish(self, step: int) -> None:
        """Training step number `step` is done."""


@dataclass(frozen=True, slots=True)
class ReferenceControl:
    """The reference, which may follow the policy, and the coefficient of its penalty."""

    reference: UpdatableReference | None = None  # None: not read, or the model without its adapter
    kl: KlController | None = None  # None: the coefficient stays as it is

    def tuned(self, algo: Algo) -> Algo:
        """The algorithm with the present coefficient of its penalty."""
        return algo if self.kl is None else self.kl.tuned(algo)

    def finish(self, step: int, batch: Batch | None, rollouts: int) -> dict[str, float]:
        """Training step number `step` on so many rollouts is done; batch: with the log-probs of the
        reference, None where the algorithm reads none. Returns reference/drift, where there are
        tokens, and reference/beta, as it was in this step."""
        metrics = {}
        if batch is not None and batch.n_tokens:
            metrics["reference/drift"] = mean_kl(batch)
        if self.kl is not None:
            metrics["reference/beta"] = self.kl.beta
            if "reference/drift" in metrics:
                self.kl.observe(metrics["reference/drift"], rollouts)
        if self.reference is not None:
            self.reference.finish(step)
        return metrics


def mean_kl(batch: Batch) -> float:
    """Mean of b - q over the tokens of a batch that has some, nats."""
    return float((batch.behaviour.double() - batch.reference.double()).mean())
