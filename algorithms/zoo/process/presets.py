"""Process rewards: PRIME and iStar."""

from __future__ import annotations

from agentrl.algorithms.credit import core
from agentrl.algorithms.credit.core import GroupRelative
from agentrl.algorithms.objective.core import TOKENS, Algo
from agentrl.algorithms.presets.declare import PPO_CLIP, Share, preset
from agentrl.algorithms.zoo.process.mixing import RewardStream, stream_advantage
from agentrl.types import Scope


@preset("prime", clip=PPO_CLIP)
def prime(
    reward: str, *, process: str = "process", weight: Share = 1.0, scaled: bool = False
) -> Algo:
    """Outcome plus returns of a reward of calls, each minus the mean of the other rollouts,
    whitened; `scaled` divides the process rewards by their largest return. arXiv 2502.01456."""
    stream = RewardStream(scope=Scope.TRANSITION, base="prime", norm="prime" if scaled else "none")
    steps = stream_advantage(process, {process: stream})
    mixed = core.weighted_sum((GroupRelative(reward, base="loo"), 1.0), (steps, weight))
    return Algo(core.Whiten(mixed), agg=TOKENS)


@preset("istar", clip=PPO_CLIP)
def istar(reward: str, *, process: str = "transition:process", weight: Share = 1.0) -> Algo:
    """Outcome standardised over rollouts plus a reward of calls standardised over all calls of the
    group. arXiv 2509.19199."""
    steps = GroupRelative(process, norm="std")
    return Algo(core.weighted_sum((GroupRelative(reward, norm="std"), 1.0), (steps, weight)))
