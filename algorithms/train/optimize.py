"""The optimizer steps of a training step, how far they move the policy, and undoing those that move
it too far. The scheduled learning rate and the order of minibatches are functions of the step.

The distance is the KL divergence of the policy before the training step from the one after it, in
nats per token: the k3 estimate (joschu.net/blog/kl-approx.html) on the step's sampled tokens,
weighted as in the loss, and by policy / sampler where an older version sampled them. It takes a
forward pass, so only a part of a large batch is measured: neighbouring rows, whose common prefixes
are computed once. Invariant: the measured rows are a function of seed and step, and no call is
sampled from weights that are undone, because weights are published later.

Many steps with the maximum allowed KL damage a policy like a single step that is too large. So the
learning rate is lowered while recent steps are large, and rises slowly afterwards; checkpoints
store it.

AdamW's step is proportional to the learning rate, so repeating a step at half the rate needs no new
gradient: the result is the midpoint of the weights before and after the step. The first moments are
multiplied by the square of the factor (a quarter). Unscaled, they would make the next steps too
large as well; set to 0, they would make many small steps learn too slowly. Second moments are kept,
because without them the next step would be the largest that AdamW makes.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.learners.base import Learner, StepReport
from agentrl.algorithms.objective import core as objective
from agentrl.algorithms.objective.core import Algo, Terms
from agentrl.algorithms.objective.ratios import GivenLogProbs, ratio
from agentrl.algorithms.objective.values import ValueTerms, select_tokens
from agentrl.algorithms.train import metrics
from agentrl.algorithms.train.metrics import BadSteps, Dump, Metrics, StepRecorder
from agentrl.core.config import AlgorithmConfig, RunConfig
from agentrl.core.types import POLICY, Group, Json, step_number

log = logging.getLogger("agentrl.algorithm")
T = TypeVar("T")
MAX_KL = 0.05  # default limit per optimizer step: tens of times the KL of a healthy run
MAX_HALVINGS = 10  # then the step is undone completely
# Maximum of weights that correct for tokens of another policy, such as an older version.
MAX_CORRECTION = 2.0
STEP_SIZE = "step_size"  # name of the part of the algorithm's state
# Share of the limit: if the mean KL of recent training steps is above it, the rate is lowered.
LOWERED_FROM = 0.1
LATEST_WEIGHT = 0.25  # weight of the latest training step in that mean
LOWER, HIGHER = 0.5, 2 ** (1 / 16)  # factors of the rate after a training step
# The measured share of a batch's tokens, with context; the minimum number.
MEASURED_SHARE, MIN_MEASURED = 1 / 8, 2048


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """The inputs of a training step, which its optimizer steps share."""

    number: int  # from 0
    version: int  # number of earlier steps in which the policy learned
    algo: Algo
    groups: list[Group]  # groups of the batch
    batch: Batch
    given: GivenLogProbs  # log-probs of the N tokens of the batch
    values: ValueTerms | None  # targets of the critic, if there is one
    advantage: Tensor  # float64 [N]
    batch_of: Callable[[list[Group]], Batch]  # builds the batch of some of the groups


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The data of one optimizer step."""

    batch: Batch
    terms: Terms
    values: ValueTerms | None
    only: bool = False  # whether this is the only optimizer step on the batch


