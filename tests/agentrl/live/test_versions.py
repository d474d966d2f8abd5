"""From which versions the learner's weights come, and which versions are served."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.core.config import resolve
from agentrl.core.errors import ConfigError, DamagedError, PolicyError
from agentrl.core.files import delete_directory
from agentrl.core.types import EMPTY
from agentrl.live import versions as module
from agentrl.live.records import (
    GIVEN,
    Event,
    EventKind,
    Lanes,
    LiveState,
    Version,
    Wish,
    live_state,
    put_wish,
)
from agentrl.live.versions import Lineage, Reset, Versions, pending, wanted_of
from agentrl.store import open_store
from agentrl.store.base import Store
from tests.agentrl.live.shop import RUN, move


def version(number: int) -> Version:
    return Version(version=number, step=number, path="", offered=float(number))


def event(kind: EventKind, number: int, lanes: Lanes) -> Event:
    return Event(time=0.0, kind=kind, version=number, lanes=lanes, why="")


def test_lag_counts_updates_on_the_way_to_the_learner() -> None:
    plain = Lineage()
    assert [plain.lag(at, 5) for at in (5, 3, 0)] == [0, 2, 5]
    assert plain.lag(6, 5) == inf
    # After 5 updates the learner went on from version 2, after 7 from version 6.
    back = Lineage([Reset(5, 2), Reset(7, 6)])
    assert back.lag(8, 9) == 1
    assert back.lag(6, 9) == 2
    assert back.lag(7, 9) == inf  # it was found bad
    assert back.lag(2, 9) == 3  # 2 -> 6 -> 8 -> 9
    assert back.lag(1, 9) == 4
    assert [back.lag(at, 9) for at in (3, 4, 5)] == [inf, inf, inf]
    first = Lineage([Reset(5, 2), Reset(7, 0)])
    assert first.lag(0, 8) == 1
    assert first.lag(2, 8) == inf


def test_steps_that_trained_nothing_are_no_updates() -> None:
    plain = Lineage(empty=[2, 3, 6])
    assert [plain.lag(at, 5) for at in (5, 4, 3, 2, 0)] == [0, 1, 1, 1, 3]
    back = Lineage([Reset(5, 2)], empty=[2, 6])
    assert [back.lag(at, 8) for at in (7, 6, 2, 1)] == [1, 1, 2, 3]


async def test_steps_that_trained_nothing_are_read_from_the_store(tmp_path: Path) -> None:
    async with open_store(f"sqlite:///{tmp_path}/store.db") as store:
        await store.open_run(RUN, {})
        lineage = Lineage()
        for step in range(4):
            metrics = {EMPTY: 0.0} if step % 2 else {}
            await store.log(RUN, step, {**metrics, "loss": 1.0})
            await lineage.read_empty(store, RUN, step)  # it is not committed yet
        assert lineage.empty == [1]
        await lineage.read_empty(store, RUN, 4)
        assert lineage.empty == [1, 3]


def test_lineage_comes_back_from_a_checkpoint() -> None:
    kept, read = Lineage([Reset(5, 2)], decided=3), Lineage()
    read.restore(kept.dump())
    assert read == kept


def test_an_offered_version_is_served_until_something_is_decided_of_it() -> None:
    lanes, both = Lanes(serving=0), {0: version(0), 3: version(3)}
    known = LiveState(versions=both, events=[event("first", 0, lanes)])
    assert pending(known) == {3}
    assert wanted_of(known) == {0, 3}
    dropped = LiveState(versions=both, events=[*known.events, event("dropped", 3, lanes)])
    assert pending(dropped) == set()
    assert wanted_of(dropped) == {0}
    before = Lanes(serving=3, previous=0)
    promoted = LiveState(versions=both, events=[*known.events, event("promoted", 3, before)])
    assert wanted_of(promoted) == {0, 3}


class Serving:
    """Policy servers that only count."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        yield

    async def freeze(self, name: str, directory: Path, version: int) -> None:
        assert directory.is_dir()
        self.names.append(name)

    async def drop(self, name: str) -> None:
        self.names.remove(name)

    def table(self) -> list[tuple[str, int, str, str]]:
        return [(name, 0, "http://x/v1", name) for name in self.names]

    async def announce(self, store: Store, run: str, epoch: int) -> None: ...


