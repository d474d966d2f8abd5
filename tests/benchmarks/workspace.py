"""Workspaces and stages: milliseconds to prepare, what is left behind, and what stages gain.

python -m tests.benchmarks.workspace --json

`prepare_ms` and `remove_ms` are medians for a repository of 20 files, one after the other;
`prepare_4_ms` is that of four at a time. `left` counts folders after `--rollouts` of them.
`left_after_kill` are those that remain after kill -9 of a process that had 50 open, which are
removed after `cleaned_after_s`. `stages` and `one_place` are
shares of the throughput that two run slots allow, where each rollout takes 1 s to prepare, 2 s to
run and 1 s to score (times `--scale`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from agentrl.config import AgentConfig, RunConfig, RunnerConfig, resolve
from agentrl.runners.execution import AttemptRunner
from agentrl.runners.executors.environment import environment
from agentrl.runners.executors.inprocess import InProcessExecutor, as_agent
from agentrl.runners.features import run_features
from agentrl.runners.gateway.server import Gateway
from agentrl.runners.scoring.verifiers import Verifier
from agentrl.runners.worker import Worker
from agentrl.runners.workspace.folders import Workspaces
from agentrl.store import open_store
from agentrl.types import NewRollout, PolicyVersion

RUN, FILES = "benchmark", {f"src/module_{n}.py": f"x = {n}\n" * 100 for n in range(20)}
HOLD = """
import asyncio, sys
from pathlib import Path
from tests.benchmarks.workspace import FILES, spaces
async def main():
    held = spaces(Path(sys.argv[1]))
    await held.start()
    for _ in range(50):
        await held.prepare({"files": FILES})
    print("ready", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def spaces(folder: Path) -> Workspaces:
    workspace = {"source": "task.files", "folder": str(folder)}
    data = {"name": RUN, "agent": {"command": ["true"]}, "workspace": workspace}
    return Workspaces(resolve(data, source=RUN), root=folder, gateway="http://127.0.0.1:1/v1")


async def prepare_and_remove(rollouts: int, at_once: int = 1) -> dict[str, float]:
    times: dict[str, list[float]] = {"prepare": [], "remove": []}
    with tempfile.TemporaryDirectory() as name:
        made = spaces(Path(name))
        await made.start()
        places = asyncio.Semaphore(at_once)

        async def one() -> None:
            async with places:
                began = time.perf_counter()
                space = await made.prepare({"files": FILES})
                ready = time.perf_counter()
                await made.remove(space)
                times["prepare"].append(ready - began)
                times["remove"].append(time.perf_counter() - ready)

        await asyncio.gather(*(one() for _ in range(rollouts)))
        left = len(os.listdir(made.folder)) - 1  # the templates  # noqa: PTH208
        await made.close()
        left += sum(1 for _ in Path(name).glob("*/*"))
    medians = {f"{key}_ms": round(statistics.median(t) * 1e3, 2) for key, t in times.items()}
    p95 = round(statistics.quantiles(times["prepare"], n=20)[-1] * 1e3, 2)
    return {**medians, "prepare_p95_ms": p95, "left": left}


def killed() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-c", HOLD, name]
        holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert holder.stdout is not None
        holder.stdout.readline()
        assert len(list(Path(name).glob("*/*/*"))) > 50
        holder.kill()
        holder.wait()
        holder.stdout.close()
        began = time.perf_counter()
        while (left := sum(1 for _ in Path(name).glob("*/*"))) and time.perf_counter() < began + 30:
            time.sleep(0.05)
        seconds = round(time.perf_counter() - began, 2)
        return {"left_after_kill": left, "cleaned_after_s": seconds}


class Slow:
    """Stands for workspaces that take `seconds` to prepare."""

    place = None

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def prepare(self, task: Any, ran: Any = None) -> Slow:
        await asyncio.sleep(self.seconds)
        return self

    async def remove(self, workspace: Any, **how: Any) -> None: ...

    def diff(self) -> str:
        return ""

    def packed(self) -> bytes:
        return b""


async def throughput(rollouts: int, scale: float, **runner: int) -> float:
    """Share of what two run slots allow."""

    async def agent(value: Any) -> None:
        await asyncio.sleep(2 * scale)

    async def verify(result: Any) -> float:
        await asyncio.sleep(scale)
        return 1.0

    with tempfile.TemporaryDirectory() as name:
        async with open_store(f"sqlite:///{Path(name) / 'store.db'}") as store:
            await store.open_run(RUN, {})
            url = "http://127.0.0.1:9/v1"
            served = PolicyVersion(run=RUN, policy="policy", version=0, base_url=url, model="m")
            await store.publish(served)
            gateway = Gateway(store, RUN, features=run_features(store, RunConfig()))
            gateway.start()
            with environment(gateway.base_url):
                executor, verifier = InProcessExecutor(as_agent(agent)), Verifier(verify)
                slow: Any = Slow(scale)
                execution = AttemptRunner(store, gateway, executor, verifier, workspaces=slow)
                execution.agent = AgentConfig(calls_optional=True)
                settings = RunnerConfig(concurrency=2, **runner)
                worker = Worker(RUN, execution, settings, name=RUN)
                queue = [
                    NewRollout(id=f"{n}", run=RUN, group="g", index=n, task={"input": n})
                    for n in range(rollouts)
                ]
                await store.enqueue(queue)
                stop = asyncio.Event()
                began = time.perf_counter()
                running = asyncio.create_task(worker.run(stop))
                await store.settled("g")
                seconds = time.perf_counter() - began
                stop.set()
                await running
            await asyncio.to_thread(gateway.close)
    return round(rollouts * 2 * scale / 2 / seconds, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--scale", type=float, default=1.0, help="seconds of the shortest stage")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    logging.getLogger("agentrl").setLevel(logging.ERROR)
    result = asyncio.run(prepare_and_remove(options.rollouts)) | killed()
    four = asyncio.run(prepare_and_remove(options.rollouts, at_once=4))
    result |= {"prepare_4_ms": four["prepare_ms"], "left_of_4": four["left"]}
    result["stages"] = asyncio.run(throughput(40, options.scale, prefetch=2, scoring_concurrency=2))
    result["one_place"] = asyncio.run(throughput(10, options.scale))
    if options.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:20} {value}")


if __name__ == "__main__":
    main()
