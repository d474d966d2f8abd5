"""The collector: requests and claims the groups that a step trains, and replaces groups without a
signal.

Invariant: requests are a function of seed, step and round, so a restarted process requests the
same rollouts, and the store ignores duplicates. Groups that were claimed and not committed are
claimed again. So a step trains the same groups however often it is started, unless
`algorithm.group_order = "completed"` lets it take groups of later steps that ended first. A
cancelled rollout has no reward (missing, never 0).

The store's counts limit the number of requested groups (see `free_groups`): at most
(max_staleness + 1) x groups of them are neither trained nor discarded, even if a process was
killed. Replacements do not count.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import floor, isfinite, isnan
from statistics import fmean
from typing import ClassVar, Protocol

from agentrl.algorithms.credit.core import ROUNDING_SPREAD
from agentrl.algorithms.data.merge import counterfactual, reward_reference, valid_for_any
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.sampling.tasks import TaskSampler, group_number
from agentrl.core.config import AlgorithmConfig, RunConfig
from agentrl.core.config.derived import trained_policies
from agentrl.core.errors import ConfigError
from agentrl.core.types import Counts, Group, NewRollout, Purpose, Rollout, RolloutState, Transition
from agentrl.store.base import Store
from agentrl.store.rows import MAX_LOGPROB, MAX_REWARD

MAX_OPEN_GROUPS = 100_000  # limit of a query; there are always fewer


async def settle_groups_ahead(store: Store, config: RunConfig) -> None:
    """With algorithm.async_sampling = "one_step_off", wait until every requested group has ended,
    so that none of their calls uses the weights after the update."""
    if config.algorithm.async_sampling == "one_step_off":
        open_groups = await store.groups(
            config.name, purpose=Purpose.TRAIN, state="open", limit=MAX_OPEN_GROUPS
        )
        for row in open_groups:
            await store.settled(row.id)


def cancelled_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """rollouts/cancelled; groups/closed_early: groups with cancelled rollouts; tokens/wasted:
    tokens of cancelled rollouts. Empty if nothing was cancelled."""
    cancelled, closed, wasted = 0, 0, 0
    for group in groups:
        ended = [row for row in group.rollouts if row.state is RolloutState.CANCELLED]
        cancelled, closed = cancelled + len(ended), closed + bool(ended)
        calls = [call for row in ended for call in row.transitions]
        wasted += sum(len(call.completion) for call in calls if call.repeats is None)
    if not cancelled:
        return {}
    counts = {"rollouts/cancelled": cancelled, "groups/closed_early": closed}
    return {name: float(count) for name, count in (counts | {"tokens/wasted": wasted}).items()}


log = logging.getLogger(__name__)
MAX_ROUNDS = 10  # rounds of replacements; verl's max_num_gen_batches
Vocabulary = Mapping[str, int]  # vocabulary size by policy


@dataclass(frozen=True, slots=True)
class Collected:
    """The groups of one step."""

    groups: list[Group]  # groups to train
    discarded: list[Group]  # not trained; the step's commit removes them from the queue
    metrics: dict[str, float]
    stored: bool = True  # whether they are in the store, so that the step's commit names them
    ready: int = 0  # groups that had ended before the step requested its own


class GroupSource(Protocol):
    """The source of a step's groups."""

    @property
    def serves(self) -> bool:
        """Whether policy servers must run while groups are collected."""

    async def collect(self, step: int) -> Collected:
        """The groups of a step; the same groups if the step is repeated."""


Observer = Callable[[Sequence[Group]], Mapping[str, float]]
"""Learns from all readable groups that a step has claimed; returns metrics."""

Requested = Callable[[Sequence[NewRollout]], Awaitable[None]]
"""Called with rollouts of the step that have been requested, before their groups are claimed."""


async def nothing_more(rollouts: Sequence[NewRollout]) -> None:
    """For `Requested`: no rollouts join the groups."""


