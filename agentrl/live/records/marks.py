"""What the labels of a session say, in the rewards of its rollout.

Every labelled session has one reward MARK, whose note is a `Mark`; one named `outcome` only if its
outcome is known: a missing value is missing. Both have the source SOURCE.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import msgspec
from msgspec import field
from msgspec.structs import replace

from agentrl.types import FEEDBACK, Record, Rollout

SOURCE = "live"  # `Reward.source` of labels
RESULT_ENDED = "ended"  # key of a session's result: unix seconds of its end
GATEWAY, FAILED = "gateway", "failed"  # source and name of the number of calls without an answer
DAMAGED = "its mark is damaged"
MARK, OUTCOME = "labelled", "outcome"  # names of rewards


class Mark(Record, frozen=True):
    """What is known of a session, and why. All values are in 0..1."""

    ended: float  # unix seconds of the store's clock
    day: str  # UTC date of its end, by which the cap of a user counts
    digest: str = ""  # of its version and what its user said
    # signals of the verifier, by name, and of the next messages
    asked: dict[str, float] = field(default_factory=dict)
    posted: dict[str, float] = field(default_factory=dict)  # signals of feedback, by its name
    explicit: bool = False  # whether a posted one has a weight
    # signal -> seconds from the session's end until it was seen
    delays: dict[str, float] = field(default_factory=dict)
    ignored: str = ""  # why what its user posted is not in the outcome; empty: it is
    held: str = ""  # why the session does not count; empty: it counts

    @property
    def all(self) -> dict[str, float]:
        """Nobody can post what the verifier says."""
        return self.posted | self.asked

    @property
    def signals(self) -> dict[str, float]:
        """Those that are in the outcome, as far as they have a weight."""
        return self.asked if self.ignored else self.all


def ended_of(session: Rollout) -> float:
    """When a session ended, in unix seconds, as its gateway wrote it; 0 if it has not."""
    ended = session.result.get(RESULT_ENDED) if isinstance(session.result, dict) else None
    return float(ended) if isinstance(ended, int | float) and math.isfinite(ended) else 0.0


def known_end(session: Rollout) -> float:
    """When a session ended, in unix seconds; of one whose end nobody wrote, when it was labelled; 0
    if neither is known."""
    mark = mark_of(session)
    return ended_of(session) or (mark.ended if mark else 0.0)


def user_of(session: Rollout) -> str:
    """The hash of its user; empty if it is not known."""
    return str(session.task.get("user") or "")


def failed_calls(session: Rollout) -> int:
    """The number of its calls that got no answer, because the gateway or the engine failed."""
    rows = (row for row in session.rewards if row.source == GATEWAY and row.name == FAILED)
    return next((int(row.value) for row in rows), 0)


def mark_of(session: Rollout) -> Mark | None:
    """The mark of a session; None: it is not labelled yet. One that cannot be read holds it."""
    rows = (row for row in session.rewards if row.name == MARK and row.source == SOURCE)
    return next((_read(row.note) for row in rows), None)


def _read(note: str) -> Mark:
    try:
        return msgspec.json.decode(note, type=Mark)
    except msgspec.DecodeError:  # it was changed by hand, or another version of agentrl wrote it
        return Mark(ended=0.0, day="", held=DAMAGED)


def outcome_of(session: Rollout) -> float:
    """The outcome of a session that counts; NaN if it is not known, or the session is held."""
    mark = mark_of(session)
    rows = (row for row in session.rewards if row.source == SOURCE and row.name == OUTCOME)
    return math.nan if mark is None or mark.held else next((r.value for r in rows), math.nan)


def believed(session: Rollout, names: Collection[str]) -> Rollout:
    """The session without what its user posted under other names, which the algorithm might take
    for its own; without all of it, corrections too, if that is held back."""
    mark = mark_of(session)
    kept = () if mark is not None and mark.ignored else names
    rewards = [row for row in session.rewards if row.source != FEEDBACK or row.name in kept]
    return replace(session, rewards=rewards)


def is_ready(session: Rollout, now: float, wait: float) -> bool:
    """Whether a session can be trained: its outcome is known, and its user gave feedback or had
    `wait` seconds for it. A clock that jumps back only lengthens the wait."""
    mark = mark_of(session)
    known = mark is not None and not math.isnan(outcome_of(session))
    return known and mark is not None and (mark.explicit or now - mark.ended >= wait)


def is_lost(session: Rollout, now: float, wait: float) -> bool:
    """Whether a session will never be trained: it does not count, or no outcome is known after
    `wait` seconds."""
    mark = mark_of(session)
    if mark is None or not math.isnan(outcome_of(session)):
        return False
    return bool(mark.held) or now - mark.ended >= wait
