"""GRPO and what differs from it in scale or average alone."""

from __future__ import annotations

from math import inf

from agentrl.algorithms.credit.core import GroupRelative, Whiten, weighted_sum
from agentrl.algorithms.objective.core import Algo, Average
from agentrl.algorithms.presets.registry import PPO_CLIP, ROLLOUTS, TOKENS, Mix, preset
from agentrl.config import Count

OUTCOME = {"outcome": 1.0}


@preset("grpo", clip=(0.2, 0.2, inf), kl=True)
def grpo(reward: str, *, std: bool = True) -> Algo:
    """Group mean and (std) deviation, PPO clip, mean of row means. arXiv 2402.03300."""
    credit = GroupRelative(reward, norm="std" if std else "none")
    return Algo(credit)


@preset("dr-grpo", clip=PPO_CLIP)
def dr_grpo(reward: str, *, length: Count = 1024) -> Algo:
    """GRPO without deviation, rows divided by a constant length. arXiv 2503.20783."""
    agg = Average(("row",), "const", length)
    return Algo(GroupRelative(reward), agg=agg)


@preset("liteppo", clip=PPO_CLIP)
def liteppo(reward: str) -> Algo:
    """Group mean, deviation of the whole batch, token mean. arXiv 2508.08221."""
    credit = GroupRelative(reward, norm="std", norm_by=("all",))
    return Algo(credit, agg=TOKENS)


@preset("gdpo", clip=PPO_CLIP)
def gdpo(*, rewards: Mix = OUTCOME) -> Algo:
    """Several rewards (name to weight), each compared on its own, then mixed. arXiv 2601.05242."""
    mixed = weighted_sum(
        *((GroupRelative(name, norm="std"), weight) for name, weight in rewards.items())
    )
    return Algo(Whiten(mixed))


@preset("agl-v0", clip=PPO_CLIP)
def agl_v0(reward: str) -> Algo:
    """LightningRL as first released: every call with the final reward, compared over calls, token
    mean. arXiv 2508.03680."""
    credit = GroupRelative(reward, at="transition", norm="std")
    return Algo(credit, agg=TOKENS)


@preset("agl-v1", clip=PPO_CLIP)
def agl_v1(reward: str) -> Algo:
    """GRPO averaged over rollouts, however many calls they took. arXiv 2608.17528."""
    return Algo(GroupRelative(reward, norm="std"), agg=ROLLOUTS)