@dataclass(frozen=True, slots=True)
class OptimizerSteps:
    """Runs the optimizer steps of one policy. unchanged: number of training steps without one."""

    config: RunConfig
    learner: Learner
    limit: KlLimit | None  # None: how far they move the policy is not measured
    recorder: StepRecorder | None
    bad_steps: BadSteps | None
    unchanged: Iterator[int]
    policy: str

    def run(self, step: TrainingStep, minibatches: Iterable[Minibatch]) -> Metrics:
        """Make the optimizer steps of a training step, until one is undone by `max_kl`; returns
        their metrics. Raises TrainingError if too many in a row fail."""
        lr, moved = self.lr(step), self.movement(step)
        planned: list[Terms] = []
        measured: list[Metrics] = []
        bad, early_stop = 0, False
        for number, minibatch in enumerate(minibatches):
            planned.append(minibatch.terms)
            if minibatch.terms.skip:
                continue
            if moved is not None:
                moved.start(only=minibatch.only)
            report = self.step(step.algo, minibatch, lr * moved.share if moved else lr)
            if not self.applied(step.number, number, minibatch, report):
                bad += 1
                continue
            if self.recorder is not None:
                if not measured:
                    self.recorder.open(step.algo, step.batch)
                self.recorder.record(step.algo, minibatch.batch, minibatch.terms, report.current)
            measured.append(self.measure(step, minibatch, report))
            if moved is not None and not moved.finish(report.logprobs):
                early_stop = True
                break
        if self.recorder is not None and not measured:
            self.recorder.open(step.algo, step.batch)  # discards the records of an earlier step
        if moved is not None and moved.kl is not None:
            moved.owner.end(moved.kl)
        reasons = [terms.skip for terms in planned if terms.skip]
        if reasons and len(reasons) == len(planned):
            self._note_unchanged(step.number, "; ".join(dict.fromkeys(reasons)))
        return {
            **metrics.advantages(planned),
            **metrics.merge_optimizer_steps(measured),
            **(moved.metrics() if moved else {}),
            "lr": lr * moved.share if moved else lr,
            "update/steps": len(planned),
            "update/skipped": len(planned) - len(measured),
            "update/bad": bad,
            "update/early_stop": float(early_stop),
        }

    def measure(self, step: TrainingStep, minibatch: Minibatch, report: StepReport) -> Metrics:
        """The metrics of one optimizer step."""
        batch, sizes = minibatch.batch, metrics.call_tokens(step.groups, self.policy)
        lag = batch.lag(step.version)
        return metrics.optimizer_step(step.algo, batch, minibatch.terms, report, sizes, lag)

    def step(self, algo: Algo, minibatch: Minibatch, lr: float) -> StepReport:
        """One optimizer step. Coefficients are picklable: a learner may send them to processes."""
        step = partial(
            self.learner.step,
            minibatch.batch,
            partial(objective.loss_coefficients, algo, minibatch.terms),
            lr=lr,
            critic=minibatch.values,
            entropy_weights=objective.entropy_weights(algo, minibatch.terms),
        )
        observed = objective.observation_weights(algo, minibatch.batch)
        return step() if observed is None else step(observation_weights=observed)

    def applied(self, step: int, number: int, tried: Minibatch, report: StepReport) -> bool:
        """Whether the weights changed; if not, the batch is written to a file."""
        if self.bad_steps is not None and report.applied:
            self.bad_steps.streak = 0
        elif self.bad_steps is not None:
            dump = Dump(tried.batch, tried.terms, report.logprobs, report.loss, report.grad_norm)
            self.bad_steps.bad(step, number, dump)
        return report.applied

    def lr(self, step: TrainingStep) -> float:
        """The learning rate of a step, by the schedule."""
        return learning_rate(self.config.algorithm, step.version, self.config.steps)

    def movement(self, step: TrainingStep) -> Movement | None:
        """A measurement of how far the step moves the policy; None if there is no limit or no
        token."""
        batch = step.batch
        if not batch.n_tokens or self.limit is None:
            return None
        live = ~step.advantage.isnan()
        if step.algo.side is not None:
            live &= step.algo.side.sampled(batch)
        weight = objective.loss_weights(step.algo, batch, live)
        count = min(self.config.algorithm.minibatches, len(step.groups))
        return self.limit.begin(step.number, batch, weight, count)

    def _note_unchanged(self, step: int, why: str) -> None:
        """Log a step that changes no weight, but only the first, 10th, 100th, ... of this
        process."""
        number = next(self.unchanged)
        if number == 1:
            log.warning("step %d changes no weight: %s", step_number(step), why)
        elif str(number).rstrip("0") == "1":
            log.warning("%d steps changed no weight; step %d: %s", number, step_number(step), why)


