"""Records of a live run: sessions, the documents of its processes, labels, and people's data.

A session that continues after its end becomes a new session in a new group. Invariant: the groups
of a name are numbered from 1 without a gap, and stay when their rollouts are deleted.

| kind | key | content | writer |
|---|---|---|---|
| `live-events` | place | `Event`: what was decided, why, and the lanes | all but the gateway |
| `live-versions` | number | `Version`: a trained version that is served, or was | algorithm |
| `live-wishes` | place | `Wish`: weights that a user offers | commands |
| `live-given` | number | `Version`: GIVEN + n, made from the wish in place n | algorithm |
| `live-scores` | place | `HeldOutScore`: the score of a version on held-out tasks | watch |
| `live` | `compared` | `Compared`: how the candidate is doing | watch |

Invariant: all documents but the last are only ever added, with growing keys, so a process reads
each once (`Documents`). Event n depends on all events before it: a writer that has not seen the
last event cannot write the next one, so several processes may decide, and one that was suspended
overwrites nothing. A wish is carried out when it has a version or an event, with a number that is
determined by its place; so it is carried out exactly once even if a process is killed.

Every labelled session has one reward MARK with a `Mark` as its note, and a reward `outcome` only if
its outcome is known. Both have the source SOURCE.

This module also handles people's data: the secret of a run, hashes of users, tokens of sessions,
and deletion.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from hashlib import blake2b, sha256
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import field
from msgspec.structs import replace

from agentrl.core.access import read_key
from agentrl.core.config import RunConfig
from agentrl.core.errors import Conflict, Invalid, NotFound, StoreError
from agentrl.core.types import FEEDBACK, POLICY, SESSION, Json, Purpose, Record, Rollout
from agentrl.runners.feedback import RENEWAL_INTERVAL, session_group
from agentrl.store.base import Store
from agentrl.store.records import Forgotten


async def ended(store: Store, run: str) -> list[Rollout]:
    """The ended sessions that no step has trained or discarded, with rewards, without calls."""
    rows = await store.rollouts(run, group_state="settled")
    return [row for row in rows if row.step == SESSION and row.purpose is Purpose.TRAIN]


def oldest_first(sessions: Sequence[Rollout]) -> list[Rollout]:
    return sorted(sessions, key=lambda session: (ended_of(session), session.id))


def group_of(run: str, name: str, number: int) -> str:
    """The group of the nth session of a name, counted from 1."""
    base = session_group(run, name)
    return base if number <= 1 else f"{base}-{number}"


def group_base(run: str, group: str) -> str:
    """The first group of the session name to which a group belongs."""
    return f"{run}/{group.removeprefix(f'{run}/').partition('-')[0]}"


def chosen(lanes: Lanes, group: str) -> int:
    """The version that answers a new session. Each candidate gets a different sample of
    sessions."""
    if lanes.candidate is None:
        return lanes.serving
    drawn = blake2b(f"{lanes.candidate}/{group}".encode(), digest_size=4).digest()
    return lanes.candidate if int.from_bytes(drawn) / 2**32 < lanes.share else lanes.serving


async def count_of(store: Store, run: str, name: str) -> int:
    """The number of sessions that a name has had, including deleted ones. Reads a logarithmic
    number of rows, because a name may be used for years."""

    async def is_known(number: int) -> bool:
        try:
            await store.settled(group_of(run, name, number), timeout=0)
        except NotFound:
            return False
        return True

    last, beyond = 0, 1
    while await is_known(last + beyond):
        last, beyond = last + beyond, 2 * beyond
    while beyond > 1:
        beyond //= 2
        if await is_known(last + beyond):
            last += beyond
    return last


async def delete(store: Store, run: str, name: str) -> bool:
    """Delete all sessions of a name; False if one is in progress or being trained on."""
    left = False
    for number in range(1, await count_of(store, run, name) + 1):
        rows = await store.rollouts(run, group=group_of(run, name, number))
        left |= bool((await store.forget([row.id for row in rows])).left)
    return not left


# Ratio of pauses to the time of reads, so that many open sessions take a fifth of a core.
PAUSE_SHARE = 4.0
KIND, COMPARED = "live", "compared"
EVENTS, VERSIONS, GIVENS = "live-events", "live-versions", "live-given"
WISHES, SCORES = "live-wishes", "live-scores"
GIVEN = 1_000_000  # number of the first version that a user offers by hand
R = TypeVar("R", bound=Record)
VersionKind = Literal["first", "trained", "offered by hand"]
EventKind = Literal["first", "candidate", "promoted", "dropped", "rolled back", "paused"]


class Lanes(Record, frozen=True):
    """The versions that answer sessions. A new session is assigned to the candidate with
    probability `share` and stays there; sessions of a version without a lane continue with the
    serving version."""

    serving: int
    candidate: int | None = None
    # Version served before the last promotion; it continues to serve its sessions.
    previous: int | None = None
    share: float = 0.1

    def promoted(self) -> Lanes:
        """The lanes after the promotion of the candidate."""
        assert self.candidate is not None
        changes = {"serving": self.candidate, "candidate": None, "previous": self.serving}
        return replace(self, **changes)

    def returned(self) -> Lanes:
        """The lanes after a rollback to the previous version. The candidate is removed, too,
        because it was trained from the removed version."""
        assert self.previous is not None
        return replace(self, serving=self.previous, candidate=None, previous=None)

    def without(self, version: int) -> Lanes:
        """The lanes without a version that is gone, whether it is the candidate or the previous
        one."""
        remaining = {
            lane: None if getattr(self, lane) == version else getattr(self, lane)
            for lane in ("candidate", "previous")
        }
        return replace(self, **remaining)


def policy_of(version: int) -> str:
    """The name by which a version is served."""
    return f"{POLICY}@{version}"


class Version(Record, frozen=True):
    """A version of the policy, once it is served."""

    version: int  # updates of the policy
    step: int  # the number of steps after which it was offered
    path: str  # folder of its weights, relative to the run's output
    offered: float  # unix seconds
    source: int | None = field(default=None, name="from")  # the version that served at that time
    kind: VersionKind = "trained"
    given: str = ""  # the folder it was copied from, if a user offered it


class Event(Record, frozen=True):
    """A decision about versions."""

    time: float  # unix seconds
    kind: EventKind
    version: int  # the version of the decision
    lanes: Lanes  # the lanes from then on
    why: str  # a sentence
    worse: bool = False  # whether the version was found to be worse
    evidence: dict[str, Json] = {}

    @property
    def serving(self) -> int:
        return self.lanes.serving


class Compared(Record, frozen=True):
    """The comparison of a candidate. The difference is candidate minus serving, with the interval
    of `served.Difference`; None: unknown."""

    version: int
    serving: int
    time: float  # unix seconds
    sessions: tuple[int, int]  # with a known outcome, of candidate and serving
    low: float
    high: float
    means: tuple[float | None, float | None]
    clipped: int = 0
    signals: dict[str, tuple[float | None, float | None]] = {}  # name -> means of the two versions
    held_out: tuple[float | None, float | None] = (None, None)
    missing: tuple[int, int] = (0, 0)  # held-out rollouts without an outcome, which are left out


class HeldOutScore(Record, frozen=True):
    """The score of a version on the held-out tasks of the run."""

    version: int
    score: float | None = None  # mean of the known outcomes; None: the evaluation failed
    # 95 % interval for any values of missing outcomes; None: a single task.
    low: float | None = None
    high: float | None = None
    tasks: int = 0
    missing: int = 0  # rollouts without an outcome
    # Of tasks and settings, see `promotion.digest_of`; only equal digests are comparable.
    digest: str = ""
    failed: str = ""  # a sentence: why there is no score; the evaluation is retried


class Wish(Record, frozen=True):
    """Weights in the folder `path` that a user offers as a candidate."""

    path: str
    asked: float  # unix seconds
    id: str = field(default_factory=lambda: secrets.token_hex(8))


class LiveState(Record, frozen=True):
    """All documents of a run."""

    versions: dict[int, Version] = {}
    events: list[Event] = []
    compared: dict[int, Compared] = {}
    wishes: list[Wish] = []
    scores: dict[int, HeldOutScore] = {}

    @property
    def lanes(self) -> Lanes | None:
        """The lanes after the last event; None: no version is served yet."""
        return self.events[-1].lanes if self.events else None


def served(lanes: Lanes) -> set[int]:
    """The versions that have to be served."""
    versions = (lanes.serving, lanes.candidate, lanes.previous)
    return {version for version in versions if version is not None}


def next_offer(state: LiveState) -> Version | None:
    """The next candidate: among undecided versions the first that a user offered, else the
    newest."""
    decided = {event.version for event in state.events}
    offers = [version for version in state.versions.values() if version.version not in decided]
    return max(offers, key=_precedence, default=None)


def _precedence(version: Version) -> tuple[bool, int]:
    by_hand = version.kind == "offered by hand"
    return by_hand, -version.version if by_hand else version.version


def unmet(state: LiveState) -> list[tuple[int, Wish]]:
    """The wishes that are not carried out yet, in order, each with the number that its version will
    have."""
    decided = {event.version for event in state.events}
    numbered = enumerate(state.wishes, start=GIVEN)
    return [
        (version, wish)
        for version, wish in numbered
        if version not in decided and version not in state.versions
    ]


def points(difference: float) -> str:
    """A difference of outcomes in hundredths, as text for users."""
    return f"{100 * difference:.1f}".removesuffix(".0")


def resets(event: Event) -> bool:
    """Whether the learner must continue from the serving version, because a version that it trained
    later was found to be worse and would otherwise be offered again."""
    return event.worse or event.kind == "rolled back"


class Documents:
    """The documents of a run, for repeated reads."""

    def __init__(self, store: Store, run: str) -> None:
        self._store, self._run = store, run
        self._cache: dict[str, dict[str, Any]] = {kind: {} for kind in (*KINDS, GIVENS)}

    async def state(self) -> LiveState:
        """The current documents, without comparisons; reads only documents that are new since the
        last call. Raises Invalid for a damaged document, which is read again at the next call."""
        await asyncio.gather(*(self._read(kind) for kind in self._cache))
        versions = [*self._cache[VERSIONS].values(), *self._cache[GIVENS].values()]
        return LiveState(
            versions={version.version: version for version in versions},
            events=[*self._cache[EVENTS].values()],
            wishes=[*self._cache[WISHES].values()],
            scores={score.version: score for score in self._cache[SCORES].values()},
        )

    async def _read(self, kind: str) -> None:
        cached = self._cache[kind]
        new = await self._store.documents(self._run, kind, after=next(reversed(cached), ""))
        for key in sorted(new):
            cached[key] = _convert(f"{kind} {key}", new[key], KINDS.get(kind, Version))


KINDS: dict[str, Any] = {EVENTS: Event, VERSIONS: Version, WISHES: Wish, SCORES: HeldOutScore}


async def live_state(store: Store, run: str) -> LiveState:
    """Read all documents; empty ones for an unknown run. Raises Invalid for a damaged one."""
    state = await Documents(store, run).state()
    shown = (await store.documents(run, KIND)).get(COMPARED)
    ended = [event.evidence for event in state.events if "means" in event.evidence]
    comparisons = [_convert(COMPARED, value, Compared) for value in [*ended, shown] if value]
    return replace(state, compared={comparison.version: comparison for comparison in comparisons})


async def put_version(store: Store, run: str, version: Version) -> None:
    kind = GIVENS if version.kind == "offered by hand" else VERSIONS
    await _put(store, run, kind, f"{version.version:07d}", version, replace=True)


async def put_compared(store: Store, run: str, compared: Compared) -> None:
    """Store the comparison, in place of the previous one; the one that led to a decision is kept in
    the event."""
    await _put(store, run, KIND, COMPARED, compared, replace=True)


async def decide(store: Store, run: str, state: LiveState, event: Event) -> None:
    """Write the next event. Raises Conflict if another process has written it."""
    first = await _append(store, run, EVENTS, len(state.events), event)
    if first != msgspec.json.decode(msgspec.json.encode(event), type=Event):
        raise Conflict(f"version {event.version}: {first.kind} meanwhile ({first.why})")


async def put_wish(store: Store, run: str, wish: Wish) -> None:
    """Add a wish after the existing ones."""
    await _add(store, run, WISHES, wish)


async def put_score(store: Store, run: str, score: HeldOutScore) -> None:
    await _add(store, run, SCORES, score)


async def _add(store: Store, run: str, kind: str, value: Record) -> None:
    place = len(await store.documents(run, kind))
    while await _append(store, run, kind, place, value) != value:
        place += 1  # another process has added a wish meanwhile


async def _append(store: Store, run: str, kind: str, place: int, value: R) -> R:
    """Write a document with this key unless it exists; returns the stored document."""
    before, key = f"{place - 1:07d}" if place else "", f"{place:07d}"
    await _put(store, run, kind, key, value, replace=False)
    stored: R = _convert(key, (await store.documents(run, kind, after=before))[key], type(value))
    return stored


def _convert(key: str, value: Json, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise Invalid(
            f"the document {key!r} of a live run is damaged ({error}): another version of agentrl "
            "wrote it, or it was changed by hand"
        ) from None


async def _put(store: Store, run: str, kind: str, key: str, value: Any, *, replace: bool) -> None:
    await store.put_documents(run, kind, {key: msgspec.to_builtins(value)}, replace=replace)


SOURCE = "live"  # `Reward.source` of labels
RESULT_ENDED = "ended"  # key of a session's result: unix seconds of its end
GATEWAY, FAILED = "gateway", "failed"  # source and name of the number of calls without an answer
DAMAGED = "its mark is damaged"
MARK, OUTCOME = "labelled", "outcome"  # names of rewards


class Mark(Record, frozen=True):
    """The label of a session, and its reasons. All values are in 0..1."""

    ended: float  # unix seconds of the store's clock
    day: str  # UTC date of its end; a user's cap counts sessions of one date
    digest: str = ""  # digest of the version and of the user's messages
    # signals of the verifier, by name, and of the next messages
    asked: dict[str, float] = field(default_factory=dict)
    posted: dict[str, float] = field(default_factory=dict)  # signals of feedback, by its name
    explicit: bool = False  # whether a posted signal has a weight
    # signal -> seconds from the session's end until it was seen
    delays: dict[str, float] = field(default_factory=dict)
    ignored: str = ""  # why posted feedback is not in the outcome; empty: it is
    held: str = ""  # why the session does not count; empty: it counts

    @property
    def all(self) -> dict[str, float]:
        """All signals. Posted feedback never replaces a signal of the verifier."""
        return self.posted | self.asked

    @property
    def signals(self) -> dict[str, float]:
        """The signals that are part of the outcome, if they have a weight."""
        return self.asked if self.ignored else self.all


def ended_of(session: Rollout) -> float:
    """When a session ended, in unix seconds, as its gateway wrote it; 0 if it has not."""
    ended = session.result.get(RESULT_ENDED) if isinstance(session.result, dict) else None
    return float(ended) if isinstance(ended, int | float) and math.isfinite(ended) else 0.0


def known_end(session: Rollout) -> float:
    """When a session ended, in unix seconds; if its end was not written, when it was labelled; 0 if
    neither is known."""
    mark = mark_of(session)
    return ended_of(session) or (mark.ended if mark else 0.0)


def user_of(session: Rollout) -> str:
    """The hash of the session's user; empty if unknown."""
    return str(session.task.get("user") or "")