class Policies:
    """A learner with as many updates as there are steps."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def versions(self, steps: int) -> dict[str, int]:
        return {"policy": steps}

    def save(self, directory: Path) -> None:
        directory.joinpath("weights").touch()

    def load(self, directory: Path) -> None:
        self.loaded.append(directory.name)


@pytest.fixture
async def versions(tmp_path: Path, monkeypatch: Any) -> AsyncIterator[Versions]:
    monkeypatch.setattr(module, "GRACE", 0.0)
    config = resolve({"name": RUN, "output": str(tmp_path), "policy": {"model": "x"}}, source="t")
    async with open_store(f"sqlite:///{tmp_path}/store.db") as store:
        state = await store.open_run(RUN, {})
        lock = SimpleNamespace(check=lambda: None)
        run: Any = SimpleNamespace(
            config=config,
            store=store,
            state=state,
            lock=lock,
            policies=Policies(),
            serving=Serving(),
        )
        made = Versions(run, Lineage())
        await made.start()
        await move(store, Lanes(serving=0), kind="first", version=0)
        yield made


def serves(versions: Versions) -> list[str]:
    return sorted(versions.run.serving.names)  # type: ignore[attr-defined]


def folders(versions: Versions) -> list[str]:
    return sorted(path.name for path in versions.folder(0).parent.iterdir())


async def test_a_dropped_version_is_neither_served_nor_kept_and_the_next_is_offered(
    versions: Versions,
) -> None:
    store = versions.run.store
    await versions.tend(1)
    assert serves(versions) == ["policy@0", "policy@1"]
    await versions.tend(2)  # the first of them is not decided about
    assert set((await live_state(store, RUN)).versions) == {0, 1}
    await move(store, Lanes(serving=0), kind="dropped", version=1)
    for _ in range(3):
        await versions.tend(2)
    assert serves(versions) == ["policy@0", "policy@2"]
    assert folders(versions) == ["policy-0", "policy-2"]
    assert versions.run.policies.loaded == []  # type: ignore[attr-defined]


async def test_the_learner_goes_on_from_the_serving_version_after_a_take_back(
    versions: Versions,
) -> None:
    store = versions.run.store
    await versions.tend(1)
    await move(store, Lanes(serving=0), kind="rolled back", version=1)
    for _ in range(3):
        await versions.tend(2)
    assert versions.run.policies.loaded == ["policy-0"]  # type: ignore[attr-defined]
    assert versions.ahead(2) == 0
    assert set((await live_state(store, RUN)).versions) == {0, 1}  # nothing new is learned yet
    await versions.tend(3)
    assert set((await live_state(store, RUN)).versions) == {0, 1, 3}
    assert versions.ahead(3) == 1


async def test_the_learner_goes_on_from_the_serving_version_if_its_newest_decided_nothing(
    versions: Versions,
) -> None:
    """It may make no more updates, and nothing that it made is compared any more."""
    await versions.tend(1)
    await move(versions.run.store, Lanes(serving=0), kind="dropped", version=1)
    await versions.tend(1)
    assert versions.run.policies.loaded == ["policy-0"]  # type: ignore[attr-defined]
    assert versions.ahead(1) == 0


async def test_the_learner_goes_on_from_a_promoted_version_that_it_did_not_make(
    versions: Versions, tmp_path: Path
) -> None:
    store, given = versions.run.store, tmp_path / "given"
    given.mkdir()
    await put_wish(store, RUN, Wish(path=str(given), asked=1.0))
    await versions.tend(1)
    await move(store, Lanes(serving=GIVEN, previous=0), kind="promoted", version=GIVEN)
    await versions.tend(1)
    assert versions.run.policies.loaded == [f"policy-{GIVEN}"]  # type: ignore[attr-defined]
    assert versions.ahead(1) == 0


def offered(folder: Path) -> Wish:
    folder.mkdir(parents=True)
    (folder / "weights").write_text(folder.name)
    return Wish(path=str(folder), asked=1.0)


def restarted(versions: Versions) -> Versions:
    """Those of the process after it."""
    versions.run.serving.names.clear()  # type: ignore[attr-defined]
    return Versions(versions.run, Lineage())


async def test_what_a_user_offers_is_copied_and_needed_no_more(
    versions: Versions, tmp_path: Path
) -> None:
    wish = offered(tmp_path / "given")
    await put_wish(versions.run.store, RUN, wish)
    await versions.tend(0)
    delete_directory(Path(wish.path))
    again = restarted(versions)
    await again.start()
    assert serves(again) == ["policy@0", f"policy@{GIVEN}"]
    assert (again.folder(GIVEN) / "weights").read_text() == "given"


@pytest.mark.parametrize(("place", "links"), [("checkpoints/000003.1", 2), ("../given", 1)])
async def test_files_of_the_run_are_linked_and_those_of_others_copied(
    versions: Versions, tmp_path: Path, place: str, links: int
) -> None:
    """Others may write into theirs."""
    await put_wish(versions.run.store, RUN, offered((tmp_path / place).resolve()))
    await versions.tend(0)
    assert (versions.folder(GIVEN) / "weights").stat().st_nlink == links


async def test_wishes_are_carried_out_once_and_in_order(
    versions: Versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is killed after it has carried one out, and a user wished again meanwhile."""

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    store = versions.run.store
    await put_wish(store, RUN, offered(tmp_path / "one"))
    with monkeypatch.context() as patch:
        patch.setattr(module, "log_phase", killed)
        with pytest.raises(KeyboardInterrupt):
            await versions.tend(0)
    await put_wish(store, RUN, offered(tmp_path / "two"))
    again = restarted(versions)
    await again.start()
    for _ in range(2):
        await again.tend(0)
    assert set((await live_state(store, RUN)).versions) == {0, GIVEN}
    await move(store, Lanes(serving=0, candidate=GIVEN), kind="candidate", version=GIVEN)
    for _ in range(2):
        await again.tend(0)
    given = {number: one.given for number, one in (await live_state(store, RUN)).versions.items()}
    assert given == {0: "", GIVEN: f"{tmp_path}/one", GIVEN + 1: f"{tmp_path}/two"}


