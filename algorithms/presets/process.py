"""Process rewards besides outcomes, and credit of calls in hindsight.

Named reward streams, PRIME, iStar, ArCHer and MT-GRPO mix process and outcome rewards in one of
three ways. "advantages" (the default): each is centred and scaled separately, so that none
dominates (iStar, arXiv 2509.19199). "returns": each is discounted and centred separately, and the
sum is scaled. "rewards": the sum of a call's rewards is one reward. A missing value adds nothing; a
token is missing if all streams are missing for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf, isnan
from typing import Annotated, ClassVar, Literal

import msgspec
import torch
from msgspec import structs
from torch import Tensor

from agentrl.algorithms.credit import calls, core
from agentrl.algorithms.credit.calls import Agreement, CallRewards, GatedByOutcome
from agentrl.algorithms.credit.core import Column, Credit, GroupRelative, WeightedSum, weighted_sum
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level, Unit, known_mean, lift, next_same, reduce_by
from agentrl.algorithms.data.merge import build_batch, map_calls, trainable
from agentrl.algorithms.objective.core import TOKENS, Algo
from agentrl.algorithms.objective.prepare import TrainedPolicy, with_call_rewards
from agentrl.algorithms.presets import declare
from agentrl.algorithms.presets.declare import PPO_CLIP, Cap, Discount, Share, modifier, preset
from agentrl.core import types
from agentrl.core.errors import ConfigError
from agentrl.core.types import Group, Rollout, Scope, Transition, int32

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
        x = calls.call_rewards(batch, self.reward)
        returns = calls.discounted_return(x, 1.0, next_same(batch.transition_rollout)).abs()
        largest = returns.nan_to_num(nan=0.0).max() if returns.numel() else torch.ones(())
        return x / largest if largest > 0 else x


@dataclass(frozen=True, slots=True)
class CentredOnOthers:
    """Rewards of calls minus the mean reward per call of the group's other rollouts, [S]; 0 if
    there is no other. PRIME, arXiv 2502.01456."""

    reward: str | Column
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        x = calls.call_rewards(batch, self.reward)
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
    weighted = tuple((_rewards(name, s), s.weight) for name, s in streams.items())
    return GroupRelative(calls.Returns(SumOfCalls(weighted), gamma), by=by, norm=norm)


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
    return GroupRelative(calls.Returns(rewards, stream.gamma), by=stream.by, base=base, norm=norm)


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


@preset("streams", clip=PPO_CLIP, kl=True)
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


@modifier("process", prefix="process_")
def with_process(algo: Algo, *, streams: Streams) -> Algo:
    """Adds the advantages of more rewards to the host's. arXiv 2509.19199; see CREDIT.md."""
    _check(streams, "process_streams", "advantages", host=True)
    terms = (
        (stream_advantage(name, streams, algo.credit), s.weight) for name, s in streams.items()
    )
    credit = WeightedSum(((algo.credit, 1.0), *terms))
    return replace(algo, credit=credit, optional=algo.optional + _optional(streams))


@preset("prime", clip=PPO_CLIP)
def prime(
    reward: str, *, process: str = "process", weight: Share = 1.0, scaled: bool = False
) -> Algo:
    """Outcome plus returns of a reward of calls, each minus the mean of the other rollouts and
    whitened; `scaled` divides the process rewards by their largest return. arXiv 2502.01456."""
    stream = RewardStream(scope=Scope.TRANSITION, base="prime", norm="prime" if scaled else "none")
    steps = stream_advantage(process, {process: stream})
    mixed = core.weighted_sum((GroupRelative(reward, base="loo"), 1.0), (steps, weight))
    return Algo(core.Whiten(mixed), agg=TOKENS)


@preset("istar", clip=PPO_CLIP)
def istar(reward: str, *, process: str = "transition:process", weight: Share = 1.0) -> Algo:
    """Outcome standardised over rollouts plus a reward of calls standardised over all calls of the
    group. arXiv 2509.19199."""
    steps = GroupRelative(process, norm="std")
    return Algo(core.weighted_sum((GroupRelative(reward, norm="std"), 1.0), (steps, weight)))


