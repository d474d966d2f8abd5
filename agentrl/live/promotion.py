"""Promotion: decides which version answers sessions, by comparison, by the guard, and by hand.

Everything is read from the store and a decision is a document in it, so decisions do not depend on
the algorithm process. `records` describes concurrent decisions.

The guard rolls a version back because of its sessions, while they are in progress. A version is
compared with the one that it replaces and may differ by `live.guard`. The betting
test of `served` detects larger differences, with a probability of at most `ALARM` per limit of
ever raising a false alarm; so a version that fails every call is rolled back after its third, and
one that fails slightly more often than allowed after many.

Each version that answers sessions is scored once on held-out tasks, by a separate run without
steps, in a separate process and in the folder `<output>/heldout/<version>-<digest>`, which exists
until the score is stored. So a watch that was killed continues the evaluation, and neither engine
nor learner of the live run takes part. Invariant: only scores of the same tasks, agent and verifier
are compared.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import to_builtins
from msgspec.structs import replace

from agentrl import trainer
from agentrl.algorithms.sampling.evaluate import confidence_interval
from agentrl.core.config import RunConfig
from agentrl.core.config.live import IDLE, MIN_SESSIONS, PromotionConfig
from agentrl.core.config.run_file import store_in
from agentrl.core.errors import AgentRLError, Conflict, StoreError
from agentrl.core.files import delete_directory, make_folder
from agentrl.core.processes import Child, log_phase, run_blocking
from agentrl.core.types import Json, Purpose, Rollout, Transition, missing_text
from agentrl.live import records
from agentrl.live.records import (
    Compared,
    Documents,
    Event,
    EventKind,
    HeldOutScore,
    Lanes,
    LiveState,
    Version,
    failed_calls,
    points,
    policy_of,
    put_score,
)
from agentrl.live.served import (
    EARLY,
    MAX_SESSIONS_READ,
    WATCHED,
    Difference,
    ServedSession,
    ServedSessions,
    began_of,
    counted,
    difference,
    exceeds,
    is_of,
)
from agentrl.live.signals import text_of
from agentrl.store import open_store
from agentrl.store.base import Store

DECISION_INTERVAL, DECISION_PAUSE = 5.0, 0.2  # maximum and minimum seconds between two checks
SHOWN = 2.0  # seconds between two documents of a comparison


async def decide_promotions(store: Store, config: RunConfig) -> None:
    """Make decisions and store them with their reasons, until cancelled. Raises StoreError; then
    call it again."""
    decider = Decider(store, config)
    while True:
        cursor, began = await store.cursor(), time.monotonic()
        try:
            while event := await decider.look(time.time()):
                log.info("version %d: %s: %s", event.version, event.kind, event.why)
        except Conflict as error:
            log.info("decided elsewhere meanwhile, reading again: %s", error)
            continue
        await asyncio.sleep(DECISION_PAUSE + records.PAUSE_SHARE * (time.monotonic() - began))
        await store.wait(cursor, timeout=DECISION_INTERVAL)


class Decider:
    """Makes decisions about the versions of one run."""

    def __init__(self, store: Store, config: RunConfig) -> None:
        self._store, self._run, self._live = store, config.name, config.live
        self._held_out = bool(config.tasks.heldout)
        self._documents = records.Documents(store, config.name)
        self._served = ServedSessions(store, config.name, self._live, config.sessions.idle or IDLE)
        self._guard = Guard(store, self._live.guard)
        self._shown = -math.inf  # when a comparison was last written

    async def look(self, now: float) -> Event | None:
        """Make at most one decision. now: unix seconds. Raises Conflict if another process decided
        meanwhile."""
        state = await self._documents.state()
        await self._served.read(now, state)
        if state.lanes is not None:
            self._guard.forget(records.served(state.lanes))
        event = self._begun(state, now) or await self._alarm(state, now)
        event = event or await self._compared(state, now)
        if event:
            await records.decide(self._store, self._run, state, event)
        return event

    def _begun(self, state: LiveState, now: float) -> Event | None:
        """The start of the first version, or of a new candidate, if there is one."""
        if (lanes := state.lanes) is None:
            first = min(state.versions, default=None)
            if first is None:
                return None
            lanes = Lanes(serving=first, share=self._live.share)
            reason = "the version that the run begins with"
            return Event(time=now, kind="first", version=first, lanes=lanes, why=reason)
        if (new := records.next_offer(state)) is None:
            return None
        by_hand = new.kind == "offered by hand"
        if lanes.candidate is not None and (not by_hand or lanes.candidate >= records.GIVEN):
            return None  # offered weights are compared one after another
        reason = f"made by {new.step} steps" if not by_hand else f"offered by hand: {new.given}"
        if lanes.candidate is not None:
            reason += f"; version {lanes.candidate} is not compared any more"
        lanes = replace(lanes, candidate=new.version, share=self._live.share)
        return Event(time=now, kind="candidate", version=new.version, lanes=lanes, why=reason)

    async def _alarm(self, state: LiveState, now: float) -> Event | None:
        """The rollback that the guard demands, if any."""
        if (lanes := state.lanes) is None:
            return None
        if (version := lanes.candidate) is not None:
            restored = replace(lanes, candidate=None)
            if event := await self._back(state, version, lanes.serving, "candidate", restored, now):
                return event
        if lanes.previous is not None:
            restored = lanes.returned()
            return await self._back(state, lanes.serving, lanes.previous, "serving", restored, now)
        return None

    async def _back(
        self, state: LiveState, version: int, baseline: int, lane: str, restored: Lanes, now: float
    ) -> Event | None:
        alarm = await self._guard.alarm(self._served, version, baseline, lane)
        if alarm is None:
            return None
        return Event(
            time=now, kind="rolled back", version=version, lanes=restored, why=alarm.why,
            worse=True, evidence=alarm.evidence,
        )  # fmt: skip

    async def _compared(self, state: LiveState, now: float) -> Event | None:
        """The decision from the comparison of the two lanes and their held-out scores."""
        lanes = state.lanes
        if lanes is None or lanes.candidate is None:
            return None
        sessions = self._served.compared(lanes.candidate, lanes.serving)
        estimate = difference(counted(sessions, lanes.candidate), self._live.promotion.alpha)
        scores = comparable(state, lanes.candidate, lanes.serving)
        decision = verdict(self._live.promotion, estimate, scores if self._held_out else None)
        comparison = compared(lanes, estimate, sessions, scores, now)
        if decision or not 0 <= now - self._shown < SHOWN:
            self._shown = now
            await records.put_compared(self._store, self._run, comparison)
        if decision is None:
            return None
        kind, worse, reason = decision
        lanes_after = lanes.promoted() if kind == "promoted" else replace(lanes, candidate=None)
        return Event(
            time=now, kind=kind, version=lanes.candidate, lanes=lanes_after, why=reason,
            worse=worse, evidence=to_builtins(comparison),
        )  # fmt: skip


ALARM = 0.01  # probability of a false alarm, for each limit and version
MIN_CALLS = 20  # calls of the other version; with fewer, its rates are unknown
Z_SCORE = 2.0  # standard errors that are added to the other version's rates
REFUSED_SHARE = 0.2  # allowed increase of the share of refusals, which are recognised in English
LONG_ANSWER = 3.0  # an answer with more tokens than this multiple of the mean is long
LONG_SHARE = 0.2  # allowed increase of the share of long answers
REFUSAL = re.compile(
    r"^\W*(i'?m |i am )?(very |really )?(sorry|unable to)\b.{0,40}\b(but|can'?t|cannot|unable|help)"
    r"|^\W*(i |we )(can'?t|cannot|can not|won'?t|will not) (help|assist|comply|answer|provide)",
    re.IGNORECASE | re.DOTALL,
)
CUT_OFF = "length"  # `finish` of an answer that a token limit ended


class Alarm(NamedTuple):
    why: str
    evidence: dict[str, Json]


class Limit(NamedTuple):
    """A limit for a mean of a version."""

    name: str  # the setting
    text: str  # description of the mean
    values: Sequence[float]  # 0 to 1, in their order
    usual: float  # mean of the other version
    of: int  # number of values in that mean
    more: float  # allowed increase

    @property
    def threshold(self) -> float:
        error = math.sqrt(self.usual * (1 - self.usual) / self.of) if self.of else 0.0
        return self.usual + Z_SCORE * error + self.more


@dataclass(slots=True)
class SeenCalls:
    """Statistics of the calls of a version, in their order."""

    policy: str  # the served name of the version
    failed: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    _read: dict[str, int] = field(default_factory=dict)  # rollout -> number of its calls
    _lost: dict[str, int] = field(default_factory=dict)  # the same for calls without an answer
    _over: set[str] = field(default_factory=set)

    async def read(self, store: Store, rows: Iterable[Rollout], max_sessions: int) -> None:
        """Add the new calls of these sessions, of at most `max_sessions` sessions in all."""
        open_ = [row for row in rows if row.id not in self._over]
        seen_before = [row for row in open_ if row.id in self._read]
        new = [row for row in open_ if row.id not in self._read]
        new = new[: max(max_sessions - len(self._read), 0)]
        calls_by_id = await store.calls([row.id for row in seen_before + new])
        for row in seen_before + new:
            calls, lost = calls_by_id.get(row.id, []), failed_calls(row)
            self.add(calls[self._read.get(row.id, 0) :])
            self.failed += [1.0] * (lost - self._lost.get(row.id, 0))
            self._read[row.id], self._lost[row.id] = len(calls), lost
            if row.state.terminal:
                self._over.add(row.id)

    def add(self, calls: Iterable[Transition]) -> None:
        for call in calls:
            if call.policy == self.policy and call.repeats is None:
                text = text_of(call.answer or {})
                empty = not text.strip() and not (call.answer or {}).get("tool_calls")
                self.failed.append(float(empty or call.finish == CUT_OFF))
                self.refused.append(float(bool(REFUSAL.search(text))))
                self.tokens.append(len(call.completion))


class Guard:
    """Watches versions of one run."""

    def __init__(self, store: Store, allowed: float | None) -> None:
        self._store, self._allowed = store, allowed
        self._calls: dict[tuple[int, str], SeenCalls] = {}  # (version, lane) -> calls of sessions
        self._usual: dict[int, SeenCalls] = {}

    async def alarm(
        self, served: ServedSessions, version: int, baseline: int, lane: str
    ) -> Alarm | None:
        """The alarm for which a version that replaced another one in a lane must be rolled back;
        None: there is none."""
        rows = [row for row in served.recent.values() if is_of(row, version, lane)]
        calls = self._calls.setdefault((version, lane), self._new(version))
        await calls.read(self._store, rows, WATCHED)
        was_cached = baseline in self._usual
        alarm = await self._judged(served, version, baseline, lane)
        if alarm and was_cached and alarm.evidence["limit"] != "drop":
            # The other version may have changed in the same way.
            del self._usual[baseline]
            alarm = await self._judged(served, version, baseline, lane)
        return alarm

    async def _judged(
        self, served: ServedSessions, version: int, baseline: int, lane: str
    ) -> Alarm | None:
        baseline_calls = await self._usual_calls(served, baseline)
        limits = call_limits(self._allowed, self._calls[version, lane], baseline_calls)
        for early in (True, False) if served.live.wait > EARLY else (False,):
            outcomes_here = served.outcomes(version, lane=lane, early=early)[:WATCHED]
            outcomes_there = served.outcomes(baseline, early=early)
            limits += outcome_limits(self._allowed, outcomes_here, outcomes_there, early=early)
        return broken(limits, baseline)

    def forget(self, versions: set[int]) -> None:
        """Keep only the statistics of these versions."""
        self._calls = {key: calls for key, calls in self._calls.items() if key[0] in versions}
        self._usual = {key: calls for key, calls in self._usual.items() if key in versions}

    async def _usual_calls(self, served: ServedSessions, version: int) -> SeenCalls:
        """The calls of the version's newest sessions; read only once if there are enough."""
        calls = self._usual.get(version)
        if calls is None or len(calls.failed) < MIN_CALLS:
            calls = self._usual[version] = self._new(version)
            rows = {row.id: row for row in served.newest[version]}
            rows |= {id: row for id, row in served.recent.items() if is_of(row, version, "")}
            by_start = sorted(rows.values(), key=lambda row: began_of(row, math.inf))
            newest = by_start[-MAX_SESSIONS_READ:]
            await calls.read(self._store, newest, MAX_SESSIONS_READ)
        return calls

    def _new(self, version: int) -> SeenCalls:
        return SeenCalls(policy_of(version))


