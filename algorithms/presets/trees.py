"""Presets for rollouts that branch off one another: `[algorithm.branching]` asks for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from agentrl.algorithms.credit.core import GroupRelative, weighted_sum
from agentrl.algorithms.credit.trees import BranchAdvantage, OriginalRollouts
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.presets.registry import Num, Share, modifier, preset
from agentrl.algorithms.presets.rollouts import ppo_clip
from agentrl.algorithms.presets.turns import outcome_of


@preset("tree-grpo")
def tree_grpo(*, reward: str = "outcome", clip_low: Num = 0.2, clip_high: Num = 0.2) -> Algo:
    """Branches compared within the task and within their tree; rollouts with the same first call
    are of one tree. arXiv 2509.21240."""
    trees = GroupRelative(reward, by=("group", "tree"), norm="std")
    return Algo(
        weighted_sum((GroupRelative(reward, norm="std"), 1.0), (trees, 1.0)),
        ppo_clip(clip_low, clip_high),
    )


@modifier("tree")
def with_tree(algo: Algo, *, tree_weight: Share = 1.0) -> Algo:
    """Adds the comparison with rollouts of the same tree. arXiv 2509.21240."""
    trees = GroupRelative(outcome_of(algo), by=("group", "tree"), norm="std")
    return replace(algo, credit=weighted_sum((algo.credit, 1.0), (trees, tree_weight)))


@preset("treerl")
def treerl(
    *,
    reward: str = "outcome",
    how: Literal["both", "parent"] = "both",
    clip_low: Num = 0.2,
    clip_high: Num = 0.2,
) -> Algo:
    """Calls by what the branches that share them come to, against their root and ("both") or
    against their parent. arXiv 2506.11902."""
    return Algo(
        GroupRelative(BranchAdvantage(reward, how), base="none"), ppo_clip(clip_low, clip_high)
    )


@preset("vineppo")
def vineppo(*, reward: str = "outcome", clip_low: Num = 0.2, clip_high: Num = 0.2) -> Algo:
    """Values of calls from fresh continuations, which are not trained on. For branching.kind =
    "mc". arXiv 2410.01679."""
    credit = GroupRelative(BranchAdvantage(reward, "siblings"), base="none")
    return Algo(credit, ppo_clip(clip_low, clip_high), keep=OriginalRollouts())


@preset("c3")
def c3(*, reward: str = "outcome", clip_low: Num = 0.2, clip_high: Num = 0.2) -> Algo:
    """Calls against the other samples of the same prompt, the rest replayed: counterfactual credit
    for one message. arXiv 2603.06859."""
    return Algo(
        GroupRelative(BranchAdvantage(reward, "siblings"), base="none"),
        ppo_clip(clip_low, clip_high),
    )
