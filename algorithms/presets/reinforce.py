"""REINFORCE without groups, and with the others of a group as its baseline."""

from __future__ import annotations

from agentrl.algorithms.credit import core
from agentrl.algorithms.credit.core import (
    GroupRelative,
    TokenKLPenalty,
    Whiten,
)
from agentrl.algorithms.objective.core import ROW_SUMS, TOKENS, Algo
from agentrl.algorithms.presets.declare import PPO_CLIP, Num, preset


@preset("reinforce", usual=True)
def reinforce(reward: str) -> Algo:
    """Reward times log-prob, no baseline. Williams 1992."""
    return Algo(GroupRelative(reward, base="none"), agg=ROW_SUMS)


@preset("reinforce++", usual=True, clip=PPO_CLIP)
def reinforce_pp(reward: str, *, gamma: Num = 1.0, kl_reward: Num = 0.0) -> Algo:
    """Reward-to-go whitened over all tokens; needs no groups. `kl_reward`: coefficient of the KL
    penalty to the reference in every token's reward. arXiv 2501.03262."""
    penalty = TokenKLPenalty(kl_reward) if kl_reward else None
    return Algo(Whiten(core.RewardToGo(reward, gamma, penalty)), agg=TOKENS)


@preset("rloo", usual=True)
def rloo(reward: str) -> Algo:
    """Leave-one-out mean as baseline, no clip. arXiv 2402.14740."""
    return Algo(GroupRelative(reward, base="loo"), agg=ROW_SUMS)