def call_limits(allowed: float | None, calls: SeenCalls, baseline: SeenCalls) -> list[Limit]:
    limits, other = [], baseline.failed
    if allowed is not None:
        usual_share = _mean(other)
        limits.append(
            Limit("failures", "calls failed", calls.failed, usual_share, len(other), allowed)
        )
    other = baseline.refused
    # Failed calls are rare for any policy, but refusals depend on the agent: they need a
    # comparison.
    if len(other) >= MIN_CALLS:
        mean = _mean(other)
        limit = Limit("refusals", "answers refuse", calls.refused, mean, len(other), REFUSED_SHARE)
        limits.append(limit)
    if len(baseline.tokens) >= MIN_CALLS:
        longest = LONG_ANSWER * _mean(baseline.tokens)
        long, other = ([float(n > longest) for n in seen.tokens] for seen in (calls, baseline))
        text = f"answers have more than {longest:.0f} tokens"
        limits.append(Limit("length", text, long, _mean(other), len(other), LONG_SHARE))
    return limits


def outcome_limits(
    allowed: float | None, outcomes: Sequence[float], other: Sequence[float], *, early: bool = False
) -> list[Limit]:
    """Limits for 1 minus the outcome. early: for 1 minus the early outcome."""
    base = [1 - value for value in other[-WATCHED:]]
    if allowed is None or len(base) < MIN_CALLS:
        return []
    lost = [1 - value for value in outcomes]
    text = "outcomes, as far as users complain at once," if early else "outcomes"
    return [Limit("drop", text, lost, _mean(base), len(base), allowed)]


