"""A session that the learner cannot train is found and discarded; nothing else is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from agentrl.errors import TrainingError, Unavailable
from agentrl.live.blame import Blame
from agentrl.types import Rollout


def rows(*names: str) -> list[Rollout]:
    return [cast(Rollout, SimpleNamespace(group=name)) for name in names]


class Learner:
    """Processes that train the sessions of a store, of which each may end."""

    def __init__(self, folder: Path, names: Iterable[str], fails: Callable[[list[str]], Any]):
        self.folder, self.names, self.fails = folder, [*names], fails
        self.step, self.trained, self.discarded = 0, list[str](), list[str]()
        self.tries: list[int] = []

    async def process(self) -> None:
        blame = Blame(self.folder)
        while self.names:
            sessions = rows(*self.names)
            suspects = blame.suspects(sessions)
            ready = [row for row in sessions if row not in suspects][:8]
            if not ready:
                return
            chosen = [row.group for row in blame.narrowed(self.step, ready, suspects)]
            self.tries.append(len(chosen))
            if error := self.fails(chosen):
                raise error
            self.trained += chosen
            if suspects and blame.failed().step < self.step:
                self.discarded += [row.group for row in suspects]
            self.names = [n for n in self.names if n not in self.trained + self.discarded]
            self.step += 1

    async def run(self, most: int = 50) -> None:
        for _ in range(most):
            try:
                return await asyncio.create_task(self.process())
            except TrainingError:
                raise
            except Exception:  # noqa: BLE001 - the supervisor starts it again
                await asyncio.sleep(0)
        raise AssertionError("it never ends")


NAMES = [f"s{n:02d}" for n in range(20)]


@pytest.mark.parametrize("bad", [["s00"], ["s05"], ["s07", "s08"], ["s01", "s02", "s03"]])
async def test_sessions_that_raise_are_found_and_the_others_are_trained(
    tmp_path: Path, bad: list[str]
) -> None:
    def fails(chosen: list[str]) -> Exception | None:
        return KeyError("bad") if {*chosen} & {*bad} else None

    learner = Learner(tmp_path, NAMES, fails)
    await learner.run()
    assert learner.discarded == bad
    assert sorted(learner.trained) == [name for name in NAMES if name not in bad]


async def test_an_error_of_all_sessions_loses_none(tmp_path: Path) -> None:
    learner = Learner(tmp_path, NAMES, lambda chosen: KeyError("always"))
    with pytest.raises(TrainingError, match="not because of them"):
        await learner.run()
    assert learner.discarded == learner.trained == []
    assert len(learner.names) == 20


async def test_kills_and_a_store_that_is_away_blame_no_session(tmp_path: Path) -> None:
    full = torch.OutOfMemoryError("CUDA out of memory")
    ends = iter([Unavailable("away"), asyncio.CancelledError(), OSError("disk full"), full] * 3)
    learner = Learner(tmp_path, NAMES, lambda chosen: next(ends, None))
    for _ in range(12):
        await asyncio.wait([asyncio.create_task(learner.process())])
    await learner.run()
    assert learner.trained == NAMES
    assert learner.tries[:12] == [8] * 12
