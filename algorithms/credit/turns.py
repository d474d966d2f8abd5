"""Credit over the calls of a rollout: returns, values, states and trees of calls.

A column here gives one number per call, float64 [S]; NaN = missing. `GroupRelative(column)`
compares it with others and copies it to the call's tokens. Time is counted in calls of the batch. A
call without a row of a reward adds nothing to a sum over time, and a call from which no known
reward lies ahead is missing itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from agentrl.algorithms.credit.core import (
    Column,
    Credit,
    gae,
    level_of,
    rewards,
    standardise,
    was_truncated,
)
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import (
    Level,
    Unit,
    key,
    known_mean,
    lift,
    next_with_same_id,
    previous_from_next,
    scan,
    segment_reduce,
    units,
)
from agentrl.errors import TrainingError, nearest

HINDSIGHT = "transition:hindsight"  # a reward that the learner gives, see `hindsight`


def call_rewards(batch: Batch, reward: str | Column) -> Tensor:
    """[S] what each call received: a rollout's reward at its last call, a role's at the last call
    of the role, a call's at itself."""
    x, level = rewards(batch, reward), level_of(reward)
    if level == "transition":
        return x
    owner = batch.transition_rollout
    if level == "role":
        owner = key(owner, batch.transition_role)
    return torch.where(next_with_same_id(owner) < 0, lift(batch, x, level, "transition"), torch.nan)


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
        return discounted_return(x, self.gamma, next_with_same_id(batch.transition_rollout))


@dataclass(frozen=True, slots=True)
class PotentialShaping:
    """[S] gamma * phi(next state) - phi(state) of a potential phi given per call. Ng et al. 1999.

    phi is 0 after the end, and its last known value where a token limit cut the rollout off. Calls
    without phi are passed over, so that the sum over a rollout stays that of its ends."""

    reward: str  # phi
    gamma: float = 1.0
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        phi = call_rewards(batch, self.reward)
        known = ~phi.isnan()
        ids = torch.where(known, batch.transition_rollout, len(batch.rollouts))
        following = next_with_same_id(ids)
        end = torch.where(was_truncated(batch)[batch.transition_rollout], phi, 0.0)
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
        valued, following = ~v.isnan(), next_with_same_id(rollout)
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
class PeerValues:
    """[S] value of the state before each call: the mean return of the calls that other rollouts of
    the group made in the same state; missing where none did. With `StepGae` a critic without
    parameters, unbiased where equal states are equal."""

    reward: str | Column = "outcome"
    gamma: float = 1.0
    by: tuple[Unit, ...] = ("group", "state")
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        x = Returns(self.reward, self.gamma)(batch)
        ids = units(batch, "transition", *self.by)
        own = key(ids, batch.transition_rollout)
        known, x = ~x.isnan(), x.nan_to_num(nan=0.0)
        total, count = (
            segment_reduce(y, ids)[ids] - segment_reduce(y, own)[own] for y in (x, known)
        )
        return torch.where(count > 0, total / count, torch.nan)


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
class BiLevelGae:
    """[N] GAE over calls, whose returns end a GAE over the tokens within each. RAGEN, arXiv
    2504.20073.

    value: V [N] per token. gamma_high counts calls, gamma tokens."""

    value: Column
    reward: str | Column = "outcome"
    gamma_high: float = 0.95
    gamma: float = 1.0
    lam: float = 1.0

    def __call__(self, batch: Batch) -> Tensor:
        return self._solved(batch)[0]

    def returns(self, batch: Batch) -> Tensor:
        """What `value` should have said, float64 [N], NaN = missing."""
        return self._solved(batch)[1]

    def _solved(self, batch: Batch) -> tuple[Tensor, Tensor]:
        v, call = self.value(batch).double(), batch.token_transition
        following = next_with_same_id(call)
        last = following < 0
        v_end = torch.full((len(batch.transitions),), torch.nan, dtype=torch.float64)
        v_end[call[last]] = v[last]
        steps = StepGae(lambda _: v_end, self.reward, self.gamma_high, self.lam)
        returns = steps(batch) + v_end
        r = torch.where(last, returns[call].nan_to_num(nan=0.0), 0.0)
        missing = returns[call].isnan()
        advantage, targets = gae(r, v, following, self.gamma, self.lam)
        return advantage.masked_fill(missing, torch.nan), targets.masked_fill(missing, torch.nan)


