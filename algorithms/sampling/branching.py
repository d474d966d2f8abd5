"""Which rollouts branch off others, once these have ended: a pure function of what they did.

A branch repeats the first calls of a rollout of its group and then goes its own way (see
`runners.replay`), so that what a call was worth is seen from what came after it, instead of read
from the end of one rollout. The branches join the group of their source before it is claimed, and
credit that knows trees of rollouts (`steps.Tree`) compares them.

Always true: asking again gives the same branches with the same ids, because only rollouts that are
none, and have ended, are looked at. So a run that was killed between asking and claiming asks for
nothing twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from msgspec.structs import replace

from agentrl.algorithms.data.merge import trainable, valid
from agentrl.algorithms.sampling.counterfactuals import replays
from agentrl.algorithms.sampling.task_sampler import branch_of
from agentrl.config import BranchingConfig, RunConfig
from agentrl.config import policies as team
from agentrl.errors import Conflict
from agentrl.store.base import Store
from agentrl.types import POLICY, Group, NewRollout, Rollout

log = logging.getLogger(__name__)


class Fork(NamedTuple):
    """A call that is to be sampled anew. `surprise`: mean -log-prob of its tokens, in nats, which
    estimates the policy's entropy there."""

    rollout: str
    calls: int  # before it
    surprise: float


async def grow(store: Store, config: RunConfig, asked: Sequence[NewRollout]) -> None:
    """Wait until the rollouts that were asked for have ended, ask for the branches or replays that
    the run file wants of their groups, and wait for those."""
    settings = config.algorithm
    if settings.branching.kind == "none" and not settings.counterfactual.stand_ins:
        return
    async with asyncio.TaskGroup() as tasks:
        for group in dict.fromkeys(rollout.group for rollout in asked):
            tasks.create_task(_grow(store, config, group))


async def _grow(store: Store, config: RunConfig, group: str) -> None:
    await store.settled(group)
    found = await store.rollouts(config.name, group=group)
    traces = [await store.trace(row.id) for row in found if row.branch is None]
    known = [trace for trace in traces if trace is not None]
    rollouts = [replace(trace.rollout, transitions=trace.transitions) for trace in known]
    replayed = config.algorithm.counterfactual.stand_ins
    more = replays(config, rollouts) if replayed else branches(config, rollouts)
    try:
        await store.enqueue(more)
    except Conflict:  # an earlier step took it, before the run file asked for branches
        log.warning("Group %s grows no branches: it was trained before its step.", group)
        return
    await store.settled(group)


def branches(config: RunConfig, rollouts: Sequence[Rollout]) -> list[NewRollout]:
    """What to ask for, of the rollouts of one group that are no branches themselves."""
    settings = config.algorithm.branching
    policies = team.trained_policies(config)
    found = chosen(settings, [list(forks(rollout, policies)) for rollout in rollouts])
    by_id = {rollout.id: rollout for rollout in rollouts}
    again = [fork for fork in found for _ in range(settings.width)]
    return [branch_of(config, by_id[f.rollout], f.calls, n) for n, f in enumerate(again)]


def forks(rollout: Rollout, policies: Collection[str] = (POLICY,)) -> Iterator[Fork]:
    """The calls of a rollout that can be sampled anew: those of the trained policies, all of them
    sampled at a temperature, after the first. Before the first call a branch would be a rollout
    like any other."""
    if not any(valid(rollout, policy=policy) for policy in policies):
        return
    for number, call in enumerate(rollout.transitions):
        trained = call.policy in policies and trainable(call, call.policy)
        if number and trained and call.completion and call.sampling.temperature > 0:
            yield Fork(rollout.id, number, -fmean(call.logprobs))
        if call.finish == "cut":  # its end is not known, and what follows cannot be repeated
            return


def chosen(settings: BranchingConfig, forks: Sequence[Sequence[Fork]]) -> list[Fork]:
    """The forks, by rollout, that branches are asked for, in order of rollout and call."""
    together = [fork for some in forks for fork in some]
    picked = {
        fork
        for some in (forks if settings.kind == "mc" else [together])
        for fork in sorted(some, key=lambda fork: -fork.surprise)[: settings.calls or None]
    }
    return [fork for fork in together if fork in picked]


def measure(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics: how many rollouts were branches, and how many of them did not repeat all that they
    should have, because the agent asked something else. None without branches."""
    rows = [row for group in groups for row in group.rollouts]
    found = [row for row in rows if row.branch is not None and not row.counterfactual]
    if not found:
        return {}
    repeats = [sum(call.repeats is not None for call in row.transitions) for row in found]
    asked = [row.branch.calls for row in found if row.branch is not None]
    diverged = sum(few < many for few, many in zip(repeats, asked, strict=True))
    return {"branches": len(found), "branches/diverged": diverged, "calls/repeated": sum(repeats)}
