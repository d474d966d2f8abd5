"""Documents of a live run, and that nobody overwrites a decision that he has not seen."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from agentrl.errors import Conflict, Invalid
from agentrl.live.records import documents
from agentrl.live.records.documents import (
    Event,
    EventKind,
    Lanes,
    Told,
    Version,
    Wish,
    decide,
    told,
)
from agentrl.store import open_store

LANES = Lanes(serving=0, candidate=3, previous=1, share=0.2)


def event(at: float, kind: EventKind = "dropped", *, worse: bool = False) -> Event:
    return Event(time=at, kind=kind, version=3, lanes=LANES, why="no difference", worse=worse)


async def test_documents_come_back_as_they_were_told(tmp_path: Path) -> None:
    version = Version(version=3, step=4, path="versions/policy-3", offered=7.0, source=0)
    async with open_store(f"sqlite:///{tmp_path}/store.db") as store:
        assert await told(store, "shop") == Told()
        await store.open_run("shop", {})
        for number in range(12):
            await decide(store, "shop", await told(store, "shop"), event(number))
        shown = {"low": 0.1, "sessions": (1, 2)}  # JSON has no tuples
        await decide(store, "shop", await told(store, "shop"), replace(event(12.0), evidence=shown))
        await documents.put_version(store, "shop", version)
        await documents.put_wish(store, "shop", Wish(path="made", asked=1.0))
        found = await told(store, "shop")
        assert (found.lanes, found.versions) == (LANES, {3: version})
        assert found.events[:-1] == [event(number) for number in range(12)]
        assert found.wish == Wish(path="made", asked=1.0)
        await documents.put_wish(store, "shop", None)
        assert (await told(store, "shop")).wish is None


async def test_who_has_not_seen_the_last_event_decides_nothing(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    async with open_store(url) as store, open_store(url) as other:
        await store.open_run("shop", {})
        seen = await told(store, "shop")
        await decide(other, "shop", seen, event(1.0, "promoted"))
        with pytest.raises(Conflict, match="version 3: promoted meanwhile"):
            await decide(store, "shop", seen, event(2.0, "taken back"))
        assert (await told(store, "shop")).events == [event(1.0, "promoted")]


async def test_a_damaged_document_is_a_sentence(tmp_path: Path) -> None:
    async with open_store(f"sqlite:///{tmp_path}/store.db") as store:
        await store.open_run("shop", {})
        await store.put_documents("shop", documents.KIND, {"events/000000": {"kind": "lost"}})
        with pytest.raises(Invalid, match=r"'events/000000' of a live run is damaged \("):
            await told(store, "shop")


def test_only_what_was_worse_sets_the_learner_back() -> None:
    assert documents.resets(event(0.0, worse=True))
    assert documents.resets(event(0.0, "taken back"))
    assert not documents.resets(event(0.0))
    assert not documents.resets(event(0.0, "promoted"))
