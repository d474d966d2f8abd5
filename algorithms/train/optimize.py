"""The optimizer steps of a training step. Learning rate and minibatch order are functions of the
step, not part of checkpoints.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.diagnostics import metrics
from agentrl.algorithms.diagnostics.credit_records import CreditRecorder
from agentrl.algorithms.diagnostics.metrics import Metrics
from agentrl.algorithms.learners.base import Learner, StepReport
from agentrl.algorithms.objective import core as objective
from agentrl.algorithms.objective import staleness
from agentrl.algorithms.objective.core import Algo, Terms
from agentrl.algorithms.objective.ratios import ratio
from agentrl.algorithms.objective.sides import MISMATCHED
from agentrl.algorithms.objective.values import ValueTerms, select_tokens
from agentrl.algorithms.train.dump import BadSteps, Dump
from agentrl.algorithms.train.trust import KlLimit, Movement, mean_kl
from agentrl.config import AlgorithmConfig, RunConfig
from agentrl.types import Group

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """The inputs of a training step, which its optimizer steps share."""

    number: int
    version: int  # number of earlier steps in which the policy learned
    algo: Algo
    groups: list[Group]
    batch: Batch  # of all groups
    streams: Mapping[str, Tensor]  # log-probs [N] by stream
    values: ValueTerms | None  # targets of the critic, if there is one
    advantage: Tensor  # float64 [N]
    cut: Callable[[list[Group]], Batch]  # the batch of some of the groups


@dataclass(frozen=True, slots=True)
class Minibatch:
    """What one optimizer step trains on."""

    batch: Batch
    terms: Terms
    values: ValueTerms | None


@dataclass(frozen=True, slots=True)
class OptimizerSteps:
    """Makes the optimizer steps of one policy. unchanged: counts training steps without one."""

    config: RunConfig
    learner: Learner
    limit: KlLimit
    recorder: CreditRecorder | None
    bad_steps: BadSteps | None
    unchanged: Iterator[int]
    policy: str

    def run(self, step: TrainingStep, parts: Iterable[Minibatch]) -> Metrics:
        """Make the optimizer steps of a training step, and stop if the KL divergence exceeds
        target_kl; returns their metrics. Raises TrainingError if too many in a row fail."""
        if self.recorder is not None:
            self.recorder.open(step.algo, step.batch)
        lr, moved = self.lr(step), self.movement(step)
        sizes = metrics.call_tokens(step.groups, self.policy)
        planned: list[Terms] = []
        measured: list[Metrics] = []
        bad, early_stop = 0, False
        for number, part in enumerate(parts):
            planned.append(part.terms)
            if part.terms.skip:
                continue
            if moved is not None:
                moved.start(only=part.batch is step.batch)
            report = self.step(step.algo, part, lr * moved.share if moved else lr)
            if not self.applied(step.number, number, part, report):
                bad += 1
                continue
            if self.recorder is not None:
                self.recorder.record(step.algo, part.batch, part.terms, report.current)
            lag = staleness.token_lag(part.batch, step.version)
            measured.append(
                metrics.optimizer_step(step.algo, part.batch, part.terms, report, sizes, lag)
            )
            early_stop = self.beyond_target(part.terms, report)
            if moved is not None and not moved.finish(report.logprobs):
                early_stop = True
            if early_stop:
                break
        if moved is not None and moved.kl is not None:
            self.limit.end(moved.kl)
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

    def step(self, algo: Algo, part: Minibatch, lr: float) -> StepReport:
        """One optimizer step. psi is picklable: a learner may send it to other processes."""
        psi, eta = partial(objective.psi, algo, part.terms), objective.eta(algo, part.terms)
        return self.learner.step(part.batch, psi, lr=lr, critic=part.values, eta=eta)

    def applied(self, step: int, number: int, part: Minibatch, report: StepReport) -> bool:
        """Whether the weights changed; if not, the batch is written to a file."""
        if self.bad_steps is not None and report.applied:
            self.bad_steps.streak = 0
        elif self.bad_steps is not None:
            dump = Dump(part.batch, part.terms, report.logprobs, report.loss, report.grad_norm)
            self.bad_steps.bad(step, number, dump)
        return report.applied

    def beyond_target(self, terms: Terms, report: StepReport) -> bool:
        """Whether the policy had moved further than `target_kl` before the optimizer step."""
        target, old = self.config.algorithm.target_kl, terms.streams.get("o")
        if target is None or old is None:
            return False
        return mean_kl(old, report.logprobs, (terms.weight > 0).double()) > target

    def lr(self, step: TrainingStep) -> float:
        """The learning rate of a step: the schedule's, scaled by the effective sample size."""
        full = learning_rate(self.config.algorithm, step.version, self.config.steps)
        enough, old = self.config.algorithm.lr_ess, step.streams.get("o")
        if enough is None or old is None:
            return full
        weights = ratio(old.double().cpu() - step.batch.behaviour.double())
        return full * min(1.0, staleness.effective_share(weights) / enough)

    def movement(self, step: TrainingStep) -> Movement | None:
        """What measures how far the step moves the policy; None where that sampled no token."""
        batch = step.batch
        if not batch.n_tokens or self.config.data.name:
            return None
        live = ~step.advantage.isnan()
        if MISMATCHED in batch.rewards:  # sampled for another prompt
            live &= (batch.rewards[MISMATCHED] != 1)[batch.token_rollout]
        weight = objective.loss_weights(step.algo, batch, live)
        count = min(self.config.algorithm.minibatches, len(step.groups))
        return self.limit.begin(batch, weight, count)

    def _note_unchanged(self, step: int, why: str) -> None:
        """Log a step that changes no weight: of this process the first, the 10th, the 100th, ..."""
        number = next(self.unchanged)
        if number == 1:
            log.warning("step %d changes no weight: %s", step + 1, why)
        elif str(number).rstrip("0") == "1":
            log.warning("%d steps changed no weight; step %d: %s", number, step + 1, why)