def failed_calls(session: Rollout) -> int:
    """The number of a session's calls without an answer, because gateway or engine failed."""
    rows = (row for row in session.rewards if row.source == GATEWAY and row.name == FAILED)
    return next((int(row.value) for row in rows), 0)


def mark_of(session: Rollout) -> Mark | None:
    """The mark of a session; None: it is not labelled yet. A session with an unreadable mark is
    held back."""
    rows = (row for row in session.rewards if row.name == MARK and row.source == SOURCE)
    return next((_read_mark(row.note) for row in rows), None)


def _read_mark(note: str) -> Mark:
    try:
        return msgspec.json.decode(note, type=Mark)
    except msgspec.DecodeError:  # changed by hand, or written by another version of agentrl
        return Mark(ended=0.0, day="", held=DAMAGED)


def outcome_of(session: Rollout) -> float:
    """The outcome of a session that counts; NaN if it is unknown or the session is held back."""
    mark = mark_of(session)
    rows = (row for row in session.rewards if row.source == SOURCE and row.name == OUTCOME)
    return math.nan if mark is None or mark.held else next((r.value for r in rows), math.nan)


def believed(session: Rollout, names: Collection[str]) -> Rollout:
    """The session without feedback that its user posted under other names, because the algorithm
    could mistake it for its own rewards. If the user's feedback is held back, all of it is removed,
    including corrections."""
    mark = mark_of(session)
    allowed = () if mark is not None and mark.ignored else names
    rewards = [row for row in session.rewards if row.source != FEEDBACK or row.name in allowed]
    return replace(session, rewards=rewards)


