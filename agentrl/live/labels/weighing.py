"""How much a session, a signal and a user count.

Always true: what counts follows from the marks of the sessions before it, in whichever order they
are read; so a restart decides the same. At most `per_user` sessions of a user and day count, and
equal sessions of a user once. Votes of a user that contradict what else is known of its sessions
are held back. A user whose outcomes are unlike all others' counts for less than the median user.
Both are shown by `agentrl live users`. Kept are the sessions of the newest `DAYS` days, and what
the last sessions of a user said if it had one in `STANDING` before.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple

from agentrl.live.labels.signals import ASKED
from agentrl.live.records.marks import Mark
from agentrl.types import CORRECTION, FEEDBACK

VOTES = (FEEDBACK, CORRECTION)  # signals of what the user thinks
MEMORY = 200  # newest sessions of a user that are looked at
DAYS = 3  # in which sessions may end and are not labelled yet
STANDING = 30 * 86_400.0  # seconds after which a user is forgotten
FRESH, MANY = 5.0, 1000  # outliers are found anew after so many seconds, or 1/MANY more sessions
LEAST = 5  # sessions of a user, or other users, from which on an outlier can be told
FEWEST = 3  # users with votes, from which on votes can be told to be unlike the others'
BEYOND = 0.25  # how much farther than the median user's an outlier's votes are from other signals
DEVIATIONS = 3.0  # standard deviations between an outlier and the median user
VARIANCE, LEAST_VARIANCE = 0.25, 0.05  # of an outcome, at most; of a distance, at least
NORMAL = 1.4826  # standard deviation of a normal variable by its median absolute deviation
REPEATED = "it repeats another session of its user"
CAPPED = "its user has {} others of that day (live.people.per_user)"
CONTRARY = "the votes of its user contradict what else is known, see `agentrl live users`"
UNLIKE = "its user is unlike all others, see `agentrl live users`"
LATE = "it ended long before others that were counted"


def weighted(signals: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """The weighted mean of the signals that there are; NaN if none has a weight."""
    total = math.fsum(weights.get(name, 0.0) for name in signals)
    if not total:
        return math.nan
    return math.fsum(value * weights.get(name, 0.0) for name, value in signals.items()) / total


Outliers = tuple[dict[str, str], dict[str, str]]  # users -> why, by `contrary` and by `unlike`


class UserSession(NamedTuple):
    """What a session says about its user; None: nothing."""

    ended: float  # unix seconds
    outcome: float | None
    vote: float | None  # mean vote
    distance: float | None  # of vote and other signals


class Mean(NamedTuple):
    """Of values that may be missing; NaN if there are none."""

    value: float
    of: int


@dataclass(slots=True)
class User:
    """The last MEMORY sessions of a user, by session."""

    seen: dict[str, UserSession] = field(default_factory=dict)
    _means: dict[str, Mean] = field(default_factory=dict)  # by field of those, once asked for

    def add(self, session: str, seen: UserSession) -> bool:
        """Take a session into account, in place of what was known of it; whether that is new."""
        if self.seen.get(session) == seen:
            return False
        self.seen[session] = seen
        self._means.clear()
        if len(self.seen) > MEMORY:
            del self.seen[min(self.seen, key=lambda one: self.seen[one].ended)]
        return True

    def ended(self) -> float:
        """When its last session ended."""
        return max(one.ended for one in self.seen.values())

    def mean(self, name: str) -> Mean:
        """Of a field of its sessions."""
        if name not in self._means:
            known = [x for one in self.seen.values() if (x := getattr(one, name)) is not None]
            self._means[name] = Mean(mean(known), len(known))
        return self._means[name]


@dataclass(slots=True)
class Day:
    """The sessions of a day that count."""

    began: float  # end of its first session, in unix seconds
    # user -> (end, session) in order, and (user, digest) -> the first such session
    counted: defaultdict[str, list[tuple[float, str]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    first: dict[tuple[str, str], str] = field(default_factory=dict)

    def has(self, session: str, user: str, mark: Mark) -> bool:
        found, at = self.counted[user], (mark.ended, session)
        return at in found[bisect_left(found, at) :][:1]

    def add(self, session: str, user: str, mark: Mark) -> None:
        if not self.has(session, user, mark):
            insort(self.counted[user], (mark.ended, session))
            self.first.setdefault((user, mark.digest), session)


def mean(values: Iterable[float]) -> float:
    """NaN if there are none."""
    known = [*values]
    return fmean(known) if known else math.nan


def is_counted(mark: Mark) -> bool:
    """Whether a session counts, as far as its mark says; what is held because of its user may."""
    return mark.held in ("", UNLIKE, CONTRARY)


class Ledger:
    """What counts, by user. Sessions without user have neither cap nor standing."""

    def __init__(self, per_user: int, weights: Mapping[str, float]) -> None:
        self.users: defaultdict[str, User] = defaultdict(User)
        self.days: dict[str, Day] = {}
        self._per_user, self._weights = per_user, weights  # 0: no limit
        self._found: Outliers = {}, {}
        self._found_at, self._known, self._new = -math.inf, 0, 0  # when; sessions then, and since

    def admit(self, session: str, user: str, mark: Mark) -> str:
        """Why a session that has just ended does not count, whatever is known of it; empty if it
        may."""
        if not user:
            return ""
        if (day := self._day(mark)) is None:
            return LATE
        if day.has(session, user, mark):  # its label could not be written
            return ""
        if day.first.get((user, mark.digest), session) != session:
            return REPEATED
        if self._per_user and len(day.counted[user]) >= self._per_user:
            return CAPPED.format(self._per_user)
        day.add(session, user, mark)
        return ""

    def learn(self, session: str, user: str, mark: Mark) -> None:
        """Take a session with its signals into account, if it counts."""
        if not (user and is_counted(mark)):
            return
        if (day := self._day(mark)) is not None:
            day.add(session, user, mark)
        outcome = weighted(mark.all, self._weights)
        vote = mean(mark.posted[name] for name in VOTES if name in mark.posted)
        other = mean(mark.asked[name] for name in ASKED if name in mark.asked)
        known = (None if math.isnan(x) else x for x in (outcome, vote, abs(vote - other)))
        self._new += self.users[user].add(session, UserSession(mark.ended, *known))

    def _day(self, mark: Mark) -> Day | None:
        """The day of a session; None for one that is before those that are kept."""
        if mark.day in self.days:
            return self.days[mark.day]
        if len(self.days) >= DAYS and mark.day < min(self.days):
            return None
        day = self.days[mark.day] = Day(mark.ended)
        if len(self.days) > DAYS:
            del self.days[min(self.days)]
            self.tidy()
        return day

    def tidy(self) -> None:
        """Forget users who have not been seen for long. A clock that jumps makes one day at most,
        so the oldest of several is a real one."""
        since = min((day.began for day in self.days.values()), default=0.0) - STANDING
        for name in [name for name, one in self.users.items() if one.ended() < since]:
            del self.users[name]

    def outliers(self) -> Outliers:
        """`contrary` and `unlike`, as they were a short time ago."""
        late = time.monotonic() - self._found_at >= FRESH
        if self._new and (late or MANY * self._new >= self._known):
            self._found = self.contrary(), self.unlike()
            self._found_at, self._new = time.monotonic(), 0
            self._known = sum(len(one.seen) for one in self.users.values())
        return self._found

    def contrary(self) -> dict[str, str]:
        """Users whose votes are held back -> what they are like."""
        found = {name: one.mean("distance") for name, one in self.users.items()}
        known = {name: distance.value for name, distance in found.items() if distance.of}
        if len(known) < FEWEST:
            return {}
        usual = median(known.values())
        spread = max(usual * (1 - usual), LEAST_VARIANCE)
        chance = {name: spread / found[name].of for name in known}
        return {
            name: f"its votes are {far:.2f} from the other signals of its sessions, those of the "
            f"median user {usual:.2f}"
            for name, far in known.items()
            if found[name].of >= LEAST
            and far - usual > max(BEYOND, DEVIATIONS * math.sqrt(chance[name]))
        }

    def unlike(self) -> dict[str, str]:
        """Users who count for less than the median user -> what they are like. The deviation of
        others' means beyond chance is allowed for: some users ask harder questions."""
        found = {name: one.mean("outcome") for name, one in self.users.items()}
        means = {name: outcome.value for name, outcome in found.items() if outcome.of >= LEAST}
        if len(means) <= LEAST:
            return {}
        usual = median(means.values())
        chance = {name: VARIANCE / found[name].of for name in means}
        seen = NORMAL * median(abs(value - usual) for value in means.values())
        between = max(0.0, seen**2 - median(chance.values()))
        return {
            name: f"its mean outcome is {value:.2f}, that of the median user {usual:.2f}"
            for name, value in means.items()
            if abs(value - usual) > DEVIATIONS * math.sqrt(between + chance[name])
        }

    def few(self, day: str) -> int:
        """Sessions of a day that count of a user who is unlike all others."""
        counts = [len(found) for found in self.days[day].counted.values() if found]
        return max(1, int(median(counts)) // 2) if counts else 1

    def is_beyond(self, session: str, user: str, mark: Mark) -> bool:
        """Whether a session is not among the `few` of its user's day; of an older day, as it was
        decided then."""
        if (day := self.days.get(mark.day)) is None:
            return mark.held == UNLIKE
        return bisect_left(day.counted[user], (mark.ended, session)) >= self.few(mark.day)
