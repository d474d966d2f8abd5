"""One training step: groups into a batch, credit, and one or more optimizer steps on psi."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Protocol

import torch
from msgspec.structs import replace
from torch import Tensor

from agentrl.algorithms import branching, columns, metrics, objective, targets
from agentrl.algorithms.batch import Batch
from agentrl.algorithms.beside import scored
from agentrl.algorithms.controller import KlController, divergence
from agentrl.algorithms.dump import BadSteps, Dump
from agentrl.algorithms.implicit import ImplicitTrainer
from agentrl.algorithms.learners.base import Learner, Psi, StepReport, ValueTerms
from agentrl.algorithms.ledger import Ledger
from agentrl.algorithms.merge import build_batch
from agentrl.algorithms.metrics import Metrics
from agentrl.algorithms.objective import Algo, Terms
from agentrl.algorithms.reference import Reference
from agentrl.algorithms.registry import check_symbols
from agentrl.algorithms.schedule import learning_rate, minibatches, moved
from agentrl.algorithms.state import State
from agentrl.config import AlgorithmConfig
from agentrl.types import Group, Judgement, Rollout

log = logging.getLogger(__name__)


class Completer(Protocol):
    """Adds to what was collected what only the learning side can know: token ids of inexact calls,
    rewards of reward models, after those that are there."""

    def complete(self, groups: list[Group]) -> list[Group]: ...


@dataclass(frozen=True, slots=True)
class Updater:
    """Turns claimed groups into updates of the learner's weights."""

    config: AlgorithmConfig
    algo: Algo
    learner: Learner
    steps: int  # of the whole run
    state: State = field(default_factory=State)  # what earlier steps are remembered for
    ledger: Ledger | None = None  # what the step made of each call; none: nobody asks
    seed: int = 0  # of the order of minibatches
    context: int | None = None  # tokens the model can read; longer calls are left out
    bad_steps: BadSteps | None = None  # none: a step that cannot be made is skipped and counted
    reference: Reference | None = None  # follows the policy, if it does
    kl: KlController | None = None  # adapts the penalty on leaving the reference
    completers: tuple[Completer, ...] = ()  # in this order
    trainers: tuple[ImplicitTrainer, ...] = ()  # of reward models that learn what they have scored
    value_clip: float = inf  # how far a step may move a value of the critic
    # Rewards that completers gave in the last step, for its commit.
    judgements: list[Judgement] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.algo.symbols:
            check_symbols(self.algo, self.learner.supplies)

    def update(self, step: int, groups: list[Group]) -> Metrics:
        """Learn from the groups of one step; returns its metrics.

        Where there is nothing to learn from (every reward missing, or all equal and no critic that
        could learn that) no weight changes, `update/skipped` counts it and the log says why.
        Raises TrainingError for a reward that no rollout carries."""
        tuned = (
            self if self.kl is None else dataclasses.replace(self, algo=self.kl.tuned(self.algo))
        )
        found = tuned.learned(step, groups)
        if self.kl is not None:
            found["reference/beta"] = self.kl.beta
            if "reference/drift" in found:
                self.kl.observe(found["reference/drift"], int(found["rollouts"]))
        if self.reference is not None:
            self.reference.finish(step)
        return found

    def learned(self, step: int, groups: list[Group]) -> Metrics:
        """`update` with the algorithm as it is."""
        inexact = sum(not call.exact for call in metrics.own_calls(groups))
        collected = groups
        for completer in self.completers:
            groups = completer.complete(groups)
        self.judgements[:] = judged(collected, groups)
        learned = {k: v for trainer in self.trainers for k, v in trainer.learn(groups).items()}
        columns.check(groups, [r for r in self.algo.rewards if r not in self.algo.optional])
        groups, too_long = fitting(groups, self.context)
        batch = self.batch(groups)
        recall = self.state.recall(batch, groups)
        batch = dataclasses.replace(batch, memory=recall.columns)
        batch, streams = scored(self.algo, self.learner, batch)
        if self.ledger is not None:
            self.ledger.open(self.algo, batch)
        lr = learning_rate(self.config, step, self.steps)
        values = targets.learned(self.algo, batch, clip=self.value_clip)
        sizes = metrics.call_tokens(groups)
        planned: list[Terms] = []
        measured: list[Metrics] = []
        bad, early_stop = 0, False
        for number, (part, terms, critic) in enumerate(self.parts(groups, batch, streams, values)):
            planned.append(terms)
            if terms.skip:
                log.warning("step %d changes no weight: %s", step, terms.skip)
                continue
            report = self.learner.step(part, self.psi(terms), lr=lr, critic=critic)
            if not self.made(step, number, part, terms, report):
                bad += 1
                continue
            if self.ledger is not None:
                self.ledger.record(self.algo, part, terms, report.current)
            measured.append(metrics.optimizer_step(self.algo, part, terms, report, sizes))
            if early_stop := self.far(terms, report):
                break
        self.state.adopt(recall)
        return {
            **metrics.collected(groups, batch),
            **metrics.staleness(step, groups),
            **branching.measure(groups),
            **metrics.advantages(planned),
            **(targets.describe(values) if values else {}),
            **({"reference/drift": divergence(batch)} if "q" in streams and batch.n_tokens else {}),
            **metrics.merged(measured),
            **learned,
            "calls/inexact": inexact,
            "calls/too_long": too_long,
            "lr": lr,
            "update/steps": len(planned),
            "update/skipped": len(planned) - len(measured),
            "update/bad": bad,
            "update/early_stop": float(early_stop),
        }

    def batch(self, groups: list[Group]) -> Batch:
        """What may be learned from, with the rewards that the algorithm reads."""
        return build_batch(groups, reward_names=self.algo.rewards, min_group=self.config.min_group)

    def parts(
        self,
        groups: list[Group],
        batch: Batch,
        streams: Mapping[str, Tensor],
        values: ValueTerms | None,
    ) -> Iterator[tuple[Batch, Terms, ValueTerms | None]]:
        """The optimizer steps of a batch: minibatches of whole groups, dealt anew in every epoch.
        Credit is computed on the whole batch, whichever way it is cut, and so are the critic's
        targets."""
        count = min(self.config.minibatches, len(groups))
        if count * self.config.epochs == 1 or not batch.n_tokens:
            yield batch, objective.plan(self.algo, batch, streams, fresh=True), values
            return
        if self.algo.symbols:
            symbols, o_NK = self.learner.top(batch, self.algo.symbols)
            streams = {"o": o_NK[:, 0], "o_K": o_NK, **streams}
        else:
            symbols, streams = None, {"o": self.learner.logprobs(batch), **streams}
        advantage = objective.credited(self.algo, batch)
        counts = batch.token_group.bincount(minlength=len(batch.groups)).tolist()
        ranges = torch.split(torch.arange(batch.n_tokens), counts)
        tokens_of = dict(zip(batch.groups, ranges, strict=True))
        for epoch in range(self.config.epochs):
            for share in minibatches(groups, count, f"{self.seed}/{batch.step}/{epoch}"):
                part = self.batch(share)
                # Within a group the tokens of the part are in the order of the whole.
                tokens = torch.cat([tokens_of[id] for id in part.groups] or [ranges[0][:0]])
                if symbols is not None:
                    part = dataclasses.replace(part, symbols=symbols[tokens])
                cut = {letter: column[tokens] for letter, column in streams.items()}
                terms = objective.plan(self.algo, part, cut, advantage=advantage[tokens])
                yield part, terms, values and targets.part_of(values, tokens)

    def psi(self, terms: Terms) -> Psi:
        """Bound to what it reads alone, for it may be sent to other processes."""
        return partial(objective.psi, self.algo, terms)

    def made(self, step: int, number: int, part: Batch, terms: Terms, report: StepReport) -> bool:
        """Whether an optimizer step changed the weights. Raises TrainingError if too many in a row
        did not."""
        if self.bad_steps is not None:
            if report.applied:
                self.bad_steps.good()
            else:
                dump = Dump(part, terms, report.logprobs, report.loss, report.grad_norm)
                self.bad_steps.bad(step, number, dump)
        return report.applied

    def far(self, terms: Terms, report: StepReport) -> bool:
        """Whether the policy has moved so far on its batch that the other steps are left out."""
        target = self.config.target_kl
        if target is None or "o" not in terms.streams:
            return False
        return moved(terms.streams["o"], report.logprobs, terms.weight) > target


