"""GRPO: rewards compared within a group."""

from __future__ import annotations

from math import inf

from agentrl.algorithms.credit.core import GroupRelative
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.presets.declare import preset


@preset("grpo", usual=True, clip=(0.2, 0.2, inf), kl=True)
def grpo(reward: str, *, std: bool = True) -> Algo:
    """Group mean and (std) deviation, PPO clip, mean of row means. arXiv 2402.03300."""
    return Algo(GroupRelative(reward, norm="std" if std else "none"))
