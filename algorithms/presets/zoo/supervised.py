"""Imitation of demonstrations, or of the best sampled rollouts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms.credit.core import rollout_rewards
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.objective.core import TOKENS, Algo
from agentrl.algorithms.presets.registry import Share, preset
from agentrl.config.base import Natural


@dataclass(frozen=True, slots=True)
class Imitated:
    """Ones [N]: psi is the token's weight, and the loss its negative log-likelihood."""

    def __call__(self, batch: Batch) -> Tensor:
        return torch.ones(batch.n_tokens, dtype=torch.float64)


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


@preset("sft")
def sft() -> Algo:
    """Imitates every sampled token, mean over tokens: supervised fine-tuning, for demonstrations.
    arXiv 2203.02155."""
    return Algo(Imitated(), agg=TOKENS, rewards=())


@preset("rft")
def rft(reward: str, *, least: Share = 1.0, best: Natural = 0) -> Algo:
    """Imitates the rollouts whose reward is at least `least`, or the `best` best of them in each
    group: rejection sampling, expert iteration. arXiv 2308.01825, 2304.06767."""
    return Algo(Imitated(), agg=TOKENS, keep=Best(reward, least, best))
