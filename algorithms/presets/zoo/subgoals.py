"""Credit of calls that choose subgoals and of calls that pursue them (HiPER)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from agentrl.algorithms.credit import turns
from agentrl.algorithms.credit.core import Column, Credit, GroupRelative, weighted_sum
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level, next_same, scan
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.presets import registry
from agentrl.algorithms.presets.registry import PPO_CLIP, Discount, preset


@dataclass(frozen=True, slots=True)
class HiperGae:
    """HiPER, arXiv 2602.16165: GAE over the acting calls inside each segment (part "low"), or over
    the segments, each started by a call that chooses a subgoal (part "high"); [S].

    high, low: values per call. A call with a high value starts a segment; one with a low value acts
    and takes one unit of time; one with both gets both credits, because its tokens are not told
    apart. Rewards of other calls belong to the call before them."""

    high: Column
    low: Column
    part: Literal["high", "low"]
    reward: str | Column = "outcome"
    gamma: float = 1.0
    lam: float = 1.0
    level: ClassVar[Level] = "transition"

    @property
    def value(self) -> Column:
        return self.high if self.part == "high" else self.low

    def returns(self, batch: Batch) -> Tensor:
        """The targets of `value` at the first token of each call, float64 [N]; NaN elsewhere."""
        return turns.at_first_tokens(batch, self(batch) + self.value(batch))

    def __call__(self, batch: Batch) -> Tensor:
        rollout, v_high, v_low = batch.transition_rollout, self.high(batch), self.low(batch)
        begins, acts = ~v_high.isnan(), ~v_low.isnan()
        counts, following = begins | acts, next_same(rollout)
        r = turns.call_rewards(batch, self.reward)
        known = ~turns.discounted_return(r, 1.0, following).isnan()
        r = scan(r.nan_to_num(nan=0.0), 1.0, torch.where(counts[following], -1, following))
        time = torch.ones_like(r).masked_fill(acts, self.gamma)
        following = next_same(torch.where(counts, rollout, len(batch.rollouts)))
        inside = torch.where(begins[following], -1, following)  # the next call of the segment
        if self.part == "low":
            after = torch.where(begins, v_high, v_low)[following]
            after = torch.where(following >= 0, after, 0.0)
            delta = r + time * after - v_low
            advantage = scan(delta.nan_to_num(nan=0.0), time * self.lam, inside)
            return torch.where(acts & known, advantage, torch.nan)
        segment = next_same(torch.where(begins, rollout, len(batch.rollouts)))
        after = torch.where(segment >= 0, v_high[segment], 0.0)
        decay = scan(time.log(), 1.0, inside).exp()
        delta = scan(r, time, inside) + decay * after - v_high
        advantage = scan(delta.nan_to_num(nan=0.0), decay * self.lam, segment)
        return torch.where(begins & known, advantage, torch.nan)


@dataclass(frozen=True, slots=True)
class OfRole:
    """`value` [S] of the calls of the role, or of those of all others; NaN elsewhere. Raises
    TrainingError for a role without calls."""

    value: Column
    role: str
    others: bool = False
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        turns.need_roles(batch, (self.role,))
        chosen = turns.made_by(batch, (self.role,)) != self.others
        return torch.where(chosen, self.value(batch), torch.nan)


@registry.as_modifier("hiper", prefix="hiper_")
@preset("hiper", clip=PPO_CLIP)
def hiper(
    reward: str,
    *,
    planner: str = "planner",
    high: str = "",
    low: str = "",
    gamma: Discount = 0.95,
    lam: Discount = 1.0,
) -> Algo:
    """Calls of the role `planner`, which choose subgoals, and calls of other roles, which pursue
    them, each whitened over the batch, with the critic's values. high, low: rewards of calls that
    hold the values instead. arXiv 2602.16165."""
    critic = turns.value_of("")
    v_high = turns.CallRewards(high) if high else OfRole(critic, planner)
    v_low = turns.CallRewards(low) if low else OfRole(critic, planner, others=True)

    def whitened(part: Literal["high", "low"]) -> Credit:
        column = HiperGae(v_high, v_low, part, reward, gamma, lam)
        return GroupRelative(column, by=("all",), norm="std")

    return Algo(weighted_sum((whitened("high"), 1.0), (whitened("low"), 1.0)))
