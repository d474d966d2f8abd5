"""Snapshots on disk and in service: there before they are remembered, gone once nobody plays."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl.algorithms.sampling.tasks import TaskSampler
from agentrl.algorithms.selfplay import OpponentPool, SnapshotStore
from agentrl.core.config import RunConfig, resolve
from agentrl.store import open_store
from agentrl.store.base import Store

SEATS = ["player_0", "player_1"]


class Learner:
    def save(self, directory: Path) -> None:
        (directory / "config.json").write_text("{}")


class Serving:
    """Remembers what is served."""

    def __init__(self) -> None:
        self.served: dict[str, Path] = {}

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        yield

    async def freeze(self, name: str, directory: Path, version: int) -> None:
        assert (directory / "config.json").is_file()
        self.served[name] = directory

    async def drop(self, name: str) -> None:
        del self.served[name]


def run_of(folder: Path, ahead: int) -> RunConfig:
    games = {"seats": SEATS, "opponents": "latest", "self_share": 0.0, "every": 1, "pool": 1}
    algorithm = {"preset": "spiral", "groups": 1, "group_size": 2, "max_staleness": ahead}
    return resolve(
        {"name": "run", "output": str(folder), "selfplay": games, "algorithm": algorithm},
        source="test",
    )


def opponents(config: RunConfig, store: Store) -> SnapshotStore:
    pool = OpponentPool(
        config.selfplay, "policy", config.seed, ahead=config.algorithm.max_staleness
    )
    fakes: tuple[Any, Any] = (Learner(), Serving())
    return SnapshotStore(pool, *fakes, store, config.name, Path(config.output, "pool"))


def kept(made: SnapshotStore) -> set[str]:
    """What is on disk, which is what is served."""
    found = {path.name for path in made.folder.iterdir()}
    assert found == made.served == made.serving.served.keys()  # type: ignore[attr-defined]
    return found


async def test_a_snapshot_is_served_until_its_last_game_has_ended(tmp_path: Path) -> None:
    config = run_of(tmp_path, ahead=1)
    async with open_store(config.store) as store:
        made = opponents(config, store)
        await made.start(0)
        await store.open_run("run", {})
        # Asked for at the start, and not ended four steps later.
        asked = TaskSampler(config, [{"input": 1}], seats=made.pool.seats).rollouts(1)
        await store.enqueue(asked)
        for steps in range(1, 5):
            await made.save_due(steps)
            await made.serve_pool()
        assert [snapshot.name for snapshot in made.pool.drawn] == ["policy@000004"]
        assert kept(made) == {"policy@000000", "policy@000003", "policy@000004"}
        await store.cancel([rollout.id for rollout in asked])
        await made.save_due(5)
        await made.serve_pool()
        assert kept(made) == {"policy@000004", "policy@000005"}


async def test_games_against_a_rolled_back_snapshot_are_cancelled(tmp_path: Path) -> None:
    config = run_of(tmp_path, ahead=1)
    async with open_store(config.store) as store:
        await store.open_run("run", {})
        killed = opponents(config, store)
        await killed.start(0)
        before = TaskSampler(config, [{"input": 1}], seats=killed.pool.seats).rollouts(1)
        at_checkpoint = killed.pool.dump()
        await killed.save_due(1)
        after = TaskSampler(config, [{"input": 1}], seats=killed.pool.seats).rollouts(2)
        await store.enqueue([*before, *after])
        again = opponents(config, store)
        again.pool.restore(at_checkpoint)
        await again.start(0)
        ended = {row.id: row.state.terminal for row in await store.rollouts("run")}
        assert [ended[row.id] for row in before] == [False] * len(before)
        assert [ended[row.id] for row in after] == [True] * len(after)
        assert {"policy@000001" in row.seats.values() for row in after} == {True}


async def test_only_whoever_commits_deletes(tmp_path: Path) -> None:
    config = run_of(tmp_path, ahead=0)
    async with open_store(config.store) as store:
        await store.open_run("run", {})
        mine, stale = opponents(config, store), opponents(config, store)
        await mine.start(0)
        await mine.save_due(1)
        await mine.serve_pool()
        assert kept(mine) == {"policy@000001"}
        await stale.start(0)  # of a process that another one has taken the run from
        assert {path.name for path in mine.folder.iterdir()} == {"policy@000000", "policy@000001"}
        left = mine.folder / "policy@000009.tmp-1"
        left.mkdir()
        await mine.serve_pool()
        assert kept(mine) == {"policy@000001"}


async def test_a_dropped_snapshot_is_never_left_in_part_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_of(tmp_path, ahead=0)
    async with open_store(config.store) as store:
        await store.open_run("run", {})
        made = opponents(config, store)
        await made.start(0)
        await made.save_due(1)
        monkeypatch.setattr(shutil, "rmtree", lambda path, **_: None)  # killed before it deletes
        await made.serve_pool()
        assert not (made.folder / "policy@000000").exists()