def iterate_minibatches(
    step: TrainingStep, config: RunConfig, learner: Learner
) -> Iterator[Minibatch]:
    """Yield the minibatch of each optimizer step with its loss terms: whole groups, reshuffled
    in every epoch. Credit and the critic's targets are those of the whole batch.

    If there are several, the old policy's log-probs are computed at the first."""
    settings, algo, batch, values = config.algorithm, step.algo, step.batch, step.values
    advantage, logprobs = step.advantage, step.given
    count = min(settings.minibatches, len(step.groups))
    if count * settings.epochs == 1 or not batch.n_tokens:
        terms = objective.loss_terms(algo, batch, logprobs, fresh=True, advantage=advantage)
        yield Minibatch(batch, terms, values, only=True)
        return
    topk_tokens = None if logprobs.teacher_candidates is None else batch.topk_tokens
    if algo.topk and topk_tokens is None:
        topk_tokens, old_NK = learner.top(batch, algo.topk)
        old_N = old_NK[:, 0] if logprobs.old is None else logprobs.old
        logprobs = replace(logprobs, old=old_N, old_candidates=old_NK)
    elif logprobs.old is None and logprobs.weight_of_current is None:
        logprobs = replace(logprobs, old=learner.logprobs(batch))
    counts = batch.token_group.bincount(minlength=len(batch.groups)).tolist()
    ranges = torch.split(torch.arange(batch.n_tokens), counts)
    tokens_of = dict(zip(batch.groups, ranges, strict=True))
    for epoch in range(settings.epochs):
        order = f"{config.seed}/{step.number}/{epoch}"
        for groups in minibatches(step.groups, count, order):
            minibatch = replace(step.batch_of(groups), step=batch.step)
            # Within a group, part and whole batch have the same order of tokens.
            tokens = torch.cat([tokens_of[id] for id in minibatch.groups] or [ranges[0][:0]])
            if topk_tokens is not None:
                minibatch = replace(minibatch, topk_tokens=topk_tokens[tokens])
            interpolated = logprobs.weight_of_current is not None
            terms = objective.loss_terms(
                algo,
                minibatch,
                logprobs.at(tokens),
                fresh=interpolated,
                advantage=advantage[tokens],
            )
            yield Minibatch(minibatch, terms, values and select_tokens(values, tokens))


def learning_rate(config: AlgorithmConfig, step: int, steps: int) -> float:
    """The learning rate of a step: the smaller of a linear warm-up over `warmup` steps and the
    schedule, which decays from `lr` before the first step to `min_lr` after the last."""
    rise = min(1.0, (step + 1) / (config.warmup + 1))
    progress = step / steps
    decay = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
    }
    scheduled = config.min_lr + (config.lr - config.min_lr) * decay[config.schedule]
    return min(config.lr * rise, scheduled)


