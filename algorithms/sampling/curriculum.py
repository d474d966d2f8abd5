"""A curriculum: tasks by difficulty (`tasks.order`)."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from agentrl.algorithms.credit.calls import CountedMeans
from agentrl.algorithms.train.features import Feature, LoadedRun
from agentrl.algorithms.train.metrics import Metrics
from agentrl.core.config import RunConfig
from agentrl.core.types import Group, Json, Task

SOLVED = 0.9  # mean outcome from which a task teaches little, ScaleRL, arXiv 2510.13786
DIFFICULTY = "difficulty"  # key of TaskDifficulty in the state of the run


@dataclass(frozen=True, slots=True)
class TaskDifficulty:
    """A curriculum: draws tasks by their mean outcome so far; with `solved`, keeps the usual order
    and replaces tasks whose mean outcome is at least `solved`.

    Tasks of medium difficulty give the strongest signal, because the outcomes that a group compares
    have variance p (1 - p) (arXiv 2502.12272)."""

    means: CountedMeans = field(default_factory=CountedMeans)
    solved: float | None = None

    def choose(
        self,
        tasks: Sequence[dict[str, Json]],
        usual: Sequence[dict[str, Json]],
        numbers: range,
        seed: str,
        candidate: str | None,
    ) -> list[dict[str, Json]]:
        """See `Order`: draws tasks, or replaces the solved ones among `usual` by unsolved ones."""
        if self.solved is None:
            return self.draw(tasks, seed, len(usual), candidate)
        unsolved = [task for task in tasks if self.mean(task, candidate) < self.solved]
        return [
            unsolved[number % len(unsolved)]
            if unsolved and self.mean(task, candidate) >= self.solved
            else task
            for task, number in zip(usual, numbers, strict=True)
        ]

    def record_outcomes(self, groups: Sequence[Group]) -> None:
        """Record the outcomes of sampled rollouts, trained or not. Ignores missing rewards, and
        branches, which begin in the middle of a task."""
        all_rollouts = (rollout for group in groups for rollout in group.rollouts)
        rollouts = [rollout for rollout in all_rollouts if rollout.branch is None]
        outcomes = torch.tensor([row.reward() for row in rollouts], dtype=torch.float64)
        names = [_key(row.task, row.candidate) for row in rollouts]
        _, self.means.values = self.means.read(names, outcomes)

    def mean(self, task: Task, candidate: str | None = None) -> float:
        """The mean outcome of a task so far; 0 for a new task."""
        return self.means.values.get(_key(task, candidate), (0.0, 0))[0]

    def weight(self, task: Task, candidate: str | None = None) -> float:
        """p (1 - p) in (0, 1/4], with p the success rate after one success and one failure are
        added: 1/2 for a new task."""
        mean, count = self.means.values.get(_key(task, candidate), (0.0, 0))
        p = (min(max(mean, 0.0), 1.0) * count + 1) / (count + 2)
        return p * (1 - p)

    def draw(
        self, tasks: Sequence[dict[str, Json]], seed: str, n: int, candidate: str | None = None
    ) -> list[dict[str, Json]]:
        """Draw `n` tasks by weight. A larger `n` begins with the same tasks."""
        weights = [self.weight(task, candidate) for task in tasks]
        return random.Random(seed).choices(tasks, weights, k=n)


def _key(task: Task, candidate: str | None) -> str:
    """The key of a task's difficulty, which depends on the prompts of the agent."""
    return task_name(task) if candidate is None else f"{candidate}/{task_name(task)}"


def task_name(task: Task) -> str:
    """The task's `id`, or a digest of its content."""
    if "id" in task:
        return str(task["id"])
    content = msgspec.json.encode(task, order="sorted")
    return hashlib.blake2b(content, digest_size=12).hexdigest()


class Curriculum(Feature):
    """Tasks by difficulty (`tasks.order`)."""

    def __init__(self, config: RunConfig) -> None:
        self.difficulty = TaskDifficulty(
            solved=SOLVED if config.tasks.order == "unsolved" else None
        )

    async def prepare(self, run: LoadedRun) -> None:
        run.policies.state.parts[DIFFICULTY] = self.difficulty.means

    def claimed(self, groups: Sequence[Group]) -> Metrics:
        self.difficulty.record_outcomes(groups)
        return {}