async def test_what_cannot_be_offered_is_said_where_decisions_are(
    versions: Versions, tmp_path: Path
) -> None:
    store = versions.run.store
    await put_wish(store, RUN, Wish(path=str(tmp_path / "gone"), asked=1.0))
    await put_wish(store, RUN, offered(tmp_path / "there"))
    for _ in range(2):
        await versions.tend(0)
    known = await live_state(store, RUN)
    assert (known.events[-1].kind, known.events[-1].version) == ("dropped", GIVEN)
    assert known.events[-1].why.startswith(f"{tmp_path}/gone cannot be offered: ")
    assert set(known.versions) == {0, GIVEN + 1}


@pytest.mark.parametrize("error", [DamagedError("torn"), ConfigError("odd"), OSError("full")])
async def test_weights_that_cannot_be_served_are_dropped_and_tried_no_more(
    versions: Versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    tried = []

    async def freeze(name: str, *_: Any) -> None:
        tried.append(name)
        raise error

    monkeypatch.setattr(versions.run.serving, "freeze", freeze)
    await put_wish(versions.run.store, RUN, offered(tmp_path / "given"))
    for _ in range(3):
        await versions.tend(0)
    event = (await live_state(versions.run.store, RUN)).events[-1]
    assert event.why == f"{tmp_path}/given cannot be offered: {error}"
    assert tried == [f"policy@{GIVEN}"]
    assert folders(versions) == ["policy-0"]  # its copy is not kept


@pytest.mark.parametrize("lane", ["previous", "candidate"])
async def test_a_version_whose_folder_is_gone_leaves_its_lane(
    versions: Versions, lane: str
) -> None:
    store = versions.run.store
    await versions.tend(1)
    await move(store, Lanes(serving=0, **{lane: 1}), kind="candidate", version=1)
    delete_directory(versions.folder(1))
    again = restarted(versions)
    await again.start()
    event = (await live_state(store, RUN)).events[-1]
    assert (event.kind, event.version, event.lanes) == ("dropped", 1, Lanes(serving=0))
    assert event.why.startswith("its weights cannot be loaded: there is no folder")
    await again.tend(1)
    assert serves(again) == ["policy@0"]


async def test_without_the_serving_version_nothing_starts(versions: Versions) -> None:
    delete_directory(versions.folder(0))
    with pytest.raises(PolicyError, match="version 0 serves, and cannot be loaded: there is no"):
        await restarted(versions).start()


async def test_the_learner_waits_until_it_can_go_on_from_the_serving_version(
    versions: Versions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = versions.run.store
    await versions.tend(1)
    await move(store, Lanes(serving=0), kind="rolled back", version=1)

    def broken(directory: Path) -> None:
        raise DamagedError(f"{directory.name} is damaged")

    with monkeypatch.context() as patch:
        patch.setattr(versions.run.policies, "load", broken)
        for _ in range(3):
            await versions.tend(2)
    assert versions.blocked.endswith("but version 0 cannot be loaded: policy-0 is damaged")
    assert caplog.text.count("learning is paused") == 1
    known = await live_state(store, RUN)
    assert set(known.versions) == {0, 1}  # what is bad is not offered again
    await versions.tend(2)
    assert (versions.blocked, versions.ahead(2)) == ("", 0)


async def test_a_learner_that_is_too_far_ahead_says_what_it_waits_for(versions: Versions) -> None:
    await versions.tend(1)
    assert versions.too_far_ahead(1) == (
        "it is 1 updates ahead of version 0, which serves (algorithm.max_staleness), and continues "
        "after a decision about the version that is offered"
    )
    await move(versions.run.store, Lanes(serving=0, candidate=1), kind="candidate", version=1)
    await versions.tend(1)
    assert versions.too_far_ahead(1).endswith("after a decision about candidate 1")


async def test_a_restarted_process_serves_what_the_lanes_say(versions: Versions) -> None:
    await versions.tend(1)
    await move(versions.run.store, Lanes(serving=1, previous=0), kind="promoted", version=1)
    versions.run.serving.names.clear()  # type: ignore[attr-defined]
    again = Versions(versions.run, Lineage())
    await again.start()
    assert serves(again) == ["policy@0", "policy@1"]
