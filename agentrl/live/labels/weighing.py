"""How much a session, a signal and a user count.

Always true: what counts follows from the marks of the sessions before it; so a restart decides the
same. At most `per_user` sessions of a user and day count, and equal sessions of a user once. Votes
of a user that contradict what else is known of its sessions are held back. A user whose outcomes
are unlike all others' counts for less than the median user. Both are shown by `agentrl live users`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, median

from agentrl.live.labels.signals import ASKED
from agentrl.live.records.marks import Mark
from agentrl.types import CORRECTION, FEEDBACK

VOTES = (FEEDBACK, CORRECTION)  # signals of what the user thinks
MEMORY = 200  # newest sessions of a user that are looked at
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


def weighted(signals: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """The weighted mean of the signals that there are; NaN if none has a weight."""
    total = math.fsum(weights.get(name, 0.0) for name in signals)
    if not total:
        return math.nan
    return math.fsum(value * weights.get(name, 0.0) for name, value in signals.items()) / total


@dataclass(slots=True)
class User:
    """What is known of one user's sessions; by session, of the last MEMORY."""

    sessions: int = 0
    counted: Counter[str] = field(default_factory=Counter)  # day -> sessions that count
    held: Counter[str] = field(default_factory=Counter)  # reason -> sessions that do not
    rank: dict[str, int] = field(default_factory=dict)  # of its day, from 0
    outcomes: dict[str, float] = field(default_factory=dict)
    votes: dict[str, float] = field(default_factory=dict)  # mean vote
    distances: dict[str, float] = field(default_factory=dict)  # of vote and other signals

    def learn(self, session: str, mark: Mark, outcome: float) -> None:
        """Take a session into account, in place of what was known of it."""
        votes = [mark.posted[name] for name in VOTES if name in mark.posted]
        others = [mark.asked[name] for name in ASKED if name in mark.asked]
        if votes:
            _keep(self.votes, session, fmean(votes))
        if votes and others:
            _keep(self.distances, session, abs(fmean(votes) - fmean(others)))
        if not math.isnan(outcome):
            _keep(self.outcomes, session, outcome)


def _keep(values: dict[str, float], session: str, value: float) -> None:
    values[session] = value
    if len(values) > MEMORY:
        del values[next(iter(values))]


def mean(values: Mapping[str, float], least: int = 1) -> float:
    """NaN if there are fewer than `least`."""
    return fmean(values.values()) if len(values) >= least else math.nan


class Ledger:
    """What counts, by user. Sessions without user have neither cap nor standing."""

    def __init__(self, per_user: int, weights: Mapping[str, float]) -> None:
        self.users: defaultdict[str, User] = defaultdict(User)
        self._per_user, self._weights = per_user, weights  # 0: no limit
        self._known: dict[str, str] = {}  # session -> why it was not admitted
        self._first: set[tuple[str, str, str]] = set()  # user, day, digest

    def admit(self, session: str, user: str, mark: Mark) -> str:
        """Why an ended session does not count, whatever is known of it; empty if it may."""
        if not user:
            return ""
        if session not in self._known:
            one, key = self.users[user], (user, mark.day, mark.digest)
            why = "" if mark.held in (UNLIKE, CONTRARY) else mark.held  # of an earlier process
            if not why and key in self._first:
                why = REPEATED
            elif not why and self._per_user and one.counted[mark.day] >= self._per_user:
                why = CAPPED.format(self._per_user)
            self._known[session] = why
            self._add(one, session, why, key)
        return self._known[session]

    def _add(self, one: User, session: str, why: str, key: tuple[str, str, str]) -> None:
        one.sessions += 1
        if why:
            one.held[why] += 1
            return
        day = key[1]
        one.rank[session] = one.counted[day]
        one.counted[day] += 1
        self._first.add(key)

    def learn(self, session: str, user: str, mark: Mark) -> None:
        """Take the signals of a session into account, if it was admitted."""
        if user and not self._known[session]:
            self.users[user].learn(session, mark, weighted(mark.all, self._weights))

    def contrary(self) -> dict[str, str]:
        """Users whose votes are held back -> what they are like."""
        known = {name: mean(one.distances) for name, one in self.users.items() if one.distances}
        if len(known) < FEWEST:
            return {}
        usual = median(known.values())
        spread = max(usual * (1 - usual), LEAST_VARIANCE)
        chance = {name: spread / len(self.users[name].distances) for name in known}
        return {
            name: f"its votes are {far:.2f} from the other signals of its sessions, those of the "
            f"median user {usual:.2f}"
            for name, far in known.items()
            if len(self.users[name].distances) >= LEAST
            and far - usual > max(BEYOND, DEVIATIONS * math.sqrt(chance[name]))
        }

    def unlike(self) -> dict[str, str]:
        """Users who count for less than the median user -> what they are like. The deviation of
        others' means beyond chance is allowed for: some users ask harder questions."""
        found = {name: mean(one.outcomes, LEAST) for name, one in self.users.items()}
        means = {name: value for name, value in found.items() if not math.isnan(value)}
        if len(means) <= LEAST:
            return {}
        usual = median(means.values())
        chance = {name: VARIANCE / len(self.users[name].outcomes) for name in means}
        seen = NORMAL * median(abs(value - usual) for value in means.values())
        between = max(0.0, seen**2 - median(chance.values()))
        return {
            name: f"its mean outcome is {value:.2f}, that of the median user {usual:.2f}"
            for name, value in means.items()
            if abs(value - usual) > DEVIATIONS * math.sqrt(between + chance[name])
        }

    def few(self, day: str) -> int:
        """Sessions of a day that count of a user who is unlike all others."""
        counts = [n for one in self.users.values() if (n := one.counted[day])]
        return max(1, int(median(counts)) // 2) if counts else 1

    def is_beyond(self, session: str, user: str, day: str) -> bool:
        """Whether a session is not among the `few` of its user's day."""
        return self.users[user].rank.get(session, 0) >= self.few(day)
