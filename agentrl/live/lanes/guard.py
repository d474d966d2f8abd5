"""The guard: takes a version back because of what its sessions show, while they are in progress.

A version is compared with the one that it replaces, from which it may differ by the limits of
[live.guard]. That it differs more is shown by the same bets as in `comparison`, at any time with a
probability of at most `ALARM` of a false alarm per limit; so a version that fails every call is
back after its third, and one that fails a little more often than allowed after many.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from agentrl.config.live import GuardConfig
from agentrl.live.lanes.comparison import exceeds
from agentrl.live.lanes.served import EARLY, NEWEST, ServedSessions, began_of, is_of
from agentrl.live.records.documents import policy_of
from agentrl.live.records.marks import failed_calls
from agentrl.store.base import Store
from agentrl.types import Json, Rollout, Transition

ALARM = 0.01  # probability of a false alarm, for each limit and version
FEW = 20  # calls or outcomes of the other version below which it is unknown what is usual
SURE = 2.0  # standard errors that are added to what is usual with the other version
CUT_OFF = "length"  # `finish` of an answer that a token limit ended


class Alarm(NamedTuple):
    why: str
    evidence: dict[str, Json]


class Limit(NamedTuple):
    """A limit of a version's mean, with what it is about."""

    name: str  # of the setting
    said: str  # what it is a share of
    values: Sequence[float]  # 0 to 1, in their order
    usual: float  # mean of the other version
    of: int  # values that it is the mean of
    more: float

    @property
    def most(self) -> float:
        error = math.sqrt(self.usual * (1 - self.usual) / self.of) if self.of else 0.0
        return self.usual + SURE * error + self.more


@dataclass(slots=True)
class SeenCalls:
    """What the calls of a version show, in their order."""

    policy: str  # by which the version is served
    refusal: re.Pattern[str]
    failed: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    _read: dict[str, int] = field(default_factory=dict)  # rollout -> number of its calls
    _lost: dict[str, int] = field(default_factory=dict)  # and of those that got no answer
    _over: set[str] = field(default_factory=set)

    async def read(self, store: Store, rows: Iterable[Rollout], most: int) -> None:
        """Add the new calls of these sessions, of at most `most` sessions in all."""
        open_ = [row for row in rows if row.id not in self._over]
        known = [row for row in open_ if row.id in self._read]
        new = [row for row in open_ if row.id not in self._read][: max(most - len(self._read), 0)]
        found = await store.calls([row.id for row in known + new])
        for row in known + new:
            calls, lost = found.get(row.id, []), failed_calls(row)
            self.add(calls[self._read.get(row.id, 0) :])
            self.failed += [1.0] * (lost - self._lost.get(row.id, 0))
            self._read[row.id], self._lost[row.id] = len(calls), lost
            if row.state.terminal:
                self._over.add(row.id)

    def add(self, calls: Iterable[Transition]) -> None:
        for call in calls:
            if call.policy == self.policy and call.repeats is None:
                said = text_of(call)
                empty = not said.strip() and not (call.answer or {}).get("tool_calls")
                self.failed.append(float(empty or call.finish == CUT_OFF))
                self.refused.append(float(bool(self.refusal.search(said))))
                self.tokens.append(len(call.completion))