def is_ready(session: Rollout, now: float, wait: float) -> bool:
    """Whether a session can be trained: its outcome is known, and its user has given feedback or
    had `wait` seconds to do so. A clock that jumps back only lengthens the wait."""
    mark = mark_of(session)
    has_outcome = mark is not None and not math.isnan(outcome_of(session))
    return has_outcome and mark is not None and (mark.explicit or now - mark.ended >= wait)


def is_lost(session: Rollout, now: float, wait: float) -> bool:
    """Whether a session will never be trained: it does not count, or no outcome is known after
    `wait` seconds."""
    mark = mark_of(session)
    if mark is None or not math.isnan(outcome_of(session)):
        return False
    return bool(mark.held) or now - mark.ended >= wait


log = logging.getLogger("agentrl.live")
SECRETS, KEY = "live-secret", "secret"  # kind and key of the document
TOKEN = "x-agentrl-feedback-token"  # header of responses, and of feedback
PAGE, AT_ONCE = 1000, 100  # sessions per read or deletion
PATIENCE = 60.0  # seconds for a step to release sessions that are deleted
NOTICED = RENEWAL_INTERVAL + 5.0  # seconds until a gateway notices that a session was cancelled
MIN_PAUSE, MAX_PAUSE = 1.0, 3600.0  # seconds between two searches for old sessions


