"""How much a session, a signal and a user count.

Always true: what counts is decided once, at the first label of a session, from the marks of those
before it; so a restart decides the same. At most `per_user` sessions of a user and day count, and
equal sessions of a user once; votes of a user that contradict what else is known of its sessions
are held back, and shown by `agentrl live users`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, median

from agentrl.live.marks import Mark
from agentrl.live.signals import ASKED
from agentrl.types import CORRECTION, FEEDBACK

VOTES = (FEEDBACK, CORRECTION)  # signals of what the user thinks
MEMORY = 200  # newest votes of a user that are looked at
LEAST_VOTES = 5  # votes of a user before it can be an outlier
CONTRADICTS = 0.5  # mean distance of votes from the other signals of the same sessions
BEYOND = 0.25  # how much more than the median user's distance an outlier's is


def weighted(signals: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """The weighted mean of the signals that there are; NaN if none has a weight."""
    total = math.fsum(weights.get(name, 0.0) for name in signals)
    if not total:
        return math.nan
    return math.fsum(value * weights.get(name, 0.0) for name, value in signals.items()) / total


@dataclass(slots=True)
class User:
    """What is known of one user's sessions."""

    sessions: int = 0
    counted: Counter[str] = field(default_factory=Counter)  # day -> sessions that count
    held: Counter[str] = field(default_factory=Counter)  # reason -> sessions that do not
    votes: dict[str, float] = field(default_factory=dict)  # session -> mean vote
    distances: dict[str, float] = field(default_factory=dict)  # session -> of vote and others

    @property
    def distance(self) -> float:
        """Mean distance of its votes from the other signals of the same sessions; NaN if there are
        fewer than LEAST_VOTES such sessions."""
        known = self.distances.values()
        return fmean(known) if len(known) >= LEAST_VOTES else math.nan

    def vote(self, session: str, mark: Mark) -> None:
        """Take the votes of a session into account, in place of its earlier ones."""
        votes = [mark.posted[name] for name in VOTES if name in mark.posted]
        others = [mark.asked[name] for name in ASKED if name in mark.asked]
        if votes:
            _keep(self.votes, session, fmean(votes))
        if votes and others:
            _keep(self.distances, session, abs(fmean(votes) - fmean(others)))


def _keep(values: dict[str, float], session: str, value: float) -> None:
    values[session] = value
    if len(values) > MEMORY:
        del values[next(iter(values))]


class Ledger:
    """What counts, by user. Sessions without user have neither cap nor standing."""

    def __init__(self, per_user: int) -> None:
        self.users: defaultdict[str, User] = defaultdict(User)
        self._per_user = per_user  # 0: no limit
        self._known: dict[str, str] = {}  # session -> why it does not count
        self._first: dict[tuple[str, str, str], str] = {}  # user, day, digest -> session

    def admit(self, session: str, user: str, day: str, digest: str) -> str:
        """Why an ended session does not count; empty if it does."""
        if not user or session in self._known:
            return self._known.get(session, "")
        if (user, day, digest) in self._first:
            return "it repeats another session of its user"
        if self._per_user and self.users[user].counted[day] >= self._per_user:
            return f"its user has {self._per_user} others of that day (live.people.per_user)"
        return ""

    def remember(self, session: str, user: str, mark: Mark) -> None:
        """Take the mark of a session into account, in place of an earlier one."""
        if not user:
            return
        one = self.users[user]
        if session not in self._known:
            self._known[session] = mark.held
            one.sessions += 1
            if mark.held:
                one.held[mark.held] += 1
            else:
                one.counted[mark.day] += 1
                self._first.setdefault((user, mark.day, mark.digest), session)
        if not mark.held:
            one.vote(session, mark)

    def outliers(self) -> dict[str, str]:
        """Users whose votes are held back -> what they are like."""
        found = {name: one.distance for name, one in self.users.items()}
        known = {name: far for name, far in found.items() if not math.isnan(far)}
        usual = median(known.values()) if len(known) > 1 else 0.0
        limit = max(CONTRADICTS, usual + BEYOND)
        return {
            name: f"its votes are {far:.2f} from the other signals of the same sessions, those of "
            f"the median user {usual:.2f}"
            for name, far in known.items()
            if far > limit
        }
