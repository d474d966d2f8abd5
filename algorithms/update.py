"""One training step: groups into a batch, credit, and one or more optimizer steps on psi."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from statistics import fmean, pstdev
from typing import Final, Literal

from torch import Tensor

from agentrl.algorithms import columns, objective, targets
from agentrl.algorithms.batch import Batch
from agentrl.algorithms.controller import KlController, divergence
from agentrl.algorithms.learners.base import Learner, Psi, ValueTerms
from agentrl.algorithms.ledger import Ledger
from agentrl.algorithms.merge import build_batch
from agentrl.algorithms.objective import Algo, Terms
from agentrl.algorithms.reference import Reference
from agentrl.algorithms.retokenize import Retokenizer
from agentrl.algorithms.state import State
from agentrl.config import AlgorithmConfig
from agentrl.types import POLICY, Group, RolloutState, Transition

Metrics = dict[str, float]
FROZEN: Final[tuple[Literal["q", "t"], ...]] = ("q", "t")  # streams of models that do not learn


@dataclass(frozen=True, slots=True)
class Updater:
    """Turns claimed groups into updates of the learner's weights."""

    config: AlgorithmConfig
    algo: Algo
    learner: Learner
    steps: int  # of the whole run
    retokenizer: Retokenizer | None = None  # completes inexact calls; none: they are refused
    state: State = field(default_factory=State)  # what earlier steps are remembered for
    ledger: Ledger | None = None  # what the step made of each call; none: nobody asks
    reference: Reference | None = None  # follows the policy, if it does
    kl: KlController | None = None  # adapts the penalty on leaving the reference
    value_clip: float = inf  # how far a step may move a value of the critic

    def update(self, step: int, groups: list[Group]) -> Metrics:
        """Learn from the groups of one step; returns its metrics.

        Where there is nothing to learn from (every reward equal or missing) no weight changes, and
        `update/skipped` counts it. Raises TrainingError for a reward that no rollout carries."""
        tuned = self if self.kl is None else replace(self, algo=self.kl.tuned(self.algo))
        metrics = tuned.learned(step, groups)
        if self.kl is not None:
            metrics["reference/beta"] = self.kl.beta
            self.kl.observe(metrics["reference/drift"], int(metrics["rollouts"]))
        if self.reference is not None:
            self.reference.finish(step)
        return metrics

    def learned(self, step: int, groups: list[Group]) -> Metrics:
        """`update` with the algorithm as it is."""
        columns.check(groups, [r for r in self.algo.rewards if r not in self.algo.optional])
        inexact = float(sum(not call.exact for call in _ours(groups)))
        if self.retokenizer is not None:
            groups = self.retokenizer.complete(groups)
        batch = self.batch(groups)
        recall = self.state.recall(batch, groups)
        batch, streams = self.scored(replace(batch, memory=recall.columns))
        if self.ledger is not None:
            self.ledger.open(self.algo, batch)
        metrics = describe(groups, batch) | {"calls/inexact": inexact}
        metrics |= {"lr": self.lr(step), "update/steps": 0.0, "update/skipped": 0.0}
        values = self.value_terms(batch)
        metrics |= targets.describe(values) if values else {}
        if "q" in streams:
            metrics["reference/drift"] = divergence(batch)
        for number, (part, terms, critic) in enumerate(self.parts(groups, batch, streams, values)):
            metrics["update/steps"] += 1
            if terms.skip:
                metrics["update/skipped"] += 1
                continue
            report = self.learner.step(part, self.psi(terms), lr=self.lr(step), critic=critic)
            metrics |= report.metrics
            metrics["update/skipped"] += not report.applied
            if self.ledger is not None:
                self.ledger.record(self.algo, part, terms, report.logprobs)
            if number == 0:  # later optimizer steps have moved away from the sampler on purpose
                metrics |= difference(report.logprobs, part.behaviour)
            metrics |= objective.stats(self.algo, part, terms, report.logprobs)
            metrics |= {"loss": report.loss, "grad_norm": report.grad_norm}
            metrics["tokens/forwarded"] = metrics.get("tokens/forwarded", 0.0) + report.tokens
        self.state.adopt(recall)
        return metrics

    def batch(self, groups: list[Group]) -> Batch:
        """What may be learned from, with the rewards that the algorithm reads."""
        return build_batch(groups, reward_names=self.algo.rewards, min_group=self.config.min_group)

    def scored(self, batch: Batch) -> tuple[Batch, Mapping[str, Tensor]]:
        """The batch with the critic's values and the reference's log-probs, where the algorithm
        reads them, and the log-probs of each frozen model [N] by stream."""
        values = self.learner.values(batch) if self.algo.critic else batch.values
        streams: dict[str, Tensor] = {
            letter: self.learner.logprobs(batch, letter).double()
            for letter in FROZEN
            if letter in self.algo.needs
        }
        reference = streams.get("q", batch.reference)
        return replace(batch, values=values, reference=reference), streams

    def value_terms(self, batch: Batch) -> ValueTerms | None:
        """What the critic learns from the whole batch, if the algorithm reads one."""
        if not self.algo.critic:
            return None
        target = targets.returns(self.algo, batch)
        return targets.value_terms(target, batch.values, clip=self.value_clip)

    def parts(
        self,
        groups: list[Group],
        batch: Batch,
        streams: Mapping[str, Tensor],
        values: ValueTerms | None,
    ) -> Iterator[tuple[Batch, Terms, ValueTerms | None]]:
        """The optimizer steps of a batch: minibatches of whole groups, once per epoch. Credit is
        computed on the whole batch, whichever way it is cut, and so are the critic's targets."""
        count = min(self.config.minibatches, len(groups))
        if count * self.config.epochs == 1 or not batch.n_tokens:
            yield batch, objective.plan(self.algo, batch, streams, fresh=True), values
            return
        streams = {"o": self.learner.logprobs(batch), **streams}
        advantage = objective.credited(self.algo, batch)
        for _ in range(self.config.epochs):
            first = 0
            for index in range(count):
                share = groups[len(groups) * index // count : len(groups) * (index + 1) // count]
                part = self.batch(share)
                tokens = slice(first, first + part.n_tokens)  # groups keep their order in a batch
                first = tokens.stop
                cut = {letter: column[tokens] for letter, column in streams.items()}
                terms = objective.plan(self.algo, part, cut, advantage=advantage[tokens])
                yield part, terms, values and targets.part_of(values, tokens)

    def psi(self, terms: Terms) -> Psi:
        def psi(logprobs: Tensor, index: Tensor) -> Tensor:
            return objective.psi(self.algo, terms, logprobs, index)

        return psi

    def lr(self, step: int) -> float:
        """Learning rate of a step: linear warm-up, then constant or linear to zero at the end."""
        warm = min(1.0, (step + 1) / (self.config.warmup + 1))
        left = 1 - step / self.steps if self.config.schedule == "linear" else 1.0
        return self.config.lr * min(warm, left)


def describe(groups: list[Group], batch: Batch) -> Metrics:
    """What was collected: counts of rollouts, groups and tokens, and the outcome rewards."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [reward for row in rollouts if not math.isnan(reward := row.reward())]
    calls = _ours(groups)
    outcome = {"reward/mean": fmean(rewards), "reward/std": pstdev(rewards)} if rewards else {}
    return outcome | {
        "rollouts": len(rollouts),
        "rollouts/failed": sum(row.state is not RolloutState.SUCCEEDED for row in rollouts),
        "groups/dropped": len(groups) - len(batch.groups),
        "calls": len(calls),
        "calls/refused": sum(not call.exact for call in calls),
        "tokens/completion": sum(len(call.completion) for call in calls),
        "tokens/prompt": sum(len(call.prompt) for call in calls),
        "rows": len(batch.rows),
        "tokens/trained": batch.n_tokens,
    }


def _ours(groups: list[Group]) -> list[Transition]:
    """Calls of the trained policy, not those of frozen ones."""
    calls = [call for group in groups for row in group.rollouts for call in row.transitions]
    return [call for call in calls if call.policy == POLICY]


def difference(learner: Tensor, sampler: Tensor) -> Metrics:
    """|log-prob of the learner - log-prob of the sampler| over all tokens."""
    gap = (learner.double().cpu() - sampler.double()).abs()
    return {
        "logprob_difference/max": float(gap.max()),
        "logprob_difference/mean": float(gap.mean()),
    }