async def secret_of(store: Store, config: RunConfig) -> bytes:
    """The secret in the variable `live.people.secret_env`, or else a stored one, generated at the
    first call. Raises ConfigError if the variable is not set, NotFound for an unknown run."""
    variable = config.live.people.secret_env
    if value := read_key(variable, "live.people.secret_env", "the run's"):
        return value.encode()
    if KEY not in await store.documents(config.name, SECRETS):
        # If two processes generate one, the first is used.
        await store.put_documents(config.name, SECRETS, {KEY: secrets.token_hex(32)})
    return str((await store.documents(config.name, SECRETS))[KEY]).encode()


def user_id(secret: bytes, user: str) -> str:
    """The name of a user in the store; empty for no user. Unlike the user's real name, it cannot be
    guessed without the secret."""
    return _digest(secret, "user", user)[:16] if user else ""


def token_of(secret: bytes, session: str) -> str:
    """The token that feedback on a session needs."""
    return _digest(secret, "feedback", session)[:32]


def is_token(secret: bytes, session: str, token: str) -> bool:
    return hmac.compare_digest(token_of(secret, session).encode(), token.encode(errors="replace"))


def _digest(secret: bytes, purpose: str, text: str) -> str:
    """Raises ValueError for an empty secret, with which anybody could make tokens."""
    if not secret:
        raise ValueError("the secret of the run is not known yet")
    # Otherwise two names could give the same text.
    message = f"{purpose}:{text}".encode(errors="surrogatepass")
    return hmac.new(secret, message, sha256).hexdigest()


