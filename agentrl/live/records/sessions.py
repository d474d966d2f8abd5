"""The ended sessions of a run, and their order."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.live.records.marks import ended_of
from agentrl.store.base import Store
from agentrl.types import SESSION, Purpose, Rollout


async def ended(store: Store, run: str) -> list[Rollout]:
    """The ended sessions that no step has trained or discarded, with rewards, without calls."""
    rows = await store.rollouts(run, group_state="settled")
    return [row for row in rows if row.step == SESSION and row.purpose is Purpose.TRAIN]


def oldest_first(sessions: Sequence[Rollout]) -> list[Rollout]:
    return sorted(sessions, key=lambda session: (ended_of(session), session.id))
