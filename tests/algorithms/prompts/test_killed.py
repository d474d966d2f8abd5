"""A prompt search over store, runner and gateway: as in process, also after `kill -9`."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from agentrl.algorithms.gepa_search import gepa_search
from agentrl.algorithms.prompt_search import Search, SearchEnd, candidates_of, reflections_of
from agentrl.store import open_store
from examples.orders import world
from tests.benchmarks.prompts import CONFIG, TEXTS, InProcess
from tests.benchmarks.prompts_commands import serving, start
from tests.system.test_kill import children

KILLS = int(os.environ.get("AGENTRL_TEST_KILLS", "2"))  # those of the slow test
CALLS = 400  # of the some 500 of an undisturbed search, before which the last kill comes
NO_TORCH = "raise ImportError('a search on upstreams needs no torch')\n"


def started(folder: Path, url: str, *more: str) -> subprocess.Popen[str]:
    (folder / "block").mkdir(exist_ok=True)
    (folder / "block" / "torch.py").write_text(NO_TORCH)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder / "block"), prepend=os.pathsep)
        return start(folder, url, more[0], "run.toml", "runner.lease=3", *more[1:])


def expected() -> Search:
    backend = InProcess(0)
    backend.tasks = world.make(16, "train0") + world.make(12, "val0")
    search = Search(CONFIG, TEXTS, backend, len(backend.tasks))
    with pytest.raises(SearchEnd):
        gepa_search(search)
    search.end_iteration()
    return search


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("most", [1, pytest.param(KILLS, marks=pytest.mark.slow)])
def test_killed_at_random_nothing_is_played_or_asked_twice(tmp_path: Path, most: int) -> None:
    chance, kills, searches = random.Random(7), 0, 0
    with serving() as server:
        while kills < most:  # one search rarely lasts for twenty
            folder = tmp_path / str(searches)
            folder.mkdir()
            made = killed_search(folder, server, chance, most - kills)
            assert made, "the search ended before the first kill"
            kills, searches = kills + made, searches + 1
        folder = tmp_path / "0"
        texts = str(folder / "runs" / "orders" / "prompts")
        evaluated = started(folder, server.url, "eval", "--prompts", texts, "eval.tasks=4")
        assert "score" in evaluated.communicate()[0]
        assert evaluated.returncode == 0


def killed_search(folder: Path, server: Any, chance: random.Random, most: int) -> int:
    """How often a process of the search was killed before it ended with what is right."""
    kills, process = 0, started(folder, server.url, "prompts")
    while kills < most and wait_for_calls(
        process, server, chance.randint(1, CALLS // max(most, 2))
    ):
        victims = {"front": process.pid} | children(process.pid)
        victim = chance.choice(sorted(victims))
        os.kill(victims[victim], signal.SIGKILL)
        kills += 1
        if victim != "runner":  # without which the front goes on
            process.communicate()
            process = started(folder, server.url, "prompts")
    output = process.communicate()[0]
    assert process.returncode == 0, output
    check_result(folder, output)
    return kills


def wait_for_calls(process: subprocess.Popen[str], server: Any, calls: int) -> bool:
    """Until the models have been asked so often again; False where the search ends before."""
    goal, deadline = server.calls + calls, time.monotonic() + 90
    while server.calls < goal:
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline, "the search made no progress"
        time.sleep(0.01)
    return True


def check_result(folder: Path, output: str) -> None:
    search = expected()
    asyncio.run(check(folder, search))
    texts = {text.component: text.text for text in search.best.texts}
    for name, text in texts.items():
        assert (folder / "runs" / "orders" / "prompts" / f"{name}.txt").read_text() == f"{text}\n"
    assert "held-out score 0.0% -> " in output


async def check(folder: Path, search: Search) -> None:
    run = "orders-prompts"
    async with open_store(f"sqlite:///{folder / 'runs' / run / 'store.db'}") as store:
        found = await candidates_of(store, run)
        assert [one.id for one in found] == list(search.candidates)
        assert {c.state for c in found} == {"accepted", "rejected", "chosen"}
        rows = await store.rollouts(run)
        assert len(rows) == search.rollouts + 2 * 60
        assert {row.state.value for row in rows} == {"succeeded"}
        asked = await reflections_of(store, run)
        assert len({one.id for one in asked}) == len(asked) == search._asked
        assert all(one.prompt_tokens for one in asked)
        row = next(row for row in rows if row.candidate == search.best.id)
        calls = (await store.trace(row.id)).transitions
        texts = {t.component: t.text for t in search.best.texts}
        for call in calls[:1]:
            assert str(call.messages[0]["content"]).startswith(texts[call.role])
        steps = await store.steps(run)
        assert all("prompts/rollouts" in row.metrics for row in steps if row.committed)
