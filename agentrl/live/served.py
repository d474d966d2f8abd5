"""Served sessions of each version, and an anytime-valid comparison of candidate and serving
version.

Every session is drawn for the candidate with a known probability p, so

    x = (y - m) / p  if the candidate served it,  -(y - m) / (1 - p)  if not

with any centre m that follows from earlier sessions has the mean d = E[y | candidate] - E[y |
serving], given all that happened before (inverse propensity weights; m only lowers the variance).
A gambler who bets a fraction of a capital of 1 on "the difference is larger than d0",

    capital_t = prod_s (1 + lambda_s (x_s - d0)),   lambda_s >= 0 known before session s,

cannot expect to gain if d <= d0: the capital is a supermartingale, and the probability that it
*ever* reaches 1 / a is at most a (Ville). The values d0 against which it was not reached are the
interval. So the test may be read after every session, stopped at any time, and continued; the base
rate may drift, and sessions may depend on earlier ones.

Waudby-Smith and Ramdas, arXiv 2010.09686 (betting; predictable bets); Waudby-Smith, Wu, Ramdas,
Karampatziakis and Mineiro, arXiv 2210.10768 (propensity weights). Bets are those that grow fastest
for a few sizes of the difference, averaged with fixed weights (`EFFECTS`).

Sessions are ordered by their start. Outcomes that are known early are biased: users complain
immediately, and failing sessions may end sooner. So a session is settled when its waiting time has
passed, with the outcome that is known then, and counts only after all sessions that began before
it, except those that take longer than `HELD` times `sessions.idle`. Then each read sees all
sessions up to some time, however they ended, and a new version is compared like an old one.
Complaints within the first seconds are also counted separately: for them, too, all versions have
had the same time.

A session is read while it is in progress, after its end, and in the step that trained it; the first
read includes discarded sessions, such as those of a candidate that was offered by hand. Only
sessions that can still affect a decision are kept.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from agentrl.core.config.live import IDLE, LiveConfig
from agentrl.core.types import SESSION, Purpose, Rollout, RolloutState
from agentrl.live.records import Lanes, LiveState, known_end, mark_of, outcome_of, served
from agentrl.store.base import Store

Array = np.ndarray[Any, np.dtype[Any]]
EFFECTS = np.array([[0.05], [0.1], [0.2], [0.4]])  # differences of means on which the test bets
# Shares of the capital for each of these bets; the largest is for ten percentage points.
WEIGHTS = np.log([[0.2], [0.5], [0.2], [0.1]])
BOLDEST = 0.5  # maximum fraction of the capital that one session can lose
VARIANCE, COUNTED = 0.25, 5.0  # prior of an outcome's variance, and its weight in sessions
HALVINGS = 12  # bisection steps for an end of the interval, to 0.0005
# Fractions of the capital that are bet on a rate above a limit.
FRACTIONS = np.array([[0.05], [0.15], [0.4], [0.8]])


class Counted(NamedTuple):
    """A session that counts."""

    candidate: bool  # whether the candidate served it
    outcome: float  # clipped to 0..1; NaN: missing, does not count
    share: float  # probability with which the session was assigned to the candidate, in (0, 1)


class Difference(NamedTuple):
    """Candidate minus serving. NaN: not known."""

    low: float  # with probability 1 - alpha, low <= difference <= high at all times simultaneously
    high: float
    candidate: float  # mean outcomes
    serving: float
    sessions: tuple[int, int]  # numbers with a known outcome: candidate, serving
    clipped: int  # outcomes outside of 0 to 1


class _Bets(NamedTuple):
    x: Array  # [n] see above
    variance: Array  # [n] of x, by earlier sessions
    loss: Array  # [n] largest -x that is possible


def difference(sessions: Sequence[Counted], alpha: float) -> Difference:
    """Compare the sessions in the order in which they became known. The probability that an end is
    ever wrong is at most alpha / 2. Raises ValueError for a share of 0 or 1."""
    present = [session for session in sessions if not math.isnan(session.outcome)]
    if not present:
        return Difference(-1.0, 1.0, math.nan, math.nan, (0, 0), 0)
    candidate, raw_outcome, share = (np.array(column) for column in zip(*present, strict=True))
    if share.min() <= 0 or share.max() >= 1:
        raise ValueError("a session that could only be drawn for one version compares nothing")
    outcome = np.clip(raw_outcome, 0.0, 1.0)
    up, down = _bets(candidate, outcome, share)
    line = math.log(2 / alpha)
    return Difference(
        _highest_refuted(up, line),
        -_highest_refuted(down, line),
        _mean(outcome[candidate]),
        _mean(outcome[~candidate]),
        (int(candidate.sum()), int((~candidate).sum())),
        int((outcome != raw_outcome).sum()),
    )


def exceeds(values: Sequence[float], limit: float, alpha: float) -> int | None:
    """The number of values after which the test rejects "the mean is at most `limit`"; None: it
    does not. `values`: 0 to 1, in order. The probability of ever rejecting it falsely is at most
    alpha."""
    if not len(values) or limit >= 1:
        return None
    bet = FRACTIONS / max(limit, 1e-3)
    gains = np.cumsum(np.log1p(bet * (np.clip(values, 0.0, 1.0) - limit)), axis=1)
    capital = np.logaddexp.reduce(gains, axis=0) - math.log(len(FRACTIONS))
    reached = np.flatnonzero(capital >= math.log(1 / alpha))
    return int(reached[0]) + 1 if reached.size else None


def refuted(sessions: tuple[Array, Array, Array], null: float, alpha: float) -> int | None:
    """The number of sessions after which "the difference is at most `null`" is rejected; None:
    never. sessions: the columns of `Counted`, [n] each, without missing outcomes."""
    up, _ = _bets(*sessions)
    reached = np.flatnonzero(_capital(up, null) >= math.log(1 / alpha))
    return int(reached[0]) + 1 if reached.size else None


def _bets(candidate: Array, outcome: Array, share: Array) -> tuple[_Bets, _Bets]:
    """The bets on a difference above `null`, and on one below."""
    ours, theirs = (_so_far(outcome, lane, 0.5, 1.0) for lane in (candidate, ~candidate))
    centre = (1 - share) * ours + share * theirs
    x = np.where(candidate, 1 / share, -1 / (1 - share)) * (outcome - centre)
    square = (outcome - centre) ** 2
    ours, theirs = (_so_far(square, lane, VARIANCE, COUNTED) for lane in (candidate, ~candidate))
    variance = ours / share + theirs / (1 - share)
    worst = np.maximum(centre / share, (1 - centre) / (1 - share))
    best = np.maximum((1 - centre) / share, centre / (1 - share))
    return _Bets(x, variance, worst), _Bets(-x, variance, best)


def _so_far(values: Array, counted: Array, first: float, weight: float) -> Array:
    """[n] -> [n] running means of the earlier, counted values, with `first` as a prior of weight
    `weight`."""
    total, number = np.cumsum(np.where(counted, values, 0.0)), np.cumsum(counted)
    before = [np.concatenate(([0.0], row[:-1])) for row in (total, number)]
    result: Array = (first * weight + before[0]) / (weight + before[1])
    return result


def _capital(bets: _Bets, null: float) -> Array:
    """[n] log of the capital after each session, for bets against the difference `null` (-1 to
    1)."""
    size = np.minimum(EFFECTS / bets.variance, BOLDEST / (bets.loss + 1))
    capital: Array = np.logaddexp.reduce(
        WEIGHTS + np.cumsum(np.log1p(size * (bets.x - null)), axis=1), axis=0
    )
    return capital


def _highest_refuted(bets: _Bets, line: float) -> float:
    """The largest rejected difference; -1: none. Zero is always one of the tested values."""
    low, high = -1.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        reached = _capital(bets, middle).max() >= line  # falls with the difference
        low, high = (middle, high) if reached else (low, middle)
    return low


def _mean(values: Array) -> float:
    return float(values.mean()) if values.size else math.nan


WATCHED = 200  # sessions of a version that the guard reads, as candidate and afterwards
HELD = 5  # multiple of `sessions.idle` for which an unsettled session holds back later ones
EARLY = 30.0  # seconds after the end of a session within which a complaint is an early one
MAX_SESSIONS_READ = 50  # ended sessions of a version whose calls are read
BEGAN = "began"  # key of a task


@dataclass(frozen=True, slots=True)
class ServedSession:
    """A session with a settled outcome. Later feedback does not change comparisons."""

    rollout: str
    version: int
    lane: str  # lane at its start: serving or candidate
    rival: int | None  # the candidate at its start
    share: float  # probability of the assignment to the candidate
    began: float  # unix seconds
    outcome: float  # NaN: unknown
    early: float  # see `early_of`
    signals: dict[str, float]


@dataclass(slots=True)
class ServedSessions:
    """The served sessions of one run."""

    store: Store
    run: str
    live: LiveConfig
    idle: float = IDLE  # seconds without a call after which a session ends
    known: dict[int, list[ServedSession]] = field(default_factory=lambda: defaultdict(list))
    newest: dict[int, deque[Rollout]] = field(  # ended sessions, also without an outcome
        default_factory=lambda: defaultdict(partial(deque, maxlen=MAX_SESSIONS_READ))
    )
    recent: dict[str, Rollout] = field(default_factory=dict)  # in progress or recently ended
    _open: dict[str, Rollout] = field(default_factory=dict)  # not settled
    # Settled session -> the last read that returned it.
    _seen: dict[str, int] = field(default_factory=dict)
    _step: int = 0  # sessions of earlier steps have been read
    _looks: int = 0
    _now: float = 0.0

    async def read(self, now: float, state: LiveState) -> None:
        """Read new sessions. now: unix seconds. The queries are in the order of a session's states,
        so that none is missed."""
        if (lanes := state.lanes) is None:
            return
        first = not self._looks
        filters: dict[str, Any]
        rows: list[Rollout] = []
        for filters in (
            {"state": RolloutState.RUNNING, "purpose": Purpose.TRAIN},
            {"group_state": "settled"},
            {"group_state": "claimed"},
        ):
            rows += await self.store.rollouts(self.run, **filters)
        run_row = await self.store.run(self.run)
        self.see(rows, now, lanes)
        if first:
            self._take(await self.store.rollouts(self.run, group_state="discarded"), lanes)
        steps = run_row.step if run_row else 0
        for step in range(max(self._step, first_step(state, lanes)), steps):
            self._take(await self.store.rollouts(self.run, trained=step), lanes)
            self._step = step + 1

    def see(self, rows: Iterable[Rollout], now: float, lanes: Lanes) -> None:
        """Update from all sessions (`rows`) that no step has trained."""
        self._now, self._looks = now, self._looks + 1
        sessions = [row for row in rows if row.step == SESSION and row.purpose is Purpose.TRAIN]
        self.recent = {row.id: row for row in sessions}
        before, self._open = self._open, {}
        self._take((before | self.recent).values(), lanes)
        still_listed = dict.fromkeys(self._seen.keys() & self.recent.keys(), self._looks)
        self._seen |= still_listed  # one read may miss a row while its group is being released
        self._seen = {id: look for id, look in self._seen.items() if look >= self._looks - 1}

    def _take(self, rows: Iterable[Rollout], lanes: Lanes) -> None:
        for row in rows:
            if row.id not in self._seen and row.task.get("version") in served(lanes):
                self._sort(row)
        self._trim(lanes)

    def _sort(self, row: Rollout) -> None:
        """Add a session if it is settled; otherwise keep it as open."""
        labelled = is_labelled(row)
        if labelled and self._had_time(row, self.live.wait):
            self._add(row)
        elif labelled or row.id in self.recent:  # others were deleted
            self._open[row.id] = row

    def _add(self, row: Rollout) -> None:
        self._seen[row.id], task = self._looks, row.task
        self.newest[task["version"]].append(row)
        mark = mark_of(row)
        session = ServedSession(
            rollout=row.id,
            version=task["version"],
            lane=task.get("lane", "serving"),
            rival=task.get("candidate"),
            share=task.get("share", 0.0),
            began=began_of(row, self._now),
            outcome=outcome_of(row),
            early=early_of(row),
            signals=mark.signals if mark else {},
        )
        self.known[session.version].append(session)

    def _trim(self, lanes: Lanes) -> None:
        """Keep only sessions that can affect a decision: those of a comparison, and the first and
        newest ones of a version, which the guard reads."""
        for version in {*self.known, *self.newest} - served(lanes):
            self.known.pop(version, None)
            self.newest.pop(version, None)
        for version, sessions in self.known.items():
            sessions.sort(key=lambda session: session.began)
            judged = [session for session in sessions if not math.isnan(session.outcome)]
            needed = {
                session.rollout
                for session in judged
                if session.rival == lanes.candidate is not None
            }
            for group in (sessions, judged):
                first = [session for session in group if session.lane == "serving"][:WATCHED]
                needed |= {session.rollout for session in [*first, *group[-WATCHED:]]}
            self.known[version] = [session for session in sessions if session.rollout in needed]

    def compared(self, candidate: int, serving: int) -> list[ServedSession]:
        """The sessions with a known outcome that were assigned to one of two lanes, in order of
        their start."""
        ours = [session for session in self.known[candidate] if session.lane == "candidate"]
        theirs = [session for session in self.known[serving] if session.lane == "serving"]
        drawn = [
            session
            for session in ours + theirs
            if session.rival == candidate and 0 < session.share < 1
        ]
        drawn = [session for session in drawn if not math.isnan(session.outcome)]
        alike = [row for row in self._open.values() if row.task.get("candidate") == candidate]
        end = self._end(alike, self.live.wait)
        return sorted(
            (session for session in drawn if session.began < end), key=lambda session: session.began
        )

    def outcomes(self, version: int, *, lane: str = "", early: bool = False) -> list[float]:
        """Known outcomes of a version, oldest first. early: the early outcomes (`early_of`), also
        of sessions that are not settled."""
        sessions = [session for session in self.known[version] if not lane or session.lane == lane]
        timed = [
            (session.began, session.early if early else session.outcome) for session in sessions
        ]
        left = [row for row in self._open.values() if is_of(row, version, lane)]
        if early:
            over = [row for row in left if is_labelled(row) and self._had_time(row, EARLY)]
            timed += [(began_of(row, self._now), early_of(row)) for row in over]
            left = [row for row in left if row not in over]
        end = self._end(left, EARLY if early else self.live.wait)
        return [value for began, value in sorted(timed) if began < end and not math.isnan(value)]

    def _had_time(self, row: Rollout, seconds: float) -> bool:
        return known_end(row) + seconds <= self._now

    def _end(self, left: Iterable[Rollout], wait: float) -> float:
        """The start of the first unsettled session, which holds back later ones."""
        oldest = self._now - wait - HELD * self.idle
        begun = [began_of(row, self._now) for row in left]
        return min((began for began in begun if began >= oldest), default=math.inf)


def is_labelled(row: Rollout) -> bool:
    return row.state.terminal and mark_of(row) is not None


def began_of(row: Rollout, now: float) -> float:
    """When a session began, in unix seconds; `now` if that is unknown and it has not ended."""
    began = row.task.get(BEGAN)
    if isinstance(began, int | float):
        return float(began)
    ended = known_end(row)
    return ended - row.seconds if ended else now


def early_of(row: Rollout) -> float:
    """The outcome of a session if its user gave feedback within `EARLY` seconds of its end, else 1:
    no complaint."""
    mark, outcome = mark_of(row), outcome_of(row)
    if mark is None or not mark.explicit or math.isnan(outcome):
        return 1.0
    soon = any(mark.delays.get(name, 0.0) <= EARLY for name in mark.posted)
    return outcome if soon else 1.0


def first_step(state: LiveState, lanes: Lanes) -> int:
    """The first step that may have trained sessions of the versions in the lanes."""
    versions = [state.versions[version] for version in served(lanes) if version in state.versions]
    return min((version.step for version in versions), default=0)


def counted(sessions: list[ServedSession], candidate: int) -> list[Counted]:
    return [
        Counted(session.version == candidate, session.outcome, session.share)
        for session in sessions
    ]


def is_of(row: Rollout, version: int, lane: str) -> bool:
    return row.task.get("version") == version and (not lane or row.task.get("lane") == lane)
