"""The adaptive coefficient of a KL penalty, which keeps the KL to the reference at a target.

beta <- beta * (1 + clip(KL / target - 1, -0.2, 0.2) * min(1, rollouts / horizon)), arXiv
1909.08593. The KL is the mean of sampler - reference per token, an unbiased estimate for the
sampling policy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from agentrl.algorithms.credit.core import TokenKLPenalty, map_records, nested_records
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.objective.core import Algo, ReferenceControl
from agentrl.algorithms.train.step import Updater
from agentrl.core.errors import ConfigError
from agentrl.core.types import Json


@dataclass(slots=True)
class KlController:
    """Adapts beta. target: nats per token. horizon: rollouts over which it adapts."""

    beta: float
    target: float
    horizon: int

    def observe(self, kl: float, rollouts: int) -> None:
        """Adapt beta after a step on `rollouts` rollouts with this KL to the reference."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        # A larger factor could make beta negative, which would reward moving away from the
        # reference.
        self.beta *= 1 + error * min(1.0, rollouts / self.horizon)

    def tuned(self, algo: Algo) -> Algo:
        """The algorithm with the current beta in its penalty."""

        def change(record: Any) -> Any:
            return TokenKLPenalty(self.beta) if isinstance(record, TokenKLPenalty) else record

        penalties = tuple(
            replace(penalty, beta=self.beta) if penalty.den == "reference" else penalty
            for penalty in algo.penalties
        )
        return replace(algo, credit=map_records(algo.credit, change), penalties=penalties)

    def dump(self) -> Json:
        return self.beta

    def restore(self, data: Json) -> None:
        """Load the output of `dump`. Raises msgspec.ValidationError for anything else."""
        self.beta = msgspec.convert(data, float)


def make_kl_controller(algo: Algo, target: float, horizon: int) -> KlController:
    """A controller that starts at the algorithm's beta. Raises ConfigError if it has none."""
    betas = [reg.beta for reg in algo.penalties if reg.den == "reference"]
    betas += [part.beta for part in nested_records(algo.credit) if isinstance(part, TokenKLPenalty)]
    if len(betas) != 1:
        raise ConfigError(
            f"reference.target_kl: algorithm.preset = {algo.name!r} has {len(betas)} KL penalties "
            "to the reference, and exactly one can be adapted; set one of its coefficients"
        )
    return KlController(betas[0], target, horizon)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveControl(ReferenceControl):
    """The reference model and its KL coefficient."""

    kl: KlController

    def tuned(self, algo: Algo) -> Algo:
        return self.kl.tuned(algo)

    def observe(self, batch: Batch | None, rollouts: int) -> dict[str, float]:
        """Also adapts the coefficient; the metric reference/beta is its value before."""
        metrics = ReferenceControl.observe(self, batch, rollouts) | {"reference/beta": self.kl.beta}
        if "reference/drift" in metrics:
            self.kl.observe(metrics["reference/drift"], rollouts)
        return metrics


def with_kl_target(updater: Updater) -> Updater:
    """The updater of a policy, with an adaptive penalty if `reference.target_kl` is set."""
    settings, control = updater.config.reference, updater.reference_control
    if not settings.target_kl:
        return updater
    kl = make_kl_controller(updater.algo, settings.target_kl, settings.kl_horizon)
    updater.state.parts["kl"] = kl
    return replace(updater, reference_control=AdaptiveControl(control.reference, kl=kl))