@dataclass(frozen=True, slots=True)
class Collector:
    """Requests and claims groups. resample: the reward that must differ within a trained group;
    None: all groups are trained. vocabulary: groups with other token ids are discarded."""

    config: RunConfig
    store: Store
    epoch: int
    tasks: TaskSampler
    resample: str | None = None
    vocabulary: Vocabulary = field(default_factory=dict)
    observers: Sequence[Observer] = ()
    requested: Requested = nothing_more
    serves: ClassVar[bool] = True

    async def collect(self, step: int) -> Collected:
        """Collect the `algorithm.groups` groups of a step.

        With `resample`, groups without a signal are discarded and replaced, in at most
        MAX_ROUNDS rounds; after that the step trains fewer groups."""
        ready = (await self.store.counts(self.config.name)).groups_settled
        claimed, replaced = await self.claim_rounds(step)
        played = cancelled_metrics(claimed)
        claimed, unreadable = split_unreadable(claimed, self.vocabulary)
        for observe in self.observers:
            played |= observe(claimed)
        if unreadable:
            played["groups/unreadable"] = len(unreadable)
        if self.resample is None:
            return Collected(claimed, unreadable, played, ready=ready)
        informative = [group for group in claimed if self.is_informative(group)]
        idle = [group for group in claimed if not self.is_informative(group)]
        metrics = resampling_metrics(claimed, idle, replaced) | played
        return Collected(informative, idle + unreadable, metrics, ready=ready)

    async def claim(self, n: int) -> list[Group]:
        """Claim `n` groups, in the order of requests or of their ends; includes groups that this
        step has claimed before."""
        ordered = self.config.algorithm.group_order == "requested"
        return await self.store.claim_groups(self.config.name, self.epoch, n, ordered=ordered)

    async def claim_rounds(self, step: int) -> tuple[list[Group], int]:
        """Request and claim until enough groups are kept. Returns all claimed groups, and the
        number of requested replacements."""
        size, replaced = self.config.algorithm.groups, 0
        await self.ask(step)
        claimed = await self.claim(size)
        if self.resample is None:
            return claimed, replaced
        for number in range(MAX_ROUNDS):
            missing = size - sum(map(self.is_informative, claimed))
            # If no rollout has the reward, replacements would not have it either.
            if not missing or not any(map(self.known_values, claimed)):
                break
            replaced += missing
            others = self.tasks.replacements(step, number, missing)
            await self.store.enqueue(others, epoch=self.epoch)
            await self.requested(others)
            claimed = await self.claim(len(claimed) + missing)
        return claimed, replaced

    async def ask(self, step: int) -> None:
        """Request the groups of this step and of steps to prefetch, and the branches of this step's
        groups."""
        name, rollouts = self.config.name, self.tasks.rollouts(step)
        free = free_groups(self.config, step, await self.store.counts(name))
        last = await self.store.groups(name, purpose=Purpose.TRAIN, limit=1)
        first = 1 + group_number(last[0].id) if last else 0
        if missing := await self.missing(rollouts, first):
            await self.store.enqueue(missing, epoch=self.epoch)
            free -= len({rollout.group for rollout in missing})
        if free > 0:
            await self.store.enqueue(self.tasks.groups(first, free), epoch=self.epoch)
        await self.requested(rollouts)

    async def missing(self, rollouts: Sequence[NewRollout], first: int) -> list[NewRollout]:
        """The rollouts of a step whose groups were requested (their numbers are below `first`) but
        are no longer in the store: a rewind deletes groups that had been pruned. They must be
        requested again; otherwise the step would train groups of later steps."""
        if group_number(rollouts[0].group) >= first:
            return []
        rows = await self.store.groups(
            self.config.name, purpose=Purpose.TRAIN, step=rollouts[0].step, limit=MAX_OPEN_GROUPS
        )
        stored = {row.id for row in rows}
        return [r for r in rollouts if r.group not in stored and group_number(r.group) < first]

    def is_informative(self, group: Group) -> bool:
        """Whether enough rollouts of a valid group have the reward, with different values."""
        values = self.known_values(group)
        if len(values) < 2:
            return False
        if unreadable_reason(group, self.vocabulary):
            return False
        return max(values) - min(values) > ROUNDING_SPREAD * max(map(abs, values))

    def known_values(self, group: Group) -> list[float]:
        """The values of the reward `resample` in a group's rollouts that can be trained."""
        name = self.resample or ""
        rewards = [
            row
            for rollout in group.rollouts
            if is_learned_from(rollout, self.config, name)
            for row in rollout.rewards
        ]
        return [x.value for x in rewards if reward_reference(x) == name and not isnan(x.value)]


