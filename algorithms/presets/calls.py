"""Credit of calls: by critics of calls, and on two levels (rollouts and calls, subgoals and the
calls that pursue them, main agent and sub-agents)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar, Literal

import msgspec
import torch
from torch import Tensor

from agentrl.algorithms.credit import calls, core
from agentrl.algorithms.credit.calls import CountedMeans, Returns, RunningMean, StepGae, value_of
from agentrl.algorithms.credit.core import (
    Column,
    Credit,
    CriticValues,
    GroupRelative,
    Whiten,
    rewards,
    weighted_sum,
)
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level, Unit, next_same, reduce_by, scan, units
from agentrl.algorithms.data.merge import last_observation
from agentrl.algorithms.objective.core import ROW_SUMS, TOKENS, Algo, Average
from agentrl.algorithms.presets.declare import PPO_CLIP, Discount, Share, preset
from agentrl.core.errors import ConfigError
from agentrl.core.types import Rollout


def whitened_gae(value: Column, reward: str, gamma: float, lam: float) -> GroupRelative:
    """GAE over calls, whitened over calls."""
    return GroupRelative(StepGae(value, reward, gamma, lam), by=("all",), norm="std")


@dataclass(frozen=True, slots=True)
class BiLevelGae:
    """GAE over calls, whose returns are the final rewards of a GAE over each call's tokens, [N].
    RAGEN, arXiv 2504.20073.

    value: V [N] per token. gamma_high discounts per call, gamma per token."""

    value: Column
    reward: str | Column = "outcome"
    gamma_high: float = 0.95
    gamma: float = 1.0
    lam: float = 1.0

    def __call__(self, batch: Batch) -> Tensor:
        v, call = self.value(batch).double(), batch.token_transition
        following = next_same(call)
        last = following < 0
        v_end = torch.full((len(batch.transitions),), torch.nan, dtype=torch.float64)
        v_end[call[last]] = v[last]
        steps = StepGae(lambda _: v_end, self.reward, self.gamma_high, self.lam)
        returns = (steps(batch) + v_end)[call]
        r = torch.where(last, returns.nan_to_num(nan=0.0), 0.0)
        advantage, _ = core.gae(r, v, following, self.gamma, self.lam)
        return advantage.masked_fill(returns.isnan(), torch.nan)

    def returns(self, batch: Batch) -> Tensor:
        """The targets of `value`, float64 [N], NaN = missing."""
        return self(batch) + self.value(batch).double()


MEAN_RETURN = "mean-return"


@dataclass(frozen=True, slots=True)
class Tabular(RunningMean):
    """The mean return of earlier steps from the state before a call, [S], 0 for a new state: a
    critic for tasks with few states."""

    reward: str | Column = "outcome"
    gamma: float = 1.0
    stored_as: ClassVar[str] = MEAN_RETURN

    @property
    def level(self) -> Level:
        return "transition"

    def part(self, seed: int) -> CountedMeans:
        return CountedMeans()

    def names(self, batch: Batch, rollouts: Sequence[Rollout]) -> list[str]:
        """A hash of each state within its task."""
        calls = {call.id: call for rollout in rollouts for call in rollout.transitions}
        states = [
            (rollouts[rollout].task, last_observation(calls[name]))
            for rollout, name in zip(
                batch.transition_rollout.tolist(), batch.transitions, strict=True
            )
        ]
        encodings = (msgspec.msgpack.encode(state, order="sorted") for state in states)
        return [hashlib.blake2b(encoded, digest_size=12).hexdigest() for encoded in encodings]

    def observed(self, batch: Batch) -> Tensor:
        return Returns(self.reward, self.gamma)(batch)


@preset("agent-r1", clip=(0.2, 0.2, inf), clip_by="token", average="row", kl=True)
def agent_r1(reward: str, *, value: str = "", gamma: Discount = 1.0, lam: Discount = 0.95) -> Algo:
    """PPO with calls as actions: GAE over calls, whitened over calls. `value`: a reward that holds
    V of each call, or "mean-return", the mean return of earlier steps from the state before it, for
    tasks with few states; default: the critic. arXiv 2511.14460, 1506.02438."""
    values = Tabular(reward, gamma) if value == MEAN_RETURN else value_of(value)
    return Algo(whitened_gae(values, reward, gamma, lam))


@preset("ragen", clip=PPO_CLIP)
def ragen(
    reward: str, *, gamma_high: Discount = 0.95, gamma: Discount = 1.0, lam: Discount = 1.0
) -> Algo:
    """GAE over calls, whose returns are the final rewards of a GAE over each call's tokens. arXiv
    2504.20073."""
    return Algo(Whiten(BiLevelGae(CriticValues(), reward, gamma_high, gamma, lam)), agg=TOKENS)


@preset("archer")
def archer(reward: str, *, advantage: str = "", gamma: Discount = 0.9) -> Algo:
    """REINFORCE with each call's temporal difference of a critic's values, r + gamma V' - V. Early
    calls learn only as fast as the critic, which in the paper is off-policy. `advantage`: a reward
    of calls, which needs no critic, `reward` or `gamma`. arXiv 2402.19446."""
    credit = advantage or calls.StepGae(calls.value_of(""), reward, gamma, lam=0.0)
    return Algo(GroupRelative(credit, base="none"), agg=ROW_SUMS)


@dataclass(frozen=True, slots=True)
class OutcomePlusCalls:
    """The reward of each rollout plus `weight` times the sum of its calls' rewards, [U]."""

    reward: str | Column
    calls: str
    weight: float = 1.0

    def __call__(self, batch: Batch) -> Tensor:
        x = calls.call_rewards(batch, self.calls).nan_to_num(nan=0.0)
        total = reduce_by(x, batch.transition_rollout, len(batch.rollouts))
        return core.rollout_rewards(batch, self.reward) + self.weight * total


