"""Baselines that are running means of earlier steps.

`data/state.py` stores the means; a record here defines their names and reads them as a column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import msgspec
from torch import Tensor

from agentrl.algorithms.credit.core import Column, level_of, rewards
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level, lift, rollout_of
from agentrl.algorithms.data.state import CountedMeans, EmaMeans, RememberedColumn, StatePart
from agentrl.errors import TrainingError, nearest
from agentrl.types import Rollout


class RunningMean(RememberedColumn):
    """A remembered column with one mean per name."""

    __slots__ = ()

    def names(self, batch: Batch, rollouts: Sequence[Rollout]) -> list[str]:
        """The name of each unit's mean."""
        raise NotImplementedError

    def observed(self, batch: Batch) -> Tensor:
        """The number of each unit that updates its mean, float64, NaN = missing."""
        raise NotImplementedError

    def recall(
        self, part: StatePart, batch: Batch, rollouts: Sequence[Rollout]
    ) -> tuple[Tensor, StatePart]:
        assert isinstance(part, EmaMeans | CountedMeans)
        column, means = part.read(self.names(batch, rollouts), self.observed(batch))
        return column, replace(part, values=means)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Ema(RunningMean):
    """The running mean of earlier rewards as a baseline: one per role if compared per role or call,
    and one per value of the task field `key`. The rewards of one step update it in the order of
    their rollouts. RAE of SPIRAL, arXiv 2506.24119.

    at: as in `GroupRelative`."""

    reward: str | Column = "outcome"
    decay: float = 0.95
    key: str = ""
    at: Level | None = None
    stored_as: ClassVar[str] = "running-mean"

    @property
    def level(self) -> Level:
        return self.at or level_of(self.reward)

    def part(self, seed: int) -> EmaMeans:
        return EmaMeans(self.decay)

    def names(self, batch: Batch, rollouts: Sequence[Rollout]) -> list[str]:
        keys = [_field(rollout, self.key) if self.key else "" for rollout in rollouts]
        pairs = zip(keys, rollouts, strict=True)  # other prompt texts make another agent
        keys = [f"{row.candidate}/{key}" if row.candidate else key for key, row in pairs]
        owners = rollout_of(batch, self.level).tolist()
        roles = [""] * len(owners)
        if self.level == "role":
            roles = batch.roles * len(rollouts)
        elif self.level == "transition":
            roles = [batch.roles[role] for role in batch.transition_role.tolist()]
        return [f"{keys[owner]}/{role}" for owner, role in zip(owners, roles, strict=True)]

    def observed(self, batch: Batch) -> Tensor:
        return lift(batch, rewards(batch, self.reward), level_of(self.reward), self.level)


def _field(rollout: Rollout, key: str) -> str:
    if key not in rollout.task:
        raise TrainingError(
            f"algorithm.options: the task of group {rollout.group!r} has no field {key!r}, "
            f"which the option `key` names; {nearest(key, rollout.task)}"
        )
    value = rollout.task[key]
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