def judged(collected: list[Group], completed: list[Group]) -> Iterator[Judgement]:
    """The rewards that were added to what was collected."""
    before = {row.id: len(row.rewards) for group in collected for row in group.rollouts}
    for rollout in (row for group in completed for row in group.rollouts):
        for reward in rollout.rewards[before[rollout.id] :]:
            yield Judgement(rollout=rollout.id, reward=reward)


def fitting(groups: list[Group], context: int | None) -> tuple[list[Group], int]:
    """Groups of which no call is longer than the model's context, and how many were: they are
    refused like calls whose tokens are not known, their rollout's other calls and reward stay."""
    long = {
        call.id
        for call in metrics.own_calls(groups)
        if context is not None and call.exact and len(call.prompt) + len(call.completion) > context
    }
    if not long:
        return groups, 0
    warnings.warn(
        f"{len(long)} calls are longer than the {context} tokens that the model can read and are "
        "left out; lower sampling.max_tokens or engine.max_context",
        RuntimeWarning,
        stacklevel=2,
    )

    def refused(rollout: Rollout) -> Rollout:
        calls = [replace(c, exact=c.exact and c.id not in long) for c in rollout.transitions]
        return replace(rollout, transitions=calls)

    return [replace(g, rollouts=[refused(row) for row in g.rollouts]) for g in groups], len(long)
