"""Documents of a live run, and that nobody overwrites a decision that he has not seen."""

import asyncio
from pathlib import Path

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from agentrl.core.errors import Conflict, Invalid
from agentrl.core.types import Json
from agentrl.live import records
from agentrl.live.records import (
    Event,
    EventKind,
    Lanes,
    LiveState,
    Version,
    Wish,
    decide,
    live_state,
)
from agentrl.store import open_store
from agentrl.store.base import Store

LANES = Lanes(serving=0, candidate=3, previous=1, share=0.2)


def event(at: float, kind: EventKind = "dropped", *, worse: bool = False) -> Event:
    return Event(time=at, kind=kind, version=3, lanes=LANES, why="no difference", worse=worse)


async def test_documents_come_back_as_they_were_written(tmp_path: Path) -> None:
    version = Version(version=3, step=4, path="versions/policy-3", offered=7.0, source=0)
    async with open_store(f"sqlite:///{tmp_path}/store.db") as store:
        assert await live_state(store, "shop") == LiveState()
        await store.open_run("shop", {})
        for number in range(12):
            await decide(store, "shop", await live_state(store, "shop"), event(number))
        shown = {"low": 0.1, "sessions": (1, 2)}  # JSON has no tuples
        last = replace(event(12.0), evidence=shown)
        await decide(store, "shop", await live_state(store, "shop"), last)
        await records.put_version(store, "shop", version)
        first, second = Wish(path="made", asked=1.0), Wish(path="made", asked=2.0)
        await asyncio.gather(*(records.put_wish(store, "shop", one) for one in (first, second)))
        found = await live_state(store, "shop")
        assert (found.lanes, found.versions) == (LANES, {3: version})
        assert found.events[:-1] == [event(number) for number in range(12)]
        assert {one.id for one in found.wishes} == {first.id, second.id}
        known = records.unmet(found)
        assert [version for version, _ in known] == [records.GIVEN, records.GIVEN + 1]
        given = {"version": records.GIVEN, "kind": "offered by hand"}
        await records.put_version(store, "shop", replace(version, **given))
        assert records.unmet(await live_state(store, "shop")) == known[1:]
        await decide(store, "shop", found, replace(event(13.0), version=records.GIVEN + 1))
        assert records.unmet(await live_state(store, "shop")) == []


class Counting:
    """A store that counts the documents that are read."""

    def __init__(self, store: Store) -> None:
        self.store, self.read = store, 0

    async def documents(self, run: str, kind: str, **after: str) -> dict[str, Json]:
        found = await self.store.documents(run, kind, **after)
        self.read += len(found)
        return found


async def test_a_process_reads_each_document_once(tmp_path: Path) -> None:
    async with open_store(f"sqlite:///{tmp_path}/store.db") as store:
        await store.open_run("shop", {})
        counting = Counting(store)
        follower = records.Documents(counting, "shop")  # type: ignore[arg-type]
        for number in range(9):
            seen = await follower.state()
            await decide(store, "shop", seen, event(float(number)))
            made = Version(version=number, step=number, path="", offered=0.0)
            await records.put_version(store, "shop", made)
            assert len(seen.events) == len(seen.versions) == number  # what was told stays
        known = await follower.state()
        assert counting.read == len(known.events) + len(known.versions) == 18
        assert replace(known, compared={}) == await live_state(store, "shop")


async def test_what_decided_is_shown_after_the_comparison_of_another_candidate(
    tmp_path: Path,
) -> None:
    async with open_store(f"sqlite:///{tmp_path}/store.db") as store:
        await store.open_run("shop", {})
        shown = [
            records.Compared(
                version=version, serving=0, time=1.0, sessions=(1, 1), low=-1.0, high=1.0,
                means=(0.5, None),
            )
            for version in (3, 4)
        ]  # fmt: skip
        await records.put_compared(store, "shop", shown[0])
        ended = replace(event(1.0), evidence=to_builtins(shown[0]))
        await decide(store, "shop", LiveState(), ended)
        await records.put_compared(store, "shop", shown[1])
        assert (await live_state(store, "shop")).compared == {3: shown[0], 4: shown[1]}
        assert len(await store.documents("shop", records.KIND)) == 1


async def test_who_has_not_seen_the_last_event_decides_nothing(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    async with open_store(url) as store, open_store(url) as other:
        await store.open_run("shop", {})
        seen = await live_state(store, "shop")
        await decide(other, "shop", seen, event(1.0, "promoted"))
        with pytest.raises(Conflict, match="version 3: promoted meanwhile"):
            await decide(store, "shop", seen, event(2.0, "rolled back"))
        assert (await live_state(store, "shop")).events == [event(1.0, "promoted")]


async def test_a_damaged_document_is_a_sentence(tmp_path: Path) -> None:
    async with open_store(f"sqlite:///{tmp_path}/store.db") as store:
        await store.open_run("shop", {})
        await store.put_documents("shop", records.EVENTS, {"0000000": {"kind": "lost"}})
        with pytest.raises(Invalid, match=r"'live-events 0000000' of a live run is damaged \("):
            await live_state(store, "shop")


def test_only_what_was_worse_sets_the_learner_back() -> None:
    assert records.resets(event(0.0, worse=True))
    assert records.resets(event(0.0, "rolled back"))
    assert not records.resets(event(0.0))
    assert not records.resets(event(0.0, "promoted"))
