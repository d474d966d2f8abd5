"""A prompt search over store, runner and gateway: as in process, also after `kill -9`."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from agentrl.algorithms.prompts.gepa import gepa_search
from agentrl.algorithms.prompts.search import Search, SearchEnd
from agentrl.store import open_store
from examples.orders import world
from tests.benchmarks.prompts import CONFIG, TEXTS, InProcess

EXAMPLE = Path(__file__).parents[2] / "examples" / "orders"
KILLS = int(os.environ.get("AGENTRL_TEST_KILLS", "2"))
NO_TORCH = "raise ImportError('a search on upstreams needs no torch')\n"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from model import Handler  # type: ignore[import-not-found]

    serving = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=serving.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{serving.server_port}/v1"
    serving.shutdown()
    thread.join()
    serving.server_close()


def started(folder: Path, url: str, *more: str) -> subprocess.Popen[str]:
    (folder / "block").mkdir(exist_ok=True)
    (folder / "block" / "torch.py").write_text(NO_TORCH)
    path = os.pathsep.join([str(folder / "block"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "agentrl", *more[:1], str(folder / "orders" / "run.toml")]
    command += [f"upstreams.{name}.base_url={url}" for name in ("scripted", "reflector")]
    return subprocess.Popen(
        [*command, *more[1:]],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def expected() -> Search:
    backend = InProcess(0)
    backend.tasks = world.make(16, "train0") + world.make(12, "val0")
    search = Search(CONFIG, TEXTS, backend, len(backend.tasks))
    with pytest.raises(SearchEnd):
        gepa_search(search)
    search.end_iteration()
    return search


@pytest.mark.timeout(600)
def test_killed_at_random_moments_nothing_is_played_or_asked_twice(
    tmp_path: Path, server: str
) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "orders")
    chance, killed, output = random.Random(7), 0, ""
    while True:
        process = started(tmp_path, server, "prompts")
        if killed < KILLS:
            time.sleep(chance.uniform(2.0, 6.0))
            killed += 1
            process.send_signal(signal.SIGKILL)
        output = process.communicate()[0]
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, output
    search = expected()
    asyncio.run(check(tmp_path, search))
    texts = {text.component: text.text for text in search.best.texts}
    folder = tmp_path / "runs" / "orders" / "prompts"
    for name, text in texts.items():
        assert (folder / f"{name}.txt").read_text() == f"{text}\n"
    assert "held-out score 0.000 -> 0." in output
    evaluated = started(tmp_path, server, "eval", "--prompts", str(folder), "eval.tasks=4")
    assert "score" in evaluated.communicate()[0]
    assert evaluated.returncode == 0


async def check(folder: Path, search: Search) -> None:
    run = "orders-prompts"
    async with open_store(f"sqlite:///{folder / 'runs' / run / 'store.db'}") as store:
        found = await store.candidates(run)
        assert [one.id for one in found] == list(search.candidates)
        assert {c.state for c in found} == {"accepted", "rejected", "chosen"}
        rows = await store.rollouts(run)
        assert len(rows) == search.rollouts + 2 * 60
        assert {row.state.value for row in rows} == {"succeeded"}
        asked = await store.reflections(run)
        assert len({one.id for one in asked}) == len(asked) == search._asked
        assert all(one.prompt_tokens for one in asked)
        row = next(row for row in rows if row.candidate == search.best.id)
        calls = (await store.trace(row.id)).transitions
        texts = {t.component: t.text for t in search.best.texts}
        for call in calls[:1]:
            assert str(call.messages[0]["content"]).startswith(texts[call.role])
        steps = await store.steps(run)
        assert all("prompts/rollouts" in row.metrics for row in steps if row.committed)
