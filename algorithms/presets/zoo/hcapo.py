"""HCAPO, arXiv 2603.08754: calls that look more probable in hindsight weigh more."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from agentrl.algorithms.credit.core import Column, Credit, GroupRelative, weighted_sum
from agentrl.algorithms.credit.turns import CallRewards, Returns
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level, known_mean
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.presets.mixing import GatedByOutcome
from agentrl.algorithms.presets.registry import (
    PPO_CLIP,
    Discount,
    Share,
    modifier,
    outcome_of,
    preset,
)

HINDSIGHT = "transition:hindsight"  # a reward that the learner gives, see `hindsight`


@dataclass(frozen=True, slots=True)
class HindsightReturns:
    """[S] HCAPO, arXiv 2603.08754: returns of calls, times how much more probable than the others
    of its rollout a call is once the outcome is known, within [low, high].

    hindsight: per call, the mean log-prob of its tokens where the prompt tells the outcome; a call
    without one keeps its return. temperature divides it."""

    hindsight: Column
    reward: str | Column = "outcome"
    gamma: float = 0.95
    temperature: float = 5.0
    low: float = 0.8
    high: float = 1.2
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        rollout, p = batch.transition_rollout, self.hindsight(batch) / self.temperature
        p = p.exp()
        ratio = (p / known_mean(p, rollout)[rollout]).clamp(self.low, self.high)
        ratio = torch.where(p.isnan(), 1.0, ratio)
        return ratio * Returns(self.reward, self.gamma)(batch)


def hindsight_credit(
    outcome: Credit, reward: str, hindsight: str, gamma: float, weight: float
) -> Credit:
    """The outcome's credit plus that of calls in hindsight, bad only where the outcome is bad."""
    calls = GroupRelative(HindsightReturns(CallRewards(hindsight), reward, gamma), norm="std")
    return weighted_sum((outcome, 1.0), (GatedByOutcome(calls, outcome, "negative"), weight))


@preset("hcapo", clip=PPO_CLIP, kl=True)
def hcapo(
    reward: str, *, hindsight_reward: str = HINDSIGHT, weight: Share = 1.0, gamma: Discount = 0.95
) -> Algo:
    """Outcome over rollouts plus returns of calls, which weigh more where the call looks more
    probable once the outcome is known, which the learner says unless another reward of calls is
    named. arXiv 2603.08754."""
    credit = hindsight_credit(
        GroupRelative(reward, norm="std"), reward, hindsight_reward, gamma, weight
    )
    return Algo(credit, optional=(HINDSIGHT,))


@modifier("hcapo")
def with_hcapo(
    algo: Algo,
    *,
    hcapo_reward: str = HINDSIGHT,
    hcapo_weight: Share = 1.0,
    hcapo_gamma: Discount = 0.95,
) -> Algo:
    """Adds HCAPO's credit of calls in hindsight to the host's. arXiv 2603.08754."""
    reward = outcome_of(algo)
    credit = hindsight_credit(algo.credit, reward, hcapo_reward, hcapo_gamma, hcapo_weight)
    return replace(algo, credit=credit, optional=(*algo.optional, HINDSIGHT))