def minibatches(items: Sequence[T], count: int, seed: str) -> list[list[T]]:
    """Split the items into `count` minibatches, with sizes that differ by at most one, in a random
    order by seed; a single minibatch keeps their order."""
    order = list(items)
    if count > 1:
        random.Random(seed).shuffle(order)
    bounds = [len(order) * index // count for index in range(count + 1)]
    return [order[first:last] for first, last in pairwise(bounds)]


@dataclass(slots=True)
class KlLimit:
    """The limits of one policy's training steps. limit: maximum KL; 0: no step is undone."""

    learner: Learner
    limit: float = MAX_KL
    seed: int = 0
    policy: str = POLICY
    notified: bool = False  # whether the console has reported undone steps
    recent: float = 0.0  # mean KL of recent training steps
    rate: float = 1.0  # factor of the learning rate at the start of a training step

    def __post_init__(self) -> None:
        if not self.learner.undoable:
            self.limit = 0.0

    def begin(self, step: int, batch: Batch, weight: Tensor, minibatches: int) -> Movement:
        """Before training step number `step`. weight [N]: of the batch's tokens in the loss.
        minibatches: optimizer steps per pass over the batch."""
        rows = measured_rows(batch, f"{self.seed}/{step}", minibatches)
        part, tokens = (batch, torch.arange(batch.n_tokens)) if rows is None else batch.cut(rows)
        return Movement(self, step, part, tokens, weight[tokens].double(), share=self.rate)

    def end(self, kl: float) -> None:
        """After a training step: lower the rate if recent steps had a large KL, else raise it
        again. The KL is about quadratic in the rate."""
        self.recent += LATEST_WEIGHT * (kl - self.recent)
        far = min(kl, self.recent) / (LOWERED_FROM * self.limit) if self.limit else 0.0
        self.rate = min(1.0, self.rate * (max(LOWER, far**-0.5) if far > 1 else HIGHER))

    def dump(self) -> Json:
        return {"recent": self.recent, "rate": self.rate}

    def restore(self, data: Json) -> None:
        """Load the output of `dump`. Raises msgspec.ValidationError for anything else."""
        state = msgspec.convert(data, dict[str, float])
        self.recent, self.rate = state.get("recent", 0.0), state.get("rate", 1.0)

    def notify(self, step: int, kl: float, share: float) -> None:
        """Report on the console, once, that a step was undone."""
        if self.notified:
            return
        self.notified = True
        again = f"repeated at 1/{1 / share:.0f} of its learning rate" if share else "not repeated"
        log.warning(
            "step %d: the update of policy %r was too large (%.3g nats per token, algorithm.max_kl "
            "= %g), so it was undone and %s. From now on the metric update/undone counts this; if "
            "it happens often, lower algorithm.lr",
            *(step_number(step), self.policy, kl, self.limit, again),
        )


@dataclass(slots=True)
class Movement:
    """How far one training step moves the policy."""

    owner: KlLimit
    step: int  # from 0
    batch: Batch  # the measured tokens
    tokens: Tensor  # int64 [n], its tokens in the batch of the step
    weight: Tensor  # [n]
    before: Tensor | None = None  # log-probs [n] before the first optimizer step
    kl: float | None = None  # after the last optimizer step; None: there was none
    share: float = 1.0  # factor of the learning rate, for this and the next optimizer steps
    undone: int = 0  # halvings

    def start(self, *, only: bool) -> None:
        """Before an optimizer step. only: whether it is the only one on the batch."""
        if self.before is None and not only:
            self.before = self.owner.learner.logprobs(self.batch)
        if self.owner.limit:
            self.owner.learner.mark()

    def finish(self, logprobs: Tensor) -> bool:
        """After an optimizer step, shorten it until the policy is within the limit. logprobs [N]:
        of its minibatch, before the step. Returns whether any part of the step is kept."""
        if self.before is None:
            self.before = logprobs[self.tokens]
        earlier, halved = self.kl or 0.0, self.undone
        self.kl = moved = self.measure()
        while self.owner.limit and not self.kl <= self.owner.limit:  # NaN is beyond it, too
            self.undone += 1
            factor = 0.5 if self.undone <= MAX_HALVINGS else 0.0
            self.share *= factor
            self.owner.learner.shrink(factor)
            self.kl = self.measure() if factor else earlier
            if not factor:
                break
        if self.undone > halved:
            self.owner.notify(self.step, moved, self.share)
        return self.share > 0

    def measure(self) -> float:
        """The KL so far."""
        assert self.before is not None
        sampled = ratio(self.before.double().cpu() - self.batch.sampler_logprobs.double())
        weight = self.weight * sampled.clamp(max=MAX_CORRECTION)
        now = self.owner.learner.logprobs(self.batch)
        return mean_kl(self.before, now, weight, self.weight.sum())

    def metrics(self) -> dict[str, float]:
        undone = {"update/undone": float(self.undone)}
        return undone if self.kl is None else {"update/kl": self.kl, **undone}


def largest_kl(config: AlgorithmConfig) -> float:
    """The KL beyond which a step is undone; 0: none is."""
    if config.max_kl is not None:
        return config.max_kl
    return MAX_KL * config.minibatches * config.epochs


def mean_kl(old: Tensor, now: Tensor, weight: Tensor, total_weight: Tensor | None = None) -> float:
    """KL(old || now) in nats per token, by the k3 estimator. weight: of each token; whole: their
    sum, without the weights that correct for the sampler."""
    live, weight = weight > 0, weight.double()
    d = (old.double().cpu() - now.double().cpu())[live]
    total = weight.sum() if total_weight is None else total_weight
    return float(objective.kl_value(d, "k3") @ weight[live] / total) if d.numel() else 0.0


def measured_rows(batch: Batch, seed: str, minibatches: int) -> Tensor | None:
    """Indices int64 [r], ascending, of neighbouring rows with MEASURED_SHARE of the tokens of a
    minibatch, or MIN_MEASURED tokens if that is more; None: all rows."""
    lengths = torch.tensor([len(row.tokens) for row in batch.rows])
    enough = max(MIN_MEASURED, math.ceil(MEASURED_SHARE * int(lengths.sum()) / minibatches))
    if enough >= lengths.sum():
        return None
    first = random.Random(seed).randrange(len(lengths))
    around = (first + torch.arange(len(lengths))) % len(lengths)
    count = int((lengths[around].cumsum(0) < enough).sum()) + 1
    return around[:count].sort().values
