"""Baselines and values that come from earlier steps.

The numbers that are remembered are in `data/state.py`; a record here says under which names, and as
a column reads them from the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
from torch import Tensor

from agentrl.algorithms.credit.core import Column, level_of, rewards
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level, lift, rollout_of
from agentrl.algorithms.data.state import CountedMeans, EmaMeans, RememberedColumn, StatePart
from agentrl.errors import TrainingError, nearest
from agentrl.types import Rollout


class RunningMean(RememberedColumn):
    """Keeps a mean for each of several names."""

    __slots__ = ()

    def names(self, batch: Batch, rollouts: Sequence[Rollout]) -> list[str]:
        """Under which name each unit is remembered."""
        raise NotImplementedError

    def observed(self, batch: Batch) -> Tensor:
        """The number of each unit that its mean learns, float64, NaN = missing."""
        raise NotImplementedError

    def recall(
        self, part: StatePart, batch: Batch, rollouts: Sequence[Rollout]
    ) -> tuple[Tensor, StatePart]:
        assert isinstance(part, EmaMeans | CountedMeans)
        column, means = part.read(self.names(batch, rollouts), self.observed(batch))
        return column, replace(part, values=means)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Ema(RunningMean):
    """The running mean of earlier rewards, as a baseline for the next: one for each role where the
    reward is one of roles, and for each value of a field of the task. Rewards of one step come one
    after the other, in the order of their rollouts. RAE of SPIRAL, arXiv 2506.24119.

    at: as in `GroupRelative`. key: the field of the task."""

    reward: str | Column = "outcome"
    decay: float = 0.95
    key: str = ""
    at: Level | None = None

    @property
    def level(self) -> Level:
        return self.at or level_of(self.reward)

    def part(self, seed: int) -> EmaMeans:
        return EmaMeans(self.decay)

    def names(self, batch: Batch, rollouts: Sequence[Rollout]) -> list[str]:
        kinds = [_field(rollout, self.key) if self.key else "" for rollout in rollouts]
        pairs = zip(kinds, rollouts, strict=True)  # other texts make another agent
        kinds = [f"{row.candidate}/{kind}" if row.candidate else kind for kind, row in pairs]
        owners = rollout_of(batch, self.level).tolist()
        roles = [""] * len(owners)
        if self.level == "role":
            roles = batch.roles * len(rollouts)
        elif self.level == "transition":
            roles = [batch.roles[role] for role in batch.transition_role.tolist()]
        return [f"{kinds[owner]}/{role}" for owner, role in zip(owners, roles, strict=True)]

    def observed(self, batch: Batch) -> Tensor:
        return lift(batch, rewards(batch, self.reward), level_of(self.reward), self.level)


def _field(rollout: Rollout, key: str) -> str:
    if key not in rollout.task:
        raise TrainingError(
            f"algorithm.options: the task of group {rollout.group!r} has no field {key!r} to keep "
            f"a baseline for; {nearest(key, rollout.task)}"
        )
    value = rollout.task[key]
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
