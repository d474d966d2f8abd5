"""Credit: functions from the rewards of a batch to one advantage per action token.

A credit maps a batch to advantages A, float64 [N]. NaN means *missing*: a rollout without a reward
enters no statistic and not the loss. 0 means *no gradient*: the rollout equals its baseline or has
no others to be compared with; it counts in the denominators of the loss.

A credit may be nested in others: `nested_records`, `map_records` and `format_record` search, change
and format its records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from math import inf
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level, Unit, lift, next_same, owner, reduce_by, scan, units
from agentrl.algorithms.data.merge import split_reference
from agentrl.core.errors import TrainingError, nearest

Credit = Callable[[Batch], Tensor]
"""Batch -> A [N]."""
Column = Callable[[Batch], Tensor]
"""Batch -> one number per unit of a level [U]."""
Base = Literal["none", "mean", "loo"]
Norm = Literal["none", "std", "mean"]

ORDINARY_DEVIATION = 0.01  # standard deviation from which eps is as published
ROUNDING_SPREAD = 1e-6  # differences below this fraction of the largest reward are rounding errors


class Standardised(NamedTuple):
    """Advantages, baselines and scales, float64 [U] each; scale 0: not divided."""

    advantage: Tensor
    baseline: Tensor
    scale: Tensor


def standardise(
    x: Tensor,
    by: Tensor,
    *,
    base: Base | Tensor = "mean",
    norm: Norm = "none",
    norm_by: Tensor | None = None,
    w: Tensor | None = None,
    bw: Tensor | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Standardised:
    """(x - baseline) / scale among units of equal id.

    x [U]: NaN = missing: enters no statistic, result 0. by, norm_by (default `by`) int64 [U]: ids
    of the groups for the baseline, and for the scale. base: none, the mean, the mean of the others
    (leave-one-out), or given values [U]. norm: the standard deviation of x - baseline plus eps
    (below ORDINARY_DEVIATION eps shrinks in proportion, so that small rewards have the same
    advantages as large ones), or the mean of |x|, which is the mean of x if none is negative, and
    keeps the results of n rewards within n + 1 if mixed signs nearly cancel. w, bw [U]: frequency
    weights of all statistics, and of the baseline alone.

    The deviation is taken around the mean of x - baseline. That mean is 0 for the baselines "mean"
    and "loo" without weights; with given values (an EMA, a greedy rollout) it may not be, and then
    stays in the result but does not enter the scale.

    The result is exactly 0, not rounding noise divided by eps, for a unit without others to compare
    with, for one within ROUNDING_SPREAD of its baseline (relative to the largest |x| of its
    id), and if the mean or deviation to divide by is not positive."""
    valid = ~(x - base if isinstance(base, Tensor) else x).isnan()
    x = torch.where(valid, x.double(), 0.0)
    weight = valid.double() if w is None else valid * w.double()
    baseline = _baseline(x, by, base, weight if bw is None else valid * bw.double())
    centred = x - baseline
    live = valid & centred.isfinite()
    live &= centred.abs() > ROUNDING_SPREAD * reduce_by(x.abs(), by, how="amax")[by]
    if not isinstance(base, Tensor) and base != "none":
        live &= reduce_by(weight > 0, by)[by] > 1
    centred = torch.where(live, centred, 0.0)
    if norm == "none":
        return Standardised(centred, baseline, torch.zeros_like(centred))
    by = by if norm_by is None else norm_by
    total = reduce_by(weight, by)
    if norm == "mean":
        positive = reduce_by(weight * x, by) > 0
        scale = torch.where(positive, reduce_by(weight * x.abs(), by) / total, 0.0)[by]
    else:
        largest = reduce_by(x.abs(), by, how="amax")
        # Relative to the largest, so that squares neither overflow nor underflow.
        relative = torch.where(centred == 0, 0.0, centred / largest[by])
        mean = reduce_by(weight * relative, by) / total
        deviation = (reduce_by(weight * (relative - mean[by]) ** 2, by) / (total - ddof)).sqrt()
        std = largest * deviation
        std = std + eps * (std / ORDINARY_DEVIATION).clamp(max=1.0)
        scale = torch.where(deviation > ROUNDING_SPREAD, std, 0.0)[by]
    return Standardised(torch.where(scale > 0, centred / scale, 0.0), baseline, scale)


def _baseline(x: Tensor, by: Tensor, base: Base | Tensor, weight: Tensor) -> Tensor:
    if isinstance(base, Tensor):
        return base.double()
    if base == "none":
        return torch.zeros_like(x)
    total = reduce_by(weight, by)[by]
    mean = reduce_by(weight * x, by)[by] / total
    # Weights are frequencies: leave-one-out removes one whole unit of weight.
    return mean - (x - mean) / (total - 1).clamp(min=0) if base == "loo" else mean


def gae(r: Tensor, v: Tensor, following: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantages and returns, float64 [U] each. following [U]: index of the next unit;
    -1 ends a chain, with value 0 after it. arXiv 1506.02438."""
    after = torch.where(following >= 0, v.double()[following], 0.0)
    advantage = scan(r + gamma * after - v, gamma * lam, following)
    return advantage, advantage + v


