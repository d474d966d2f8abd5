"""Stored rollouts scored again: beside the old reward, resumable, with what changes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from agentrl.core.config import resolve
from agentrl.core.errors import ConfigError
from agentrl.core.types import NewRollout, Outcome, Reward
from agentrl.rescore import _pages, rescore
from agentrl.store import open_store
from agentrl.store.base import Store

VERIFIER = """
def strict(task, result):
    if result == "raises": raise ValueError("no answer")
    return float(result == task["answer"])
"""


async def filled(store: Store, groups: int, results: list[str], timeout: float = 60.0) -> None:
    """A run whose rollouts all have the outcome 1."""
    import msgspec

    data = {"name": "r", "policy": {"model": "m"}, "agent": {"timeout": timeout}}
    config = resolve(data, source="test")
    await store.open_run("r", msgspec.to_builtins(config))
    rows = [
        NewRollout(
            id=f"r/{g:05d}/{i}", run="r", group=f"r/{g:05d}", index=i,
            task={"input": "q", "answer": "a"},
        )
        for g in range(groups) for i in range(len(results))
    ]  # fmt: skip
    await store.enqueue(rows)
    while attempts := await store.claim(500, runner="x", lease=60.0, run="r"):
        await store.finish(
            [
                Outcome(
                    attempt=one.id, fence=one.fence, result=results[one.rollout.index],
                    rewards=[Reward(1.0)],
                )
                for one in attempts
            ]
        )  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "again.py").write_text(VERIFIER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def test_a_new_reward_stands_beside_the_old_one(here: Path) -> None:
    async with open_store(f"sqlite:///{here}/store.db") as store:
        await filled(store, 3, ["a", "b", "raises"])
        found = await rescore(store, "r", verifier="again.py:strict")
        (row, *_) = [one for one in await store.rollouts("r") if one.index == 1]
        assert (row.reward(), row.reward("strict")) == (1.0, 0.0)
        summary = found.summary()
        assert (found.scored, summary["lower"], summary["higher"]) == (6, 3, 0)
        assert list(found.failed.values()) == [3]
        assert len(found.reordered) == 3
        assert [one["new"] for one in summary["reordered"]["r/00000"]] == [0.5, -0.5]
        assert [one["credit"] for one in summary["reordered"]["r/00000"]] == [0.0, 0.0]


async def test_what_is_scored_is_not_scored_again(here: Path) -> None:
    async with open_store(f"sqlite:///{here}/store.db") as store:
        await filled(store, 2, ["a", "b"])
        await rescore(store, "r", verifier="again.py:strict")
        again = await rescore(store, "r", verifier="again.py:strict")
        assert (again.scored, again.known) == (0, 4)
        assert again.summary()["lower"] == 2
        with pytest.raises(ConfigError, match="have a reward 'outcome' already"):
            await rescore(store, "r", verifier="again.py:strict", name="outcome")
        with pytest.raises(ConfigError, match="no judge 'nobody'"):
            await rescore(store, "r", judge="nobody")


async def test_what_has_no_outcome_is_counted(here: Path) -> None:
    (here / "odd.py").write_text(
        "import asyncio\n"
        "async def waits(task, result): await asyncio.sleep(60)\n"
        "def other(task, result): return {'style': 1.0}\n"
    )
    async with open_store(f"sqlite:///{here}/store.db") as store:
        await filled(store, 1, ["a", "b"], timeout=0.1)
        for name, reason in (("waits", "ran longer than 0.1 s"), ("other", "no outcome")):
            found = await rescore(store, "r", verifier=f"odd.py:{name}")
            ((message, count),) = found.failed.items()
            assert (found.scored, count) == (0, 2)
            assert reason in message


async def test_groups_are_scored_as_a_whole(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.rescore.PAGE", 5)
    async with open_store(f"sqlite:///{here}/store.db") as store:
        await filled(store, 7, ["a", "b", "a"])
        sizes = [
            [row.group for row in page].count(group)
            async for page in _pages(store, "r") for group in {row.group for row in page}
        ]  # fmt: skip
        assert sizes == [3] * 7


@pytest.mark.slow
async def test_ten_thousand_rollouts_take_seconds(here: Path) -> None:
    async with open_store(f"sqlite:///{here}/store.db") as store:
        await filled(store, 1250, ["a", "b"] * 4)
        began = time.monotonic()
        found = await rescore(store, "r", verifier="again.py:strict")
        assert found.scored == 10_000
        assert time.monotonic() - began < 20
