"""Credit of single calls without a critic: from calls in the same state (GiGPO, HGPO, peer values,
batch TD) and in hindsight (HCAPO)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from agentrl.algorithms.credit import core, turns
from agentrl.algorithms.credit.core import Column, GroupRelative, column, weighted_sum
from agentrl.algorithms.credit.shrinkage import mean_by, reliability, variance_components
from agentrl.algorithms.data import ids
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Unit, key, next_same, previous, reduce_by, units
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.presets import registry
from agentrl.algorithms.presets.mixing import GatedByOutcome
from agentrl.algorithms.presets.registry import PPO_CLIP, Discount, Scale, Share, modifier, preset
from agentrl.algorithms.presets.zoo.grpo import grpo
from agentrl.config import Natural

CERTAIN = 1e-6  # least squared norm of a call's score
ERRORS = 3.0  # standard errors above which the effect of actions is significant
HINDSIGHT = "transition:hindsight"  # a reward from the learner, see `train/preprocess.py`


@column()
def SameStateRelative(
    batch: Batch,
    reward: str | Column = "outcome",
    gamma: float = 0.95,
    depth: int = 0,
    alpha: float = 1.0,
    norm: Literal["none", "std"] = "none",
) -> Tensor:
    """HGPO, arXiv 2602.22817: calls compared with those in the same state and with the same k
    previous states, for k = 0 .. depth; mean over the k with an advantage other than 0, weighted
    by (k + 1) ** alpha, [N]. depth 0 is the step credit of GiGPO (arXiv 2505.10978)."""
    x = turns.Returns(reward, gamma)(batch)
    before = previous(next_same(batch.transition_rollout))
    state = units(batch, "transition", "state")
    same, back = units(batch, "transition", "group", "state"), before
    total, weights = torch.zeros_like(x), torch.zeros_like(x)
    for k in range(depth + 1):
        advantage = core.standardise(x, same, norm=norm).advantage
        weight = (k + 1) ** alpha * (advantage != 0)
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
    anchors = SameStateRelative(registry.outcome_of(algo), gamma, norm=norm)
    return replace(algo, credit=weighted_sum((algo.credit, 1.0), (anchors, weight)))


@preset("gigpo", clip=PPO_CLIP, kl=True)
def gigpo(
    reward: str, *, weight: Share = 1.0, gamma: Discount = 0.95, norm: Scale = "none"
) -> Algo:
    """Rollouts compared within the task, plus calls compared with those in the same state. arXiv
    2505.10978."""
    host = Algo(GroupRelative(reward, norm=norm))
    return with_gigpo(host, weight=weight, gamma=gamma, norm=norm)


@registry.as_modifier("hgpo", prefix="hgpo_")
@preset("hgpo", clip=PPO_CLIP, kl=True)
def hgpo(
    reward: str,
    *,
    gamma: Discount = 0.95,
    depth: Natural = 2,
    alpha: registry.Num = 1.0,
    norm: Scale = "none",
) -> Algo:
    """Calls compared with those in the same state and with the same previous states; longer
    histories weigh more. arXiv 2602.22817."""
    return Algo(SameStateRelative(reward, gamma, depth, alpha, norm))


@column("transition")
def PeerValues(
    batch: Batch,
    reward: str | Column = "outcome",
    gamma: float = 1.0,
    by: tuple[Unit, ...] = ("group", "state"),
) -> Tensor:
    """Value of the state before each call: the mean return of the calls that the group's other
    rollouts made in the same state, [S]; missing if there are none. With `StepGae` it is a critic
    without parameters, unbiased if equal ids mean equal states."""
    x = turns.Returns(reward, gamma)(batch)
    same, known = units(batch, "transition", *by), (~x.isnan()).double()
    mean, count = mean_by(x.nan_to_num(nan=0.0), same, batch.transition_rollout, known)
    return torch.where(count > 0, mean, torch.nan)


def explained_by_states(batch: Batch, reward: str | Column = "outcome") -> float:
    """Share of the variance of the rewards of last calls, within groups, that their states and
    actions explain (adjusted R squared, at least 0); 0 where no two of them are the same. Where it
    is small, states do not show what earlier calls did."""
    x = turns.call_rewards(batch, reward)
    last = (next_same(batch.transition_rollout) < 0) & ~x.isnan()
    group, state = (
        units(batch, "transition", "group", *more)[last] for more in ((), ("role", "state"))
    )
    x, cell = x[last], key(state, ids.of_calls(batch, "action")[last])

    def variance(within: Tensor) -> float:
        mean, count = mean_by(x, within)
        freedom = len(x) - round(float((1 / count).sum()))
        return float((x - mean).square().sum()) / freedom if freedom > 0 else math.inf

    total, within = variance(group), variance(cell)
    if not math.isfinite(within):
        return 0.0
    rounding = (core.SPREAD * float(x.abs().max())) ** 2
    return max(0.0, 1 - within / total) if total > rounding else 1.0


def score_norms(batch: Batch) -> Tensor:
    """Squared norm of the gradient of each call's log-prob by its logits, up to a factor of 2 that
    other tokens decide: the sum of (1 - p) ** 2 over its tokens, [S]."""
    rare = (1 - batch.behaviour.double().exp()).square()
    norms = rare.new_zeros(len(batch.transition_rollout))
    return norms.index_add_(0, batch.token_transition, rare).clamp(min=CERTAIN)


def peer_baselines(batch: Batch, x: Tensor) -> Tensor:
    """Baseline of each call's x [S] of about the least gradient variance, [S]: means over the
    group's other rollouts, weighted by `score_norms`; see "Peers" in CREDIT.md. Greensmith,
    Bartlett and Baxter, JMLR 5, 2004."""
    known, group = ~x.isnan(), units(batch, "transition", "group")
    weight = torch.where(known, score_norms(batch), 0.0)
    lowest = reduce_by(torch.where(known, x, torch.inf), group, how="amin")[group]
    x = torch.where(known, x - lowest, 0.0)  # so that equal x stay equal

    def of_others(*by: Unit) -> Tensor:
        same = units(batch, "transition", "group", *by)
        mean, count = mean_by(x, same, batch.transition_rollout, weight)
        return torch.where(count > 0, mean, torch.nan)

    base = of_others().nan_to_num(nan=0.0)
    rounding = core.SPREAD**2 * float((weight * x.square()).sum())
    for narrow in (of_others("turn"), of_others("state")):
        differs = (narrow - base).nan_to_num(nan=0.0)
        squares = float((weight * differs.square()).sum())
        if squares > rounding:
            fit = float((weight * differs * (x - base)).sum()) / squares
            base = base + min(max(fit, 0.0), 1.0) * differs
    return base + torch.where(lowest.isinf(), 0.0, lowest)


@column("transition")
def PeerAdvantages(
    batch: Batch, reward: str | Column = "outcome", gamma: float = 0.95, lam: float = 0.5
) -> Tensor:
    """The lambda-return of each call with `PeerValues`, as far as states explain rewards, and else
    its return; minus `peer_baselines`, [S]."""
    value, anywhere = (
        PeerValues(reward, gamma, by)(batch) for by in (("group", "state"), ("group",))
    )
    gae = turns.StepGae(lambda _: value, reward, gamma, lam, lambda _: anywhere)(batch)
    target = gae + torch.where(value.isnan(), anywhere, value)
    discounted, total = (turns.Returns(reward, rate)(batch) for rate in (gamma, 1.0))
    share = explained_by_states(batch, reward)
    discounted = torch.where(discounted.isnan(), total, discounted)  # gamma = 0
    base = peer_baselines(batch, share * discounted + (1 - share) * total)
    x = share * target + (1 - share) * torch.where(total.isnan(), target, total)
    advantage = core.standardise(x, units(batch, "transition", "group"), base=base).advantage
    return torch.where(gae.isnan(), torch.nan, advantage)


@registry.as_modifier("peers", prefix="peers_")
@preset("peers", clip=PPO_CLIP, kl=True)
def peers(reward: str, *, gamma: Discount = 0.95, lam: Discount = 0.5) -> Algo:
    """Lambda-returns of calls without a critic: the value of a state is the mean return of the
    group's other rollouts from there, as far as states explain the reward, and the baseline the one
    of least gradient variance (JMLR 5, 2004, p. 1471). States as in arXiv 2505.10978, GAE as in
    2511.14460."""
    return Algo(GroupRelative(PeerAdvantages(reward, gamma, lam), base="none"))


@preset("auto", clip=(0.2, 0.2, math.inf), kl=True)
def auto(reward: str, *, std: bool = True, gamma: Discount = 0.95, lam: Discount = 0.5) -> Algo:
    """`peers` for batches in which at least half of the rollouts made several calls; for others
    `grpo`, with or without `std`. Only `grpo` divides advantages by their deviation. arXiv
    2402.03300, 2505.10978."""
    several, one = peers(reward=reward, gamma=gamma, lam=lam), grpo(reward=reward, std=std)
    return Algo(turns.BySeveralCalls(several.credit, one.credit))


def histories(batch: Batch) -> Tensor:
    """Ids of the rollout's states and actions up to each call's state, [S], within its group."""
    state = units(batch, "transition", "group", "role", "state")
    action, turn = ids.of_calls(batch, "action"), batch.transition_turn
    before, found = previous(next_same(batch.transition_rollout)), state.clone()
    for number in range(1, int(turn.max()) + 1):
        now = (turn == number).nonzero().squeeze(1)
        past = before[now]
        found[now] = number * len(turn) + key(found[past], action[past], state[now])
    return found


@column("transition")
def BatchTd(batch: Batch, reward: str | Column = "outcome", gamma: float = 1.0) -> Tensor:
    """The reward of a call plus the value of the next state (its TD target), minus the targets of
    other rollouts in the same state, [S]: see "Batch TD" in CREDIT.md.

    The value of a state is the mean TD target of the group's calls in it (batch TD(0): Sutton and
    Barto, Reinforcement Learning, 2018, 6.3), shrunk towards the mean of those at the same turn by
    how much turns matter, and towards the mean return of those with the same history by how much
    histories matter. A target is shrunk towards the mean return of the calls with the same state
    and action if actions have a significant effect beyond it. The baseline is the mean target of
    other rollouts in the same state, shrunk towards the same turn by how little states differ."""
    returns = turns.Returns(reward, gamma)(batch)
    known = (~returns.isnan()).nonzero().squeeze(1)
    advantage = torch.full_like(returns, torch.nan)
    if not known.numel():
        return advantage
    x, rollout = returns[known], batch.transition_rollout[known]
    group, turn, state = (
        units(batch, "transition", "group", *more)[known]
        for more in ((), ("role", "turn"), ("role", "state"))
    )
    past, following = key(histories(batch)[known]), next_same(rollout)
    after, count = mean_by(x, past)
    # Noise averages out over the groups of the batch, the bias of a wrong value does not.
    trust = reliability(count, *_between_groups(x, state, past, batch))
    apart = key(state, turn)
    timed = reliability(mean_by(x, apart)[1], *_between_groups(x, state, apart, batch))
    received = turns.call_rewards(batch, reward)[known].nan_to_num(nan=0.0)
    value = x
    for _ in range(int(batch.transition_turn.max()) + 1):
        mean = mean_by(x, state)[0]
        value = mean + timed * (mean_by(x, apart)[0] - mean)
        value += trust * (after - value)
        x = received + gamma * torch.where(following >= 0, value[following], 0.0)
    # Effects of an action that the next state does not show are in the returns.
    missed = returns[known] - x
    action = key(state, ids.of_calls(batch, "action")[known])
    more, count = mean_by(missed, action)
    trust = reliability(count, *variance_components(missed, apart, action, turn, ERRORS))
    x = x + trust * (more - mean_by(missed, state)[0])
    # Targets at other turns may depend on this call; returns of other rollouts do not.
    base, others = mean_by(returns[known], group, rollout)
    same, count = mean_by(x, turn, rollout)
    base = torch.where(count > 0, same, base)
    same, count = mean_by(x, state, rollout)
    base += reliability(count, *variance_components(x, turn, state)) * (same - base)
    advantage[known] = torch.where(others > 0, x - base, 0.0)
    return advantage


def _between_groups(x: Tensor, state: Tensor, inner: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    within, between = variance_components(x, state, inner)
    return within, between * len(batch.groups)


@registry.as_modifier("batch-td", prefix="batch_td_")
@preset("batch-td", clip=PPO_CLIP, kl=True)
def batch_td(reward: str, *, gamma: Discount = 1.0) -> Algo:
    """Calls compared by reward plus value of the next state, learned from the group by batch TD; by
    returns if states do not show the effect of an action. States as in arXiv 2505.10978."""
    return Algo(GroupRelative(BatchTd(reward, gamma), base="none"))


@column("transition")
def HindsightReturns(
    batch: Batch,
    hindsight: Column,
    reward: str | Column = "outcome",
    gamma: float = 0.95,
    temperature: float = 5.0,
    low: float = 0.8,
    high: float = 1.2,
) -> Tensor:
    """HCAPO, arXiv 2603.08754: the return of each call times its hindsight probability relative to
    the mean of its rollout's calls, clamped to [low, high]; [S].

    hindsight: mean log-prob of each call's tokens given a prompt with the outcome, [S]; a call
    without it keeps its return. temperature divides it."""
    p = (hindsight(batch) / temperature).exp()
    rollout = batch.transition_rollout
    ratio = (p / ids.known_mean(p, rollout)[rollout]).clamp(low, high)
    return torch.where(p.isnan(), 1.0, ratio) * turns.Returns(reward, gamma)(batch)


@modifier("hcapo", prefix="hcapo_")
def with_hcapo(
    algo: Algo, *, reward: str = HINDSIGHT, weight: Share = 1.0, gamma: Discount = 0.95
) -> Algo:
    """Adds HCAPO's hindsight credit of calls to the host's; negative only where the host's is
    negative. arXiv 2603.08754."""
    returns = HindsightReturns(turns.CallRewards(reward), registry.outcome_of(algo), gamma)
    calls = GatedByOutcome(GroupRelative(returns, norm="std"), algo.credit, "negative")
    credit = weighted_sum((algo.credit, 1.0), (calls, weight))
    return replace(algo, credit=credit, optional=(*algo.optional, HINDSIGHT))


@preset("hcapo", clip=PPO_CLIP, kl=True)
def hcapo(
    reward: str, *, hindsight_reward: str = HINDSIGHT, weight: Share = 1.0, gamma: Discount = 0.95
) -> Algo:
    """Outcome over rollouts plus returns of calls, weighted by the probability of the call given
    the outcome. The learner computes that probability unless `hindsight_reward` names another
    reward of calls. arXiv 2603.08754."""
    host = Algo(GroupRelative(reward, norm="std"))
    return with_hcapo(host, reward=hindsight_reward, weight=weight, gamma=gamma)
