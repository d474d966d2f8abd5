"""Credit of single calls without a critic, from calls in the same state."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from agentrl.algorithms.credit import calls, core
from agentrl.algorithms.credit.core import Column, GroupRelative, weighted_sum
from agentrl.algorithms.credit.states import LAMBDA, GrpoScale, PeerAdvantages, ReturnScale, mean_by
from agentrl.algorithms.data import ids
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level, key, next_same, previous, reduce_by, units
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.presets import declare
from agentrl.algorithms.presets.declare import PPO_CLIP, Discount, Scale, Share, modifier, preset
from agentrl.core.config import Natural


@preset("auto", clip=(0.2, 0.2, math.inf), kl=True)
def auto(reward: str, *, std: bool = True, gamma: Discount = 1.0, lam: Discount = LAMBDA) -> Algo:
    """`grpo`, with the credit of `peers` where states recur and predict the outcome, on the scale
    of `grpo` with or without `std`, estimated from earlier batches too. arXiv 2402.03300."""
    credit = GroupRelative(PeerAdvantages(reward, gamma, lam), base="none")
    return Algo(GrpoScale(credit, reward, ReturnScale(reward)) if std else credit)


SIGNIFICANT_ERRORS = 3.0  # standard errors above which the effect of actions is significant


@dataclass(frozen=True, slots=True)
class SameStateRelative:
    """HGPO, arXiv 2602.22817: calls compared with those in the same state and with the same k
    previous states, for k = 0 .. depth; mean over the k with an advantage other than 0, weighted
    by (k + 1) ** alpha, [N]. depth 0 is the step credit of GiGPO (arXiv 2505.10978)."""

    reward: str | Column = "outcome"
    gamma: float = 0.95
    depth: int = 0
    alpha: float = 1.0
    norm: Literal["none", "std"] = "none"

    def __call__(self, batch: Batch) -> Tensor:
        x = calls.Returns(self.reward, self.gamma)(batch)
        before = previous(next_same(batch.transition_rollout))
        state = units(batch, "transition", "state")
        same, back = units(batch, "transition", "group", "state"), before
        total, weights = torch.zeros_like(x), torch.zeros_like(x)
        for k in range(self.depth + 1):
            advantage = core.standardise(x, same, norm=self.norm).advantage
            weight = (k + 1) ** self.alpha * (advantage != 0)
            total, weights = total + weight * advantage, weights + weight
            same = key(same, torch.where(back >= 0, state[back], -1))
            back = torch.where(back >= 0, before[back], -1)
        advantage = torch.where(weights > 0, total / weights, 0.0)
        return torch.where(x.isnan(), torch.nan, advantage)[batch.token_transition]


@modifier("gigpo", prefix="gigpo_")
def with_gigpo(
    algo: Algo, *, weight: Share = 1.0, gamma: Discount = 0.95, norm: Scale = "none"
) -> Algo:
    """Adds a comparison with calls in the same state. arXiv 2505.10978."""
    anchors = SameStateRelative(declare.outcome_of(algo), gamma, norm=norm)
    return replace(algo, credit=weighted_sum((algo.credit, 1.0), (anchors, weight)))


@preset("gigpo", clip=PPO_CLIP, kl=True)
def gigpo(
    reward: str, *, weight: Share = 1.0, gamma: Discount = 0.95, norm: Scale = "none"
) -> Algo:
    """Rollouts compared within the task, plus calls compared with those in the same state. arXiv
    2505.10978. The discount makes credit depend on constants: with rewards of -9 and -10 in place
    of 1 and 0 the error of a gradient rose from 0.97 to 1.2 times that of `rloo`."""
    host = Algo(GroupRelative(reward, norm=norm))
    return with_gigpo(host, weight=weight, gamma=gamma, norm=norm)


@preset("hgpo", clip=PPO_CLIP, kl=True)
def hgpo(
    reward: str,
    *,
    gamma: Discount = 0.95,
    depth: Natural = 2,
    alpha: declare.Num = 1.0,
    norm: Scale = "none",
) -> Algo:
    """Calls compared with those in the same state and with the same previous states; longer
    histories weigh more. arXiv 2602.22817. Calls in states of their own have no credit. Where tools
    give the same answers after the decisive call, the error of the gradient is up to 1.3 times that
    of `rloo`; where many calls earn slightly more than few, it learns the opposite."""
    return Algo(SameStateRelative(reward, gamma, depth, alpha, norm))


def histories(batch: Batch) -> Tensor:
    """Ids of the rollout's states and actions up to each call's state, [S], within its group."""
    state = units(batch, "transition", "group", "role", "state")
    action, turn = ids.of_calls(batch, "action"), batch.transition_turn
    before, histories = previous(next_same(batch.transition_rollout)), state.clone()
    for number in range(1, int(turn.max()) + 1):
        now = (turn == number).nonzero().squeeze(1)
        past = before[now]
        histories[now] = number * len(turn) + key(histories[past], action[past], state[now])
    return histories


@dataclass(frozen=True, slots=True)
class BatchTd:
    """The reward of a call plus the value of the next state (its TD target), minus the targets of
    other rollouts in the same state, [S]: see "Batch TD" in CREDIT.md.

    The value of a state is the mean TD target of the group's calls in it (batch TD(0): Sutton and
    Barto, Reinforcement Learning, 2018, 6.3), shrunk towards the mean of those at the same turn by
    how much turns matter, and towards the mean return of those with the same history by how much
    histories matter. A target is shrunk towards the mean return of the calls with the same state
    and action if actions have a significant effect beyond it. The baseline is the mean target of
    other rollouts in the same state, shrunk towards the same turn by how little states differ."""

    reward: str | Column = "outcome"
    gamma: float = 1.0
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        returns = calls.Returns(self.reward, self.gamma)(batch)
        index = (~returns.isnan()).nonzero().squeeze(1)
        advantage = torch.full_like(returns, torch.nan)
        if not index.numel():
            return advantage
        x, rollout = returns[index], batch.transition_rollout[index]
        group, turn, state = (
            units(batch, "transition", "group", *extra)[index]
            for extra in ((), ("role", "turn"), ("role", "state"))
        )
        past, following = key(histories(batch)[index]), next_same(rollout)
        after, count = mean_by(x, past)
        # Noise averages out over the groups of the batch, the bias of a wrong value does not.
        trust = reliability(count, *_between_groups(x, state, past, batch))
        apart = key(state, turn)
        timed = reliability(mean_by(x, apart)[1], *_between_groups(x, state, apart, batch))
        received = calls.call_rewards(batch, self.reward)[index].nan_to_num(nan=0.0)
        value = x
        for _ in range(int(batch.transition_turn.max()) + 1):
            mean = mean_by(x, state)[0]
            value = mean + timed * (mean_by(x, apart)[0] - mean)
            value += trust * (after - value)
            x = received + self.gamma * torch.where(following >= 0, value[following], 0.0)
        # Effects of an action that the next state does not show are in the returns.
        missed = returns[index] - x
        action = key(state, ids.of_calls(batch, "action")[index])
        extra, count = mean_by(missed, action)
        trust = reliability(
            count, *variance_components(missed, apart, action, turn, SIGNIFICANT_ERRORS)
        )
        x = x + trust * (extra - mean_by(missed, state)[0])
        # Targets at other turns may depend on this call; returns of other rollouts do not.
        base, others = mean_by(returns[index], group, rollout)
        same, count = mean_by(x, turn, rollout)
        base = torch.where(count > 0, same, base)
        same, count = mean_by(x, state, rollout)
        base += reliability(count, *variance_components(x, turn, state)) * (same - base)
        advantage[index] = torch.where(others > 0, x - base, 0.0)
        return advantage


def _between_groups(x: Tensor, state: Tensor, inner: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    within, between = variance_components(x, state, inner)
    return within, between * len(batch.groups)


@preset("batch-td", clip=PPO_CLIP, kl=True)
def batch_td(reward: str, *, gamma: Discount = 1.0) -> Algo:
    """Calls compared by reward plus value of the next state, learned from the group by batch TD; by
    returns if states do not show the effect of an action. States as in arXiv 2505.10978. Where luck
    comes between a call and its result, or calls matter jointly, the gradient of few groups is 0.2
    to 0.9 of the exact one, and its error 1.1 to 15 times that of `rloo`."""
    return Algo(GroupRelative(BatchTd(reward, gamma), base="none"))


def variance_components(
    x: Tensor, wide: Tensor, narrow: Tensor, by: Tensor | None = None, errors: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Variance of x within narrow groups, and of their expected values within wide ones, [U] each.

    Analysis of variance with random effects and unequal sizes (Searle, Casella and McCulloch,
    Variance Components, 1992, 3.6), over wide groups with several narrow ones. by: ids to estimate
    separately for, each wide group in one of them; default: one estimate. If no narrow group of an
    id has two members, the variance within is the pooled one; if none at all has, it is 0. errors:
    number of standard errors (under a true variance of 0) to subtract from the variance between.
    """
    narrow, by = key(wide, narrow), key(torch.zeros_like(wide) if by is None else by)
    ones = torch.ones_like(x)
    size, total = reduce_by(ones, narrow)[narrow], reduce_by(ones, wide)[wide]
    several = (size < total).to(x.dtype)
    inner, outer = mean_by(x, narrow)[0], mean_by(x, wide)[0]

    def summed(y: Tensor) -> Tensor:
        return reduce_by(several * y, by)

    members, groups, wides = summed(ones), summed(1 / size), summed(1 / total)
    squares, freedom = summed((x - inner).square()), members - groups
    pooled = squares.sum() / freedom.sum().clamp(min=1.0)
    within = torch.where(freedom > 0.5, squares / freedom, pooled)
    spread = summed((inner - outer).square()) - (groups - wides) * within
    spread -= errors * within * (2 * (groups - wides)).clamp(min=0.0).sqrt()
    unit = members - summed(size / total)
    between = torch.where(unit > 0, spread / unit, 0.0).clamp(min=0.0)
    return within[by], between[by]


def reliability(count: Tensor, within: Tensor, between: Tensor) -> Tensor:
    """Fraction of the variance of a mean of `count` values that is signal, in [0, 1], [U]."""
    signal = count * between
    return torch.where(signal > 0, signal / (signal + within), 0.0)
