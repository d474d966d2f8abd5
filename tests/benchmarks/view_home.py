"""The first page of `agentrl view` with 100 runs in 20 stores, while one of the runs goes on."""

from __future__ import annotations

import asyncio
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from msgspec import to_builtins

from agentrl.core.config.run_file import resolve
from agentrl.core.types import StepCommit
from agentrl.store import open_store

STORES, RUNS, STEPS, EVERY = 20, 5, 30, 5  # runs of a store; steps of a run; evaluation
VISITS = 40


def fill(folder: Path) -> None:
    """20 stores below runs/, each with five runs of 30 steps at other learning rates."""
    for place in range(STORES):
        asyncio.run(_fill_store(folder / "runs" / f"study{place:02}", place))


async def _fill_store(folder: Path, place: int) -> None:
    async with open_store(f"sqlite:///{folder / 'store.db'}") as store:
        for n in range(RUNS):
            data = {"name": f"run-{place:02}-{n}", "root": str(folder), "steps": STEPS}
            data |= {"policy": {"model": "not/there"}, "algorithm": {"lr": 1e-5 * (n + 1)}}
            config = to_builtins(resolve(data | {"output": str(folder)}, source="benchmark"))
            state = await store.open_run(data["name"], config)
            for step in range(STEPS):
                await store.commit_step(_commit(state.run, state.epoch, step, n))


def _commit(run: str, epoch: int, step: int, n: int) -> StepCommit:
    score = 1 - math.exp(-step * (n + 1) / 40)
    metrics = {f"time/part{i:02}": 0.1 * i for i in range(60)} | {"reward/mean": score}
    if step % EVERY == 0:
        bounds = {"eval/score_low": 0.9 * score, "eval/score_high": min(score + 0.05, 1.0)}
        metrics |= {"eval/score": score} | bounds
    return StepCommit(
        run=run, epoch=epoch, step=step, groups=[], versions={}, checkpoint=None, metrics=metrics
    )


async def _go_on(folder: Path, step: int) -> None:
    async with open_store(f"sqlite:///{folder / 'runs/study00/store.db'}") as store:
        await store.log("run-00-0", STEPS + step, {"reward/mean": 0.5})


def measure(folder: Path, visits: int = VISITS) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    fill(folder)
    command = [sys.executable, "-m", "agentrl", "view", "--port", "0"]
    environment = {key: value for key, value in os.environ.items() if key != "AGENTRL_STORE_URL"}
    times: dict[str, list[float]] = {"home": [], "home sorted": [], "home filtered": []}
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().rpartition(" at ")[2].strip()
        with httpx.Client(base_url=address, timeout=60) as client:
            since = time.perf_counter()
            assert client.get("/").text.count('name="run"') == STORES * RUNS
            first = time.perf_counter() - since
            for visit in range(visits):
                asyncio.run(_go_on(folder, visit))
                paths = {"home": "/", "home sorted": "/?sort=gain", "home filtered": "/?q=run-07"}
                for name, path in paths.items():
                    since = time.perf_counter()
                    assert client.get(path).status_code == 200
                    times[name].append(time.perf_counter() - since)
        process.terminate()
    every = sorted(one for found in times.values() for one in found)
    return {
        "runs": STORES * RUNS,
        "stores": STORES,
        "first_visit_ms": round(1000 * first, 1),
        "p50_ms": round(1000 * statistics.median(every), 1),
        "p95_ms": round(1000 * every[int(0.95 * (len(every) - 1))], 1),
    }
