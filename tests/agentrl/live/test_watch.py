"""The real processes: a watch that is killed again and again, and a session that opts out."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from agentrl.core.config import resolve
from agentrl.core.errors import ConfigError, StoreError
from agentrl.live import supervisor
from agentrl.live.records import SOURCE, mark_of, outcome_of
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.trainer import write_settings
from tests.agentrl.live.sessions import NOW, RUN, ended
from tests.agentrl.live.shop import running, until
from tests.agentrl.live.test_people import on_disk

CANARY = "CANARY-7131"
VERIFIER = """
import time

def verify(result):
    time.sleep(0.02)  # so that some sessions are asked about when the watch is killed
    return float(result == "good")
"""
ROUNDS, EACH = 6, 8


async def test_work_that_fails_is_begun_again_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, third, going = list[str](), asyncio.Event(), asyncio.Event()

    async def failing(*_: object) -> None:
        begun.append("failing")
        if len(begun) == 3:
            third.set()
            await asyncio.Event().wait()
        raise (KeyError("s-17"), LostStore("the store is gone"))[len(begun) - 1]

    async def steady(*_: object) -> None:
        going.set()
        await third.wait()

    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(
        supervisor, "WORK", {"nothing is labelled": failing, "nothing else": steady}
    )
    config = resolve({"store": f"sqlite:///{tmp_path}/store.db"}, source="test")
    watching = asyncio.create_task(supervisor.watch(config))
    await asyncio.gather(going.wait(), third.wait())
    watching.cancel()
    assert begun == ["failing"] * 3
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "nothing is labelled now (KeyError: 's-17'); tried again",
        "nothing is labelled now (LostStore: the store is gone); tried again",
    ]


async def test_what_a_user_must_mend_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(*_: object) -> None:
        raise ConfigError("there is no file shop.py")

    monkeypatch.setattr(supervisor, "WORK", {"sessions are not labelled": work})
    config = resolve({"store": f"sqlite:///{tmp_path}/store.db"}, source="test")
    with pytest.raises(ConfigError, match=r"there is no file shop.py"):
        await supervisor.watch(config)


class LostStore(StoreError):
    """The store cannot be reached."""


async def labelled(store: Store) -> int:
    return sum(mark_of(row) is not None for row in await store.rollouts(RUN))


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_watch_that_is_killed_at_any_moment_labels_each_session_once(tmp_path: Path):
    (tmp_path / "shop.py").write_text(VERIFIER)
    config = resolve(
        {
            "name": RUN, "root": str(tmp_path), "store": f"sqlite:///{tmp_path}/store.db",
            "verifier": {"path": "shop.py:verify"},
            "live": {"running": True, "people": {"per_user": 5}}, "policy": {"model": "x"},
        },
        source="test",
    )  # fmt: skip
    file = write_settings(tmp_path / "run.json", config)
    expected = {}
    async with open_store(config.store) as store:
        await store.open_run(RUN, {})
        for number in range(ROUNDS):
            for n in range(EACH):
                name, good = f"{number}-{n}", (n + number) % 2 == 0
                answer = "good" if good else "bad"
                words, at = f"question {name}", NOW + number
                id = await ended(store, name, words, answer, user=f"u{n}", at=at)
                expected[id] = 1.0 if number < 5 and good else 0.0 if number < 5 else None
            before = await labelled(store)
            with (tmp_path / "watch.log").open("ab") as log:
                watch = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "agentrl", "process", "watch", str(file),
                    stdout=log, stderr=log,
                )  # fmt: skip
            wanted = before + 1 if number < ROUNDS - 1 else len(expected)

            async def enough(least: int = wanted) -> bool:
                return await labelled(store) >= least

            try:
                await until(enough, what=f"{wanted} sessions are labelled", seconds=120.0)
            finally:
                watch.kill()
                await watch.wait()
        rows = {row.id: row for row in await store.rollouts(RUN)}
    for id, outcome in expected.items():
        row = rows[id]
        names = sorted(r.name for r in row.rewards if r.source == SOURCE)
        assert names == (["labelled"] if outcome is None else ["labelled", "outcome"])
        if outcome is None:
            assert "5 others of that day" in mark_of(row).held
        else:
            assert outcome_of(row) == outcome
    assert "Traceback" not in (tmp_path / "watch.log").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_nothing_of_a_session_that_opts_out_is_on_the_disk_of_a_live_run(
    tmp_path: Path, tiny_model_dir: Path
):
    async with running(tmp_path, tiny_model_dir) as (_, store, client):
        for text, header in (("hello ADA-1815", {}), (CANARY, {"x-agentrl-opt-out": "1"})):
            headers = {"x-session-id": f"of {text}", "x-user-id": f"{text}@home", **header}
            await client.chat.completions.create(
                model="gpt-4o",
                messages=[{"role": "user", "content": text}],
                extra_headers={**headers, "x-agentrl-end": "1"},
            )
        (row,) = await store.rollouts(RUN)
        assert len(row.task["user"]) == 16
    assert "store.db" in " ".join(on_disk(tmp_path, "hello ADA-1815"))
    assert on_disk(tmp_path, CANARY) == on_disk(tmp_path, "ADA-1815@home") == []
