"""Baselines that are running means of earlier steps, and the means, which checkpoints store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import msgspec
import torch
from torch import Tensor

from agentrl.algorithms.credit.core import Column, level_of, rewards
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level, lift, next_same, reduce_by, rollout_of, scan
from agentrl.algorithms.data.state import RememberedColumn, StatePart
from agentrl.errors import TrainingError, nearest
from agentrl.types import Json, Rollout


@dataclass(slots=True)
class EmaMeans:
    """One running mean per name, b <- decay * b + (1 - decay) * x, starting at 0."""

    decay: float
    values: dict[str, float] = field(default_factory=dict)

    def read(self, names: Sequence[str], x: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Mean of each name before its x [U], float64 [U], and the means after all updates.
        Missing x (NaN) are skipped."""
        _, ids = _numbered(names)
        start = torch.tensor([self.values.get(name, 0.0) for name in names], dtype=torch.float64)
        known = (~x.isnan()).nonzero().squeeze(1)
        previous = next_same(ids[known], torch.arange(known.numel() - 1, -1, -1))
        first = torch.where(previous < 0, self.decay * start[known], 0.0)
        after = scan((1 - self.decay) * x[known] + first, self.decay, previous)
        before = start.clone()
        before[known] = torch.where(previous < 0, start[known], after[previous])
        newest = {names[at]: float(b) for at, b in zip(known.tolist(), after, strict=True)}
        return before, self.values | newest

    def dump(self) -> Json:
        return self.values

    def restore(self, data: Json) -> None:
        self.values = msgspec.convert(data, dict[str, float])


@dataclass(slots=True)
class CountedMeans:
    """Mean and count of all values of each name."""

    values: dict[str, tuple[float, int]] = field(default_factory=dict)

    def read(self, names: Sequence[str], x: Tensor) -> tuple[Tensor, dict[str, tuple[float, int]]]:
        """Mean of each name, float64 [U], 0 for a new name, and the means including x [U].
        Missing x (NaN) are skipped."""
        index, ids = _numbered(names)
        count = reduce_by(~x.isnan(), ids, len(index)).tolist()
        total = reduce_by(x.nan_to_num(nan=0.0), ids, len(index)).tolist()
        after = dict(self.values)
        for name, number in index.items():
            mean, seen = self.values.get(name, (0.0, 0))
            if count[number]:
                whole = seen + int(count[number])
                after[name] = (mean + (total[number] - count[number] * mean) / whole, whole)
        before = [self.values.get(name, (0.0, 0))[0] for name in names]
        return torch.tensor(before, dtype=torch.float64), after

    def dump(self) -> Json:
        return self.values

    def restore(self, data: Json) -> None:
        self.values = msgspec.convert(data, dict[str, tuple[float, int]])


def _numbered(names: Sequence[str]) -> tuple[dict[str, int], Tensor]:
    """The index of each distinct name, and the indices of `names`, int64 [U]."""
    index = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return index, torch.tensor([index[name] for name in names], dtype=torch.int64)


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
