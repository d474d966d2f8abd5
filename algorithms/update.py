"""One training step: groups into a batch, credit, and one or more optimizer steps on psi."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from agentrl.algorithms import columns, metrics, objective
from agentrl.algorithms.batch import Batch
from agentrl.algorithms.learners.base import Learner, Psi
from agentrl.algorithms.merge import build_batch
from agentrl.algorithms.metrics import Metrics
from agentrl.algorithms.objective import Algo, Terms
from agentrl.algorithms.retokenize import Retokenizer
from agentrl.config import AlgorithmConfig
from agentrl.types import Group


@dataclass(frozen=True, slots=True)
class Updater:
    """Turns claimed groups into updates of the learner's weights; keeps no state of its own."""

    config: AlgorithmConfig
    algo: Algo
    learner: Learner
    steps: int  # of the whole run
    retokenizer: Retokenizer | None = None  # completes inexact calls; none: they are refused

    def update(self, step: int, groups: list[Group]) -> Metrics:
        """Learn from the groups of one step; returns its metrics.

        Where there is nothing to learn from (every reward equal or missing) no weight changes, and
        `update/skipped` counts it. Raises TrainingError for a reward that no rollout carries."""
        columns.check(groups, [r for r in self.algo.rewards if r not in self.algo.optional])
        inexact = sum(not call.exact for call in metrics.own_calls(groups))
        if self.retokenizer is not None:
            groups = self.retokenizer.complete(groups)
        batch = self.batch(groups)
        sizes = metrics.call_tokens(groups)
        planned: list[Terms] = []
        measured: list[Metrics] = []
        skipped = 0
        for part, terms in self.parts(groups, batch):
            planned.append(terms)
            if terms.skip:
                skipped += 1
                continue
            report = self.learner.step(part, self.psi(terms), lr=self.lr(step))
            skipped += not report.applied
            measured.append(metrics.optimizer_step(self.algo, part, terms, report, sizes))
        return {
            **metrics.collected(groups, batch),
            **metrics.staleness(step, groups),
            **metrics.advantages(planned),
            **metrics.merged(measured),
            "calls/inexact": inexact,
            "lr": self.lr(step),
            "update/steps": len(planned),
            "update/skipped": skipped,
        }

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
