"""What the records of a session say: whether it has ended, is labelled, and may be trained."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import isnan

from agentrl.store.base import Store
from agentrl.types import CORRECTION, FEEDBACK, Purpose, Rollout

RESULT_ENDED = "ended"  # key of a session's result: unix seconds of its end
SOURCE = "live"  # of the rewards that `label` writes
NO_SIGNAL = "no_signal"  # a reward: the session was looked at, and nothing is known of it
PAGE = 200


async def ended(store: Store, run: str) -> list[Rollout]:
    """The ended sessions that no step has trained or discarded, with rewards, without calls."""
    found: list[Rollout] = []
    before: str | None = None
    while True:
        page = await store.groups(
            run, purpose=Purpose.TRAIN, state="settled", before=before, limit=PAGE
        )
        for group in page:
            found += await store.rollouts(run, group=group.id)
        if len(page) < PAGE:
            return found
        before = page[-1].id


def ended_at(session: Rollout) -> float:
    """Unix seconds; 0 if unknown."""
    result = session.result if isinstance(session.result, dict) else {}
    return float(result.get(RESULT_ENDED, 0.0))


def is_ready(session: Rollout, wait: float, now: float | None = None) -> bool:
    """Whether a session is labelled, and nobody is waited for any longer."""
    corrected = any(row.name == CORRECTION for row in session.rewards)
    if isnan(session.reward()) and not corrected:
        return False
    explicit = any(row.source == FEEDBACK for row in session.rewards)
    return explicit or (time.time() if now is None else now) >= ended_at(session) + wait


def is_void(session: Rollout, wait: float, now: float | None = None) -> bool:
    """Whether nothing is known of a session, and nobody is waited for any longer."""
    looked = any(row.name == NO_SIGNAL for row in session.rewards)
    waited = (time.time() if now is None else now) >= ended_at(session) + wait
    return looked and waited and not is_ready(session, wait, now)


def oldest_first(sessions: Sequence[Rollout]) -> list[Rollout]:
    return sorted(sessions, key=lambda session: (ended_at(session), session.id))
