"""Mixing of process and outcome rewards: named reward streams, PRIME, iStar, ArCHer and MT-GRPO.

Streams are mixed in one of three ways. "advantages" (the default): each is centred and scaled
separately, so that none dominates (iStar, arXiv 2509.19199). "returns": each is discounted and
centred separately, and the sum is scaled. "rewards": the sum of a call's rewards is one reward. A
missing value adds nothing; a token is missing if all streams are missing for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Annotated, ClassVar, Literal

import msgspec
import torch
from torch import Tensor

from agentrl.algorithms.credit import call_credit, core
from agentrl.algorithms.credit.core import Column, Credit, GroupRelative, WeightedSum
from agentrl.algorithms.credit_blocks import calls
from agentrl.algorithms.credit_blocks.calls import Agreement, GatedByOutcome
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level, Unit, known_mean, lift, next_same, reduce_by
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.presets import declare
from agentrl.algorithms.presets.declare import PPO_CLIP, Cap, Discount, Share, modifier, preset
from agentrl.errors import ConfigError
from agentrl.types import Scope

Way = Literal["advantages", "returns", "rewards"]


class SumOfCalls(WeightedSum):
    """`WeightedSum` of columns of calls, [S]."""

    level: ClassVar[Level] = "transition"


@dataclass(frozen=True, slots=True)
class DiscountedAdvantages:
    """Advantages of calls, roles or rollouts times gamma ** (number of later calls), [S]."""

    rel: GroupRelative
    gamma: float = 1.0
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        x = lift(batch, self.rel.unit_advantages(batch), self.rel.level, "transition")
        return x * calls.call_discounts(batch, self.gamma)


@dataclass(frozen=True, slots=True)
class ScaledByLargestReturn:
    """Rewards of calls divided by the batch's largest |return|, [S]. PRIME, arXiv 2502.01456."""

    reward: str | Column
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        x = call_credit.call_rewards(batch, self.reward)
        returns = call_credit.discounted_return(x, 1.0, next_same(batch.transition_rollout)).abs()
        largest = returns.nan_to_num(nan=0.0).max() if returns.numel() else torch.ones(())
        return x / largest if largest > 0 else x


@dataclass(frozen=True, slots=True)
class CentredOnOthers:
    """Rewards of calls minus the mean reward per call of the group's other rollouts, [S]; 0 if
    there is no other. PRIME, arXiv 2502.01456."""

    reward: str | Column
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        x = call_credit.call_rewards(batch, self.reward)
        rollout, group = batch.transition_rollout, batch.rollout_group
        mean = known_mean(x, rollout, len(batch.rollouts))
        base = core.standardise(mean, group, base="loo").baseline
        others = reduce_by(~mean.isnan(), group, len(batch.groups))[group] > 1
        return torch.where(others[rollout], x - base[rollout], 0.0 * x)


@dataclass(frozen=True, slots=True)
class ClampedAdvantage:
    """A credit clamped to +- limit, [N]."""

    credit: Credit
    limit: float

    def __call__(self, batch: Batch) -> Tensor:
        return self.credit(batch).clamp(-self.limit, self.limit)


