"""One training step: builds a batch from groups, computes credit, and makes one or more optimizer
steps on psi. Learning rate and minibatch order are functions of the step, not part of checkpoints.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, pairwise
from math import ceil
from typing import TypeVar

import torch
from torch import Tensor

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.data.state import AlgorithmState
from agentrl.algorithms.diagnostics import metrics, token_age
from agentrl.algorithms.diagnostics.credit_records import CreditRecorder
from agentrl.algorithms.diagnostics.metrics import Metrics
from agentrl.algorithms.learners.base import Learner, Psi
from agentrl.algorithms.learners.factory import score_batch
from agentrl.algorithms.objective import core as objective
from agentrl.algorithms.objective import staleness
from agentrl.algorithms.objective import values as critic_targets
from agentrl.algorithms.objective.core import Algo, Terms
from agentrl.algorithms.objective.kl_control import ReferenceControl
from agentrl.algorithms.objective.prepare import TrainedPolicy
from agentrl.algorithms.objective.ratios import ratio
from agentrl.algorithms.objective.sides import MISMATCHED, WEIGHT, row_unit
from agentrl.algorithms.objective.values import ValueTerms
from agentrl.algorithms.presets.registry import check_supplies
from agentrl.algorithms.train.dump import BadSteps, Dump
from agentrl.algorithms.train.prepare import Preprocessor
from agentrl.algorithms.train.teacher import RemoteTeacher
from agentrl.algorithms.train.trust import KlLimit, Movement, largest_kl, mean_kl
from agentrl.config import AlgorithmConfig, RunConfig
from agentrl.types import POLICY, Float32, Group

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Updater:
    """Makes the optimizer steps of one policy, on its calls in the claimed groups."""

    config: RunConfig
    algo: Algo
    learner: Learner
    state: AlgorithmState = field(default_factory=AlgorithmState)  # kept between steps
    preprocessor: Preprocessor = field(default_factory=Preprocessor)  # before credit
    anchor: ReferenceControl = field(default_factory=ReferenceControl)
    recorder: CreditRecorder | None = None  # None: credit is not stored
    bad_steps: BadSteps | None = None  # None: failed steps are only counted
    policy: str = POLICY
    cached: dict[str, Float32] | None = None  # log-probs of the reference by rollout; None: compute
    teacher: RemoteTeacher | None = None  # None: the learner's
    unchanged: Iterator[int] = field(default_factory=lambda: count(1))  # steps without a change
    trust: KlLimit = field(init=False)
    trained: TrainedPolicy = field(init=False)  # as preparation sees it

    def __post_init__(self) -> None:
        check_supplies(self.algo, self.learner.supplies)
        limit, seed = largest_kl(self.config.algorithm), self.config.seed
        trust = KlLimit(self.learner, limit, seed, self.policy)
        object.__setattr__(self, "trust", trust)
        tokenizer, context = self.preprocessor.tokenizer, self.preprocessor.context
        trained = TrainedPolicy(self.learner.logprobs, tokenizer, context, self.policy)
        object.__setattr__(self, "trained", trained)

    def update(self, step: int, groups: list[Group], turn: int | None = None) -> Metrics:
        """Train on the groups of one step; returns its metrics. turn: number of earlier steps in
        which the policy learned, which is its version; default: all.

        If there is no learning signal (every reward is missing, or all are equal and there is no
        critic) no weight changes, `update/skipped` counts it and the log has the reason.
        Raises TrainingError for a reward that no rollout has."""
        turn = step if turn is None else turn
        algo = self.anchor.tuned(self.algo)
        prepared = self.preprocessor.prepare(groups, algo, self.trained)
        groups = prepared.groups
        batch = self.batch(groups)
        recall = self.state.recall(batch, groups)
        oldest = turn - ceil(self.config.algorithm.max_staleness)
        old = staleness.token_lag(batch, oldest) > 0
        algo = staleness.withhold(algo, batch, oldest)
        batch = replace(batch, memory=recall.columns)
        taught = self.teacher.top if self.teacher else None
        batch, streams = score_batch(algo, self.learner, batch, self.cached, taught)
        streams = {**streams, **self.staleness_streams(algo, batch, turn)}
        values = critic_targets.critic_terms(algo, batch, clip=self.config.critic.clip)
        measured = self.optimize(TrainingStep(step, turn, algo, groups, batch, streams, values))
        self.state.adopt(recall)
        rollouts = sum(len(group.rollouts) for group in groups)
        controlled = self.anchor.finish(turn, batch if "q" in streams else None, rollouts)
        return {
            **prepared.metrics,
            **metrics.batch_metrics(groups, batch, self.policy),
            **token_age.staleness(step, groups, self.policy, version=turn),
            "staleness/withheld": float(old.sum()),
            **(critic_targets.value_metrics(values) if values else {}),
            **measured,
            **controlled,
        }

    def staleness_streams(self, algo: Algo, batch: Batch, turn: int) -> dict[str, Tensor]:
        """The streams that staleness corrections read: the current policy's log-probs before the
        update (o), or the interpolation weight of the old policy between sampler and policy."""
        streams = {}
        if self.config.algorithm.lr_ess is not None and batch.n_tokens:
            streams["o"] = self.learner.logprobs(batch)
        if algo.old_from_versions:
            streams["share"] = staleness.old_policy_share(staleness.token_lag(batch, turn))
        return streams

    def lr(self, step: TrainingStep) -> float:
        """The learning rate of a step: the schedule's, scaled by the effective sample size."""
        full = learning_rate(self.config.algorithm, step.turn, self.config.steps)
        enough, old = self.config.algorithm.lr_ess, step.streams.get("o")
        if enough is None or old is None:
            return full
        weights = ratio(old.double().cpu() - step.batch.behaviour.double())
        return full * min(1.0, staleness.effective_share(weights) / enough)

    def optimize(self, step: TrainingStep) -> Metrics:
        """Make the optimizer steps of a training step, and stop if the KL divergence exceeds
        target_kl; returns their metrics. Raises TrainingError if too many in a row fail."""
        if self.recorder is not None:
            self.recorder.open(step.algo, step.batch)
        lr, advantage = self.lr(step), objective.compute_advantages(step.algo, step.batch)
        moved = self.movement(step, advantage)
        sizes = metrics.call_tokens(step.groups, self.policy)
        planned: list[Terms] = []
        measured: list[Metrics] = []
        bad, early_stop = 0, False
        for number, (part, terms, critic) in enumerate(self.optimizer_batches(step, advantage)):
            planned.append(terms)
            if terms.skip:
                continue
            eta, share = objective.eta(step.algo, terms), 1.0
            if moved is not None:
                moved.start(only=part is step.batch)
                share = moved.share
            psi = step.psi(terms)
            report = self.learner.step(part, psi, lr=lr * share, critic=critic, eta=eta)
            if not report.applied:
                bad += 1
                if self.bad_steps is not None:
                    dump = Dump(part, terms, report.logprobs, report.loss, report.grad_norm)
                    self.bad_steps.bad(step.number, number, dump)
                continue
            if self.bad_steps is not None:
                self.bad_steps.streak = 0
            if self.recorder is not None:
                self.recorder.record(step.algo, part, terms, report.current)
            lag = staleness.token_lag(part, step.turn)
            measured.append(metrics.optimizer_step(step.algo, part, terms, report, sizes, lag))
            target, old = self.config.algorithm.target_kl, terms.streams.get("o")
            if target is not None and old is not None:
                early_stop = mean_kl(old, report.logprobs, (terms.weight > 0).double()) > target
            if moved is not None and not moved.finish(report.logprobs):
                early_stop = True
            if early_stop:
                break
        reasons = [terms.skip for terms in planned if terms.skip]
        if reasons and len(reasons) == len(planned):
            self._note_unchanged(step.number, "; ".join(dict.fromkeys(reasons)))
        return {
            **metrics.advantages(planned),
            **metrics.merge_optimizer_steps(measured),
            **(moved.metrics() if moved else {}),
            "lr": lr * moved.share if moved and moved.share else lr,
            "update/steps": len(planned),
            "update/skipped": len(planned) - len(measured),
            "update/bad": bad,
            "update/early_stop": float(early_stop),
        }

    def _note_unchanged(self, step: int, why: str) -> None:
        """Log a step that changes no weight: of this process the first, the 10th, the 100th, ..."""
        number = next(self.unchanged)
        if number == 1:
            log.warning("step %d changes no weight: %s", step + 1, why)
        elif str(number).rstrip("0") == "1":
            log.warning("%d steps changed no weight; step %d: %s", number, step + 1, why)

    def batch(self, groups: list[Group], min_group: int | None = None) -> Batch:
        """The trainable tokens of the groups, with the rewards that the algorithm reads. min_group:
        default `algorithm.min_group`, or for a data set the number of sides of an item."""
        least = self.config.algorithm.min_group if min_group is None else min_group
        if self.config.data.name and min_group is None:
            least = 2 if self.algo.side is not None and self.algo.side.paired else 1
        names, side = self.algo.rewards, self.algo.side
        names += () if side is None else (WEIGHT, MISMATCHED)
        batch = build_batch(groups, reward_names=names, min_group=least, policy=self.policy)
        return batch if side is None else replace(batch, row_unit=row_unit(side, batch))

    def movement(self, step: TrainingStep, advantage: Tensor) -> Movement | None:
        """What measures how far the step moves the policy; None where that sampled no token."""
        batch = step.batch
        if not batch.n_tokens or self.config.data.name:
            return None
        live = ~advantage.isnan()
        if MISMATCHED in batch.rewards:  # sampled for another prompt
            live &= (batch.rewards[MISMATCHED] != 1)[batch.token_rollout]
        weight = objective.loss_weights(step.algo, batch, live)
        count = min(self.config.algorithm.minibatches, len(step.groups))
        return self.trust.begin(batch, weight, count)

    def optimizer_batches(
        self, step: TrainingStep, advantage: Tensor
    ) -> Iterator[tuple[Batch, Terms, ValueTerms | None]]:
        """The minibatch of each optimizer step: whole groups, shuffled anew in every epoch. Credit
        and the critic's targets are computed on the whole batch before the split."""
        settings, algo, batch, values = self.config.algorithm, step.algo, step.batch, step.values
        count = min(settings.minibatches, len(step.groups))
        streams = dict(step.streams)
        symbols = batch.symbols if "t_K" in streams else None
        if count * settings.epochs == 1 or not batch.n_tokens:
            terms = objective.loss_terms(algo, batch, streams, fresh=True, advantage=advantage)
            yield batch, terms, values
            return
        if algo.symbols and symbols is None:
            symbols, o_NK = self.learner.top(batch, algo.symbols)
            streams = {"o": o_NK[:, 0], "o_K": o_NK, **streams}
        elif not {"o", "share"} & streams.keys():
            streams["o"] = self.learner.logprobs(batch)
        counts = batch.token_group.bincount(minlength=len(batch.groups)).tolist()
        ranges = torch.split(torch.arange(batch.n_tokens), counts)
        tokens_of = dict(zip(batch.groups, ranges, strict=True))
        for epoch in range(settings.epochs):
            order = f"{self.config.seed}/{batch.step}/{epoch}"
            for groups in minibatches(step.groups, count, order):
                part = self.batch(groups)
                # Within a group, part and whole batch have the same order of tokens.
                tokens = torch.cat([tokens_of[id] for id in part.groups] or [ranges[0][:0]])
                if symbols is not None:
                    part = replace(part, symbols=symbols[tokens])
                cut = {letter: column[tokens] for letter, column in streams.items()}
                terms = objective.loss_terms(
                    algo, part, cut, fresh="share" in cut, advantage=advantage[tokens]
                )
                yield part, terms, values and critic_targets.select_tokens(values, tokens)


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """The inputs of a training step, which its optimizer steps share."""

    number: int
    turn: int  # number of earlier steps in which the policy learned
    algo: Algo
    groups: list[Group]
    batch: Batch  # of all groups
    streams: Mapping[str, Tensor]  # log-probs [N] by stream
    values: ValueTerms | None  # targets of the critic, if there is one

    def psi(self, terms: Terms) -> Psi:
        """psi of these terms, picklable because a learner may send it to other processes."""
        return partial(objective.psi, self.algo, terms)


def learning_rate(config: AlgorithmConfig, step: int, steps: int) -> float:
    """The learning rate of a step: the smaller of a linear warm-up over `warmup` steps and the
    schedule, which decays from `lr` before the first step to `min_lr` after the last."""
    rise = min(1.0, (step + 1) / (config.warmup + 1))
    done = step / steps
    decay = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    scheduled = config.min_lr + (config.lr - config.min_lr) * decay[config.schedule]
    return min(config.lr * rise, scheduled)


def minibatches(items: Sequence[T], count: int, seed: str) -> list[list[T]]:
    """Split the items into `count` minibatches, whose sizes differ by one at most, in a random
    order by seed; a single minibatch keeps their order."""
    order = list(items)
    if count > 1:
        random.Random(seed).shuffle(order)
    bounds = [len(order) * index // count for index in range(count + 1)]
    return [order[first:last] for first, last in pairwise(bounds)]
