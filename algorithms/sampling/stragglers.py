"""Groups that end without their slowest rollouts, and rollouts that got too old to be trained.

Both are ended by the store's `cancel`. A cancelled rollout has no reward: it is missing from its
group, never 0. Everything is decided from the store, so a restarted process decides the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable, Sequence
from math import ceil, inf
from typing import Any, TypeVar

from agentrl.config import RunConfig
from agentrl.config.policies import steps_learned, trained_policies
from agentrl.store.base import Store
from agentrl.store.pages import GroupRow
from agentrl.types import Group, Purpose, RolloutState, Transition

T = TypeVar("T")
PAUSE = 0.5  # seconds from one look at the open groups to the next
EVERY = 100_000  # groups: more than are ever open


async def close_groups_during(work: Coroutine[Any, Any, T], store: Store, config: RunConfig) -> T:
    """What `work` returns. Meanwhile groups end early as `algorithm.close_at` and `group_deadline`
    say; an error of the store there ends `work` too."""
    if config.algorithm.close_at is None and config.algorithm.group_deadline is None:
        return await work
    waiting = asyncio.ensure_future(work)
    closing = asyncio.ensure_future(_close_groups(store, config))
    try:
        await asyncio.wait((waiting, closing), return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            await closing
        return await waiting
    finally:
        waiting.cancel()
        closing.cancel()
        await asyncio.gather(waiting, closing, return_exceptions=True)


async def settle_groups_ahead(store: Store, config: RunConfig) -> None:
    """With algorithm.overlap = "one_step_off", until every group that was asked for has ended: none
    of their calls then reads weights after the update, however long they take."""
    if config.algorithm.overlap == "one_step_off":
        await close_groups_during(_settle(store, config), store, config)


async def _settle(store: Store, config: RunConfig) -> None:
    for row in await _open_groups(store, config):
        await store.settled(row.id)


async def _close_groups(store: Store, config: RunConfig) -> None:
    begun: dict[str, float] = {}
    while True:
        for row in await _open_groups(store, config):
            if await is_complete(store, config, row, begun, time.time()):
                await store.cancel(row.rollouts)
        await asyncio.sleep(PAUSE)


async def is_complete(
    store: Store, config: RunConfig, row: GroupRow, begun: dict[str, float], now: float
) -> bool:
    """Whether an open group has enough successful rollouts. begun: when the first rollout of each
    group was claimed, as far as it is known; what is found here is added."""
    settings = config.algorithm
    succeeded = row.states.count(RolloutState.SUCCEEDED)
    if succeeded >= (settings.close_at or inf):
        return True
    if settings.group_deadline is None or succeeded < settings.min_group:
        return False
    if row.id not in begun:
        tries = [await store.attempts(rollout) for rollout in row.rollouts]
        begun[row.id] = min(found[0].started for found in tries if found)
    return now - begun[row.id] >= settings.group_deadline


async def cancel_stale(store: Store, config: RunConfig, step: int) -> None:
    """Cancel what still runs of groups of earlier steps that have tokens too old for this step."""
    for row in await _open_groups(store, config):
        if row.step < step:
            calls = await store.calls(row.rollouts)
            if is_stale(config, calls.values(), step):
                await store.cancel(row.rollouts)


def is_stale(config: RunConfig, rollouts: Iterable[Sequence[Transition]], step: int) -> bool:
    """Whether a policy that learns sampled some of the tokens of their calls more than
    max_staleness of its updates before a step."""
    ahead = ceil(config.algorithm.max_staleness)
    oldest = {name: steps_learned(config, name, step) - ahead for name in trained_policies(config)}
    return any(
        call.version is not None
        and call.repeats is None
        and call.version < oldest.get(call.policy, call.version)
        for calls in rollouts
        for call in calls
    )


def is_replaced(config: RunConfig, group: Group, step: int) -> bool:
    """Whether another group takes its place because it is too old."""
    calls = (rollout.transitions for rollout in group.rollouts)
    return config.algorithm.stale == "cancel" and is_stale(config, calls, step)


def cancelled_metrics(config: RunConfig, groups: Sequence[Group], step: int) -> dict[str, float]:
    """rollouts/cancelled, groups/closed_early: which had some. tokens/wasted: sampled by them,
    or by groups that are replaced as too old. Empty where nothing was cancelled."""
    cancelled, closed, wasted = 0, 0, 0
    for group in groups:
        ended = [row for row in group.rollouts if row.state is RolloutState.CANCELLED]
        cancelled, closed = cancelled + len(ended), closed + bool(ended)
        rows = group.rollouts if is_replaced(config, group, step) else ended
        calls = [call for row in rows for call in row.transitions]
        wasted += sum(len(call.completion) for call in calls if call.repeats is None)
    if not (cancelled or wasted):
        return {}
    counts = {"rollouts/cancelled": cancelled, "groups/closed_early": closed}
    return {name: float(count) for name, count in (counts | {"tokens/wasted": wasted}).items()}


async def _open_groups(store: Store, config: RunConfig) -> list[GroupRow]:
    return await store.groups(config.name, purpose=Purpose.TRAIN, state="open", limit=EVERY)
