"""A mining that is killed at any write, and repeated, makes the same version."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from agentrl.algorithms.preferences import draft
from agentrl.store import open_store
from tests import warm
from tests.algorithms.preferences.test_mining import play

CHILD = """
import os, signal, sys
from agentrl.cli.data import data
from agentrl.algorithms.preferences import draft
from agentrl.store.sqlite import SqliteStore

draft.ROWS_PER_CALL, left = 4, int(sys.argv.pop(1))
for verb in ("draft_dataset", "add_items", "commit_dataset"):
    def counted(self, *given, call=getattr(SqliteStore, verb)):
        global left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(self, *given)
    setattr(SqliteStore, verb, counted)
data()
"""


async def mined(url: Path, write: int) -> tuple[int, int, str]:
    """Version, items and digest of a mining that is killed at this write and repeated; 0: none."""
    async with open_store(str(url)) as store:
        for k in range(6):
            sides = {f"{k}a": (1.0, [[5]]), f"{k}b": (0.0, [[6]]), f"{k}c": (0.5, [[7]])}
            await play(store, f"g{k}", sides, prompt=(1, 10 + k))
    mine = ["mine", "pairs", "--run", "run", "--how", "all", "--store", str(url)]
    for left in (write, 0) if write else (0,):
        done = await asyncio.to_thread(warm.run, "-c", CHILD, str(left), *mine)
        assert done.returncode == (-signal.SIGKILL if left else 0), done.stderr
    async with open_store(str(url)) as store:
        (found,) = await store.datasets("pairs")
    return found.version, found.items, found.digest


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, int, str]:
    """What a mining that nothing kills makes."""
    return asyncio.run(mined(tmp_path_factory.mktemp("mined") / "whole.db", 0))


@pytest.mark.parametrize("write", [2, 4, 7, 9])
async def test_a_killed_mining_is_repeated_to_the_same_digest(
    tmp_path: Path, whole: tuple[int, int, str], write: int
) -> None:
    assert await mined(tmp_path / "killed.db", write) == whole
    assert draft.ROWS_PER_CALL == 500
