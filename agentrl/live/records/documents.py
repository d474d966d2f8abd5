"""What the processes of a live run tell each other: documents in the store.

| kind | key | content | writer |
|---|---|---|---|
| `live-events` | place | `Event`: what was decided, why, and the lanes | all but the gateway |
| `live-versions` | number | `Version`: a trained version that is served, or was | algorithm |
| `live-wishes` | place | `Wish`: weights that a user offers | commands |
| `live-given` | number | `Version`: GIVEN + n, made of the wish in place n | algorithm |
| `live-scores` | place | `HeldOutScore`: what a version reaches on held-out tasks | watch |
| `live` | `compared` | `Compared`: how the candidate is doing | watch |

Always true: all but the last are only ever added, with growing keys, so a process reads each once
(`Documents`). Event n follows from the events before it: a writer who has not seen the last one
cannot write the next, so several may decide, and one that was suspended overwrites nothing. A wish
is carried out once it has a version or an event, under a number that follows from its place; so it
is carried out once, whoever is killed, and none overwrites another.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import field
from msgspec.structs import replace

from agentrl.errors import Conflict, Invalid
from agentrl.store.base import Store
from agentrl.types import POLICY, Json, Record

KIND, COMPARED = "live", "compared"
EVENTS, VERSIONS, GIVENS = "live-events", "live-versions", "live-given"
WISHES, SCORES = "live-wishes", "live-scores"
GIVEN = 1_000_000  # number of the first version that a user offers by hand
R = TypeVar("R", bound=Record)
VersionKind = Literal["first", "trained", "offered by hand"]
EventKind = Literal[
    "first", "candidate", "promoted", "dropped", "taken back", "rolled back", "paused"
]


class Lanes(Record, frozen=True):
    """The versions that answer sessions. New sessions go to the candidate with probability `share`
    and stay there; those of a version that is none of the three go on with the serving one."""

    serving: int
    candidate: int | None = None
    previous: int | None = None  # served before the last promotion, and goes on with its sessions
    share: float = 0.1

    def promoted(self) -> Lanes:
        """The candidate serves."""
        assert self.candidate is not None
        given = {"serving": self.candidate, "candidate": None, "previous": self.serving}
        return replace(self, **given)

    def returned(self) -> Lanes:
        """The version before serves again; a candidate goes, too: it was made from what goes."""
        assert self.previous is not None
        return replace(self, serving=self.previous, candidate=None, previous=None)

    def without(self, version: int) -> Lanes:
        """Without a candidate or a version before that is not there any more."""
        kept = {
            lane: None if getattr(self, lane) == version else getattr(self, lane)
            for lane in ("candidate", "previous")
        }
        return replace(self, **kept)


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
    given: str = ""  # the folder of which it is a copy, if a user offered it


class Event(Record, frozen=True):
    """A decision about versions."""

    time: float  # unix seconds
    kind: EventKind
    version: int  # what it is about
    lanes: Lanes  # since then
    why: str  # a sentence
    worse: bool = False  # whether the version was found to be worse
    evidence: dict[str, Json] = {}

    @property
    def serving(self) -> int:
        return self.lanes.serving


class Compared(Record, frozen=True):
    """How a candidate is doing. The difference is candidate minus serving, its ends are those of
    `comparison.Difference`; None: not known."""

    version: int
    serving: int
    time: float  # unix seconds
    sessions: tuple[int, int]  # with a known outcome, of candidate and serving
    low: float
    high: float
    means: tuple[float | None, float | None]
    clipped: int = 0
    signals: dict[str, tuple[float | None, float | None]] = {}  # name -> means of the two
    held_out: tuple[float | None, float | None] = (None, None)
    missing: tuple[int, int] = (0, 0)  # held-out rollouts without an outcome, which it leaves out


class HeldOutScore(Record, frozen=True):
    """What a version reaches on the held-out tasks of the run."""

    version: int
    score: float | None = None  # mean outcome of those that have one; None: it failed
    low: float | None = None  # 95 % interval, whatever the missing are worth; None: of one task
    high: float | None = None
    tasks: int = 0
    missing: int = 0  # rollouts without an outcome
    digest: str = ""  # of what was played, see `heldout.digest_of`; others are not comparable
    failed: str = ""  # why there is no score, a sentence; it is tried again


class Wish(Record, frozen=True):
    """Weights in the folder `path` that a user offers as a candidate."""

    path: str
    asked: float  # unix seconds
    id: str = field(default_factory=lambda: secrets.token_hex(8))


class Told(Record, frozen=True):
    """All documents of a run."""

    versions: dict[int, Version] = {}
    events: list[Event] = []
    compared: dict[int, Compared] = {}
    wishes: list[Wish] = []
    scores: dict[int, HeldOutScore] = {}

    @property
    def lanes(self) -> Lanes | None:
        """Those after the last event; None: no version is served yet."""
        return self.events[-1].lanes if self.events else None


def served(lanes: Lanes) -> set[int]:
    """The versions that have to be served."""
    known = (lanes.serving, lanes.candidate, lanes.previous)
    return {version for version in known if version is not None}


def next_offer(known: Told) -> Version | None:
    """The version that becomes the candidate next: of those that nothing has been decided about,
    the first that a user offered, else the newest."""
    decided = {event.version for event in known.events}
    offers = [one for one in known.versions.values() if one.version not in decided]
    return max(offers, key=_precedence, default=None)


def _precedence(version: Version) -> tuple[bool, int]:
    by_hand = version.kind == "offered by hand"
    return by_hand, -version.version if by_hand else version.version


def unmet(known: Told) -> list[tuple[int, Wish]]:
    """The wishes that are not carried out, in order, with the number of the version that each will
    be."""
    decided = {event.version for event in known.events}
    numbered = enumerate(known.wishes, start=GIVEN)
    return [one for one in numbered if one[0] not in decided and one[0] not in known.versions]


def points(difference: float) -> str:
    """A difference of outcomes for users: in hundredths."""
    return f"{100 * difference:.1f}".removesuffix(".0")


def resets(event: Event) -> bool:
    """Whether the policy must be learned further from the version that serves since then: what it
    learned after that was found to be worse, and it would be offered again."""
    return event.worse or event.kind in ("taken back", "rolled back")


class Documents:
    """The documents of a run, for who looks at them again and again."""

    def __init__(self, store: Store, run: str) -> None:
        self._store, self._run = store, run
        self._known: dict[str, dict[str, Any]] = {kind: {} for kind in (*KINDS, GIVENS)}

    async def told(self) -> Told:
        """What is known now, without comparisons; reads what is new since the last call. Raises
        Invalid for a damaged document, which is read again at the next call."""
        await asyncio.gather(*(self._read(kind) for kind in self._known))
        versions = [*self._known[VERSIONS].values(), *self._known[GIVENS].values()]
        return Told(
            versions={one.version: one for one in versions},
            events=[*self._known[EVENTS].values()],
            wishes=[*self._known[WISHES].values()],
            scores={one.version: one for one in self._known[SCORES].values()},
        )

    async def _read(self, kind: str) -> None:
        known = self._known[kind]
        found = await self._store.documents(self._run, kind, after=next(reversed(known), ""))
        for key in sorted(found):
            known[key] = _read(f"{kind} {key}", found[key], KINDS.get(kind, Version))


KINDS: dict[str, Any] = {EVENTS: Event, VERSIONS: Version, WISHES: Wish, SCORES: HeldOutScore}


async def told(store: Store, run: str) -> Told:
    """Read all documents; empty ones for an unknown run. Raises Invalid for a damaged one."""
    known = await Documents(store, run).told()
    shown = (await store.documents(run, KIND)).get(COMPARED)
    ended = [event.evidence for event in known.events if "means" in event.evidence]
    found = [_read(COMPARED, one, Compared) for one in [*ended, shown] if one]
    return replace(known, compared={one.version: one for one in found})


async def put_version(store: Store, run: str, version: Version) -> None:
    kind = GIVENS if version.kind == "offered by hand" else VERSIONS
    await _put(store, run, kind, f"{version.version:07d}", version, replace=True)


async def put_compared(store: Store, run: str, compared: Compared) -> None:
    """In place of the one before; what decided about a candidate is in the event."""
    await _put(store, run, KIND, COMPARED, compared, replace=True)


async def decide(store: Store, run: str, known: Told, event: Event) -> None:
    """Write the event that follows those that are known. Raises Conflict if there is another."""
    first = await _append(store, run, EVENTS, len(known.events), event)
    if first != msgspec.json.decode(msgspec.json.encode(event), type=Event):
        raise Conflict(f"version {event.version}: {first.kind} meanwhile ({first.why})")


async def put_wish(store: Store, run: str, wish: Wish) -> None:
    """Add a wish after those that there are."""
    await _add(store, run, WISHES, wish)


async def put_score(store: Store, run: str, score: HeldOutScore) -> None:
    await _add(store, run, SCORES, score)


async def _add(store: Store, run: str, kind: str, value: Record) -> None:
    place = len(await store.documents(run, kind))
    while await _append(store, run, kind, place, value) != value:
        place += 1  # somebody else has added one meanwhile


async def _append(store: Store, run: str, kind: str, place: int, value: R) -> R:
    """Write in this place, unless there is something; returns what is there."""
    before, key = f"{place - 1:07d}" if place else "", f"{place:07d}"
    await _put(store, run, kind, key, value, replace=False)
    found: R = _read(key, (await store.documents(run, kind, after=before))[key], type(value))
    return found


def _read(key: str, value: Json, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise Invalid(
            f"the document {key!r} of a live run is damaged ({error}): another version of agentrl "
            "wrote it, or it was changed by hand"
        ) from None


async def _put(store: Store, run: str, kind: str, key: str, value: Any, *, replace: bool) -> None:
    await store.put_documents(run, kind, {key: msgspec.to_builtins(value)}, replace=replace)