# -- sessions --------------------------------------------------------------------------------------


async def all_sessions(store: Store, run: str) -> AsyncIterator[Rollout]:
    """All sessions of a run, without calls, in order of their groups."""
    after = None
    while page := await store.rollouts(run, step=SESSION, after=after, limit=PAGE):
        for row in page:
            yield row
        after = page[-1].id


async def sessions_of_user(store: Store, config: RunConfig, user: str) -> list[Rollout]:
    user_hash = user_id(await secret_of(store, config), user)
    return [
        row async for row in all_sessions(store, config.name) if row.task.get("user") == user_hash
    ]


async def export(store: Store, config: RunConfig, user: str) -> AsyncIterator[dict[str, Any]]:
    """All data of a user: each session with calls and rewards, then the data sets with items of the
    sessions."""
    rows = await sessions_of_user(store, config, user)
    for row in rows:
        calls = (await store.calls([row.id])).get(row.id, [])
        shown = ("id", "role", "version", "started", "messages", "answer")
        yield {
            "session": row.group, "task": row.task, "state": str(row.state), "trained": row.trained,
            "ended": ended_of(row),
            "calls": [{name: getattr(call, name) for name in shown} for call in calls],
            "rewards": row.rewards,
        }  # fmt: skip
    deletable = await store.forget([row.id for row in rows], dry_run=True)
    yield {"user": user_id(await secret_of(store, config), user), "items": deletable.items}


