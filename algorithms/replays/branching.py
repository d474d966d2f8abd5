"""Branches: rollouts that repeat the first calls of another rollout and sample the rest anew (see
`runners.gateway.replays`), to estimate the value of a call from several continuations.

Branches join the group of their source before it is claimed; credit over trees of rollouts
(`presets`) compares them. Always true: requests are deterministic, ids included, because
they depend only on ended rollouts that are no branches themselves. So a run that was killed between
requesting and claiming requests nothing twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from msgspec.structs import replace

from agentrl.algorithms.data.merge import trainable, valid_for_any
from agentrl.algorithms.replays.counterfactuals import counterfactual_rollouts, joining_rollout
from agentrl.config import RunConfig
from agentrl.config.learning import BranchingConfig
from agentrl.config.policies import trained_policies
from agentrl.errors import Conflict
from agentrl.store.base import Store
from agentrl.types import POLICY, Branch, NewRollout, Rollout

log = logging.getLogger(__name__)


class BranchPoint(NamedTuple):
    """A call to sample again. surprise: mean of -log-prob over its tokens in nats, an estimate of
    the policy's entropy."""

    rollout: str
    calls: int  # number of calls before it
    surprise: float


async def request_branches(store: Store, config: RunConfig, rollouts: Sequence[NewRollout]) -> None:
    """Wait for the rollouts to end, request the branches or counterfactual rollouts of their
    groups, and wait for these."""
    if not config.algorithm.joins:
        return
    async with asyncio.TaskGroup() as tasks:
        for group in dict.fromkeys(rollout.group for rollout in rollouts):
            tasks.create_task(_grow(store, config, group))


async def _grow(store: Store, config: RunConfig, group: str) -> None:
    await store.settled(group)
    rows = await store.rollouts(config.name, group=group)
    calls = await store.calls([row.id for row in rows if row.branch is None])
    rollouts = [replace(row, transitions=calls[row.id]) for row in rows if row.id in calls]
    replayed = config.algorithm.counterfactual.substitutes
    more = counterfactual_rollouts(config, rollouts) if replayed else branches(config, rollouts)
    try:
        await store.enqueue(more)
    except Conflict:  # trained by an earlier step, before the run file had branches
        log.warning("Group %s grows no branches: it was trained before its step.", group)
        return
    await store.settled(group)


def branches(config: RunConfig, rollouts: Sequence[Rollout]) -> list[NewRollout]:
    """The branches to request for one group. rollouts: those of the group that are no branches."""
    settings = config.algorithm.branching
    policies = trained_policies(config)
    points = [list(branch_points(rollout, policies)) for rollout in rollouts]
    by_id = {rollout.id: rollout for rollout in rollouts}
    branches: list[NewRollout] = []
    for point in (x for x in choose_branch_points(settings, points) for _ in range(settings.width)):
        source = by_id[point.rollout]
        branch = Branch(rollout=source.id, calls=point.calls)
        branches.append(joining_rollout(config, source, branch, source.seats, len(branches)))
    return branches


def branch_points(rollout: Rollout, policies: Collection[str] = (POLICY,)) -> Iterator[BranchPoint]:
    """The calls of a rollout that can be sampled again: all calls of trained policies at a
    temperature above 0 but the first, from which a branch would be an ordinary rollout."""
    if not valid_for_any(rollout, policies):
        return
    for number, call in enumerate(rollout.transitions):
        trained = call.policy in policies and trainable(call, call.policy)
        if number and trained and call.completion and call.sampling.temperature > 0:
            yield BranchPoint(rollout.id, number, -fmean(call.logprobs))
        if call.finish == "cut":  # its end is unknown, so later calls cannot be replayed
            return


def choose_branch_points(
    settings: BranchingConfig, points: Sequence[Sequence[BranchPoint]]
) -> list[BranchPoint]:
    """Where to branch, in order of rollout and call. points: by rollout."""
    together = [point for each in points for point in each]
    chosen = {
        point
        for each in (points if settings.kind == "mc" else [together])
        for point in sorted(each, key=lambda point: -point.surprise)[: settings.calls or None]
    }
    return [point for point in together if point in chosen]