class RewardStream(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings that turn one reward into advantages."""

    scope: Scope = Scope.ROLLOUT
    weight: Share = 1.0
    gamma: Discount = 1.0  # per call
    potential: bool = False  # a call's reward is the potential of the state before it
    by: tuple[Unit, ...] = ("group",)  # the comparison group
    # prime: the mean reward per call of the group's other rollouts, subtracted before the return.
    base: Literal["none", "mean", "loo", "prime"] = "mean"
    norm: Literal["none", "std", "mean", "prime"] = "none"  # prime: the largest |return|
    clip: Cap = inf  # largest |advantage|
    # See `GatedByOutcome`: the advantage counts only if that of the stream `outcome` agrees.
    gate: Literal["none"] | Agreement = "none"
    outcome: str = "outcome"
    required: bool = True  # a step in which no rollout has it ends the run


Streams = Annotated[dict[str, RewardStream], msgspec.Meta(min_length=1)]


def mixed_credit(
    streams: Mapping[str, RewardStream],
    way: Way = "advantages",
    *,
    gamma: float = 1.0,
    by: tuple[Unit, ...] = ("group",),
    norm: Literal["none", "std"] = "none",
) -> Credit:
    """Mix named streams into one credit. gamma (for rewards only), by and norm apply to the sum of
    returns or rewards. Raises ConfigError for an option that has no effect in this way of mixing.
    """
    _check(streams, "streams", way)
    if way == "advantages":
        if gamma != 1 or norm != "none":
            raise ConfigError(
                "algorithm.options: gamma and norm are those of a sum of returns or rewards; set "
                "them for each stream, or set mix to 'returns' or 'rewards'"
            )
        return WeightedSum(
            tuple((stream_advantage(name, streams), s.weight) for name, s in streams.items())
        )
    if way == "returns":
        returns = (
            (_compared(name, s), 1.0 if s.scope is Scope.TRANSITION else s.gamma, s.weight)
            for name, s in streams.items()
        )
        terms = tuple((DiscountedAdvantages(rel, decay), weight) for rel, decay, weight in returns)
        return GroupRelative(SumOfCalls(terms), by=by, base="none", norm=norm)
    parts = tuple((_rewards(name, s), s.weight) for name, s in streams.items())
    return GroupRelative(call_credit.Returns(SumOfCalls(parts), gamma), by=by, norm=norm)


def stream_advantage(
    name: str, streams: Mapping[str, RewardStream], host: Credit | None = None
) -> Credit:
    """The unweighted credit of one stream. host: gates it if `stream.outcome` is no stream."""
    stream = streams[name]
    credit: Credit = _compared(name, stream)
    if stream.scope is not Scope.TRANSITION and stream.gamma != 1:
        credit = calls.TurnDiscount(credit, stream.gamma)
    if stream.clip < inf:
        credit = ClampedAdvantage(credit, stream.clip)
    if stream.gate == "none":
        return credit
    if host is None or stream.outcome in streams:
        host = stream_advantage(stream.outcome, streams)
    return GatedByOutcome(credit, host, stream.gate)


def _compared(name: str, stream: RewardStream) -> GroupRelative:
    """Compare rollouts and roles by their reward, calls by their return."""
    norm = "none" if stream.norm == "prime" else stream.norm
    base = "none" if stream.base == "prime" else stream.base
    if stream.scope is not Scope.TRANSITION:
        return GroupRelative(_reference(name, stream), by=stream.by, base=base, norm=norm)
    rewards = _rewards(name, stream)
    if stream.norm == "prime":
        rewards = ScaledByLargestReturn(rewards)
    if stream.base == "prime":
        rewards = CentredOnOthers(rewards)
    return GroupRelative(
        call_credit.Returns(rewards, stream.gamma), by=stream.by, base=base, norm=norm
    )


def _rewards(name: str, stream: RewardStream) -> Column:
    reference = _reference(name, stream)
    if stream.potential:
        return calls.PotentialShaping(reference, stream.gamma)
    return calls.CallRewards(reference)


def _reference(name: str, stream: RewardStream) -> str:
    return name if stream.scope is Scope.ROLLOUT else f"{stream.scope}:{name}"


def _optional(streams: Mapping[str, RewardStream]) -> tuple[str, ...]:
    """References of the rewards that a step may lack."""
    return tuple(_reference(name, s) for name, s in streams.items() if not s.required)


def _check(streams: Mapping[str, RewardStream], option: str, way: Way, host: bool = False) -> None:
    """Raise ConfigError for settings that have no effect."""
    for name, stream in streams.items():
        key = f"algorithm.options.{option}.{name}"
        unused = [] if way == "advantages" else ["norm", "clip", "gate"]
        if way == "rewards":
            unused += ["base", "by"] + ([] if stream.potential else ["gamma"])
        for field in unused:
            if getattr(stream, field) != getattr(RewardStream(), field):
                raise ConfigError(
                    f"{key}.{field}: has no effect on streams mixed as {way}; remove it, or mix "
                    "them as advantages"
                )
        of_calls = stream.potential or "prime" in (stream.base, stream.norm)
        if of_calls and stream.scope is not Scope.TRANSITION:
            raise ConfigError(
                f"{key}: potential and base or norm 'prime' apply to rewards of calls; set "
                "scope = 'transition'"
            )
        gate = streams.get(stream.outcome, RewardStream() if host else None)
        if stream.gate != "none" and (gate is None or gate.gate != "none"):
            raise ConfigError(
                f"{key}.outcome = {stream.outcome!r}: there is no stream of that name without a "
                "gate of its own"
            )


@preset("streams", usual=True, clip=PPO_CLIP, kl=True)
def streams(
    *,
    streams: Streams,
    mix: Way = "advantages",
    gamma: Discount = 1.0,
    norm: declare.Scale = "none",
) -> Algo:
    """Any number of process and outcome rewards, each with its own options, mixed as advantages,
    returns or rewards. arXiv 2509.19199; see CREDIT.md."""
    return Algo(mixed_credit(streams, mix, gamma=gamma, norm=norm), optional=_optional(streams))


@modifier("process", usual=True, prefix="process_")
def with_process(algo: Algo, *, streams: Streams) -> Algo:
    """Adds the advantages of more rewards to the host's. arXiv 2509.19199; see CREDIT.md."""
    _check(streams, "process_streams", "advantages", host=True)
    terms = (
        (stream_advantage(name, streams, algo.credit), s.weight) for name, s in streams.items()
    )
    credit = WeightedSum(((algo.credit, 1.0), *terms))
    return replace(algo, credit=credit, optional=algo.optional + _optional(streams))
