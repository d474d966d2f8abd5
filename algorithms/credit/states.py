"""The calls of a batch that can be compared, and the values of their states: see "Peers" in
CREDIT.md.

Calls without a later known reward are left out. Tensors are float64 [S] over the calls that remain.
Means are over other rollouts than the call's own, so that they do not depend on the call.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.algorithms.credit import core
from agentrl.algorithms.credit.calls import Returns, call_rewards
from agentrl.algorithms.credit.core import Column
from agentrl.algorithms.data import ids
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import key, next_same, reduce_by, scan, units

LEAST_SCORE_NORM = 1e-6  # least squared norm of a call's score


class Calls(NamedTuple):
    """The calls of a batch that have a return."""

    returns: Tensor  # discounted sum of the call's and later rewards
    received: Tensor  # the call's own reward
    gamma: float
    rollout: Tensor  # int64, also of the following
    group: Tensor
    turn: Tensor  # number of earlier calls
    following: Tensor  # index of the rollout's next call; -1: none
    state: Tensor  # id of (group, role, state)
    action: Tensor  # id of what was said or called
    contexts: tuple[Tensor, ...]  # ids of what the policy may have acted on: state, whole prompt
    chance: Tensor  # probability of what the call said
    weight: Tensor  # squared norm of the gradient of its log-prob by the logits, about
    unit: float  # standard deviation of returns within groups; 0: they are equal


def calls_of(
    batch: Batch, reward: str | Column, gamma: float, total: Tensor
) -> tuple[Calls, Tensor]:
    """The calls that have a return and can be compared, as another rollout of the group has one
    too, and their indices in the batch, int64 [K]. total: undiscounted return of each call, [S]."""
    group = units(batch, "transition", "group")
    known = ~total.isnan()
    compared = reduce_by(known & (batch.transition_turn == 0), group)[group] > 1
    index = (known & compared).nonzero().squeeze(1)
    behaviour, call = batch.behaviour.double(), batch.token_transition
    logprob, norm = (torch.zeros(len(group), dtype=torch.float64) for _ in range(2))
    logprob.index_add_(0, call, behaviour)
    norm.index_add_(0, call, (1 - behaviour.exp()).square())
    rollout = batch.transition_rollout[index]
    returns = total if gamma == 1.0 else Returns(reward, gamma)(batch)
    calls = Calls(
        returns=returns[index].nan_to_num(nan=0.0),  # missing if gamma is 0 and rewards are later
        received=call_rewards(batch, reward)[index].nan_to_num(nan=0.0),
        gamma=gamma,
        rollout=key(rollout),
        group=key(group[index]),
        turn=batch.transition_turn[index],
        following=next_same(rollout),
        state=units(batch, "transition", "group", "role", "state")[index],
        action=ids.of_calls(batch, "action")[index],
        contexts=tuple(
            units(batch, "transition", "role", what)[index] for what in ("state", "prompt")
        ),
        chance=logprob.exp()[index],
        weight=norm.clamp(min=LEAST_SCORE_NORM)[index],
        unit=0.0,
    )
    calls = from_lowest(calls) if gamma == 1.0 else calls
    return calls._replace(unit=deviation(calls)), index


def deviation(calls: Calls) -> float:
    """Standard deviation of returns within groups; 0 if it is a rounding error."""
    x = calls.returns
    if not x.numel():
        return 0.0
    found = float((x - mean_by(x, calls.group)[0]).square().mean().sqrt())
    return found if found > core.ROUNDING_SPREAD * float(x.abs().max()) else 0.0


def from_lowest(calls: Calls) -> Calls:
    """Outcomes less the lowest of the group, so that equal ones are exactly 0: differences that
    `core.standardise` takes for rounding errors are 0. Rewards of calls are left as they are."""
    if calls.received[calls.following >= 0].any():
        return calls
    lowest = reduce_by(calls.returns, calls.group, how="amin")[calls.group]
    largest = reduce_by(calls.returns.abs(), calls.group, how="amax")[calls.group]
    over = calls.returns - lowest
    over = torch.where(over > core.ROUNDING_SPREAD * largest, over, 0.0)
    return calls._replace(returns=over, received=torch.where(calls.following < 0, over, 0.0))


def of_others(calls: Calls, x: Tensor, same: Tensor) -> Tensor:
    """Sum of x over the calls of other rollouts with the same id; a rollout's calls have one id."""
    return reduce_by(x, same)[same] - reduce_by(x, calls.rollout)[calls.rollout]


