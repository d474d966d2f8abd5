"""Credit of the calls of a rollout: rewards, returns, values, potentials, advantages, roles; and
baselines that are running means of earlier steps, which checkpoints store.

A column returns one number per call, float64 [S]; NaN = missing. `GroupRelative(column)` compares
calls and copies the result to their tokens. Time is counted in calls of the batch. A call without a
reward adds nothing to a sum over time; it is missing if no known reward follows it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import msgspec
import torch
from torch import Tensor

from agentrl.algorithms.credit import core
from agentrl.algorithms.credit.core import Column, Credit, level_of, rewards, was_truncated
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level, key, lift, next_same, reduce_by, rollout_of, scan
from agentrl.algorithms.data.state import RememberedColumn, StatePart
from agentrl.core.errors import TrainingError, nearest
from agentrl.core.types import Json, Rollout


@dataclass(slots=True)
class EmaMeans:
    """One running mean per name, b <- decay * b + (1 - decay) * x, starting at 0."""

    decay: float
    values: dict[str, float] = field(default_factory=dict)

    def read(self, names: Sequence[str], x: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Mean of each name just before its x (float64 [U]) updates it, float64 [U], and the means
        after all updates. Missing x (NaN) are skipped."""
        _, ids = _numbered(names)
        start = torch.tensor([self.values.get(name, 0.0) for name in names], dtype=torch.float64)
        present = (~x.isnan()).nonzero().squeeze(1)
        previous = next_same(ids[present], torch.arange(present.numel() - 1, -1, -1))
        first = torch.where(previous < 0, self.decay * start[present], 0.0)
        after = scan((1 - self.decay) * x[present] + first, self.decay, previous)
        before = start.clone()
        before[present] = torch.where(previous < 0, start[present], after[previous])
        newest = {names[at]: float(b) for at, b in zip(present.tolist(), after, strict=True)}
        return before, self.values | newest

    def dump(self) -> Json:
        return self.values

    def restore(self, data: Json) -> None:
        self.values = msgspec.convert(data, dict[str, float])


@dataclass(slots=True)
class CountedMeans:
    """Mean and count of all values of each name."""

    values: dict[str, tuple[float, int]] = field(default_factory=dict)

    def read(self, names: Sequence[str], x: Tensor) -> tuple[Tensor, dict[str, tuple[float, int]]]:
        """Mean of each name before x (float64 [U]), 0 for a new name, float64 [U], and the means
        including x. Missing x (NaN) are skipped."""
        index, ids = _numbered(names)
        count = reduce_by(~x.isnan(), ids, len(index)).tolist()
        total = reduce_by(x.nan_to_num(nan=0.0), ids, len(index)).tolist()
        after = dict(self.values)
        for name, number in index.items():
            mean, old_count = self.values.get(name, (0.0, 0))
            if count[number]:
                new_count = old_count + int(count[number])
                after[name] = (mean + (total[number] - count[number] * mean) / new_count, new_count)
        before = [self.values.get(name, (0.0, 0))[0] for name in names]
        return torch.tensor(before, dtype=torch.float64), after

    def dump(self) -> Json:
        return self.values

    def restore(self, data: Json) -> None:
        self.values = msgspec.convert(data, dict[str, tuple[float, int]])


def _numbered(names: Sequence[str]) -> tuple[dict[str, int], Tensor]:
    """The index of each distinct name, and the indices of `names`, int64 [U]."""
    index = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return index, torch.tensor([index[name] for name in names], dtype=torch.int64)


class RunningMean(RememberedColumn):
    """A remembered column with one mean per name."""

    __slots__ = ()

    def names(self, batch: Batch, rollouts: Sequence[Rollout]) -> list[str]:
        """The name of each unit's mean."""
        raise NotImplementedError

    def observed(self, batch: Batch) -> Tensor:
        """The number of each unit that updates its mean, float64, NaN = missing."""
        raise NotImplementedError

    def recall(
        self, part: StatePart, batch: Batch, rollouts: Sequence[Rollout]
    ) -> tuple[Tensor, StatePart]:
        assert isinstance(part, EmaMeans | CountedMeans)
        column, means = part.read(self.names(batch, rollouts), self.observed(batch))
        return column, replace(part, values=means)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Ema(RunningMean):
    """The running mean of earlier rewards as a baseline: one per role if compared per role or call,
    and one per value of the task field `key`. The rewards of one step update it in the order of
    their rollouts. RAE of SPIRAL, arXiv 2506.24119.

    at: as in `GroupRelative`."""

    reward: str | Column = "outcome"
    decay: float = 0.95
    key: str = ""
    at: Level | None = None
    stored_as: ClassVar[str] = "running-mean"

    @property
    def level(self) -> Level:
        return self.at or level_of(self.reward)

    def part(self, seed: int) -> EmaMeans:
        return EmaMeans(self.decay)

    def names(self, batch: Batch, rollouts: Sequence[Rollout]) -> list[str]:
        keys = [_field(rollout, self.key) if self.key else "" for rollout in rollouts]
        pairs = zip(keys, rollouts, strict=True)  # each prompt candidate has its own means
        keys = [f"{row.candidate}/{key}" if row.candidate else key for key, row in pairs]
        owners = rollout_of(batch, self.level).tolist()
        roles = [""] * len(owners)
        if self.level == "role":
            roles = batch.roles * len(rollouts)
        elif self.level == "transition":
            roles = [batch.roles[role] for role in batch.transition_role.tolist()]
        return [f"{keys[owner]}/{role}" for owner, role in zip(owners, roles, strict=True)]

    def observed(self, batch: Batch) -> Tensor:
        return lift(batch, rewards(batch, self.reward), level_of(self.reward), self.level)


