"""One training step: groups into a batch, credit, and one or more optimizer steps on psi."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from agentrl.algorithms.data import rewards as columns
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.data.state import AlgorithmState
from agentrl.algorithms.diagnostics import metrics
from agentrl.algorithms.diagnostics.credit_records import CreditRecorder
from agentrl.algorithms.diagnostics.metrics import Metrics
from agentrl.algorithms.learners.base import Learner, Psi, StepReport
from agentrl.algorithms.learners.factory import score_batch
from agentrl.algorithms.objective import core as objective
from agentrl.algorithms.objective import values as targets
from agentrl.algorithms.objective.core import Algo, Terms
from agentrl.algorithms.objective.kl_control import ReferenceControl
from agentrl.algorithms.objective.values import ValueTerms
from agentrl.algorithms.presets.registry import check_supplies
from agentrl.algorithms.train.dump import BadSteps, Dump
from agentrl.algorithms.train.preprocess import Preprocessor
from agentrl.algorithms.train.schedule import learning_rate, mean_kl, minibatches
from agentrl.config import RunConfig
from agentrl.types import POLICY, Group

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Updater:
    """Turns claimed groups into optimizer steps of one policy, on the calls that it answered."""

    config: RunConfig
    algo: Algo
    learner: Learner
    state: AlgorithmState = field(default_factory=AlgorithmState)  # kept from step to step
    preprocessor: Preprocessor = field(default_factory=Preprocessor)  # before credit
    anchor: ReferenceControl = field(default_factory=ReferenceControl)
    recorder: CreditRecorder | None = None  # None: credit is not stored
    bad_steps: BadSteps | None = None  # None: steps that fail are only counted
    policy: str = POLICY

    def __post_init__(self) -> None:
        check_supplies(self.algo, self.learner.supplies)

    def update(self, step: int, groups: list[Group], turn: int | None = None) -> Metrics:
        """Train on the groups of one step; returns its metrics. turn: the number of steps in which
        the policy learned before, which is its version; by default all of them.

        If there is no learning signal (every reward is missing, or all are equal and there is no
        critic) no weight changes, `update/skipped` counts it and the log says why.
        Raises TrainingError for a reward that no rollout carries."""
        turn = step if turn is None else turn
        algo = self.anchor.tuned(self.algo)
        groups, taken = self.preprocessor.process(groups)
        columns.check_rewards(groups, [name for name in algo.rewards if name not in algo.optional])
        batch = self.batch(groups)
        recall = self.state.recall(batch, groups)
        batch, streams = score_batch(algo, self.learner, replace(batch, memory=recall.columns))
        values = targets.critic_terms(algo, batch, clip=self.config.critic.clip)
        measured = self.optimize(TrainingStep(step, turn, algo, groups, batch, streams, values))
        self.state.adopt(recall)
        rollouts = sum(len(group.rollouts) for group in groups)
        held = self.anchor.finish(turn, batch if "q" in streams else None, rollouts)
        return {
            **taken,
            **metrics.batch_metrics(groups, batch, self.policy),
            **metrics.staleness(step, groups, self.policy, version=turn),
            **(targets.value_metrics(values) if values else {}),
            **measured,
            **held,
        }

    def optimize(self, step: TrainingStep) -> Metrics:
        """Make the optimizer steps of a training step, until the KL divergence exceeds target_kl;
        returns their metrics."""
        if self.recorder is not None:
            self.recorder.open(step.algo, step.batch)
        lr = learning_rate(self.config.algorithm, step.turn, self.config.steps)
        sizes = metrics.call_tokens(step.groups, self.policy)
        planned: list[Terms] = []
        measured: list[Metrics] = []
        bad, early_stop = 0, False
        for number, (part, terms, critic) in enumerate(self.optimizer_batches(step)):
            planned.append(terms)
            if terms.skip:
                log.warning("step %d changes no weight: %s", step.number, terms.skip)
                continue
            eta = objective.eta(step.algo, terms)
            report = self.learner.step(part, step.psi(terms), lr=lr, critic=critic, eta=eta)
            if not self.was_applied(step, number, part, terms, report):
                bad += 1
                continue
            if self.recorder is not None:
                self.recorder.record(step.algo, part, terms, report.current)
            measured.append(metrics.optimizer_step(step.algo, part, terms, report, sizes))
            if early_stop := self.exceeds_target_kl(terms, report):
                break
        return {
            **metrics.advantages(planned),
            **metrics.merge_optimizer_steps(measured),
            "lr": lr,
            "update/steps": len(planned),
            "update/skipped": len(planned) - len(measured),
            "update/bad": bad,
            "update/early_stop": float(early_stop),
        }

    def batch(self, groups: list[Group]) -> Batch:
        """The trainable tokens of the groups, with the rewards that the algorithm reads."""
        least = self.config.algorithm.min_group
        names = self.algo.rewards
        return build_batch(groups, reward_names=names, min_group=least, policy=self.policy)

    def optimizer_batches(
        self, step: TrainingStep
    ) -> Iterator[tuple[Batch, Terms, ValueTerms | None]]:
        """The minibatch of each optimizer step: whole groups, shuffled anew in every epoch. Credit
        and the critic's targets are computed on the whole batch before it is split."""
        settings, algo, batch, values = self.config.algorithm, step.algo, step.batch, step.values
        count = min(settings.minibatches, len(step.groups))
        if count * settings.epochs == 1 or not batch.n_tokens:
            yield batch, objective.loss_terms(algo, batch, step.streams, fresh=True), values
            return
        symbols = None
        if algo.symbols:
            symbols, o_NK = self.learner.top(batch, algo.symbols)
            streams = {"o": o_NK[:, 0], "o_K": o_NK, **step.streams}
        else:
            streams = {"o": self.learner.logprobs(batch), **step.streams}
        advantage = objective.compute_advantages(algo, batch)
        counts = batch.token_group.bincount(minlength=len(batch.groups)).tolist()
        ranges = torch.split(torch.arange(batch.n_tokens), counts)
        tokens_of = dict(zip(batch.groups, ranges, strict=True))
        for epoch in range(settings.epochs):
            order = f"{self.config.seed}/{batch.step}/{epoch}"
            for share in minibatches(step.groups, count, order):
                part = self.batch(share)
                # Within a group the tokens of the part are in the order of the whole.
                tokens = torch.cat([tokens_of[id] for id in part.groups] or [ranges[0][:0]])
                if symbols is not None:
                    part = replace(part, symbols=symbols[tokens])
                cut = {letter: column[tokens] for letter, column in streams.items()}
                terms = objective.loss_terms(algo, part, cut, advantage=advantage[tokens])
                yield part, terms, values and targets.select_tokens(values, tokens)

    def was_applied(
        self, step: TrainingStep, number: int, part: Batch, terms: Terms, report: StepReport
    ) -> bool:
        """Whether an optimizer step changed the weights. Raises TrainingError if too many in a row
        did not."""
        if self.bad_steps is not None:
            if report.applied:
                self.bad_steps.good()
            else:
                dump = Dump(part, terms, report.logprobs, report.loss, report.grad_norm)
                self.bad_steps.bad(step.number, number, dump)
        return report.applied

    def exceeds_target_kl(self, terms: Terms, report: StepReport) -> bool:
        """Whether the policy moved so far on its batch that the remaining steps are skipped."""
        target = self.config.algorithm.target_kl
        if target is None or "o" not in terms.streams:
            return False
        return mean_kl(terms.streams["o"], report.logprobs, terms.weight) > target


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """What all optimizer steps of a training step share."""

    number: int
    turn: int  # steps in which the policy learned before
    algo: Algo
    groups: list[Group]
    batch: Batch  # the whole of them
    streams: Mapping[str, Tensor]  # log-probs [N] of frozen models, by letter
    values: ValueTerms | None  # targets of the critic, if there is one

    def psi(self, terms: Terms) -> Psi:
        """psi of these terms, picklable because a learner may send it to other processes."""
        return partial(objective.psi, self.algo, terms)