@dataclass(frozen=True, slots=True)
class GroupRelative:
    """Rewards standardised among the units of one level and copied to their tokens, as in GRPO.

    reward: a reference or a function of the batch. at: the level of comparison, by default the
    reward's own (see `level_of`); a reward of a higher level is copied down to it first. The other
    fields are those of `standardise`; functions among them return values at that level."""

    reward: str | Column = "outcome"
    at: Level | None = None
    by: tuple[Unit, ...] = ("group",)
    base: Base | Column = "mean"
    norm: Norm = "none"
    norm_by: tuple[Unit, ...] | None = None
    w: Column | None = None
    bw: Column | None = None
    ddof: int = 1
    eps: float = 1e-6

    @property
    def level(self) -> Level:
        return self.at or level_of(self.reward)

    def standard(self, batch: Batch) -> tuple[Tensor, Standardised]:
        """Rewards at the level of comparison, NaN = missing, and their standardised values."""
        at = self.level
        x = lift(batch, rewards(batch, self.reward), level_of(self.reward), at)
        return x, standardise(
            x,
            units(batch, at, *self.by),
            base=self.base(batch) if callable(self.base) else self.base,
            norm=self.norm,
            norm_by=None if self.norm_by is None else units(batch, at, *self.norm_by),
            w=None if self.w is None else self.w(batch),
            bw=None if self.bw is None else self.bw(batch),
            ddof=self.ddof,
            eps=self.eps,
        )

    def unit_advantages(self, batch: Batch) -> Tensor:
        """Advantages at the level of comparison, NaN = missing."""
        x, standard = self.standard(batch)
        return torch.where(x.isnan(), torch.nan, standard.advantage)

    def __call__(self, batch: Batch) -> Tensor:
        return self.unit_advantages(batch)[owner(batch, self.level)]


@dataclass(frozen=True, slots=True)
class RewardToGo:
    """Discounted reward-to-go per token; the rollout's reward is at its last action token.

    gamma discounts per action token, not for tool results in between. token_cost [N]: subtracted
    from every token's reward."""

    reward: str | Column = "outcome"
    gamma: float = 1.0
    token_cost: Column | None = None

    def __call__(self, batch: Batch) -> Tensor:
        following = next_action(batch)
        return scan(
            terminal_rewards(batch, self.reward, following, self.token_cost), self.gamma, following
        )


@dataclass(frozen=True, slots=True)
class Gae:
    """GAE over the action tokens of a rollout; `value` returns V [N]. PPO, arXiv 1707.06347.

    A reward is terminal, even if a token limit truncated the rollout: bootstrapping on top of it
    would make the critic's target R + V, which no V satisfies. A truncated rollout without a reward
    bootstraps from its last V. token_cost [N]: subtracted from every token's reward."""

    value: Column
    reward: str | Column = "outcome"
    gamma: float = 1.0
    lam: float = 0.95
    token_cost: Column | None = None

    def __call__(self, batch: Batch) -> Tensor:
        following, v = next_action(batch), self.value(batch).double()
        r = terminal_rewards(batch, self.reward, following, self.token_cost)
        cut = was_truncated(batch)[batch.token_rollout] & (following < 0) & r.isnan()
        return gae(torch.where(cut, v, r), v, following, self.gamma, self.lam)[0]

    def returns(self, batch: Batch) -> Tensor:
        """The targets of `value`, float64 [N], NaN = missing."""
        return self(batch) + self.value(batch).double()


