"""Scores a batch before the update: what policy, frozen models and critic make of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol

from torch import Tensor

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.learners.base import Learner
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.objective.distill import TopKDistillation
from agentrl.algorithms.objective.ratios import GivenLogProbs
from agentrl.algorithms.objective.staleness import old_policy_share

ReferenceElsewhere = Callable[[Batch], Tensor]
"""Log-probs [N] of the reference, if the learner does not hold it."""


class Teacher(Protocol):
    """A teacher outside the learner."""

    def top(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """As `Learner.top`, for as many tokens as the algorithm reads."""


class Scored(NamedTuple):
    """A batch with `values`, `reference` and the `symbols` of a distillation over several tokens;
    and the log-probs of other models, float64."""

    batch: Batch
    given: GivenLogProbs


def score_batch(
    algo: Algo,
    learner: Learner,
    batch: Batch,
    reference: ReferenceElsewhere | None = None,
    teacher: Teacher | None = None,
    *,
    version: int | None = None,
    current: bool = False,
) -> Scored:
    """Compute the critic's values and the frozen models' log-probs that the algorithm reads.

    reference, teacher: those that are not the learner's. version: the policy's, from which follows
    its weight in an interpolated old policy. current: also compute the policy's own log-probs, as
    the old ones."""
    reference_N = teacher_N = teacher_NK = None
    if "reference" in algo.needs:
        found_N = reference(batch) if reference else learner.logprobs(batch, "reference")
        reference_N = found_N.double()
    if algo.distill is not None and batch.n_tokens:
        taught = teacher.top(batch) if teacher else _taught(algo.distill, learner, batch)
        symbols, teacher_NK = taught
        batch, teacher_N = replace(batch, symbols=symbols), teacher_NK[:, 0].double()
    elif "teacher" in algo.needs:
        taught_N = teacher.top(batch)[1][:, 0] if teacher else learner.logprobs(batch, "teacher")
        teacher_N = taught_N.double()
    weight_N = None
    if algo.old_from_versions and version is not None:
        weight_N = old_policy_share(batch.lag(version))
    given = GivenLogProbs(
        old=learner.logprobs(batch) if current and batch.n_tokens else None,
        reference=reference_N,
        teacher=teacher_N,
        current_in_old=weight_N,
        teacher_candidates=teacher_NK,
    )
    values = learner.values(batch) if algo.critic else batch.values
    known = batch.reference if reference_N is None else reference_N
    return Scored(replace(batch, values=values, reference=known), given)


def _taught(distill: TopKDistillation, learner: Learner, batch: Batch) -> tuple[Tensor, Tensor]:
    """The tokens [N, K] on which teacher and policy are compared, and the teacher's log-probs."""
    if distill.of == "teacher":
        return learner.top(batch, distill.k, "teacher")
    symbols, _ = learner.top(batch, distill.k)
    return symbols, learner.symbol_logprobs(replace(batch, symbols=symbols), "teacher")