class Guard:
    """Watches versions of one run."""

    def __init__(self, store: Store, settings: GuardConfig) -> None:
        self._store, self._settings = store, settings
        self._refusal = re.compile(settings.refusal, re.IGNORECASE | re.DOTALL)
        self._calls: dict[tuple[int, str], SeenCalls] = {}  # (version, lane) -> of its sessions
        self._usual: dict[int, SeenCalls] = {}

    async def alarm(
        self, served: ServedSessions, version: int, other: int, lane: str
    ) -> Alarm | None:
        """Why a version has to be taken back that began in a lane in place of another version."""
        rows = [row for row in served.recent.values() if is_of(row, version, lane)]
        calls = self._calls.setdefault((version, lane), self._new(version))
        await calls.read(self._store, rows, self._settings.sessions)
        known = other in self._usual
        found = await self._judged(served, version, other, lane)
        if found and known and found.evidence["limit"] != "drop":
            # Perhaps it is the same with both by now.
            del self._usual[other]
            found = await self._judged(served, version, other, lane)
        return found

    async def _judged(
        self, served: ServedSessions, version: int, other: int, lane: str
    ) -> Alarm | None:
        most, usual = self._settings.sessions, await self._usual_calls(served, other)
        limits = call_limits(self._settings, self._calls[version, lane], usual)
        for early in (True, False) if served.live.wait > EARLY else (False,):
            ours = served.outcomes(version, lane=lane, early=early)[:most]
            theirs = served.outcomes(other, early=early)
            limits += outcome_limits(self._settings, ours, theirs, early=early)
        return broken(limits, other)

    def forget(self, kept: set[int]) -> None:
        """Forget all other versions."""
        self._calls = {key: one for key, one in self._calls.items() if key[0] in kept}
        self._usual = {key: one for key, one in self._usual.items() if key in kept}

    async def _usual_calls(self, served: ServedSessions, version: int) -> SeenCalls:
        """Of its newest sessions; read once there are enough calls."""
        calls = self._usual.get(version)
        if calls is None or len(calls.failed) < FEW:
            calls = self._usual[version] = self._new(version)
            rows = {row.id: row for row in served.newest[version]}
            rows |= {id: row for id, row in served.recent.items() if is_of(row, version, "")}
            newest = sorted(rows.values(), key=lambda row: began_of(row, math.inf))[-NEWEST:]
            await calls.read(self._store, newest, NEWEST)
        return calls

    def _new(self, version: int) -> SeenCalls:
        return SeenCalls(policy_of(version), self._refusal)


def call_limits(settings: GuardConfig, calls: SeenCalls, usual: SeenCalls) -> list[Limit]:
    found = []
    for name, said, of in (
        ("failures", "calls failed", "failed"),
        ("refusals", "answers refuse", "refused"),
    ):
        base: list[float] = getattr(usual, of)
        # Policies fail rarely, but what refuses is a matter of the agent: it takes a comparison.
        known = name == "failures" or len(base) >= FEW
        if known and (more := getattr(settings, name)) is not None:
            found.append(Limit(name, said, getattr(calls, of), _mean(base), len(base), more))
    if settings.length is not None and len(usual.tokens) >= FEW:
        longest = settings.length * _mean(usual.tokens)
        long, base = ([float(n > longest) for n in one.tokens] for one in (calls, usual))
        said = f"answers have more than {longest:.0f} tokens"
        found.append(Limit("length", said, long, _mean(base), len(base), settings.long))
    return found


def outcome_limits(
    settings: GuardConfig, outcomes: Sequence[float], usual: Sequence[float], *, early: bool = False
) -> list[Limit]:
    """Of what is missing to an outcome of 1. early: to what is known of it at once."""
    base = [1 - one for one in usual[-settings.sessions :]]
    if settings.drop is None or len(base) < FEW:
        return []
    lost = [1 - one for one in outcomes]
    said = "outcomes, as far as users complain at once," if early else "outcomes"
    return [Limit("drop", said, lost, _mean(base), len(base), settings.drop)]


def broken(limits: Iterable[Limit], other: int) -> Alarm | None:
    """Why the first limit that is shown to be exceeded is; None: none is."""
    for one in limits:
        if at := exceeds(one.values, one.most, ALARM):
            share = _mean(one.values[:at])
            both = f"{share:.0%} of its first {at} {one.said}, {one.usual:.0%}"
            if one.name == "drop":
                both = (
                    f"its first {at} {one.said} are {1 - share:.0%} on average, {1 - one.usual:.0%}"
                )
            why = f"{both} with version {other}: more than live.guard.{one.name} allows"
            return Alarm(why, {"limit": one.name, "share": share, "usual": one.usual, "of": at})
    return None


def text_of(call: Transition) -> str:
    content = (call.answer or {}).get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(str(one.get("text") or "") for one in content if isinstance(one, dict))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