@dataclass(frozen=True, slots=True)
class CriticValues:
    """V [N] of the learner's critic."""

    def __call__(self, batch: Batch) -> Tensor:
        if batch.values.numel() != batch.n_tokens:
            raise TrainingError(
                f"step {batch.step}: the algorithm needs the values of a critic for "
                f"{batch.n_tokens} tokens, and there are none; choose a preset without "
                "a critic, or set its `value` to a reward that holds the values of calls"
            )
        if bad := int((~batch.values.isfinite()).sum()):
            raise TrainingError(
                f"step {batch.step}: {bad} of {batch.n_tokens} values of the critic are NaN or "
                "infinite; set a smaller critic.lr"
            )
        return batch.values.double()


@dataclass(frozen=True, slots=True)
class Whiten:
    """A credit normalised to mean 0 and standard deviation 1 over the tokens of the batch, or of
    each unit `by`. REINFORCE++, arXiv 2501.03262."""

    credit: Credit
    by: tuple[Unit, ...] = ("all",)

    def __call__(self, batch: Batch) -> Tensor:
        advantage = self.credit(batch)
        ids = units(batch, "token", *self.by)
        white = standardise(advantage, ids, norm="std", eps=1e-8).advantage
        return torch.where(advantage.isnan(), torch.nan, white)


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """Weighted sum of credits (or of columns of one level); a weight may be a column. A value
    missing in some terms counts as 0 in them; one missing in all terms is missing."""

    terms: tuple[tuple[Credit, float | Column], ...]

    def __call__(self, batch: Batch) -> Tensor:
        parts = [c(batch) * (w(batch) if callable(w) else w) for c, w in self.terms]
        missing = torch.stack([part.isnan() for part in parts]).all(0)
        total = sum((part.nan_to_num(nan=0.0) for part in parts), torch.zeros(()))
        return torch.where(missing, torch.nan, total)


def weighted_sum(*terms: tuple[Credit, float | Column]) -> WeightedSum:
    return WeightedSum(terms)


