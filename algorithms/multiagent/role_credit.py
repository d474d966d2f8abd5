"""Credit among the roles of a team. Columns as in `steps`; NaN = missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from agentrl.algorithms.credit.core import Column, Credit, level_of, rewards
from agentrl.algorithms.credit.turns import is_first_token
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level, Unit, segment_reduce, units


@dataclass(frozen=True, slots=True)
class GroupMaximum:
    """[U] the highest reward of those that are compared. MAREMAX of comlrl, arXiv 2508.04652."""

    reward: str
    by: tuple[Unit, ...]

    def __call__(self, batch: Batch) -> Tensor:
        x, ids = rewards(batch, self.reward), units(batch, level_of(self.reward), *self.by)
        return segment_reduce(x.nan_to_num(nan=-torch.inf), ids, how="amax")[ids]


@dataclass(frozen=True, slots=True)
class EvenRolloutWeights:
    """[S] 1 / number of calls that the role made in the rollout and that have the reward: each
    rollout counts once for each of its roles, however often it called."""

    reward: str
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        pair = units(batch, "transition", "rollout", "role")
        return 1 / segment_reduce(~rewards(batch, self.reward).isnan(), pair)[pair].clamp(min=1)


@dataclass(frozen=True, slots=True)
class MainAndSubCredit:
    """[N] a credit for the calls of one role, another one for those of the others."""

    role: str
    credit: Credit
    others: Credit

    def __call__(self, batch: Batch) -> Tensor:
        leads = torch.tensor([role == self.role for role in batch.roles], dtype=torch.bool)
        mine = leads[batch.transition_role][batch.token_transition]
        return torch.where(mine, self.credit(batch), self.others(batch))


@dataclass(frozen=True, slots=True)
class SingleCallAdvantage:
    """[S] the reward of a call minus V of the state before it: every call an episode of its own."""

    value: Column
    reward: str
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        return rewards(batch, self.reward) - self.value(batch)

    def returns(self, batch: Batch) -> Tensor:
        """What `value` should have said, float64 [N], at the first token of each call."""
        known = rewards(batch, self.reward)[batch.token_transition]
        return torch.where(is_first_token(batch), known, torch.nan)