def broken(limits: Iterable[Limit], baseline: int) -> Alarm | None:
    """The alarm for the first limit that the test shows to be exceeded; None: there is none."""
    for limit in limits:
        if at := exceeds(limit.values, limit.threshold, ALARM):
            share = _mean(limit.values[:at])
            summary = f"{share:.0%} of its first {at} {limit.text}, {limit.usual:.0%}"
            if limit.name == "drop":
                means = f"{1 - share:.0%} on average, {1 - limit.usual:.0%}"
                summary = f"its first {at} {limit.text} are {means}"
            why = f"{summary} with version {baseline}: more than the guard allows"
            return Alarm(why, {"limit": limit.name, "share": share, "usual": limit.usual, "of": at})
    return None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


Scored = HeldOutScore | None  # None: unknown


def verdict(
    settings: PromotionConfig, estimate: Difference, scores: tuple[Scored, Scored] | None = None
) -> tuple[EventKind, bool, str] | None:
    """The decision on a candidate, whether it was found worse, and the reason; None: no decision
    yet. scores: of candidate and serving version; None if there are no held-out tasks."""
    ours = estimate.sessions[0]
    margin = settings.margin if settings.rule == "not_worse" else 0.0
    scored = scores is None or all(
        score is not None and score.score is not None for score in scores
    )
    failed = next(
        (score.failed for score in scores or () if score is not None and score.failed), ""
    )
    if reason := held_out_worse(*scores or (None, None)):
        return "dropped", True, reason
    if estimate.high <= -margin:
        return "dropped", True, f"its sessions are worse: {in_points(estimate)}"
    if ours >= settings.most and failed and settings.rule != "never":
        return "dropped", False, f"after {ours} sessions there is no held-out score: {failed}"
    if settings.rule == "always":
        return ("promoted", False, 'live.promotion.rule = "always"') if scored else None
    compares = settings.rule in ("better", "not_worse") and ours >= MIN_SESSIONS
    shown_better = compares and estimate.low >= -margin
    if shown_better and scored:
        how = "are better" if estimate.low >= 0 else f"are not worse by {points(margin)} points"
        return "promoted", False, f"its sessions {how}: {in_points(estimate)}"
    if ours >= settings.most and not shown_better:
        return "dropped", False, f"{ours} sessions did not decide: {in_points(estimate)}"
    return None


