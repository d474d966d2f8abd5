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
from agentrl.algorithms.objective.staleness import old_policy_share, token_lag

ReferenceElsewhere = Callable[[Batch], Tensor]
"""Log-probs [N] of the reference, if the learner does not hold it."""


class Teacher(Protocol):
    """A teacher outside the learner."""

    def top(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """As `Learner.top`, for as many tokens as the algorithm reads."""


class Scored(NamedTuple):
    """A batch with `values`, `reference` and the `symbols` of a distillation over several tokens;
    and log-probs float64 [N] by stream, with t_K [N, K] for the symbols."""

    batch: Batch
    streams: dict[str, Tensor]


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
    streams: dict[str, Tensor] = {}
    if "q" in algo.needs:
        q_N = reference(batch) if reference else learner.logprobs(batch, "q")
        streams["q"] = q_N.double()
    if algo.distill is not None and batch.n_tokens:
        symbols, t_NK = teacher.top(batch) if teacher else _taught(algo.distill, learner, batch)
        batch = replace(batch, symbols=symbols)
        streams |= {"t": t_NK[:, 0].double(), "t_K": t_NK}
    elif "t" in algo.needs:
        t_N = teacher.top(batch)[1][:, 0] if teacher else learner.logprobs(batch, "t")
        streams["t"] = t_N.double()
    if current and batch.n_tokens:
        streams["o"] = learner.logprobs(batch)
    if algo.old_from_versions and version is not None:
        streams["share"] = old_policy_share(token_lag(batch, version))
    values = learner.values(batch) if algo.critic else batch.values
    known = streams.get("q", batch.reference)
    return Scored(replace(batch, values=values, reference=known), streams)


def _taught(distill: TopKDistillation, learner: Learner, batch: Batch) -> tuple[Tensor, Tensor]:
    """The tokens [N, K] on which teacher and policy are compared, and the teacher's log-probs."""
    if distill.of == "teacher":
        return learner.top(batch, distill.k, "t")
    symbols, _ = learner.top(batch, distill.k)
    return symbols, learner.symbol_logprobs(replace(batch, symbols=symbols), "t")
