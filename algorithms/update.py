"""One training step: groups into a batch, credit, and one or more optimizer steps on psi."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from statistics import fmean, pstdev

from torch import Tensor

from agentrl.algorithms import branching, columns, objective
from agentrl.algorithms.batch import Batch
from agentrl.algorithms.hindsight import Hindsight
from agentrl.algorithms.learners.base import Learner, Psi
from agentrl.algorithms.ledger import Ledger
from agentrl.algorithms.merge import build_batch
from agentrl.algorithms.objective import Algo, Terms
from agentrl.algorithms.retokenize import Retokenizer
from agentrl.algorithms.state import State
from agentrl.config import AlgorithmConfig
from agentrl.types import POLICY, Group, RolloutState, Transition

Metrics = dict[str, float]


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
    hindsight: Hindsight | None = None  # scores calls for algorithms that read it

    def update(self, step: int, groups: list[Group]) -> Metrics:
        """Learn from the groups of one step; returns its metrics.

        Where there is nothing to learn from (every reward equal or missing) no weight changes, and
        `update/skipped` counts it. Raises TrainingError for a reward that no rollout carries."""
        if self.hindsight is not None:
            groups = self.hindsight.complete(groups)
        columns.check(groups, [r for r in self.algo.rewards if r not in self.algo.optional])
        inexact = float(sum(not call.exact for call in _ours(groups)))
        if self.retokenizer is not None:
            groups = self.retokenizer.complete(groups)
        batch = self.batch(groups)
        recall = self.state.recall(batch, groups)
        batch = replace(batch, memory=recall.columns)
        if self.ledger is not None:
            self.ledger.open(self.algo, batch)
        metrics = describe(groups, batch) | {"calls/inexact": inexact}
        metrics |= branching.measure(groups)
        metrics |= {"lr": self.lr(step), "update/steps": 0.0, "update/skipped": 0.0}
        for number, (part, terms) in enumerate(self.parts(groups, batch)):
            metrics["update/steps"] += 1
            if terms.skip:
                metrics["update/skipped"] += 1
                continue
            report = self.learner.step(part, self.psi(terms), lr=self.lr(step))
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

    def parts(self, groups: list[Group], batch: Batch) -> Iterator[tuple[Batch, Terms]]:
        """The optimizer steps of a batch: minibatches of whole groups, once per epoch. Credit is
        computed on the whole batch, whichever way it is cut."""
        count = min(self.config.minibatches, len(groups))
        if count * self.config.epochs == 1 or not batch.n_tokens:
            yield batch, objective.plan(self.algo, batch, {}, fresh=True)
            return
        old = self.learner.logprobs(batch)
        advantage = objective.credited(self.algo, batch)
        for _ in range(self.config.epochs):
            first = 0
            for index in range(count):
                share = groups[len(groups) * index // count : len(groups) * (index + 1) // count]
                part = self.batch(share)
                tokens = slice(first, first + part.n_tokens)  # groups keep their order in a batch
                first = tokens.stop
                yield (
                    part,
                    objective.plan(
                        self.algo, part, {"o": old[tokens]}, advantage=advantage[tokens]
                    ),
                )

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
