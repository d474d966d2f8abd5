"""What a runner adds to a rollout: claim, start, run, score and end, for agents that do nothing.

python -m tests.benchmarks.runner --json

In milliseconds of wall clock for each rollout, with `--concurrency` at a time on a SQLite store.
A command is compared with a bare start of the same command, as many at a time, in the same run;
what is allowed is allowed to us, so without that.
"""

from __future__ import annotations

import asyncio
import logging
import os
import statistics
import tempfile
import time
from pathlib import Path

from agentrl.core.config import AgentConfig, RunConfig, resolve
from agentrl.core.types import NewRollout, PolicyVersion, RolloutState
from agentrl.runners.execution import AttemptRunner
from agentrl.runners.executors import Executor
from agentrl.runners.executors.command import environment
from agentrl.runners.executors.factory import make_executor
from agentrl.runners.gateway.server import Gateway
from agentrl.runners.main import Worker, run_features
from agentrl.runners.scoring import Verifier
from agentrl.store import open_store
from agentrl.store.base import Store
from tests.benchmarks.report import arguments, report

RUN = "benchmark"
TRIVIAL = ["/bin/true"]
KINDS = {"async": 3.0, "threads": 3.0, "pool": 10.0, "command": 10.0}  # ms that are allowed
AGENT = "async def agent(value):\n    return value\n"


def settings(kind: str, folder: Path, concurrency: int) -> RunConfig:
    agent = {"command": TRIVIAL} if kind == "command" else {"path": "trivial_agent.py:agent"}
    runner = {"executor": kind, "concurrency": concurrency}
    data = {"name": RUN, "root": str(folder), "agent": agent, "runner": runner}
    return resolve(data, source="benchmark")


async def measure(kind: str, rollouts: int, concurrency: int) -> dict[str, float]:
    """Milliseconds and CPU milliseconds of the runner's process for each rollout."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "trivial_agent.py").write_text(AGENT)
        config = settings(kind, folder, concurrency)
        async with open_store(f"sqlite:///{folder / 'store.db'}") as store:
            await prepare(store)
            gateway = Gateway(store, RUN, features=run_features(store, RunConfig()))
            gateway.start()
            try:
                with environment(gateway.base_url):
                    executor = make_executor(
                        config, root=folder, gateway=gateway.base_url, runner="benchmark"
                    )
                    await executor.start()
                    try:
                        await drain(store, gateway, executor, config, 2 * concurrency)  # warm up
                        return await drain(store, gateway, executor, config, rollouts)
                    finally:
                        await executor.close()
            finally:
                await asyncio.to_thread(gateway.close)


async def prepare(store: Store) -> None:
    await store.open_run(RUN, {})
    url = "http://127.0.0.1:9/v1"
    await store.publish(PolicyVersion(run=RUN, policy="policy", version=0, base_url=url, model="m"))


async def drain(
    store: Store, gateway: Gateway, executor: Executor, config: RunConfig, rollouts: int
) -> dict[str, float]:
    """Run a full queue to its end."""
    execution = AttemptRunner(store, gateway, executor, Verifier(lambda result: 1.0))
    execution.agent = AgentConfig(calls_optional=True)  # there is no model
    worker = Worker(RUN, execution, config.runner, name="benchmark")
    group = f"g{time.monotonic_ns()}"
    queue = [
        NewRollout(id=f"{group}/{i}", run=RUN, group=group, index=i, task={"input": i})
        for i in range(rollouts)
    ]
    await store.enqueue(queue)
    stop = asyncio.Event()
    started, used = time.perf_counter(), time.process_time()
    running = asyncio.create_task(worker.run(stop))
    await store.settled(group)
    seconds, cpu = time.perf_counter() - started, time.process_time() - used
    stop.set()
    await running
    ended = await store.rollouts(RUN, group=group)
    assert {rollout.state for rollout in ended} == {RolloutState.SUCCEEDED}, ended[0].failure
    return {"ms": seconds / rollouts * 1e3, "cpu_ms": cpu / rollouts * 1e3}


async def bare(rollouts: int, concurrency: int) -> float:
    """Milliseconds for each start of the command alone, its output collected."""
    places = asyncio.Semaphore(concurrency)

    async def one() -> None:
        async with places:
            process = await asyncio.create_subprocess_exec(
                *TRIVIAL,
                env={"PATH": os.environ["PATH"]},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            await process.communicate()

    started = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(rollouts)))
    return (time.perf_counter() - started) / rollouts * 1e3


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    logging.getLogger("agentrl").setLevel(logging.ERROR)  # that the agents call no model
    size = options.rollouts, options.concurrency
    result: dict[str, float] = {}
    for kind, allowed in KINDS.items():
        runs = [asyncio.run(measure(kind, *size)) for _ in range(options.repeat)]
        best = min(runs, key=lambda run: run["ms"])
        result |= {f"{kind}_{key}": round(value, 3) for key, value in best.items()}
        result[f"{kind}_median_ms"] = round(statistics.median(run["ms"] for run in runs), 3)
        result[f"{kind}_allowed_ms"] = allowed
    result["bare_command_ms"] = round(
        min(asyncio.run(bare(*size)) for _ in range(options.repeat)), 3
    )
    result["command_ours_ms"] = round(result["command_ms"] - result["bare_command_ms"], 3)
    result["all_within"] = all(
        result[f"{kind}_ours_ms" if kind == "command" else f"{kind}_ms"] < allowed
        for kind, allowed in KINDS.items()
    )
    report(result, as_json=options.json)


if __name__ == "__main__":
    main()