@dataclass(frozen=True, slots=True)
class CallsOrOutcome:
    """`credit` for rollouts in which a call received the reward, `outcome` for the others, [N]."""

    credit: Credit
    outcome: Credit
    reward: str

    def __call__(self, batch: Batch) -> Tensor:
        rewarded = ~calls.call_rewards(batch, self.reward).isnan()
        has = reduce_by(rewarded, batch.transition_rollout, len(batch.rollouts)) > 0
        return torch.where(has[batch.token_rollout], self.credit(batch), self.outcome(batch))


@preset("mt-grpo", clip=PPO_CLIP)
def mt_grpo(reward: str, *, turn_reward: str = "transition:turn", weight: Share = 1.0) -> Algo:
    """Outcome compared over rollouts plus a reward of calls compared within the same turn. A
    rollout without such a reward (no tool call) is compared by the sum of both. arXiv 2505.11821.
    """
    same_turn = GroupRelative(turn_reward, by=("group", "turn"), norm="std")
    separate = core.weighted_sum((GroupRelative(reward, norm="std"), 1.0), (same_turn, weight))
    combined = GroupRelative(OutcomePlusCalls(reward, turn_reward, weight), norm="std")
    return Algo(CallsOrOutcome(separate, combined, turn_reward))


@dataclass(frozen=True, slots=True)
class HiperGae:
    """HiPER, arXiv 2602.16165: GAE over the acting calls inside each segment (part "low"), or over
    the segments, each started by a call that chooses a subgoal (part "high"); [S].

    high, low: values per call. A call with a high value starts a segment; one with a low value acts
    and takes one unit of time; one with both gets both credits, because its tokens are not
    distinguished. Rewards of other calls belong to the call before them."""

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
        return calls.at_first_tokens(batch, self(batch) + self.value(batch))

    def __call__(self, batch: Batch) -> Tensor:
        rollout, v_high, v_low = batch.transition_rollout, self.high(batch), self.low(batch)
        begins, acts = ~v_high.isnan(), ~v_low.isnan()
        counts, following = begins | acts, next_same(rollout)
        r = calls.call_rewards(batch, self.reward)
        has_return = ~calls.discounted_return(r, 1.0, following).isnan()
        r = scan(r.nan_to_num(nan=0.0), 1.0, torch.where(counts[following], -1, following))
        time = torch.ones_like(r).masked_fill(acts, self.gamma)
        following = next_same(torch.where(counts, rollout, len(batch.rollouts)))
        inside = torch.where(begins[following], -1, following)  # the next call of the segment
        if self.part == "low":
            after = torch.where(begins, v_high, v_low)[following]
            after = torch.where(following >= 0, after, 0.0)
            delta = r + time * after - v_low
            advantage = scan(delta.nan_to_num(nan=0.0), time * self.lam, inside)
            return torch.where(acts & has_return, advantage, torch.nan)
        segment = next_same(torch.where(begins, rollout, len(batch.rollouts)))
        after = torch.where(segment >= 0, v_high[segment], 0.0)
        decay = scan(time.log(), 1.0, inside).exp()
        delta = scan(r, time, inside) + decay * after - v_high
        advantage = scan(delta.nan_to_num(nan=0.0), decay * self.lam, segment)
        return torch.where(begins & has_return, advantage, torch.nan)


