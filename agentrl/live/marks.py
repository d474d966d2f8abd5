"""What the labels of a session say, in the rewards of its rollout.

Every labelled session has one reward MARK, whose note is a `Mark`; one named `outcome` only if its
outcome is known: a missing value is missing. Both have the source SOURCE.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from agentrl.types import Record, Reward, Rollout, Scope

SOURCE = "live"  # `Reward.source` of labels
MARK, SIGNAL, OUTCOME = "labelled", "signal", "outcome"  # names of rewards; SIGNAL is of a call


class Mark(Record, frozen=True):
    """What is known of a session, and why. Signals are in 0..1; what is posted as feedback has the
    reward's name."""

    ended: float  # unix seconds of the store's clock
    day: str  # UTC date of its end, by which the cap of a user counts
    digest: str = ""  # of its version and what its user said
    explicit: bool = False  # Whether its user gave feedback.
    signals: dict[str, float] = {}
    delays: dict[str, float] = {}  # signal -> seconds from the session's end until it was seen
    held: str = ""  # why the session does not count; empty: it counts
    ignored: dict[str, str] = {}  # signal -> why it is not in the outcome


def mark_of(rewards: Iterable[Reward]) -> Mark | None:
    """The mark in a session's rewards; None: it is not labelled yet."""
    rows = (row for row in rewards if row.name == MARK and row.source == SOURCE)
    return next((msgspec.json.decode(row.note, type=Mark) for row in rows), None)


def outcome_of(rewards: Iterable[Reward]) -> float:
    """The outcome in a session's labels; NaN if it is not known."""
    rows = (row for row in rewards if row.scope is Scope.ROLLOUT and row.source == SOURCE)
    return next((row.value for row in rows if row.name == OUTCOME), math.nan)


def is_ready(session: Rollout, now: float, wait: float) -> bool:
    """Whether a session can be trained: its outcome is known, and its user gave feedback or had
    `wait` seconds for it. A clock that jumps back only lengthens the wait."""
    mark = mark_of(session.rewards)
    known = mark is not None and not math.isnan(outcome_of(session.rewards))
    return known and mark is not None and (mark.explicit or now - mark.ended >= wait)


def is_lost(session: Rollout, now: float, wait: float) -> bool:
    """Whether a session will never be trained: no outcome is known after `wait` seconds."""
    mark = mark_of(session.rewards)
    unknown = mark is not None and math.isnan(outcome_of(session.rewards))
    return unknown and mark is not None and now - mark.ended >= wait