async def forget_user(
    store: Store, config: RunConfig, user: str, say: Callable[[str], None]
) -> Forgotten:
    """Delete a user's sessions and the items that were mined from them. Sessions in progress are
    ended. Sessions in training are deleted after the step; if that takes too long, they are
    `left`."""
    rows = await sessions_of_user(store, config, user)
    running = [row.id for row in rows if not row.state.terminal]
    if running and await store.cancel(running):
        say(f"{len(running)} sessions are in progress: they are ended now")
        await asyncio.sleep(NOTICED)
    rollouts, items, left = 0, Counter[str](), [row.id for row in rows]
    deadline = time.monotonic() + PATIENCE
    while True:
        cursor = await store.cursor()
        results = [await store.forget(part) for part in _parts(left)]
        rollouts += sum(result.rollouts for result in results)
        for result in results:
            items.update(result.items)
        left = [id for result in results for id in result.left]
        patience = deadline - time.monotonic()
        if not left or patience <= 0:
            break
        await store.wait(cursor, timeout=patience)
    await store.vacuum()
    return Forgotten(rollouts=rollouts, left=left, items=dict(items))


def _parts(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    yield from (ids[i : i + AT_ONCE] for i in range(0, len(ids), AT_ONCE))


async def learned_from(store: Store, run: str, sessions: Iterable[Rollout]) -> list[int]:
    """The versions that were offered after a step that trained one of the sessions: they have
    learned from it, or may be trained from a version that has."""
    steps = [row.trained for row in sessions if row.trained is not None]
    versions = (await live_state(store, run)).versions.values()
    return sorted(version.version for version in versions if steps and version.step > min(steps))


# -- retention -------------------------------------------------------------------------------------


async def expire(store: Store, config: RunConfig, now: float) -> int:
    """Delete sessions that ended more than `live.people.retention` seconds ago, and the items that
    were mined from them; returns the number of sessions. Sessions in training stay until the next
    call."""
    limit = config.live.people.retention
    if limit is None:
        return 0
    old = [
        row.id
        async for row in all_sessions(store, config.name)
        if row.state.terminal and 0.0 < known_end(row) < now - limit
    ]
    return sum([(await store.forget(part)).rollouts for part in _parts(old)])


async def keep(store: Store, config: RunConfig) -> None:
    """Delete old sessions from time to time, until cancelled."""
    limit = config.live.people.retention
    while limit is not None:
        try:
            if gone := await expire(store, config, time.time()):
                log.info("%d sessions are older than live.people.retention: deleted", gone)
        except StoreError as error:
            log.warning("no old session was deleted: %s; tried again", error)
        await asyncio.sleep(min(max(MIN_PAUSE, limit / 10), MAX_PAUSE))
