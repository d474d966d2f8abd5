"""What the processes of a live run tell each other: documents of the kind "live" in the store.

| key | content | writer |
|---|---|---|
| `events/<nnnnnn>` | `Event`: what was decided, why, and the lanes since | watch and commands |
| `versions/<nnnnnn>` | `Version`: a version that is served, or was | algorithm |
| `compared/<nnnnnn>` | `Compared`: how a candidate is doing | watch |
| `wish` | `Wish`: weights that a user offers | commands; the algorithm carries it out |

Invariant: event n follows from the events before it. A writer who has not seen the last one cannot
write the next, so several may decide, and one that was suspended overwrites nothing.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import field
from msgspec.structs import replace

from agentrl.errors import Conflict, Invalid
from agentrl.store.base import Store
from agentrl.types import Json, Record

KIND = "live"
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


class Version(Record, frozen=True):
    """A version of the policy, once it is served."""

    version: int  # updates of the policy
    step: int  # the number of steps after which it was offered
    path: str  # folder of its weights, relative to the run's output or absolute
    offered: float  # unix seconds
    source: int | None = field(default=None, name="from")  # the version that served at that time
    kind: VersionKind = "trained"


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


class Wish(Record, frozen=True):
    """Weights in the folder `path` that a user offers as a candidate."""

    path: str
    asked: float  # unix seconds


class Told(Record, frozen=True):
    """All documents of a run."""

    versions: dict[int, Version] = {}
    events: list[Event] = []
    compared: dict[int, Compared] = {}
    wish: Wish | None = None

    @property
    def lanes(self) -> Lanes | None:
        """Those after the last event; None: no version is served yet."""
        return self.events[-1].lanes if self.events else None


def served(lanes: Lanes) -> set[int]:
    """The versions that have to be served."""
    known = (lanes.serving, lanes.candidate, lanes.previous)
    return {version for version in known if version is not None}


def newest_offer(known: Told) -> Version | None:
    """The newest version that nothing has been decided about."""
    decided = {event.version for event in known.events}
    offers = [one for one in known.versions.values() if one.version not in decided]
    return max(offers, key=lambda one: (one.kind == "offered by hand", one.version), default=None)


def points(difference: float) -> str:
    """A difference of outcomes for users: in hundredths."""
    return f"{100 * difference:.1f}".removesuffix(".0")


def resets(event: Event) -> bool:
    """Whether the policy must be learned further from the version that serves since then: what it
    learned after that was found to be worse, and it would be offered again."""
    return event.worse or event.kind in ("taken back", "rolled back")


async def told(store: Store, run: str) -> Told:
    """Read the documents; empty ones for an unknown run. Raises Invalid for a damaged one."""
    found = await store.documents(run, KIND)

    def those(prefix: str, kind: Any) -> list[Any]:
        return [_read(key, found[key], kind) for key in sorted(found) if key.startswith(prefix)]

    return Told(
        versions={one.version: one for one in those("versions/", Version)},
        events=those("events/", Event),
        compared={one.version: one for one in those("compared/", Compared)},
        wish=_read("wish", found.get("wish"), Wish | None),
    )


async def put_version(store: Store, run: str, version: Version) -> None:
    await _put(store, run, f"versions/{version.version:06d}", version, replace=True)


async def put_compared(store: Store, run: str, compared: Compared) -> None:
    await _put(store, run, f"compared/{compared.version:06d}", compared, replace=True)


async def decide(store: Store, run: str, known: Told, event: Event) -> None:
    """Write the event that follows those that are known. Raises Conflict if there is another."""
    key = f"events/{len(known.events):06d}"
    await _put(store, run, key, event, replace=False)
    first = _read(key, (await store.documents(run, KIND))[key], Event)
    if first != msgspec.json.decode(msgspec.json.encode(event), type=Event):
        raise Conflict(f"version {event.version}: {first.kind} meanwhile ({first.why})")


async def put_wish(store: Store, run: str, wish: Wish | None) -> None:
    """Leave a wish in place of an earlier one; None: it is carried out."""
    await _put(store, run, "wish", wish, replace=True)


def _read(key: str, value: Json, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise Invalid(
            f"the document {key!r} of a live run is damaged ({error}): another version of agentrl "
            "wrote it, or it was changed by hand"
        ) from None


async def _put(store: Store, run: str, key: str, value: Any, *, replace: bool) -> None:
    await store.put_documents(run, KIND, {key: msgspec.to_builtins(value)}, replace=replace)
