"""One training step, on one page: groups are prepared and made a batch, which is scored; credit and
loss terms follow from it, optimizer steps change the policy, and the report says what happened.

Each is a call of one function. What an algorithm needs beyond that it declares in its `Algo`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from math import ceil
from typing import NamedTuple

from torch import Tensor

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.data.state import AlgorithmState, Recalled
from agentrl.algorithms.diagnostics.bad_steps import BadSteps, StepRecorder
from agentrl.algorithms.diagnostics.metrics import Metrics, batch_metrics
from agentrl.algorithms.learners.base import Learner, ReferenceElsewhere, Teacher
from agentrl.algorithms.objective.core import Algo, ReferenceControl, compute_advantages
from agentrl.algorithms.objective.distill import TopKDistillation
from agentrl.algorithms.objective.prepare import TrainedPolicy
from agentrl.algorithms.objective.ratios import GivenLogProbs
from agentrl.algorithms.objective.staleness import old_policy_share, staleness_metrics, withhold
from agentrl.algorithms.objective.values import critic_terms, value_metrics
from agentrl.algorithms.presets.registry import check_supplies
from agentrl.algorithms.train.optimize import (
    KlLimit,
    OptimizerSteps,
    TrainingStep,
    iterate_minibatches,
)
from agentrl.algorithms.train.prepare import Preprocessor
from agentrl.config import RunConfig
from agentrl.types import POLICY, Group


@dataclass(frozen=True, slots=True)
class Built:
    """The batch of a step, not scored yet."""

    algo: Algo  # with a filter for tokens that are too old, if the batch has any
    batch: Batch
    recalled: Recalled  # the state between steps, before and after this one
    withheld: int  # tokens that are too old


class ScoredBatch(NamedTuple):
    """A batch with `values`, `reference` and the `symbols` of a distillation over several tokens;
    and the log-probs of other models, float64."""

    batch: Batch
    given: GivenLogProbs


@dataclass(frozen=True)
class Updater:
    """Trains one policy, on its calls in the claimed groups. `build.make_updater` makes that of a
    run."""

    config: RunConfig
    algo: Algo
    learner: Learner
    state: AlgorithmState = field(default_factory=AlgorithmState)  # kept between steps
    preprocessor: Preprocessor = field(default_factory=Preprocessor)  # before credit
    reference_control: ReferenceControl = field(default_factory=ReferenceControl)
    recorder: StepRecorder | None = None  # None: credit is not stored
    bad_steps: BadSteps | None = None  # None: failed steps are only counted
    policy: str = POLICY
    reference: ReferenceElsewhere | None = None  # None: the learner's
    teacher: Teacher | None = None  # None: the learner's
    # None: how far steps move the policy is not measured, because no policy sampled what it trains
    # on.
    limit: KlLimit | None = None
    unchanged: Iterator[int] = field(default_factory=lambda: count(1))  # steps without a change

    def __post_init__(self) -> None:
        check_supplies(self.algo, self.learner.supplies)

    @cached_property
    def trained(self) -> TrainedPolicy:
        """The learner, as preparation sees it."""
        tokenizer, context = self.preprocessor.tokenizer, self.preprocessor.context
        return TrainedPolicy(self.learner.logprobs, tokenizer, context, self.policy)

    @cached_property
    def optimizer(self) -> OptimizerSteps:
        return OptimizerSteps(
            self.config, self.learner, self.limit, self.recorder, self.bad_steps, self.unchanged,
            self.policy,
        )  # fmt: skip

    def update(self, step: int, groups: list[Group], version: int | None = None) -> Metrics:
        """Train on the groups of one step; returns its metrics. version: number of earlier steps in
        which the policy learned; default: all.

        If there is no learning signal (every reward is missing, or all are equal and there is no
        critic) no weight changes, `update/skipped` counts it and the log has the reason.
        Raises TrainingError for a reward that no rollout has."""
        version = step if version is None else version
        algo = self.reference_control.tuned(self.algo)
        prepared = self.preprocessor.prepare(groups, algo, self.trained, step + 1)
        built = self.build(algo, prepared.groups, step, version)
        # A step without a usable rollout has no checkpoint, so nothing may learn from it.
        learned = self.preprocessor.learn(prepared.complete) if built.batch.rollouts else {}
        scored = self.score(built.algo, built.batch, version)
        clip = self.config.critic.clip
        values = critic_terms(built.algo, scored.batch, clip=clip) if algo.reads_critic else None
        advantage = compute_advantages(built.algo, scored.batch)
        training = TrainingStep(
            number=step,
            version=version,
            algo=built.algo,
            groups=[group for group in prepared.groups if group.id in scored.batch.groups],
            batch=scored.batch,
            given=scored.given,
            values=values,
            advantage=advantage,
            batch_of=self.batch,
        )
        minibatches = iterate_minibatches(training, self.config, self.learner)
        optimized = self.optimizer.run(training, minibatches)
        self.state.adopt(built.recalled)
        rollouts = sum(len(group.rollouts) for group in prepared.groups)
        reference = scored.batch if scored.given.reference is not None else None
        return {
            **prepared.metrics,
            **learned,
            **batch_metrics(prepared.groups, scored.batch, self.policy),
            **staleness_metrics(step, prepared.groups, self.policy, version=version),
            **(value_metrics(values) if values else {}),
            "staleness/withheld": float(built.withheld),
            **self.state.metrics(),
            **optimized,
            **self.reference_control.observe(reference, rollouts),
        }

    def build(self, algo: Algo, groups: list[Group], step: int, version: int) -> Built:
        """The batch of prepared groups, with what the algorithm remembers of earlier steps."""
        batch = replace(self.batch(groups), step=step + 1)
        recalled = self.state.recall(batch, groups) if self.state.remembered else Recalled({}, {})
        oldest = version - ceil(self.config.algorithm.max_staleness)
        withheld = int(batch.too_old(oldest).sum())
        batch = replace(batch, remembered=recalled.columns)
        algo = withhold(algo, batch, oldest) if withheld else algo
        return Built(algo, batch, recalled, withheld)

    def score(self, algo: Algo, batch: Batch, version: int | None = None) -> ScoredBatch:
        """The critic's values and the log-probs of other models that the algorithm reads. version:
        the policy's, if it is about to be trained."""
        learner, teacher, given = self.learner, self.teacher, GivenLogProbs()
        if "reference" in algo.needs:
            elsewhere = self.reference
            found = elsewhere(batch) if elsewhere else learner.logprobs(batch, "reference")
            batch = replace(batch, reference=found.double())
            given = replace(given, reference=batch.reference)
        if algo.distill is not None and batch.n_tokens:
            taught = teacher.top(batch) if teacher else _taught(algo.distill, learner, batch)
            batch = replace(batch, symbols=taught[0])
            first = taught[1][:, 0].double()
            given = replace(given, teacher=first, teacher_candidates=taught[1])
        elif "teacher" in algo.needs:
            of_teacher = (
                teacher.top(batch)[1][:, 0] if teacher else learner.logprobs(batch, "teacher")
            )
            given = replace(given, teacher=of_teacher.double())
        if algo.reads_critic:
            batch = replace(batch, values=learner.values(batch))
        if version is not None and algo.old_from_versions:
            given = replace(given, weight_of_current=old_policy_share(batch.lag(version)))
        if (
            version is not None
            and self.config.algorithm.ess_for_full_lr is not None
            and batch.n_tokens
        ):
            given = replace(given, old=learner.logprobs(batch))
        return ScoredBatch(batch, given)

    def batch(self, groups: list[Group], min_group: int | None = None) -> Batch:
        """The trainable tokens of the groups, with the rewards that the algorithm reads. min_group:
        default `algorithm.min_group`."""
        least = self.config.algorithm.min_group if min_group is None else min_group
        names, side = self.algo.rewards, self.algo.side
        names += () if side is None else side.columns
        batch = build_batch(groups, reward_names=names, min_group=least, policy=self.policy)
        return batch if side is None else replace(batch, row_unit=side.row_unit(batch))


def _taught(distill: TopKDistillation, learner: Learner, batch: Batch) -> tuple[Tensor, Tensor]:
    """The tokens [N, K] on which teacher and policy are compared, and the teacher's log-probs."""
    if distill.of == "teacher":
        return learner.top(batch, distill.k, "teacher")
    symbols, _ = learner.top(batch, distill.k)
    return symbols, learner.symbol_logprobs(replace(batch, symbols=symbols), "teacher")
