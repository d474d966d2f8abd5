"""HiPER, arXiv 2602.16165: separate advantages for choosing subgoals and for pursuing them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from agentrl.algorithms.credit.core import Column, Credit, GroupRelative, weighted_sum
from agentrl.algorithms.credit.turns import CallRewards, call_rewards, discounted_return
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level, next_same, scan
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.presets.registry import PPO_CLIP, Discount, modifier, outcome_of, preset


@dataclass(frozen=True, slots=True)
class HiperGae:
    """[S] HiPER, arXiv 2602.16165: GAE over the calls that act, inside the segments that calls
    which choose a subgoal begin ("low"), and over those segments ("high").

    high, low: values per call. A call that has the first begins a segment, one that has the second
    acts and takes one unit of time; a call that does both earns both, for its tokens are not told
    apart. What other calls receive belongs to the one before."""

    high: Column
    low: Column
    part: Literal["high", "low"]
    reward: str | Column = "outcome"
    gamma: float = 1.0
    lam: float = 1.0
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        rollout, high, low = batch.transition_rollout, self.high(batch), self.low(batch)
        begins, acts = ~high.isnan(), ~low.isnan()
        counts, following = begins | acts, next_same(rollout)
        r = call_rewards(batch, self.reward)
        known = ~discounted_return(r, 1.0, following).isnan()
        r = scan(r.nan_to_num(nan=0.0), 1.0, torch.where(counts[following], -1, following))
        time = torch.ones_like(r).masked_fill(acts, self.gamma)
        following = next_same(torch.where(counts, rollout, len(batch.rollouts)))
        inside = torch.where(begins[following], -1, following)  # the next call of the segment
        if self.part == "low":
            after = torch.where(begins, high, low)[following]
            after = torch.where(following >= 0, after, 0.0)
            advantage = scan((r + time * after - low).nan_to_num(nan=0.0), time * self.lam, inside)
            return torch.where(acts & known, advantage, torch.nan)
        segment = next_same(torch.where(begins, rollout, len(batch.rollouts)))
        after = torch.where(segment >= 0, high[segment], 0.0)
        decay = scan(time.log(), 1.0, inside).exp()
        delta = scan(r, time, inside) + decay * after - high
        advantage = scan(delta.nan_to_num(nan=0.0), decay * self.lam, segment)
        return torch.where(begins & known, advantage, torch.nan)


def hiper_credit(high: str, low: str, reward: str, gamma: float, lam: float) -> Credit:
    """Both levels, each whitened over its calls."""
    parts: tuple[Literal["high", "low"], ...] = ("high", "low")
    columns = [
        HiperGae(CallRewards(high), CallRewards(low), part, reward, gamma, lam) for part in parts
    ]
    return weighted_sum(
        *((GroupRelative(column, by=("all",), norm="std"), 1.0) for column in columns)
    )


@preset("hiper", clip=PPO_CLIP)
def hiper_preset(
    reward: str,
    *,
    high: str = "transition:v_high",
    low: str = "transition:v_low",
    gamma: Discount = 0.95,
    lam: Discount = 1.0,
) -> Algo:
    """Calls that choose subgoals and calls that pursue them, each with values of their own, given
    as rewards of calls. arXiv 2602.16165."""
    return Algo(hiper_credit(high, low, reward, gamma, lam))


@modifier("hiper")
def with_hiper(
    algo: Algo,
    *,
    hiper_high: str = "transition:v_high",
    hiper_low: str = "transition:v_low",
    hiper_gamma: Discount = 0.95,
    hiper_lam: Discount = 1.0,
) -> Algo:
    """Puts HiPER's credit in the place of the host's. arXiv 2602.16165."""
    credit = hiper_credit(hiper_high, hiper_low, outcome_of(algo), hiper_gamma, hiper_lam)
    return replace(algo, credit=credit)