def held_out_worse(ours: Scored, theirs: Scored) -> str:
    """A sentence if the interval of the candidate's held-out score is below that of the serving
    version, else empty."""
    if ours is None or theirs is None or ours.high is None or theirs.low is None:
        return ""
    if ours.high >= theirs.low:
        return ""
    return (
        f"it solves fewer held-out tasks: {ours.score:.0%}{missing_text(ours.missing)} (at most "
        f"{ours.high:.0%}) against {theirs.score:.0%}{missing_text(theirs.missing)}"
    )


def in_points(estimate: Difference) -> str:
    ours, theirs = estimate.sessions
    return (
        f"by {points(estimate.low)} to {points(estimate.high)} points ({estimate.candidate:.0%} "
        f"against {estimate.serving:.0%}, {ours} and {theirs} sessions)"
    )


def compared(
    lanes: Lanes,
    estimate: Difference,
    sessions: Sequence[ServedSession],
    scores: tuple[Scored, Scored],
    now: float,
) -> Compared:
    """The displayed summary of a comparison. scores: of candidate and serving version."""
    assert lanes.candidate is not None
    ours = [session for session in sessions if session.version == lanes.candidate]
    theirs = [session for session in sessions if session.version == lanes.serving]
    names = sorted({name for session in sessions for name in session.signals})
    return Compared(
        version=lanes.candidate, serving=lanes.serving, time=now, sessions=estimate.sessions,
        low=estimate.low, high=estimate.high, clipped=estimate.clipped,
        means=(_none_if_nan(estimate.candidate), _none_if_nan(estimate.serving)),
        signals={name: (_mean_signal(name, ours), _mean_signal(name, theirs)) for name in names},
        held_out=(_score(scores[0]), _score(scores[1])),
        missing=(_missing(scores[0]), _missing(scores[1])),
    )  # fmt: skip


