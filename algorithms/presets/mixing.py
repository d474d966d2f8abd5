"""Named reward streams: process and result rewards, each answered for itself, mixed in one place.

Streams are mixed as advantages unless another way is chosen: each is compared and scaled on its
own, so none drowns another (iStar, arXiv 2509.19199). As returns: each is discounted and centred on
its own, and the sum is scaled. As rewards: the sum of what a call received is treated as one
reward. What a stream misses adds nothing; a token that all of them miss is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Annotated, ClassVar, Literal

import msgspec
import torch
from torch import Tensor

from agentrl.algorithms.credit.core import Column, Credit, GroupRelative, WeightedSum, standardise
from agentrl.algorithms.credit.turns import (
    CallRewards,
    PotentialShaping,
    Returns,
    TurnDiscount,
    call_rewards,
    discounted_return,
    turn_discounts,
)
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level, Unit, known_mean, lift, next_same, reduce_by
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.presets.registry import (
    PPO_CLIP,
    Cap,
    CreditFunction,
    Discount,
    Scale,
    Share,
    modifier,
    outcome_of,
    preset,
)
from agentrl.errors import ConfigError
from agentrl.types import Scope

Agreement = Literal["agree", "positive", "negative"]


@dataclass(frozen=True, slots=True)
class SumOfCalls(WeightedSum):
    """[S] weighted sum of columns of calls; what is missing in one counts as 0 there."""

    level: ClassVar[Level] = "transition"


@dataclass(frozen=True, slots=True)
class DiscountedAdvantages:
    """[S] advantages of calls, or of what is above them, fading towards the start."""

    rel: GroupRelative
    gamma: float = 1.0
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        x = lift(batch, self.rel.of_units(batch), self.rel.level, "transition")
        return x * turn_discounts(batch, self.gamma)


@dataclass(frozen=True, slots=True)
class ScaledByLargestReturn:
    """[S] rewards over the largest |return| of the batch. PRIME, arXiv 2502.01456."""

    reward: str | Column
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        x = call_rewards(batch, self.reward)
        returns = discounted_return(x, 1.0, next_same(batch.transition_rollout)).abs()
        largest = returns.nan_to_num(nan=0.0).max() if returns.numel() else torch.ones(())
        return x / largest if largest > 0 else x


@dataclass(frozen=True, slots=True)
class CentredOnOthers:
    """[S] rewards minus the mean over the other rollouts of the group of theirs per call; 0 where
    there is no other. PRIME, arXiv 2502.01456."""

    reward: str | Column
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        x, rollout, n = (
            call_rewards(batch, self.reward),
            batch.transition_rollout,
            len(batch.rollouts),
        )
        mean = known_mean(x, rollout, n)
        base = standardise(mean, batch.rollout_group, base="loo").baseline
        others = (
            reduce_by(~mean.isnan(), batch.rollout_group, len(batch.groups))[batch.rollout_group]
            > 1
        )
        return torch.where(others[rollout], x - base[rollout], 0.0 * x)


@dataclass(frozen=True, slots=True)
class ClampedAdvantage:
    """[N] a credit within +- limit."""

    credit: Credit
    limit: float

    def __call__(self, batch: Batch) -> Tensor:
        return self.credit(batch).clamp(-self.limit, self.limit)


@dataclass(frozen=True, slots=True)
class GatedByOutcome:
    """[N] a credit where the outcome agrees, else 0; missing where the outcome is.

    agree: both have the same sign. positive: what is good counts only where the outcome is good,
    negative: what is bad only where it is bad."""

    credit: Credit
    outcome: Credit
    how: Agreement

    def __call__(self, batch: Batch) -> Tensor:
        a, outcome = self.credit(batch), self.outcome(batch)
        agrees = a * outcome > 0
        if self.how != "agree":
            sign = 1 if self.how == "positive" else -1
            agrees |= sign * a <= 0
        return torch.where(outcome.isnan() | a.isnan(), torch.nan, torch.where(agrees, a, 0.0))


Way = Literal["advantages", "returns", "rewards"]


class RewardStream(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one reward becomes advantages."""

    scope: Scope = Scope.ROLLOUT
    weight: Share = 1.0
    gamma: Discount = 1.0  # per call
    potential: bool = False  # the rewards of calls are potentials of the states before them
    by: tuple[Unit, ...] = ("group",)  # whom to compare with
    # prime: what the other rollouts of the group got per call, taken off before the return.
    base: Literal["none", "mean", "loo", "prime"] = "mean"
    norm: Literal["none", "std", "mean", "prime"] = "none"  # prime: the largest |return|
    clip: Cap = inf  # largest |advantage|
    # agree: only where the advantage of `outcome` has the same sign; positive (negative): what is
    # good (bad) only where that of `outcome` is, too.
    gate: Literal["none"] | Agreement = "none"
    outcome: str = "outcome"  # the stream that gates
    required: bool = True  # a step in which nobody has it stops the run