@dataclass(frozen=True, slots=True)
class SameStateRelative:
    """[N] HGPO, arXiv 2602.22817: calls compared with those in the same state after the same k
    states before, for k = 0 .. depth; mean of the levels that teach something, weighted
    (k + 1) ** alpha. depth 0 is the step credit of GiGPO (arXiv 2505.10978)."""

    reward: str | Column = "outcome"
    gamma: float = 0.95
    depth: int = 0
    alpha: float = 1.0
    norm: Literal["none", "std"] = "none"

    def __call__(self, batch: Batch) -> Tensor:
        x = Returns(self.reward, self.gamma)(batch)
        before = previous_from_next(next_with_same_id(batch.transition_rollout))
        state = units(batch, "transition", "state")
        ids, back = units(batch, "transition", "group", "state"), before
        total, share = torch.zeros_like(x), torch.zeros_like(x)
        for k in range(self.depth + 1):
            advantage = standardise(x, ids, norm=self.norm).advantage
            weight = (k + 1) ** self.alpha * (advantage != 0)
            total, share = total + weight * advantage, share + weight
            ids = key(ids, torch.where(back >= 0, state[back], -1))
            back = torch.where(back >= 0, before[back], -1)
        advantage = torch.where(share > 0, total / share, 0.0)
        return torch.where(x.isnan(), torch.nan, advantage)[batch.token_transition]


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
        counts, following = begins | acts, next_with_same_id(rollout)
        r = call_rewards(batch, self.reward)
        known = ~discounted_return(r, 1.0, following).isnan()
        r = scan(r.nan_to_num(nan=0.0), 1.0, torch.where(counts[following], -1, following))
        time = torch.ones_like(r).masked_fill(acts, self.gamma)
        following = next_with_same_id(torch.where(counts, rollout, len(batch.rollouts)))
        inside = torch.where(begins[following], -1, following)  # the next call of the segment
        if self.part == "low":
            after = torch.where(begins, high, low)[following]
            after = torch.where(following >= 0, after, 0.0)
            advantage = scan((r + time * after - low).nan_to_num(nan=0.0), time * self.lam, inside)
            return torch.where(acts & known, advantage, torch.nan)
        segment = next_with_same_id(torch.where(begins, rollout, len(batch.rollouts)))
        after = torch.where(segment >= 0, high[segment], 0.0)
        decay = scan(time.log(), 1.0, inside).exp()
        delta = scan(r, time, inside) + decay * after - high
        advantage = scan(delta.nan_to_num(nan=0.0), decay * self.lam, segment)
        return torch.where(begins & known, advantage, torch.nan)


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
    following = next_with_same_id(batch.transition_rollout)
    ones = torch.ones_like(following, dtype=torch.float64)
    return gamma ** (scan(ones, 1.0, following) - 1)


@dataclass(frozen=True, slots=True)
class RoleFilter:
    """bool [N]: the tokens of the calls that these roles made. Raises TrainingError for a role that
    made none of the calls."""

    roles: tuple[str, ...]

    def __call__(self, batch: Batch) -> Tensor:
        for role in self.roles:
            if role not in batch.roles and batch.transitions:
                raise TrainingError(
                    f"step {batch.step}: none of the {len(batch.transitions)} calls was made in "
                    f"the role {role!r}; {nearest(role, batch.roles)}"
                )
        chosen = torch.tensor([role in self.roles for role in batch.roles], dtype=torch.bool)
        return chosen[batch.transition_role][batch.token_transition]
