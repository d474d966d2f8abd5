"""A squared penalty on the log-ratio instead of a clip: Kimi, DRO and on-policy distillation."""

from __future__ import annotations

from agentrl.algorithms.credit.core import GroupRelative, ZeroAdvantage
from agentrl.algorithms.objective.core import Algo, KLPenalty
from agentrl.algorithms.presets.registry import TOKENS, Num, preset
from agentrl.config import Positive


@preset("kimi")
def kimi(reward: str, *, beta: Num = 0.1) -> Algo:
    """Group mean with a squared penalty on leaving the old policy (DRO). arXiv 2501.12599."""
    return Algo(GroupRelative(reward), penalties=(KLPenalty("k2", beta, "o"),), agg=TOKENS)


@preset("dro")
def dro(reward: str, *, beta: Num = 0.1) -> Algo:
    """The same as kimi, by its name in verl: log-prob times advantage, squared penalty. arXiv
    2501.12599."""
    return kimi(reward=reward, beta=beta)


@preset("distill")
def distill(*, beta: Positive = 1.0) -> Algo:
    """On-policy distillation: reverse KL to a teacher on the policy's own rollouts, no rewards.
    arXiv 2306.13649."""
    penalties = (KLPenalty("k2", beta, "t"),)
    return Algo(ZeroAdvantage(), penalties=penalties, agg=TOKENS, rewards=())
