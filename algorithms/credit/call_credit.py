"""Rewards and returns of the calls of a rollout, columns of one number per call: float64 [S], NaN =
missing.

Time is counted in calls of the batch. A call without a reward adds nothing to a sum over time; it
is missing if no known reward follows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from agentrl.algorithms.credit import core
from agentrl.algorithms.credit.core import Column, rewards
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level, key, lift, next_same, scan


def call_rewards(batch: Batch, reward: str | Column) -> Tensor:
    """The reward that each call received, [S]: a rollout's reward at its last call, a role's at the
    role's last call, a call's own; NaN elsewhere."""
    x, level = rewards(batch, reward), core.level_of(reward)
    if level == "transition":
        return x
    owner = batch.transition_rollout
    if level == "role":
        owner = key(owner, batch.transition_role)
    return torch.where(next_same(owner) < 0, lift(batch, x, level, "transition"), torch.nan)


def discounted_return(x: Tensor, decay: Tensor | float, following: Tensor) -> Tensor:
    """Discounted sum of the known x along `following`; NaN if no known x has a weight above 0."""
    known = scan((~x.isnan()).double(), decay, following) > 0
    return torch.where(known, scan(x.nan_to_num(nan=0.0), decay, following), torch.nan)


@dataclass(frozen=True, slots=True)
class Returns:
    """Discounted return of each call, from its own and the rollout's later rewards, [S]."""

    reward: str | Column = "outcome"
    gamma: float = 1.0
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        following = next_same(batch.transition_rollout)
        return discounted_return(call_rewards(batch, self.reward), self.gamma, following)