def _field(rollout: Rollout, key: str) -> str:
    if key not in rollout.task:
        raise TrainingError(
            f"algorithm.options: the task of group {rollout.group!r} has no field {key!r}, "
            f"which the option `key` names; {nearest(key, rollout.task)}"
        )
    value = rollout.task[key]
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def call_rewards(batch: Batch, reward: str | Column) -> Tensor:
    """The reward that each call received, [S]: a rollout's reward at its last call, a role's at the
    role's last call, a call's own; NaN elsewhere."""
    x, level = rewards(batch, reward), core.level_of(reward)
    if level == "transition":
        return x
    owner = batch.transition_rollout
    if level == "role":
        owner = key(owner, batch.transition_role)
    return torch.where(next_same(owner) < 0, lift(batch, x, level, "transition"), torch.nan)


def discounted_return(x: Tensor, decay: Tensor | float, following: Tensor) -> Tensor:
    """Discounted sum of the known x along `following`; NaN if no known x has a weight above 0."""
    has_return = scan((~x.isnan()).double(), decay, following) > 0
    return torch.where(has_return, scan(x.nan_to_num(nan=0.0), decay, following), torch.nan)


@dataclass(frozen=True, slots=True)
class Returns:
    """Discounted return of each call, from its own and the rollout's later rewards, [S]."""

    reward: str | Column = "outcome"
    gamma: float = 1.0
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        following = next_same(batch.transition_rollout)
        return discounted_return(call_rewards(batch, self.reward), self.gamma, following)


Agreement = Literal["agree", "positive", "negative"]


@dataclass(frozen=True, slots=True)
class CallRewards:
    """`call_rewards` as a column, [S]."""

    reward: str | Column = "outcome"
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        return call_rewards(batch, self.reward)


@dataclass(frozen=True, slots=True)
class PotentialShaping:
    """Potential-based shaping: gamma * phi(next state) - phi(state) per call, [S]. `reward` is the
    potential phi of the state before each call. Ng et al. 1999.

    phi is 0 after the end, and an outcome is terminal even if a token limit truncated the rollout:
    the shaping then adds a function of the first state alone and leaves the policy gradient
    unchanged. A truncated rollout without an outcome uses its last known phi as the phi after the
    end. Calls without phi are skipped."""

    reward: str
    gamma: float = 1.0
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        phi = call_rewards(batch, self.reward)
        has_phi = ~phi.isnan()
        following = next_same(torch.where(has_phi, batch.transition_rollout, len(batch.rollouts)))
        unfinished = was_truncated(batch) & ~has_outcome(batch)
        end = torch.where(unfinished[batch.transition_rollout], phi, 0.0)
        return self.gamma * torch.where(following >= 0, phi[following], end) - phi


@dataclass(frozen=True, slots=True)
class StepGae:
    """GAE with calls as actions, [S]: Agent-R1 (arXiv 2511.14460), Turn-PPO (2512.17008), PSPO
    (2601.10029). `lam` = 0 with values from fresh continuations is VinePPO (2410.01679).

    value: returns V of the state before each call. A call without V is merged into the call before
    it, which gets its reward. Its own baseline is `base`, which can be any value that does not
    depend on the call; without `base` its advantage is 0, or missing if it has no tokens.

    A reward is terminal even if a token limit truncated the rollout. A truncated rollout that has
    no rewards after its last call with a value bootstraps from that value."""

    value: Column
    reward: str | Column = "outcome"
    gamma: float = 1.0
    lam: float = 1.0
    base: Column | None = None
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        rollout, x = batch.transition_rollout, call_rewards(batch, self.reward)
        v = self.value(batch)
        valued, following = ~v.isnan(), next_same(rollout)
        # Rewards and number of calls up to the next call with a value, and the index of that call.
        inside = torch.where(valued[following], -1, following)
        has_reward = ~discounted_return(x, 1.0, inside).isnan()
        r = scan(x.nan_to_num(nan=0.0), self.gamma, inside)
        gamma = self.gamma ** scan(torch.ones_like(r), 1.0, inside)
        number = torch.where(valued[following], following + 1, 0)
        following = scan(number, 1.0, inside).long() - 1
        cut = was_truncated(batch)[rollout] & (following < 0) & valued & ~has_reward
        r = torch.where(cut, v, r)
        missing = scan((has_reward | cut).double(), 1.0, following) == 0
        v = v if self.base is None else torch.where(valued, v, self.base(batch))
        after = torch.where(following >= 0, v[following], 0.0)
        learned = ~v.isnan()
        delta = torch.where(learned, r + gamma * after - v, 0.0)
        advantage = scan(delta, gamma * self.lam, torch.where(learned, following, -1))
        has_tokens = torch.zeros(len(rollout), dtype=torch.bool)
        has_tokens[batch.token_transition] = True
        return torch.where(missing | ~(learned | has_tokens), torch.nan, advantage)

    def returns(self, batch: Batch) -> Tensor:
        """The targets of `value` at the first token of each call, float64 [N], NaN elsewhere: the
        value is that of the state before the call."""
        return at_first_tokens(batch, self(batch) + self.value(batch))