def is_learned_from(rollout: Rollout, config: RunConfig, reward: str = "outcome") -> bool:
    """Whether one of the run's policies can train on a rollout."""
    return valid_for_any(rollout, trained_policies(config), (reward,))


def free_groups(config: RunConfig, step: int, counts: Counts) -> int:
    """How many more groups may be requested before a step is trained. At most (max_staleness + 1) x
    groups, or those left in the run, may be neither trained nor discarded.

    In the order of requests no group then waits for more than max_staleness steps, rounded up, so
    no token is older than that many updates."""
    size = config.algorithm.groups
    ahead = floor(config.algorithm.max_staleness * size + 1e-9)  # 0.29 * 100 is 28.999...
    most = min(size + ahead, (config.steps - step) * size)
    return most - counts.groups_open - counts.groups_settled


def resampling_reward(config: AlgorithmConfig, algo: Algo) -> str | None:
    """The reward of dynamic sampling: the preset's or, if the run file turns it on, the first that
    the algorithm reads; None: off. arXiv 2503.14476.

    Raises ConfigError for an algorithm that reads no reward."""
    preset = algo.resample is not None
    if not (preset if config.dynamic_sampling is None else config.dynamic_sampling):
        return None
    if algo.resample is None and not algo.rewards:
        raise ConfigError(
            f"algorithm.dynamic_sampling: {algo.name!r} reads no reward that could differ within a "
            "group; leave it out or choose another preset"
        )
    return algo.resample or algo.rewards[0]


def resampling_metrics(
    claimed: Sequence[Group], discarded: Sequence[Group], replaced: int
) -> dict[str, float]:
    """groups/resampled: requested replacements. groups/discarded: replaced groups.
    reward/sampled_mean: mean over all sampled rollouts but counterfactual ones; reward/mean is over
    trained groups."""
    rollouts = (rollout for group in claimed for rollout in group.rollouts)
    played = [rollout for rollout in rollouts if not counterfactual(rollout)]
    rewards = [value for row in played if not isnan(value := row.reward())]
    mean = {"reward/sampled_mean": fmean(rewards)} if rewards else {}
    return mean | {"groups/resampled": float(replaced), "groups/discarded": float(len(discarded))}


def split_unreadable(
    groups: Sequence[Group], vocabulary: Vocabulary
) -> tuple[list[Group], list[Group]]:
    """The valid groups, and the invalid ones; their defects are logged. They are discarded, because
    one invalid row would make every attempt at the step fail. The store cannot check token ids
    against the vocabulary, and older stores did not check rewards and log-probs."""
    reasons = {group.id: unreadable_reason(group, vocabulary) for group in groups}
    for id, reason in reasons.items():
        if reason:
            log.warning("group %s is discarded: %s", id, reason)
    good = [group for group in groups if reasons[group.id] is None]
    return good, [group for group in groups if reasons[group.id] is not None]


def unreadable_reason(group: Group, vocabulary: Vocabulary) -> str | None:
    """The first defect of a group; None if there is none."""
    for rollout in group.rollouts:
        for reward in rollout.rewards:
            if not abs(reward.value) <= MAX_REWARD:  # also true for NaN
                return f"reward {reward.name!r} of rollout {rollout.id} is {reward.value:g}"
        for call in rollout.transitions:
            if defect := call.exact and _call_defect(call, vocabulary.get(call.policy)):
                return f"call {call.id} of rollout {rollout.id} has {defect}"
    return None


def _call_defect(call: Transition, size: int | None) -> str | None:
    for tokens in (call.prompt, call.completion):
        if tokens and size is not None and not 0 <= min(tokens) <= max(tokens) < size:
            worst = max(tokens) if max(tokens) >= size else min(tokens)
            return (
                f"the token id {worst}, but policy {call.policy!r} has only ids below {size}: the "
                "server that answered it has another tokenizer"
            )
    if not (isfinite(sum(call.logprobs)) and max(call.logprobs, default=0.0) <= MAX_LOGPROB):
        return "log-probs that are above 0 or not finite"
    return None
