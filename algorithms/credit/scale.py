"""The scale of GRPO, remembered over batches, and columns that can do without a memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import torch
from torch import Tensor

from agentrl.algorithms.credit import core
from agentrl.algorithms.credit.calls import Returns
from agentrl.algorithms.credit.core import Column, Credit
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level, reduce_by, units
from agentrl.algorithms.data.state import RememberedColumn, StatePart
from agentrl.types import Json, Rollout

SCALE_DECAY = 0.9  # weight of a batch in what is remembered, relative to the next one


class JudgedColumn(RememberedColumn):
    """A column that remembers earlier batches, but can do without: a batch on its own, or of which
    nothing was stored, is judged by itself."""

    __slots__ = ()

    def __call__(self, batch: Batch) -> Tensor:
        found = batch.remembered.get(self.name)
        if found is None or bool(found.isnan().all()):
            return self.recall(self.part(0), batch, ())[0]
        return found


@dataclass(slots=True)
class Spread:
    """Squared deviations of returns within groups, and degrees of freedom, of earlier batches."""

    squares: float = 0.0
    freedom: float = 0.0

    def dump(self) -> Json:
        return [self.squares, self.freedom]

    def restore(self, data: Json) -> None:
        self.squares, self.freedom = msgspec.convert(data, tuple[float, float])


@dataclass(frozen=True, slots=True)
class ReturnScale(JudgedColumn):
    """Standard deviation of the returns of each rollout's group, [U], of which each rollout weighs
    as much as every other, however many calls it has: that of the group as in GRPO, with those of
    earlier batches as more degrees of freedom. A group's own depends on what was done, so that a
    division by it alone weighs groups by their luck."""

    stored_as: ClassVar[str] = "return-scale"
    reward: str | Column = "outcome"

    @property
    def level(self) -> Level:
        return "rollout"

    def part(self, seed: int) -> StatePart:
        return Spread()

    def recall(
        self, part: StatePart, batch: Batch, rollouts: Sequence[Rollout]
    ) -> tuple[Tensor, StatePart]:
        assert isinstance(part, Spread)
        returns = Returns(self.reward)(batch)
        group, owner = units(batch, "transition", "group"), batch.transition_rollout
        known = (~returns.isnan()).double()
        weight = known / reduce_by(known, owner)[owner].clamp(min=1.0)
        scale = core.standardise(returns, group, norm="std", w=weight).scale
        freedom = torch.where(scale > 0, reduce_by(weight, group)[group] - 1, 0.0)
        squares = freedom * scale.square()
        kept = Spread(SCALE_DECAY * part.squares, SCALE_DECAY * part.freedom)
        both = (squares + kept.squares) / (freedom + kept.freedom).clamp(min=1e-300)
        found = torch.zeros(len(batch.rollouts), dtype=torch.float64)
        found[owner] = torch.where(freedom > 0, both.sqrt(), 0.0)
        kept.squares += float((squares * weight / (freedom + 1)).sum())
        kept.freedom += float((freedom * weight / (freedom + 1)).sum())
        return found, kept


@dataclass(frozen=True, slots=True)
class GrpoScale:
    """A credit [N] that is the reward minus the mean of the others', times the factor that makes it
    GRPO's: (n - 1) / n over the standard deviation of the returns of the group's n rollouts."""

    credit: Credit
    reward: str | Column = "outcome"
    scale: Column | None = None

    def __call__(self, batch: Batch) -> Tensor:
        known = ~Returns(self.reward)(batch).isnan()
        rollouts = reduce_by(known, batch.transition_rollout, len(batch.rollouts)) > 0
        n = reduce_by(rollouts, batch.rollout_group)[batch.rollout_group]
        scale = (self.scale or ReturnScale(self.reward))(batch)
        factor = torch.where(scale > 0, (n - 1) / n / scale, 0.0)
        return self.credit(batch) * factor[batch.token_rollout]
