"""One training step: groups are prepared and become a batch, the batch is scored, credit and loss
terms are computed from it, optimizer steps change the policy, and metrics are returned.

Each is a call of one function. An algorithm declares additional needs in its `Algo`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from math import ceil

import torch

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.merge import (
    build_batch,
)
from agentrl.algorithms.data.observations import AnswerTexts
from agentrl.algorithms.data.state import AlgorithmState, Recalled
from agentrl.algorithms.learners.base import Learner, ReferenceElsewhere, Teacher
from agentrl.algorithms.objective.core import (
    Algo,
    ReferenceControl,
    compute_advantages,
    staleness_metrics,
    withhold,
)
from agentrl.algorithms.objective.prepare import TrainedPolicy
from agentrl.algorithms.objective.values import critic_terms, value_metrics
from agentrl.algorithms.presets.registry import check_supplies
from agentrl.algorithms.train.metrics import BadSteps, Metrics, StepRecorder, batch_metrics
from agentrl.algorithms.train.optimize import (
    KlLimit,
    OptimizerSteps,
    TrainingStep,
    iterate_minibatches,
)
from agentrl.algorithms.train.prepare import BatchScorer, Preprocessor, ScoredBatch
from agentrl.core.config import RunConfig
from agentrl.core.errors import TrainingError
from agentrl.core.types import POLICY, Group, step_number


@dataclass(frozen=True, slots=True)
class Built:
    """The batch of a step, not scored yet."""

    algo: Algo  # with a filter for tokens that are too old, if the batch has any
    batch: Batch
    recalled: Recalled  # the state between steps, before and after this one
    withheld: int  # number of tokens that are too old


@dataclass(frozen=True)
class Updater:
    """Trains one policy, on its calls in the claimed groups. `stages.make_updater` builds it."""

    config: RunConfig
    algo: Algo
    learner: Learner
    state: AlgorithmState = field(default_factory=AlgorithmState)  # kept between steps
    preprocessor: Preprocessor = field(default_factory=Preprocessor)  # runs before credit
    reference_control: ReferenceControl = field(default_factory=ReferenceControl)
    recorder: StepRecorder | None = None  # None: credit is not stored
    bad_steps: BadSteps | None = None  # None: failed steps are only counted
    policy: str = POLICY
    reference: ReferenceElsewhere | None = None  # None: the learner's
    teacher: Teacher | None = None  # None: the learner's
    # None: the KL of steps is not measured, because no policy sampled the data (a data set).
    limit: KlLimit | None = None
    unchanged: Iterator[int] = field(default_factory=lambda: count(1))  # steps without a change

    def __post_init__(self) -> None:
        check_supplies(self.algo, self.learner.supplies)

    @cached_property
    def trained(self) -> TrainedPolicy:
        """The learner, as preparation sees it."""
        tokenizer, context = self.preprocessor.tokenizer, self.preprocessor.context
        state = self.state.parts
        return TrainedPolicy(self.learner.logprobs, tokenizer, context, self.policy, state)

    @cached_property
    def observations(self) -> AnswerTexts | None:
        """Finds the observations that the algorithm learns from; None if it learns from none.
        Raises TrainingError without a tokenizer."""
        if self.algo.echo is None:
            return None
        if self.preprocessor.tokenizer is None:
            raise TrainingError(f"policy {self.policy!r} has no tokenizer to read answers with")
        return AnswerTexts(self.algo.echo, self.preprocessor.tokenizer)

    @cached_property
    def scorer(self) -> BatchScorer:
        return BatchScorer(self.learner, self.trained, self.reference, self.teacher)

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
        critic), no weight changes, `update/skipped` counts the step and the log has the reason.
        Raises TrainingError for a reward that no rollout has."""
        version = step if version is None else version
        algo = self.reference_control.tuned(self.algo)
        prepared = self.preprocessor.prepare(groups, algo, self.trained, step_number(step))
        built = self.build(algo, prepared.groups, step, version)
        # A step without a usable rollout gets no checkpoint, so no state may change.
        learned = self.preprocessor.learn(prepared.complete) if built.batch.rollouts else {}
        scored = self.score(built.algo, built.batch, version, prepared.groups)
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
        if self.observations is not None:
            self.observations.check_learned(optimized, step_number(step))
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
        """The batch of prepared groups, with the algorithm's memory of earlier steps."""
        batch = replace(self.batch(groups), step=step_number(step))
        if self.observations is not None:
            self.observations.check(batch)
        recalled = self.state.recall(batch, groups) if self.state.remembered else Recalled({}, {})
        oldest = version - ceil(self.config.algorithm.max_staleness)
        withheld = int(batch.too_old(oldest).sum())
        batch = replace(batch, remembered=recalled.columns)
        algo = withhold(algo, batch, oldest) if withheld else algo
        return Built(algo, batch, recalled, withheld)

    def score(
        self, algo: Algo, batch: Batch, version: int | None = None, groups: Sequence[Group] = ()
    ) -> ScoredBatch:
        """The batch with the log-probs and values that `algo` reads: `BatchScorer.score`."""
        return self.scorer.score(algo, batch, version, list(groups))

    def batch(self, groups: list[Group], min_group: int | None = None) -> Batch:
        """The trainable tokens of the groups, with the rewards that the algorithm reads. min_group:
        default that of the settings."""
        smallest = self.config.algorithm.min_group if min_group is None else min_group
        names, side = self.algo.rewards, self.algo.side
        names += () if side is None else side.columns
        batch = build_batch(
            groups,
            reward_names=names,
            min_group=smallest,
            policy=self.policy,
            observations=self.observations,
        )
        if self.algo.reads_whole_step:
            return replace(batch, row_unit=torch.zeros(len(batch.rows), dtype=torch.int64))
        return batch if side is None else replace(batch, row_unit=side.row_unit(batch))
