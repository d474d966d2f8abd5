"""How strong the penalty on leaving the reference is: adapted so that their KL stays at a target.

beta <- beta * (1 + clip(KL / target - 1, -0.2, 0.2) * rollouts / horizon), arXiv 1909.08593; more
rollouts than the horizon count as that many. The KL is the mean of b - q per token, which estimates
it without bias for the policy that was sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from agentrl.algorithms.credit.core import TokenKLPenalty, map_parts, parts_of
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.objective.core import Algo
from agentrl.errors import ConfigError
from agentrl.types import Json

LARGEST = 0.2  # relative error beyond which the step of beta does not grow


@dataclass(slots=True)
class KlController:
    """beta is what it owns; target in nats per token, horizon in rollouts."""

    beta: float
    target: float
    horizon: int

    def observe(self, kl: float, rollouts: int) -> None:
        """After a step on so many rollouts whose KL to the reference was that."""
        error = min(max(kl / self.target - 1, -LARGEST), LARGEST)
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
        """Take over what `dump` wrote. Raises msgspec.ValidationError for what it cannot have."""
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
    """A reference, wherever it is, that may become the policy as it is."""

    def finish(self, step: int) -> None:
        """Training step number `step` is done."""
        ...


@dataclass(frozen=True, slots=True)
class ReferenceControl:
    """What the policy is held by: a reference that may follow it, and a penalty that may adapt."""

    reference: UpdatableReference | None = None  # none: not read, or the model without its adapter
    kl: KlController | None = None  # none: the penalty stays as it is

    def tuned(self, algo: Algo) -> Algo:
        """The algorithm with the present strength of its penalty."""
        return algo if self.kl is None else self.kl.tuned(algo)

    def finish(self, step: int, batch: Batch | None, rollouts: int) -> dict[str, float]:
        """Training step number `step` is done, on a batch with the reference's log-probs (None: the
        algorithm reads none) of so many rollouts. reference/drift, where there are tokens, and
        reference/beta, as it was in this step."""
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
    """Mean of b - q over the tokens of the batch, of which there are some, nats."""
    return float((batch.behaviour.double() - batch.reference.double()).mean())
