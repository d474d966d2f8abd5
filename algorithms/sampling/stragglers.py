"""Cancels the slowest rollouts of groups, and rollouts that have become too stale to train.

A cancelled rollout has no reward (missing, never 0). Decisions depend on the store alone, so a
restarted process makes the same ones.
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
from agentrl.store.records import GroupRow
from agentrl.types import Group, Purpose, RolloutState, Transition

T = TypeVar("T")
CHECK_PAUSE = 0.5  # seconds between checks of the open groups
MOST_GROUPS = 100_000  # limit on open groups, more than there ever are


async def close_groups_during(work: Coroutine[Any, Any, T], store: Store, config: RunConfig) -> T:
    """Run `work` and return its result. Meanwhile closes groups early by `algorithm.group_quorum`
    and `group_deadline`; an error of the store there also cancels `work`."""
    if config.algorithm.group_quorum is None and config.algorithm.group_deadline is None:
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
    """With algorithm.async_sampling = "one_step_off", wait until every requested group has ended,
    so that none of their calls uses the weights after the update."""
    if config.algorithm.async_sampling == "one_step_off":
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
        await asyncio.sleep(CHECK_PAUSE)


async def is_complete(
    store: Store, config: RunConfig, row: GroupRow, begun: dict[str, float], now: float
) -> bool:
    """Whether an open group has enough successful rollouts. begun: cache of the time at which each
    group's first rollout was claimed."""
    settings = config.algorithm
    succeeded = row.states.count(RolloutState.SUCCEEDED)
    if succeeded >= (settings.group_quorum or inf):
        return True
    if settings.group_deadline is None or succeeded < settings.min_group:
        return False
    if row.id not in begun:
        attempts = [await store.attempts(rollout) for rollout in row.rollouts]
        begun[row.id] = min(each[0].started for each in attempts if each)
    return now - begun[row.id] >= settings.group_deadline


async def cancel_stale(store: Store, config: RunConfig, step: int) -> None:
    """Cancel the running rollouts of earlier steps' groups that are too stale for this step."""
    for row in await _open_groups(store, config):
        if row.step < step:
            calls = await store.calls(row.rollouts)
            if is_stale(config, calls.values(), step):
                await store.cancel(row.rollouts)


def is_stale(config: RunConfig, rollouts: Iterable[Sequence[Transition]], step: int) -> bool:
    """Whether a trained policy sampled tokens of these calls more than max_staleness updates before
    a step. rollouts: calls by rollout."""
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
    """Whether a group is replaced because it is too stale."""
    calls = (rollout.transitions for rollout in group.rollouts)
    return config.algorithm.stale_tokens == "cancel" and is_stale(config, calls, step)


def cancelled_metrics(config: RunConfig, groups: Sequence[Group], step: int) -> dict[str, float]:
    """rollouts/cancelled; groups/closed_early: groups with cancelled rollouts; tokens/wasted:
    sampled by cancelled rollouts or stale groups. Empty if nothing was cancelled."""
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
    return await store.groups(config.name, purpose=Purpose.TRAIN, state="open", limit=MOST_GROUPS)