Streams = Annotated[dict[str, RewardStream], msgspec.Meta(min_length=1)]


def mixed_credit(
    streams: Mapping[str, RewardStream],
    way: Way = "advantages",
    *,
    gamma: float = 1.0,
    by: tuple[Unit, ...] = ("group",),
    norm: Literal["none", "std"] = "none",
) -> Credit:
    """One credit of several streams by name. gamma (of rewards), by and norm are those of the sum,
    where it is not a sum of advantages.

    Raises ConfigError for an answer that cannot matter in this way of mixing."""
    _check(streams, "streams", way)
    if way == "advantages" and (gamma != 1 or norm != "none"):
        raise ConfigError(
            "algorithm.options: gamma and norm are those of a sum of returns or rewards; give "
            "each stream its own, or choose another way of mixing"
        )
    if way == "advantages":
        return WeightedSum(
            tuple((stream_advantage(name, streams), s.weight) for name, s in streams.items())
        )
    if way == "returns":
        terms = tuple((_centred(name, s), s.weight) for name, s in streams.items())
        return GroupRelative(SumOfCalls(terms), by=by, base="none", norm=norm)
    parts = tuple((_rewards(name, s), s.weight) for name, s in streams.items())
    return GroupRelative(Returns(SumOfCalls(parts), gamma), by=by, norm=norm)


def stream_reference(name: str, stream: RewardStream) -> str:
    """The reference of the stream's reward."""
    return name if stream.scope is Scope.ROLLOUT else f"{stream.scope}:{name}"


def optional_rewards(streams: Mapping[str, RewardStream]) -> tuple[str, ...]:
    """References of the rewards that a step may lack."""
    return tuple(
        stream_reference(name, stream) for name, stream in streams.items() if not stream.required
    )


def with_streams(host: Credit, streams: Mapping[str, RewardStream]) -> Credit:
    """A credit plus the advantages of streams, gated by the host unless one has that name."""
    _check(streams, "process_streams", "advantages", host=True)
    terms = ((stream_advantage(name, streams, host), s.weight) for name, s in streams.items())
    return WeightedSum(((host, 1.0), *terms))


def stream_advantage(
    name: str, streams: Mapping[str, RewardStream], host: Credit | None = None
) -> Credit:
    """The credit of one of the streams by itself, before its weight."""
    stream = streams[name]
    credit: Credit = _returns(name, stream)
    if stream.scope is not Scope.TRANSITION and stream.gamma != 1:
        credit = TurnDiscount(credit, stream.gamma)
    if stream.clip < inf:
        credit = ClampedAdvantage(credit, stream.clip)
    if stream.gate != "none":
        outcome = host
        if outcome is None or stream.outcome in streams:
            outcome = stream_advantage(stream.outcome, streams)
        credit = GatedByOutcome(credit, outcome, stream.gate)
    return credit


