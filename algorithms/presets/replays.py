"""Credit for branching rollouts (`[algorithm.branching]`): Tree-GRPO, TreeRL, VinePPO, C3.

Calls with equal `Batch.transition_node` are one node of the tree; `Batch.transition_repeats` marks
the calls that a branch replays from the rollout it branched from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from agentrl.algorithms.credit.core import (
    GroupRelative,
    rollout_rewards,
    standardise,
    weighted_sum,
)
from agentrl.algorithms.data import ids
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level, known_mean, reduce_by, units
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.presets.declare import PPO_CLIP, modifier, outcome_of, preset


@dataclass(frozen=True, slots=True)
class BranchAdvantage:
    """V of each call, the mean reward of the rollouts that contain it, minus a baseline, [S].

    "siblings": minus the mean over the other samples of the same prompt; 0 without others. This is
    the unbiased advantage of Monte-Carlo step values, VinePPO (arXiv 2410.01679) and C3
    (2603.06859). "parent": minus V of the previous call (at the root: of the group). "both":
    (V - V of the root + V - V of the parent) / sqrt(rollouts that contain the call), TreeRL, arXiv
    2506.11902."""

    reward: str = "outcome"
    how: Literal["both", "parent", "siblings"] = "both"
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        x, rollout = rollout_rewards(batch, self.reward), batch.transition_rollout
        rewarded, node = ~x.isnan()[rollout], units(batch, "transition", "group", "node")
        v = known_mean(x[rollout], node)
        if self.how == "siblings":
            step = _siblings(batch, v, node)[node]
        else:
            before, group = ids.previous(ids.next_same(rollout)), batch.rollout_group
            root = known_mean(x, group)[group[rollout]]
            step = v[node] - torch.where(before >= 0, v[node[before]], root)
            if self.how == "both":
                step = (step + v[node] - root) / reduce_by(rewarded, node)[node].sqrt()
        return torch.where(rewarded, step, torch.nan)


def _siblings(batch: Batch, v: Tensor, node: Tensor) -> Tensor:
    """v minus the mean over the other samples of the same prompt, per node. A node counts once for
    each time it was sampled; replays do not count."""
    prompt = torch.zeros_like(v, dtype=torch.int64)
    prompt[node] = units(batch, "transition", "group", "prompt")
    drawn = reduce_by(~ids.of_calls(batch, "repeats"), node, v.numel())
    return standardise(v, prompt, base="loo", w=drawn).advantage


@dataclass(frozen=True, slots=True)
class OriginalRollouts:
    """Filter for tokens of rollouts without replayed calls, bool [N]."""

    def __call__(self, batch: Batch) -> Tensor:
        repeated, n = ids.of_calls(batch, "repeats"), len(batch.rollouts)
        return (reduce_by(repeated, batch.transition_rollout, n) == 0)[batch.token_rollout]


@modifier("tree")
def with_tree(algo: Algo) -> Algo:
    """Adds the comparison with rollouts of the same tree. arXiv 2509.21240."""
    trees = GroupRelative(outcome_of(algo), by=("group", "tree"), norm="std")
    return replace(algo, credit=weighted_sum((algo.credit, 1.0), (trees, 1.0)))


@preset("treerl", clip=PPO_CLIP)
def treerl(
    reward: str,
    *,
    how: Literal["both", "parent", "siblings"] = "both",
    train: Literal["all", "original"] = "all",
) -> Algo:
    """Calls valued by the mean reward of the branches that share them, minus the value of their
    root and parent ("both"), their parent, or the other samples of their prompt ("siblings").
    train: all rollouts, or those without replayed calls. arXiv 2506.11902."""
    credit = GroupRelative(BranchAdvantage(reward, how), base="none")
    return Algo(credit, keep=OriginalRollouts() if train == "original" else None)