def _mean_signal(signal: str, sessions: Sequence[ServedSession]) -> float | None:
    values = [session.signals[signal] for session in sessions if signal in session.signals]
    return sum(values) / len(values) if values else None


def _none_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else value


def _missing(score: Scored) -> int:
    return 0 if score is None else score.missing


def _score(score: Scored) -> float | None:
    return None if score is None else score.score


log = logging.getLogger("agentrl.live")
FOLDER, RUN_FILE, TASKS = "heldout", "score.json", "eval/tasks"
HELDOUT_INTERVAL, HELDOUT_PAUSE = 60.0, 1.0  # seconds between two reads of the lanes
LANES_PAUSE = 5.0  # seconds, while tasks are played
NICENESS = 10  # `nice` value of an evaluation's processes
T = TypeVar("T")


async def evaluate_heldout(store: Store, config: RunConfig) -> None:
    """Score each version that is in a lane, until cancelled. Returns if there are no held-out
    tasks. Raises AgentRLError if an evaluation fails; then call it again."""
    documents, cursor, digest = Documents(store, config.name), 0, ""
    seated: list[int] = []
    while config.tasks.heldout:
        state = await documents.state()
        if (lanes := _to_score(state)) != seated:  # a comparison keeps the tasks of its start
            seated, digest = lanes, digest_of(config)
        if (version := unscored(state, digest)) is None:
            cursor = await store.wait(cursor, timeout=HELDOUT_INTERVAL)
            await asyncio.sleep(HELDOUT_PAUSE)
            continue
        log_phase(log, f"version {version.version}: playing the held-out tasks")
        playing = scored(config, version, digest)
        try:
            score = await _while_in_a_lane(documents, version.version, playing)
        except StoreError:
            raise
        except AgentRLError as error:
            failed = HeldOutScore(version=version.version, digest=digest, failed=str(error))
            if state.scores.get(version.version) != failed:
                await put_score(store, config.name, failed)
            raise
        if score is None:
            log.info("version %d: not played further, it is in no lane now", version.version)
        else:
            await put_score(store, config.name, score)
            log.info(
                "version %d: %.1f %% held-out%s",
                version.version,
                100 * (score.score or 0.0),
                missing_text(score.missing),
            )
        delete_directory(folder_of(config, version.version, digest))