def with_loss_terms(step: TrainingStep, config: RunConfig, learner: Learner) -> Iterator[Minibatch]:
    """The minibatch of each optimizer step: whole groups, shuffled anew in every epoch. Credit and
    the critic's targets are computed on the whole batch before the split."""
    settings, algo, batch, values = config.algorithm, step.algo, step.batch, step.values
    advantage, streams = step.advantage, dict(step.streams)
    count = min(settings.minibatches, len(step.groups))
    if count * settings.epochs == 1 or not batch.n_tokens:
        terms = objective.loss_terms(algo, batch, streams, fresh=True, advantage=advantage)
        yield Minibatch(batch, terms, values)
        return
    symbols = batch.symbols if "t_K" in streams else None
    if algo.symbols and symbols is None:
        symbols, o_NK = learner.top(batch, algo.symbols)
        streams = {"o": o_NK[:, 0], "o_K": o_NK, **streams}
    elif not {"o", "share"} & streams.keys():
        streams["o"] = learner.logprobs(batch)
    counts = batch.token_group.bincount(minlength=len(batch.groups)).tolist()
    ranges = torch.split(torch.arange(batch.n_tokens), counts)
    tokens_of = dict(zip(batch.groups, ranges, strict=True))
    for epoch in range(settings.epochs):
        order = f"{config.seed}/{batch.step}/{epoch}"
        for groups in minibatches(step.groups, count, order):
            part = step.cut(groups)
            # Within a group, part and whole batch have the same order of tokens.
            tokens = torch.cat([tokens_of[id] for id in part.groups] or [ranges[0][:0]])
            if symbols is not None:
                part = replace(part, symbols=symbols[tokens])
            own = {letter: column[tokens] for letter, column in streams.items()}
            terms = objective.loss_terms(
                algo, part, own, fresh="share" in own, advantage=advantage[tokens]
            )
            yield Minibatch(part, terms, values and select_tokens(values, tokens))


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