@dataclass(frozen=True, slots=True)
class ZeroAdvantage:
    """Zero advantages: the algorithm learns from its penalties alone."""

    def __call__(self, batch: Batch) -> Tensor:
        return torch.zeros(batch.n_tokens, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Imitated:
    """Ones [N]: psi is the token's weight, and the loss its negative log-likelihood."""

    def __call__(self, batch: Batch) -> Tensor:
        return torch.ones(batch.n_tokens, dtype=torch.float64)


def level_of(reward: str | Column) -> Level:
    """The scope of a reward reference, or a function's `level` (default: rollout)."""
    if isinstance(reward, str):
        return split_reference(reward)[0].value
    level: Level = getattr(reward, "level", "rollout")
    return level


def rewards(batch: Batch, reward: str | Column) -> Tensor:
    """The values of a reward reference or of a function of the batch, float64, NaN = missing.

    Raises TrainingError if the batch does not have the reward, and for infinite values."""
    if isinstance(reward, str) and reward not in batch.rewards:
        raise TrainingError(
            f"step {batch.step}: none of {len(batch.rollouts)} rollouts has a reward {reward!r}; "
            f"{nearest(reward, batch.rewards)}"
        )
    x = batch.rewards[reward].double() if isinstance(reward, str) else reward(batch)
    if infinite := int(x.isinf().sum()):
        raise TrainingError(
            f"step {batch.step}: {infinite} of {x.numel()} values of reward {reward!r} are infinite"
        )
    return x


def rollout_rewards(batch: Batch, reward: str | Column) -> Tensor:
    """One reward per rollout, float64 [U]. Accepts a reward of roles or calls if there is exactly
    one per rollout; raises TrainingError otherwise."""
    x, n = rewards(batch, reward), len(batch.rollouts)
    if x.numel() != n:
        raise TrainingError(
            f"step {batch.step}: the algorithm needs one reward per rollout, and {reward!r} has "
            f"{x.numel()} values for {n}; name a reward of rollouts, or choose a preset that "
            "compares roles or calls"
        )
    return x


def terminal_rewards(
    batch: Batch, reward: str | Column, following: Tensor, token_cost: Column | None = None
) -> Tensor:
    """The rollout's reward at its last action token, else 0, minus token costs: float64 [N]."""
    r = torch.where(following < 0, rollout_rewards(batch, reward)[batch.token_rollout], 0.0)
    return r if token_cost is None else r - token_cost(batch)


def next_action(batch: Batch) -> Tensor:
    """Index of the rollout's next action token, in call order, int64 [N]; -1 at its end."""
    return next_same(batch.token_rollout, batch.token_transition)


def was_truncated(batch: Batch) -> Tensor:
    """Whether a token limit truncated the last call of each rollout, bool [U]."""
    cut = torch.zeros(len(batch.rollouts), dtype=torch.bool)
    if batch.transition_truncated.numel():
        last = next_same(batch.transition_rollout) < 0
        cut[batch.transition_rollout[last]] = batch.transition_truncated[last]
    return cut


def response_lengths(batch: Batch) -> Tensor:
    """Action tokens per rollout, float64 [U]."""
    return reduce_by(torch.ones(batch.n_tokens), batch.token_rollout, len(batch.rollouts))


def has_variance(batch: Batch, reward: str | Column = "outcome") -> Tensor:
    """Whether the known rewards of each unit's group differ; bool, one per unit of the reward."""
    x, group = rewards(batch, reward), units(batch, level_of(reward), "group")
    high = reduce_by(x.nan_to_num(nan=-torch.inf), group, how="amax")
    low = reduce_by(x.nan_to_num(nan=torch.inf), group, how="amin")
    largest = reduce_by(x.nan_to_num(nan=0.0).abs(), group, how="amax")
    return (high - low > ROUNDING_SPREAD * largest)[group]


@dataclass(frozen=True, slots=True)
class AllFilters:
    """Tokens that all filters keep, bool [N]."""

    keep: tuple[Column, ...]

    def __call__(self, batch: Batch) -> Tensor:
        return torch.stack([filter_(batch) for filter_ in self.keep]).all(0)


@dataclass(frozen=True, slots=True)
class TokenKLPenalty:
    """KL penalty to the reference per token, in rewards: beta * (sampler - reference), float64 [N].
    Its sum over a rollout is an unbiased estimate of beta * KL, as the sampler chose the tokens.
    arXiv 1909.08593."""

    beta: float

    def __call__(self, batch: Batch) -> Tensor:
        if batch.reference.numel() != batch.n_tokens:
            raise TrainingError(
                f"step {batch.step}: the algorithm needs the log-probs of a reference model for "
                f"{batch.n_tokens} tokens, and there are none; set its coefficient to 0"
            )
        return self.beta * (batch.sampler_logprobs.double() - batch.reference.double())


def nested_records(part: object) -> Iterator[object]:
    """Yield a credit and every record inside it, outermost first."""
    inside = part if isinstance(part, tuple) else ()
    if is_dataclass(part) and not isinstance(part, type):
        yield part
        inside = tuple(getattr(part, item.name) for item in fields(part))
    for item in inside:
        yield from nested_records(item)


def rewards_read(*parts: object) -> tuple[str, ...]:
    """The reward references that credits read: every `reward` field that is a string, in order."""
    references = (getattr(record, "reward", None) for record in nested_records(parts))
    return tuple(dict.fromkeys(name for name in references if isinstance(name, str)))


def map_records(part: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of a credit with `change` applied to every record inside it, innermost first."""
    if isinstance(part, tuple):
        return tuple(map_records(item, change) for item in part)
    if not is_dataclass(part) or isinstance(part, type):
        return part
    inner = {item.name: map_records(getattr(part, item.name), change) for item in fields(part)}
    return change(replace(part, **inner))


def format_record(record: object, leave_out: tuple[str, ...] = ()) -> str:
    """Format a record with the fields that differ from their defaults, as in
    GroupRelative('outcome', norm='std'), or, if all its fields are numbers, with those that are
    finite, Clip(0.2, hi=0.28)."""
    if isinstance(record, tuple):
        return f"({', '.join(map(format_record, record))}{',' if len(record) == 1 else ''})"
    if not is_dataclass(record) or isinstance(record, type):
        return getattr(record, "__name__", repr(record))
    shown = []
    numeric = all(isinstance(getattr(record, field.name), float) for field in fields(record))
    for number, field in enumerate(fields(record)):
        value = getattr(record, field.name)
        usual = value == (inf if numeric else field.default)
        if field.name in leave_out or (number and usual):
            continue
        shown.append(f"{field.name}={format_record(value)}" if number else format_record(value))
    return f"{type(record).__name__}({', '.join(shown)})"