async def _while_in_a_lane(
    documents: Documents, version: int, work: Coroutine[Any, Any, T]
) -> T | None:
    """The result of `work`; None if it is cancelled because the version has left its lane."""
    playing = asyncio.create_task(work)
    try:
        while not (await asyncio.wait([playing], timeout=LANES_PAUSE))[0]:
            with suppress(StoreError):  # the evaluation continues meanwhile
                if version not in _to_score(await documents.state()):
                    return None
        return playing.result()
    finally:
        playing.cancel()
        await asyncio.wait([playing])


def _to_score(state: LiveState) -> list[int]:
    """The version that serves, then its candidate."""
    lanes = (state.lanes.serving, state.lanes.candidate) if state.lanes else ()
    return [version for version in lanes if version is not None]


def unscored(state: LiveState, digest: str) -> Version | None:
    """The version to score next. digest: of the current tasks and settings."""
    done = {
        score.version
        for score in state.scores.values()
        if score.digest == digest and not score.failed
    }
    left = [version for version in _to_score(state) if version not in done]
    return next((state.versions[version] for version in left if version in state.versions), None)


def comparable(state: LiveState, ours: int, theirs: int) -> tuple[Scored, Scored]:
    """The scores of two versions; None if they are not comparable because tasks or settings differ:
    new scores will follow."""
    our_score, their_score = state.scores.get(ours), state.scores.get(theirs)
    if our_score and their_score and our_score.digest != their_score.digest:
        return None, None
    return our_score, their_score


def digest_of(config: RunConfig) -> str:
    """A hash of everything but the version that a score depends on: the settings of tasks, agent,
    verifier, sampling and evaluations, and the files that they name."""
    tables = [config.tasks, config.agent, config.verifier, config.sampling, config.eval]
    settings = [msgspec.to_builtins(table) for table in tables]
    named = {Path(config.root, part) for text in _texts(settings) for part in _parts(text)}
    files = {str(path): path.read_bytes() for path in sorted(named) if path.is_file()}
    return blake2b(msgspec.json.encode([settings, files]), digest_size=16).hexdigest()