def state_values(calls: Calls, x: Tensor, past: Tensor | None = None) -> Tensor:
    """Mean x of other rollouts in each call's state, NaN if there are none, and the effect of time,
    as a state that comes back later may leave less of it: one slope of the differences from the
    means of states, by turn, less what noise explains of it. past: `time_sums` of earlier batches.
    """
    mean, count = mean_by(x, calls.state, calls.rollout)
    turn, everywhere = calls.turn.double(), torch.zeros_like(calls.rollout)
    when = mean_by(turn, calls.state, calls.rollout)[0]
    before = torch.zeros(4, dtype=torch.float64) if past is None else past
    squares, product, total, seen = (
        of_others(calls, y, everywhere) + more
        for y, more in zip(time_terms(calls, x), before, strict=True)
    )
    slope = torch.where(squares > 0, product / squares, 0.0)
    noise = (total - slope * product).clamp(min=0.0) / (seen - 1).clamp(min=1.0)
    slope *= surplus(slope * product, noise)
    return torch.where(count > 0, mean + slope * (turn - when), torch.nan)


def time_terms(calls: Calls, x: Tensor) -> Tensor:
    """What slopes are fitted to, of each call, [4, S]: squared distance of its turn from the mean
    of its state, product with that of x, squared distance of x, and whether there is one."""
    turn = calls.turn.double()
    late = turn - mean_by(turn, calls.state)[0]
    off = x - mean_by(x, calls.state)[0]
    return torch.stack([late**2, late * off, off**2, (late != 0).double()])


def surplus(signal: Tensor, noise: Tensor) -> Tensor:
    """1 - noise / signal, at least 0: the share of a square that noise does not explain."""
    return torch.where(signal > noise, 1 - noise / signal, 0.0)


def lambda_returns(calls: Calls, value: Tensor, lam: float) -> Tensor:
    """Lambda-return of each call by the values of states; those without one are passed over."""
    after = torch.where(calls.following >= 0, value[calls.following], torch.nan)
    valued = ~after.isnan()
    step = calls.received + torch.where(valued, calls.gamma * (1 - lam) * after, 0.0)
    return scan(step, torch.where(valued, lam, 1.0) * calls.gamma, calls.following)


def missed_by_values(calls: Calls, lam: float, past: Tensor | None = None) -> Tensor:
    """Each return less the lambda-return by the values of states. past: as in `state_values`."""
    return calls.returns - lambda_returns(calls, state_values(calls, calls.returns, past), lam)


def plain_baselines(calls: Calls) -> Tensor:
    """Mean return of the group's other rollouts at the same turn, or at their last call. Of an
    outcome this is the mean of the others' (RLOO, arXiv 2402.14740)."""
    last = (calls.following < 0).double()
    at = key(calls.group, calls.turn)  # in a group each turn follows the one before
    now, ended = reduce_by(calls.returns, at), reduce_by(calls.returns * last, at)
    before = torch.arange(len(now)) - 1
    before[at[calls.turn == 0]] = -1
    total = now + scan(ended, 1.0, before) - ended
    others = reduce_by(last, calls.group)[calls.group] - 1
    return (total[at] - calls.returns) / others.clamp(min=1.0)


def baselines(calls: Calls, x: Tensor, past: Tensor | None = None) -> Tensor:
    """`plain_baselines`, moved towards the value of the state by how much less x then varies: least
    squares over the calls of other rollouts, weighted as in the gradient, less what noise explains.
    """
    base = plain_baselines(calls)
    moved = (state_values(calls, x, past) - base).nan_to_num(nan=0.0)
    everywhere, left = torch.zeros_like(calls.rollout), x - base
    squares, product, total = (
        of_others(calls, calls.weight * y, everywhere) for y in (moved**2, moved * left, left**2)
    )
    others = int(calls.rollout.max())
    fit = torch.where(squares > 0, product / squares, 0.0)
    noise = (total - fit * product).clamp(min=0.0) / max(others - 1, 1)
    return base + (fit * surplus(fit * product, noise)).clamp(0.0, 1.0) * moved


def mean_by(x: Tensor, ids: Tensor, without: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean and count of the x with the same id, [U] each; 0 if there are none. without: ids; units
    that share one with x, itself included, are excluded from its mean."""
    own = None if without is None else key(ids, without)

    def total(y: Tensor) -> Tensor:
        every = reduce_by(y, ids)[ids]
        return every if own is None else every - reduce_by(y, own)[own]

    count = total(torch.ones_like(x))
    return torch.where(count > 0, total(x) / count, 0.0), count
