"""PPO over tokens, with a critic."""

from __future__ import annotations

from agentrl.algorithms.credit import core
from agentrl.algorithms.credit.core import CriticValues, Whiten
from agentrl.algorithms.objective.core import TOKENS, Algo
from agentrl.algorithms.presets import declare
from agentrl.algorithms.presets.declare import PPO_CLIP, Discount, preset


@preset("ppo", usual=True, clip=PPO_CLIP, kl=True)
def ppo(
    reward: str, *, gamma: Discount = 1.0, lam: Discount = 0.95, kl_reward: declare.Num = 0.0
) -> Algo:
    """GAE over tokens with a critic, whitened, PPO clip. The KL penalty to the reference is in the
    loss (`kl`) or in the rewards (`kl_reward`, arXiv 1909.08593). arXiv 1707.06347."""
    penalty = core.TokenKLPenalty(kl_reward) if kl_reward else None
    return Algo(Whiten(core.Gae(CriticValues(), reward, gamma, lam, penalty)), agg=TOKENS)
