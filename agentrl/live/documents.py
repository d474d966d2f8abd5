"""What the processes of a live run tell each other: documents of the kind "live" in the store.

| key | content | writer |
|---|---|---|
| `lanes` | `Lanes`: which versions answer sessions | watch |
| `versions/<n>` | `Version`: a version that is served, or was | algorithm |
| `events/<nnnnnn>` | `Event`: what was decided, and why | watch and commands |
| `wish` | `Wish`: what a user asked for | commands; watch carries it out |
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import field

from agentrl.store.base import Store
from agentrl.types import Json, Record

KIND = "live"
VersionKind = Literal["first", "trained", "offered by hand"]
EventKind = Literal[
    "first", "candidate", "promoted", "dropped", "taken back", "rolled back", "paused"
]


class Lanes(Record, frozen=True):
    """The versions that answer sessions. New sessions go to the candidate with probability `share`
    and stay there; sessions of a retired version go on with the serving one."""

    serving: int
    candidate: int | None = None
    share: float = 0.1
    retired: list[int] = []


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
    serving: int  # the serving version afterwards
    why: str  # a sentence
    evidence: dict[str, Json] = {}


class Wish(Record, frozen=True):
    """What a user asked for. path: of the weights to offer."""

    kind: Literal["promote", "rollback", "offer"]
    asked: float  # unix seconds
    version: int | None = None
    path: str = ""


class Told(Record, frozen=True):
    """All documents of a run."""

    lanes: Lanes | None = None  # None: no version is served yet
    versions: dict[int, Version] = {}
    events: list[Event] = []
    wish: Wish | None = None


async def told(store: Store, run: str) -> Told:
    """Read the documents; empty ones for an unknown run."""
    found = await store.documents(run, KIND)

    def those(prefix: str, kind: Any) -> list[Any]:
        keys = sorted(key for key in found if key.startswith(prefix))
        return [msgspec.convert(found[key], kind) for key in keys]

    return Told(
        lanes=next(iter(those("lanes", Lanes)), None),
        versions={one.version: one for one in those("versions/", Version)},
        events=those("events/", Event),
        wish=msgspec.convert(found.get("wish"), Wish | None),
    )


async def put_version(store: Store, run: str, version: Version) -> None:
    await _put(store, run, {f"versions/{version.version:06d}": version})


async def decide(store: Store, run: str, lanes: Lanes, *events: Event) -> None:
    """Write lanes and the events that explain them, all or none."""
    keys = [key for key in await store.documents(run, KIND) if key.startswith("events/")]
    named = {f"events/{len(keys) + i:06d}": event for i, event in enumerate(events)}
    await _put(store, run, {"lanes": lanes} | named)


async def put_wish(store: Store, run: str, wish: Wish | None) -> None:
    """Leave a wish in place of an earlier one; None: it is carried out."""
    await _put(store, run, {"wish": wish})


async def _put(store: Store, run: str, documents: dict[str, Any]) -> None:
    await store.put_documents(run, KIND, msgspec.to_builtins(documents), replace=True)