def _centred(name: str, stream: RewardStream) -> Column:
    fades = stream.scope is not Scope.TRANSITION
    return DiscountedAdvantages(_returns(name, stream), stream.gamma if fades else 1.0)


def _rewards(name: str, stream: RewardStream) -> Column:
    reference = stream_reference(name, stream)
    if stream.potential:
        return PotentialShaping(reference, stream.gamma)
    return CallRewards(reference)


def _returns(name: str, stream: RewardStream) -> GroupRelative:
    """What is compared: rollouts and roles by their reward, calls by their return."""
    norm = "none" if stream.norm == "prime" else stream.norm
    base = "none" if stream.base == "prime" else stream.base
    if stream.scope is not Scope.TRANSITION:
        return GroupRelative(stream_reference(name, stream), by=stream.by, base=base, norm=norm)
    rewards = _rewards(name, stream)
    if stream.norm == "prime":
        rewards = ScaledByLargestReturn(rewards)
    if stream.base == "prime":
        rewards = CentredOnOthers(rewards)
    return GroupRelative(Returns(rewards, stream.gamma), by=stream.by, base=base, norm=norm)


def _check(streams: Mapping[str, RewardStream], option: str, way: Way, host: bool = False) -> None:
    for name, stream in streams.items():
        for field, why in _faults(stream, streams, way, host):
            raise ConfigError(f"algorithm.options.{option}.{name}{field}: {why}")


def _faults(
    stream: RewardStream, streams: Mapping[str, RewardStream], way: Way, host: bool
) -> Iterator[tuple[str, str]]:
    """(field, what is wrong with it) of settings that could not matter."""
    idle = [] if way == "advantages" else ["norm", "clip", "gate"]
    if way == "rewards":
        idle += ["base", "by"] + ([] if stream.potential else ["gamma"])
    for field in idle:
        if getattr(stream, field) != getattr(RewardStream(), field):
            why = f"streams mixed as {way} have none of their own"
            yield f".{field}", f"{why}; leave it out, or mix them as advantages"
    of_calls = stream.potential or "prime" in (stream.base, stream.norm)
    if of_calls and stream.scope is not Scope.TRANSITION:
        why = "potentials and base or norm 'prime' are about rewards of calls"
        yield "", f"{why}; give it scope = 'transition'"
    gate = streams.get(stream.outcome, RewardStream() if host else None)
    if stream.gate != "none" and (gate is None or gate.gate != "none"):
        why = "there is no stream of that name without a gate of its own"
        yield f".outcome = {stream.outcome!r}", why


@preset("streams", clip=PPO_CLIP, kl=True)
def streams(
    *, streams: Streams, mix: Way = "advantages", gamma: Discount = 1.0, norm: Scale = "none"
) -> Algo:
    """Any number of process and result rewards, each with answers of its own, and where they are
    mixed. arXiv 2509.19199; see CREDIT.md."""
    credit = mixed_credit(streams, mix, gamma=gamma, norm=norm)
    algo = Algo(credit)
    return replace(algo, optional=optional_rewards(streams))


@modifier("process")
def with_process(algo: Algo, *, process_streams: Streams) -> Algo:
    """Adds the advantages of more rewards to the host's. arXiv 2509.19199; see CREDIT.md."""
    credit = with_streams(algo.credit, process_streams)
    return replace(algo, credit=credit, optional=algo.optional + optional_rewards(process_streams))


@modifier("credit")
def with_credit(algo: Algo, *, credit: CreditFunction, credit_reward: str = "") -> Algo:
    """Puts a function of yours, "file.py:name", in the place of the host's credit: it takes a batch
    and returns one advantage per token, NaN where it is missing. credit_reward: the reward that the
    batch carries for it; default: the host's. As in arXiv 2402.03300 advantages are of tokens."""
    return replace(algo, credit=credit, rewards=(credit_reward or outcome_of(algo),))