@dataclass(frozen=True, slots=True)
class OfRole:
    """`value` [S] of the calls of the role, or of those of all others; NaN elsewhere. Raises
    TrainingError for a role without calls."""

    value: Column
    role: str
    others: bool = False
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        calls.need_roles(batch, (self.role,))
        chosen = calls.made_by(batch, (self.role,)) != self.others
        return torch.where(chosen, self.value(batch), torch.nan)


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
    critic = calls.value_of("")
    v_high = calls.CallRewards(high) if high else OfRole(critic, planner)
    v_low = calls.CallRewards(low) if low else OfRole(critic, planner, others=True)

    def whitened(part: Literal["high", "low"]) -> Credit:
        column = HiperGae(v_high, v_low, part, reward, gamma, lam)
        return GroupRelative(column, by=("all",), norm="std")

    return Algo(weighted_sum((whitened("high"), 1.0), (whitened("low"), 1.0)))


PAIRS = Average(("rollout", "role"), parts=("row",))


@dataclass(frozen=True, slots=True)
class EvenRolloutWeights:
    """1 / number of calls of the same role and rollout that have the reward, [S]: each rollout
    counts once per role, however many calls it made."""

    reward: str
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        pair = units(batch, "transition", "rollout", "role")
        return 1 / reduce_by(~rewards(batch, self.reward).isnan(), pair)[pair].clamp(min=1)


@dataclass(frozen=True, slots=True)
class MainAndSubCredit:
    """`credit` for the calls of `role`, `others` for all other calls, [N]."""

    role: str
    credit: Credit
    others: Credit

    def __call__(self, batch: Batch) -> Tensor:
        main = calls.made_by(batch, (self.role,))[batch.token_transition]
        return torch.where(main, self.credit(batch), self.others(batch))


@preset("m-grpo", clip=PPO_CLIP, kl=True)
def m_grpo(reward: str, *, main: str = "main", sub_reward: str = "transition:sub") -> Algo:
    """Calls of the main role are compared by the outcome, those of each sub-agent by a reward of
    their own, over the group. Each call weighs 1 / number of its rollout's calls in statistics and
    loss; the paper copies calls until all rollouts have the same number. arXiv 2511.13288."""
    if core.level_of(sub_reward) != "transition":
        raise ConfigError(
            f"algorithm.options.sub_reward = {sub_reward!r}: must be a reward of calls; write "
            "'transition:name'"
        )
    by: tuple[Unit, ...] = ("group", "role")
    lead = GroupRelative(reward, at="role", by=by, norm="std")
    calls = GroupRelative(sub_reward, by=by, norm="std", w=EvenRolloutWeights(sub_reward), ddof=0)
    return Algo(MainAndSubCredit(main, lead, calls), agg=PAIRS, optional=(sub_reward,))
