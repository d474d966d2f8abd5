"""A curriculum: tasks are drawn by how often they were solved so far.

Tasks of medium difficulty have the strongest signal, because groups compare outcomes and these have
the variance p (1 - p) (arXiv 2502.12272). The draw is a function of a seed and of the history,
which is saved in the checkpoint."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from agentrl.algorithms.data.state import CountedMeans
from agentrl.types import Group, Json, Task

PART = "difficulty"  # its name in the state of the run


@dataclass(frozen=True, slots=True)
class TaskDifficulty:
    """The mean outcome of every task that was sampled, and of how many rollouts."""

    means: CountedMeans = field(default_factory=CountedMeans)

    def record_outcomes(self, groups: Sequence[Group]) -> None:
        """Record the outcomes of sampled rollouts, trained or not. Missing rewards do not count,
        nor do branches, which begin in the middle of a task."""
        every = (rollout for group in groups for rollout in group.rollouts)
        rollouts = [rollout for rollout in every if rollout.branch is None]
        outcomes = torch.tensor([row.reward() for row in rollouts], dtype=torch.float64)
        _, self.means.values = self.means.read([task_name(row.task) for row in rollouts], outcomes)

    def weight(self, task: Task) -> float:
        """p (1 - p) of the rate p at which it is solved, in (0, 1/4]: that of a task never seen is
        1/2, and one success and one failure are added to what was seen of the others."""
        mean, seen = self.means.values.get(task_name(task), (0.0, 0))
        p = (min(max(mean, 0.0), 1.0) * seen + 1) / (seen + 2)
        return p * (1 - p)

    def draw(self, tasks: Sequence[dict[str, Json]], seed: str, n: int) -> list[dict[str, Json]]:
        """`n` tasks by weight. Of a larger `n` the first are the same."""
        return random.Random(seed).choices(tasks, [self.weight(task) for task in tasks], k=n)


def task_name(task: Task) -> str:
    """Its `id`, or without one a digest of its content."""
    if "id" in task:
        return str(task["id"])
    whole = msgspec.json.encode(task, order="sorted")
    return hashlib.blake2b(whole, digest_size=12).hexdigest()
