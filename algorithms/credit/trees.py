"""Credit of calls that rollouts share: the tree of a group, by what its branches came to.

Columns and filters as in `steps`. Which calls are one node of the tree is `Batch.transition_node`;
what a branch repeats of the rollout it branched off is `Batch.transition_repeats`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from agentrl.algorithms.credit.core import rewards, standardise
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import (
    Level,
    known_mean,
    next_with_same_id,
    of_calls,
    previous_from_next,
    segment_reduce,
    units,
)


@dataclass(frozen=True, slots=True)
class BranchAdvantage:
    """[S] how much better the rollouts that share a call end than those of the branch it left.

    V of a call is the mean reward of the rollouts that made it. "siblings": V minus the mean over
    the other samples of the same prompt: the advantage of Monte-Carlo step values,
    VinePPO (arXiv 2410.01679) and C3 (2603.06859), unbiased; 0 where there is no other. "parent":
    V - V of the call before (the group's mean at the root). "both": (V - V of the root + V - V of
    the parent) / sqrt(rollouts that made it), TreeRL, arXiv 2506.11902."""

    reward: str = "outcome"
    how: Literal["both", "parent", "siblings"] = "both"
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        x, rollout = rewards(batch, self.reward), batch.transition_rollout
        known, node = ~x.isnan()[rollout], units(batch, "transition", "group", "node")
        v = known_mean(x[rollout], node)
        if self.how == "siblings":
            step = _siblings(batch, v, node)[node]
        else:
            before, group = previous_from_next(next_with_same_id(rollout)), batch.rollout_group
            root = known_mean(x, group)[group[rollout]]
            step = v[node] - torch.where(before >= 0, v[node[before]], root)
            if self.how == "both":
                step = (step + v[node] - root) / segment_reduce(known, node)[node].sqrt()
        return torch.where(known, step, torch.nan)


def _siblings(batch: Batch, v: Tensor, node: Tensor) -> Tensor:
    """Per node, v minus the mean over the other samples of its prompt. A node counts as often as it
    was drawn, which repeats of it are not."""
    prompt = torch.zeros_like(v, dtype=torch.int64)
    prompt[node] = units(batch, "transition", "group", "prompt")
    drawn = segment_reduce(~of_calls(batch, "repeats"), node, v.numel())
    return standardise(v, prompt, base="loo", w=drawn).advantage


@dataclass(frozen=True, slots=True)
class OriginalRollouts:
    """bool [N]: tokens of rollouts that repeat no other's calls."""

    def __call__(self, batch: Batch) -> Tensor:
        repeats = segment_reduce(
            of_calls(batch, "repeats"), batch.transition_rollout, len(batch.rollouts)
        )
        return (repeats == 0)[batch.token_rollout]
