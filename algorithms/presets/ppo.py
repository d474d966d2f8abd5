"""PPO over tokens or calls, with a critic or a reward as values."""

from __future__ import annotations

from agentrl.algorithms.credit import core
from agentrl.algorithms.credit.core import Column, CriticValues, GroupRelative, Whiten
from agentrl.algorithms.credit.turns import StepGae, value_of
from agentrl.algorithms.objective.core import TOKENS, Algo
from agentrl.algorithms.presets import declare
from agentrl.algorithms.presets.declare import PPO_CLIP, Discount, preset


def whitened_gae(value: Column, reward: str, gamma: float, lam: float) -> GroupRelative:
    """GAE over calls, whitened over calls."""
    return GroupRelative(StepGae(value, reward, gamma, lam), by=("all",), norm="std")


@preset("ppo", clip=PPO_CLIP, kl=True)
def ppo(
    reward: str, *, gamma: Discount = 1.0, lam: Discount = 0.95, kl_reward: declare.Num = 0.0
) -> Algo:
    """GAE over tokens with a critic, whitened, PPO clip. The KL penalty to the reference is in the
    loss (`kl`) or in the rewards (`kl_reward`, arXiv 1909.08593). arXiv 1707.06347."""
    penalty = core.TokenKLPenalty(kl_reward) if kl_reward else None
    return Algo(Whiten(core.Gae(CriticValues(), reward, gamma, lam, penalty)), agg=TOKENS)


@preset("turn-ppo", clip=PPO_CLIP)
def turn_ppo(reward: str, *, value: str = "", gamma: Discount = 0.99, lam: Discount = 0.95) -> Algo:
    """Agent-R1 with a discount per turn, token mean. arXiv 2512.17008."""
    return Algo(whitened_gae(value_of(value), reward, gamma, lam), agg=TOKENS)