HINDSIGHT = f"transition:{types.HINDSIGHT}"  # the reward that `add_hindsight` adds


OUTCOME_NOTE = "\n\n(In the end, this attempt was rewarded with {outcome:g}.)"


def add_hindsight(groups: list[Group], policy: TrainedPolicy) -> list[Group]:
    """Add to every call a reward `hindsight`, the mean log-prob of its tokens if its prompt states
    the outcome. HCAPO, arXiv 2603.08754.

    The prompt is rendered again with the outcome at its end, and the learner computes the log-probs
    of the sampled tokens after it. Nothing is sampled. Excludes calls of rollouts without an
    outcome, calls whose last message is not text, and those that then exceed the context."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    informed = {call.id: call for rollout in rollouts for call in _with_outcome(rollout, policy)}
    batch = build_batch(map_calls(groups, lambda c: informed.get(c.id)), policy=policy.name)
    if not batch.n_tokens:
        return groups
    call, n = batch.token_transition, len(batch.transitions)
    total = reduce_by(policy.logprobs(batch).cpu(), call, n)
    mean = (total / reduce_by(call >= 0, call, n)).tolist()
    scores = {id: x for id, x in zip(batch.transitions, mean, strict=True) if not isnan(x)}
    return with_call_rewards(groups, HINDSIGHT, scores)


def _with_outcome(rollout: Rollout, policy: TrainedPolicy) -> Iterator[Transition]:
    """The calls of a rollout with prompts that state its outcome, where that is possible."""
    from agentrl.algorithms.model.chat import RequestError  # imports transformers

    outcome = rollout.reward()
    for call in [] if isnan(outcome) else rollout.transitions:
        *before, last = call.messages or [{}]
        if not trainable(call, policy.name) or call.repeats is not None:
            continue
        if not isinstance(last.get("content"), str):
            continue
        text = last["content"] + OUTCOME_NOTE.format(outcome=outcome)
        try:
            prompt = policy.chat.encode([*before, {**last, "content": text}], call.tools)
        except RequestError:
            continue
        if policy.fits(len(prompt) + len(call.completion)):
            yield structs.replace(call, prompt=int32(prompt))


@dataclass(frozen=True, slots=True)
class HindsightReturns:
    """HCAPO, arXiv 2603.08754: the return of each call times its hindsight probability relative to
    the mean of its rollout's calls, clamped to [low, high]; [S].

    hindsight: mean log-prob of each call's tokens given a prompt with the outcome, [S]; a call
    without it keeps its return. temperature divides it."""

    hindsight: Column
    reward: str | Column = "outcome"
    gamma: float = 0.95
    temperature: float = 5.0
    low: float = 0.8
    high: float = 1.2
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        p = (self.hindsight(batch) / self.temperature).exp()
        rollout = batch.transition_rollout
        ratio = (p / known_mean(p, rollout)[rollout]).clamp(self.low, self.high)
        return torch.where(p.isnan(), 1.0, ratio) * calls.Returns(self.reward, self.gamma)(batch)


@modifier("hcapo", prefix="hcapo_")
def with_hcapo(algo: Algo, *, weight: Share = 1.0, gamma: Discount = 0.95) -> Algo:
    """Adds HCAPO's hindsight credit of calls to the host's; negative only where the host's is
    negative. arXiv 2603.08754."""
    returns = HindsightReturns(CallRewards(HINDSIGHT), declare.outcome_of(algo), gamma)
    gated = GatedByOutcome(GroupRelative(returns, norm="std"), algo.credit, "negative")
    credit = weighted_sum((algo.credit, 1.0), (gated, weight))
    return replace(algo, credit=credit, optional=(*algo.optional, HINDSIGHT))


@preset("hcapo", clip=PPO_CLIP, kl=True)
def hcapo(reward: str, *, weight: Share = 1.0, gamma: Discount = 0.95) -> Algo:
    """Outcome over rollouts plus returns of calls, weighted by the probability of the call given
    the outcome, which the learner computes. arXiv 2603.08754."""
    host = Algo(GroupRelative(reward, norm="std"))
    return with_hcapo(host, weight=weight, gamma=gamma)
