"""Imitation of demonstrations, of the best sampled rollouts, or of a teacher."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from agentrl.algorithms.credit.core import Imitated, ZeroAdvantage, rollout_rewards
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.objective.core import TOKENS, Algo, KLPenalty
from agentrl.algorithms.objective.distill import TopKDistillation
from agentrl.algorithms.presets.declare import Share, modifier, preset
from agentrl.config import Natural, Positive
from agentrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Best:
    """Filter for tokens of rollouts with a reward of at least `least`, and of these only the `best`
    best of each group (0: all; the first of equal ones), bool [N]."""

    reward: str = "outcome"
    least: float = 1.0
    best: int = 0

    def __call__(self, batch: Batch) -> Tensor:
        x, group = rollout_rewards(batch, self.reward), batch.rollout_group
        kept = x >= self.least
        if self.best:
            rivals = (group[:, None] == group) & kept
            number = torch.arange(len(x))
            ahead = (x > x[:, None]) | ((x == x[:, None]) & (number < number[:, None]))
            kept &= (rivals & ahead).sum(1) < self.best
        return kept[batch.token_rollout]


@preset("sft", usual=True)
def sft() -> Algo:
    """Imitates every sampled token, mean over tokens: supervised fine-tuning, for demonstrations.
    arXiv 2203.02155."""
    return Algo(Imitated(), agg=TOKENS, rewards=())


@preset("rft", usual=True)
def rft(reward: str, *, least: Share = 1.0, best: Natural = 0) -> Algo:
    """Imitates the rollouts whose reward is at least `least`, or the `best` best of them in each
    group: rejection sampling, expert iteration. arXiv 2308.01825, 2304.06767."""
    return Algo(Imitated(), agg=TOKENS, keep=Best(reward, least, best))


Whose = Literal["teacher", "policy"]


@preset("distill", usual=True)
def distill(*, beta: Positive = 1.0, top: Natural = 0, of: Whose = "teacher") -> Algo:
    """On-policy distillation: reverse KL to a teacher on the policy's own rollouts, no rewards.
    top: 0: estimated from the sampled token; else over this many tokens and the rest: the most
    probable ones of the teacher (forward KL) or of the policy (reverse KL). arXiv 2306.13649."""
    return with_teacher(Algo(ZeroAdvantage(), agg=TOKENS, rewards=()), beta=beta, top=top, of=of)


@modifier("distill", usual=True, prefix="distill_")
def with_teacher(
    algo: Algo, *, beta: Positive = 1.0, top: Natural = 0, of: Whose = "teacher"
) -> Algo:
    """Adds the KL to a teacher on the tokens of the host's policy gradient: see `distill`."""
    if not top:
        return replace(algo, penalties=(*algo.penalties, KLPenalty("k2", beta, "teacher")))
    if algo.symbols or algo.side is not None:
        raise ConfigError(
            f"top = {top} imitates several tokens at every position, which cannot be combined with "
            f"the preference loss or the top-k gate of {algo.name!r}; set top = 0"
        )
    return replace(algo, distill=TopKDistillation(top, beta, of))
