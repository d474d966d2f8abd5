"""How often each task was solved so far, and drawing tasks by it.

A task teaches most that is solved now and then: the variance p (1 - p) of its outcome is what a
comparison within its group lives on (arXiv 2502.12272). What is drawn is a function of a seed and
of the history, which is saved in the checkpoint.
"""

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
class Difficulty:
    """The mean outcome of every task that was sampled, and of how many rollouts."""

    means: CountedMeans = field(default_factory=CountedMeans)

    def learn(self, groups: Sequence[Group]) -> None:
        """Remember what was sampled, whether it is trained or not; a missing reward is none, and a
        branch, which begins where another rollout got to, is no try at the task."""
        every = (rollout for group in groups for rollout in group.rollouts)
        rollouts = [rollout for rollout in every if rollout.branch is None]
        outcomes = torch.tensor([row.reward() for row in rollouts], dtype=torch.float64)
        _, self.means.values = self.means.read([name(row.task) for row in rollouts], outcomes)

    def weight(self, task: Task) -> float:
        """p (1 - p) of the rate p at which it is solved, in (0, 1/4]: that of a task never seen is
        1/2, and one success and one failure are added to what was seen of the others."""
        mean, seen = self.means.values.get(name(task), (0.0, 0))
        p = (min(max(mean, 0.0), 1.0) * seen + 1) / (seen + 2)
        return p * (1 - p)

    def draw(self, tasks: Sequence[dict[str, Json]], seed: str, n: int) -> list[dict[str, Json]]:
        """`n` tasks by weight. Of a larger `n` the first are the same."""
        return random.Random(seed).choices(tasks, [self.weight(task) for task in tasks], k=n)


def name(task: Task) -> str:
    """Its `id`, or without one a digest of its content."""
    if "id" in task:
        return str(task["id"])
    whole = msgspec.json.encode(task, order="sorted")
    return hashlib.blake2b(whole, digest_size=12).hexdigest()