@dataclass(frozen=True, slots=True)
class ValuesFromReward:
    """The value of the state before each call, [S], from a reward that every call must have."""

    reward: str
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        v = call_rewards(batch, self.reward)
        if missing := int(v.isnan().sum()):
            raise TrainingError(
                f"step {batch.step}: {missing} of {v.numel()} calls have no value {self.reward!r}, "
                "which the algorithm needs for every call"
            )
        return v


@dataclass(frozen=True, slots=True)
class FirstTokenValues:
    """`value` [N] at the first token of each call, [S]; missing for calls without tokens."""

    value: Column
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        starts = is_first_token(batch)
        out = torch.full((len(batch.transitions),), torch.nan, dtype=torch.float64)
        out[batch.token_transition[starts]] = self.value(batch)[starts].double()
        return out


@dataclass(frozen=True, slots=True)
class TurnDiscount:
    """A credit [N] times gamma ** (number of later calls). SPIRAL, arXiv 2506.24119."""

    credit: Credit
    gamma: float

    def __call__(self, batch: Batch) -> Tensor:
        return self.credit(batch) * call_discounts(batch, self.gamma)[batch.token_transition]


@dataclass(frozen=True, slots=True)
class GatedByOutcome:
    """A credit, set to 0 where it disagrees with the outcome's advantage, [N]; missing where either
    is missing.

    how: "agree": both must have the same sign; "positive": a positive advantage counts only if the
    outcome's is positive; "negative": a negative one counts only if the outcome's is negative."""

    credit: Credit
    outcome: Credit
    how: Agreement

    def __call__(self, batch: Batch) -> Tensor:
        a, result = self.credit(batch), self.outcome(batch)
        agrees = a * result > 0
        if self.how != "agree":
            agrees |= (a <= 0) if self.how == "positive" else (a >= 0)
        return torch.where(result.isnan() | a.isnan(), torch.nan, torch.where(agrees, a, 0.0))


def has_outcome(batch: Batch) -> Tensor:
    """Whether the batch has a reward of each rollout or of one of its roles, bool [U]."""
    has = torch.zeros(len(batch.rollouts), dtype=torch.bool)
    for name, x in batch.rewards.items():
        if (level := core.level_of(name)) in ("rollout", "role"):
            has[rollout_of(batch, level)[~x.isnan()]] = True
    return has


def is_first_token(batch: Batch) -> Tensor:
    """Whether each token is the first of its call, bool [N]."""
    call = batch.token_transition
    starts = torch.ones_like(call, dtype=torch.bool)
    starts[1:] = call[1:] != call[:-1]
    return starts


def at_first_tokens(batch: Batch, x: Tensor) -> Tensor:
    """x [S] at the first token of each call, NaN at the others, [N]."""
    return torch.where(is_first_token(batch), x[batch.token_transition], torch.nan)


def made_by(batch: Batch, roles: Collection[str]) -> Tensor:
    """Whether each call was made in one of the roles, bool [S]."""
    chosen = torch.tensor([role in roles for role in batch.roles], dtype=torch.bool)
    return chosen[batch.transition_role]


def need_roles(batch: Batch, roles: Collection[str]) -> None:
    """Raises TrainingError for a role without calls."""
    for role in roles:
        if role not in batch.roles and batch.transitions:
            raise TrainingError(
                f"step {batch.step}: none of the {len(batch.transitions)} calls of the policy was "
                f"made in the role {role!r}; {nearest(role, batch.roles)}"
            )


def call_discounts(batch: Batch, gamma: float) -> Tensor:
    """gamma ** (number of the rollout's later calls), [S]."""
    following = next_same(batch.transition_rollout)
    ones = torch.ones_like(following, dtype=torch.float64)
    return gamma ** (scan(ones, 1.0, following) - 1)


def value_of(name: str) -> Column:
    """The column of call values: reward `name`, or the critic's values if it is empty."""
    return ValuesFromReward(name) if name else FirstTokenValues(core.CriticValues())
