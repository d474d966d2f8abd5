"""The sessions of a run: those that have ended, in their order, all of one name, and the version
that answers a new one.

A session that goes on after its end is another one, in a group of its own. Always true: the groups
of a name are numbered from 1 without a gap, and stay when their rollouts are deleted.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from agentrl.errors import NotFound
from agentrl.live.records.documents import Lanes
from agentrl.live.records.marks import ended_of
from agentrl.runners.sessions.feedback import session_group
from agentrl.store.base import Store
from agentrl.types import SESSION, Purpose, Rollout


async def ended(store: Store, run: str) -> list[Rollout]:
    """The ended sessions that no step has trained or discarded, with rewards, without calls."""
    rows = await store.rollouts(run, group_state="settled")
    return [row for row in rows if row.step == SESSION and row.purpose is Purpose.TRAIN]


def oldest_first(sessions: Sequence[Rollout]) -> list[Rollout]:
    return sorted(sessions, key=lambda session: (ended_of(session), session.id))


def group_of(run: str, name: str, number: int) -> str:
    """The group of the nth session of a name, counted from 1."""
    base = session_group(run, name)
    return base if number <= 1 else f"{base}-{number}"


def group_base(run: str, group: str) -> str:
    """The first group of the name that a group is of."""
    return f"{run}/{group.removeprefix(f'{run}/').partition('-')[0]}"


def chosen(lanes: Lanes, group: str) -> int:
    """The version that answers a new session. Each candidate gets other sessions."""
    if lanes.candidate is None:
        return lanes.serving
    drawn = blake2b(f"{lanes.candidate}/{group}".encode(), digest_size=4).digest()
    return lanes.candidate if int.from_bytes(drawn) / 2**32 < lanes.share else lanes.serving


async def count_of(store: Store, run: str, name: str) -> int:
    """How many sessions of a name there have been, also deleted ones. Reads twice the logarithm of
    their number, because one name may be used for years."""

    async def is_known(number: int) -> bool:
        try:
            await store.settled(group_of(run, name, number), timeout=0)
        except NotFound:
            return False
        return True

    last, beyond = 0, 1
    while await is_known(last + beyond):
        last, beyond = last + beyond, 2 * beyond
    while beyond > 1:
        beyond //= 2
        if await is_known(last + beyond):
            last += beyond
    return last


async def delete(store: Store, run: str, name: str) -> bool:
    """Delete all sessions of a name; False if one is in progress or being trained on."""
    left = False
    for number in range(1, await count_of(store, run, name) + 1):
        rows = await store.rollouts(run, group=group_of(run, name, number))
        left |= bool((await store.forget([row.id for row in rows])).left)
    return not left
