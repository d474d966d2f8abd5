"""Credit over the calls of a rollout: returns, values, states and trees of calls.

A column here gives one number per call, float64 [S]; NaN = missing. `GroupRelative(column)`
compares it with others and copies it to the call's tokens. Time is counted in calls of the batch. A
call without a row of a reward adds nothing to a sum over time, and a call from which no known
reward lies ahead is missing itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from agentrl.algorithms.credit.core import (
    Column,
    Credit,
    CriticValues,
    has_outcome,
    level_of,
    rewards,
    was_truncated,
)
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level, key, lift, next_same, scan
from agentrl.errors import TrainingError


def call_rewards(batch: Batch, reward: str | Column) -> Tensor:
    """[S] what each call received: a rollout's reward at its last call, a role's at the last call
    of the role, a call's at itself."""
    x, level = rewards(batch, reward), level_of(reward)
    if level == "transition":
        return x
    owner = batch.transition_rollout
    if level == "role":
        owner = key(owner, batch.transition_role)
    return torch.where(next_same(owner) < 0, lift(batch, x, level, "transition"), torch.nan)


def discounted_return(x: Tensor, decay: Tensor | float, following: Tensor) -> Tensor:
    """Sum of the known x over time; missing where nothing known lies ahead that would count."""
    known = scan((~x.isnan()).double(), decay, following) > 0
    return torch.where(known, scan(x.nan_to_num(nan=0.0), decay, following), torch.nan)


@dataclass(frozen=True, slots=True)
class CallRewards:
    """[S] see `received`."""

    reward: str | Column = "outcome"
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        return call_rewards(batch, self.reward)


@dataclass(frozen=True, slots=True)
class Returns:
    """[S] discounted sum of what a call and the later ones of its rollout received."""

    reward: str | Column = "outcome"
    gamma: float = 1.0
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        x = call_rewards(batch, self.reward)
        return discounted_return(x, self.gamma, next_same(batch.transition_rollout))


@dataclass(frozen=True, slots=True)
class PotentialShaping:
    """[S] gamma * phi(next state) - phi(state) of a potential phi given per call. Ng et al. 1999.

    phi is 0 after the end, and an outcome ends its rollout, also one that a token limit cut off:
    what a potential adds then depends on the first state alone, and the policy gradient stays what
    it is. Where a limit came before any outcome, the last known phi stands for what would have
    followed. Calls without phi are passed over."""

    reward: str  # phi
    gamma: float = 1.0
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        phi = call_rewards(batch, self.reward)
        known = ~phi.isnan()
        ids = torch.where(known, batch.transition_rollout, len(batch.rollouts))
        following = next_same(ids)
        unfinished = was_truncated(batch) & ~has_outcome(batch)
        end = torch.where(unfinished[batch.transition_rollout], phi, 0.0)
        return self.gamma * torch.where(following >= 0, phi[following], end) - phi


@dataclass(frozen=True, slots=True)
class StepGae:
    """[S] generalised advantage with calls as actions: Agent-R1 (arXiv 2511.14460), Turn-PPO
    (2512.17008), PSPO (2601.10029). `lam` = 0 with values from fresh continuations is VinePPO
    (2410.01679).

    value: what gives V of the state before each call. Where it is missing, what was received counts
    for the call before, as if both were one, and the call itself is compared with `base`, which
    only has to be a value that does not depend on it; without either, nothing is learned from it,
    and if it has no tokens, it is missing itself.

    What was received ends a rollout, also one that a token limit cut off. Where that came before
    anything was received, from the last call with a value on, this value stands for the return."""

    value: Column
    reward: str | Column = "outcome"
    gamma: float = 1.0
    lam: float = 1.0
    base: Column | None = None
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        rollout, x, v = (
            batch.transition_rollout,
            call_rewards(batch, self.reward),
            self.value(batch),
        )
        valued, following = ~v.isnan(), next_same(rollout)
        # Rewards and calls up to the next call that has a value, and which one that is.
        inside = torch.where(valued[following], -1, following)
        known = ~discounted_return(x, 1.0, inside).isnan()
        r = scan(x.nan_to_num(nan=0.0), self.gamma, inside)
        gamma = self.gamma ** scan(torch.ones_like(r), 1.0, inside)
        number = torch.where(valued[following], following + 1, 0)
        following = scan(number, 1.0, inside).long() - 1
        cut = was_truncated(batch)[rollout] & (following < 0) & valued & ~known
        r = torch.where(cut, v, r)
        missing = scan((known | cut).double(), 1.0, following) == 0
        v = v if self.base is None else torch.where(valued, v, self.base(batch))
        after = torch.where(following >= 0, v[following], 0.0)
        learned = ~v.isnan()
        delta = torch.where(learned, r + gamma * after - v, 0.0)
        advantage = scan(delta, gamma * self.lam, torch.where(learned, following, -1))
        made = torch.zeros(len(rollout), dtype=torch.bool)
        made[batch.token_transition] = True
        return torch.where(missing | ~(learned | made), torch.nan, advantage)

    def returns(self, batch: Batch) -> Tensor:
        """What `value` should have said at the first token of each call, float64 [N], NaN at the
        others: a call is one decision, judged before it is made."""
        returns, call = self(batch) + self.value(batch), batch.token_transition
        return torch.where(is_first_token(batch), returns[call], torch.nan)


@dataclass(frozen=True, slots=True)
class ValuesFromReward:
    """[S] the value of the state before each call, given as a reward that every call must have."""

    reward: str
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        v = call_rewards(batch, self.reward)
        if missing := int(v.isnan().sum()):
            raise TrainingError(
                f"step {batch.step}: {missing} of {v.numel()} calls have no value {self.reward!r}, "
                "which the algorithm needs of every call"
            )
        return v


@dataclass(frozen=True, slots=True)
class FirstTokenValues:
    """[S] what a function gives for the first token of each call; missing for calls without tokens,
    before which there was no state to judge."""

    value: Column
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        call, x, starts = batch.token_transition, self.value(batch), is_first_token(batch)
        out = torch.full((len(batch.transitions),), torch.nan, dtype=torch.float64)
        out[call[starts]] = x[starts].double()
        return out


@dataclass(frozen=True, slots=True)
class TurnDiscount:
    """[N] a credit times gamma to the number of the rollout's calls still to come. SPIRAL, arXiv
    2506.24119."""

    credit: Credit
    gamma: float

    def __call__(self, batch: Batch) -> Tensor:
        return self.credit(batch) * turn_discounts(batch, self.gamma)[batch.token_transition]


def is_first_token(batch: Batch) -> Tensor:
    """bool [N]: whether a token is the first of its call."""
    call = batch.token_transition
    starts = torch.ones_like(call, dtype=torch.bool)
    starts[1:] = call[1:] != call[:-1]
    return starts


def turn_discounts(batch: Batch, gamma: float) -> Tensor:
    """[S] gamma to the number of the rollout's calls still to come."""
    following = next_same(batch.transition_rollout)
    ones = torch.ones_like(following, dtype=torch.float64)
    return gamma ** (scan(ones, 1.0, following) - 1)


def value_of(name: str) -> Column:
    """Values of calls: a reward by name, or without one what the critic says."""
    return ValuesFromReward(name) if name else FirstTokenValues(CriticValues())