def _texts(value: Json) -> Iterator[str]:
    """All strings in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def _parts(text: str) -> tuple[str, ...]:
    """Parts of a string that may be file names: `file.py:name` is a function in a file."""
    return tuple(part for part in (text, text.rpartition(":")[0]) if part and len(part) < 256)


def folder_of(config: RunConfig, version: int, digest: str) -> Path:
    return Path(config.output, FOLDER, f"{version}-{digest[:8]}").resolve()


async def scored(config: RunConfig, version: Version, digest: str) -> HeldOutScore:
    """Play the held-out tasks with a version. Raises AgentRLError if no rollout has a reward, and
    if the tasks, agent or verifier are not those of the digest."""
    settings = evaluation_of(config, version, folder_of(config, version.version, digest))
    folder, logs = make_folder(Path(settings.output)), make_folder(Path(config.output, "logs"))
    for path in folder.parent.iterdir():
        if path != folder:  # folder of a version without a lane, or of outdated tasks
            delete_directory(path)
    file = trainer.write_settings(folder / RUN_FILE, settings)
    playing = Child("heldout", ["process", "heldout", str(file)], logs / "heldout.log")
    await playing.start()
    try:
        if code := await playing.wait():
            raise AgentRLError(playing.last_error() or f"the evaluation ended with code {code}")
        if digest_of(config) != digest:
            raise AgentRLError("tasks, agent or verifier were changed while they were played")
        return await _read(settings, version.version, digest)
    except AgentRLError:
        delete_directory(folder)  # the folder's rollouts are played again
        raise
    finally:
        await playing.stop()


async def _read(settings: RunConfig, version: int, digest: str) -> HeldOutScore:
    from agentrl.evaluation import check_any_succeeded

    async with open_store(settings.store, readonly=True) as store:
        steps = await store.steps(settings.name)
        rows = await store.rollouts(settings.name, purpose=Purpose.EVAL)
    tasks = next((int(row.metrics[TASKS]) for row in steps if TASKS in row.metrics), 0)
    trials = [row.group for row in rows if row.group.rpartition("/")[2].startswith("score")]
    scored = [row for row in rows if trials and row.group == max(trials)]
    if not (tasks and scored):
        raise AgentRLError("the evaluation ended without playing the held-out tasks")
    check_any_succeeded(scored, "held-out")
    return score_of(version, [(row.index % tasks, row.reward()) for row in scored], digest)


def score_of(version: int, outcomes: Sequence[tuple[int, float]], digest: str) -> HeldOutScore:
    """The score with its interval. outcomes: (task number, outcome) of each rollout; NaN: missing.
    A missing outcome may have any value in the range of outcomes, which widens the interval. Raises
    AgentRLError if all are missing."""
    present = [value for _, value in outcomes if not math.isnan(value)]
    if not present:
        raise AgentRLError("no held-out task has a reward; see logs/heldout.log")
    ends = []
    for worth, end in ((min(0.0, *present), 0), (max(1.0, *present), 1)):
        by_task = defaultdict[int, list[float]](list)
        for task, value in outcomes:
            by_task[task].append(worth if math.isnan(value) else value)
        means = [fmean(values) for values in by_task.values()]
        ends.append(confidence_interval(means)[end] if len(means) > 1 else None)
    return HeldOutScore(
        version=version, score=fmean(present), low=ends[0], high=ends[1], tasks=len(by_task),
        missing=len(outcomes) - len(present), digest=digest,
    )  # fmt: skip


def evaluation_of(config: RunConfig, version: Version, output: Path) -> RunConfig:
    """The settings of a run without steps that plays the held-out tasks with a version."""
    from agentrl.evaluation import evaluation_run

    name = f"{config.name}-heldout-{version.version}"
    folder = Path(config.output, version.path).resolve()
    run = evaluation_run(config.for_evaluation(), name, folder)
    changes: dict[str, Any] = {"output": str(output), "store": store_in(output)}
    for key in ("runner", "engine"):  # the ports of the live run are in use
        if hasattr(table := getattr(run, key), "port"):
            changes[key] = replace(table, port=0)
    return replace(run, **changes)


def play(config: RunConfig) -> None:
    """Play the held-out tasks, in this process and those that it starts."""
    os.nice(NICENESS)
    run_blocking(trainer.launch(config))
