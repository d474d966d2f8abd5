"""The group of a step and its replays, as a run makes them, of which everything is killed once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from agentrl.algorithms.engines.embedded.server import EmbeddedServer
from agentrl.algorithms.sampling.collect import Collector
from agentrl.algorithms.sampling.replays import request_branches
from agentrl.algorithms.sampling.tasks import TaskSampler
from agentrl.core.config import RunConfig, RunnerConfig, UpstreamConfig
from agentrl.core.types import Group, PolicyVersion
from agentrl.runners.execution import AttemptRunner
from agentrl.runners.executors.command import environment
from agentrl.runners.executors.inprocess import InProcessExecutor, as_agent
from agentrl.runners.gateway.server import Gateway
from agentrl.runners.main import Worker, run_features
from agentrl.runners.scoring import Verifier
from agentrl.store.base import Store


@dataclass(frozen=True)
class RunnerSide:
    """What the runner of the run "run" needs."""

    server: EmbeddedServer
    agent: Callable[..., Any]
    verify: Callable[..., Any]
    upstreams: Mapping[str, UpstreamConfig] = field(default_factory=dict)

    @asynccontextmanager
    async def working(self, store: Store) -> AsyncIterator[None]:
        """A runner at work, which stops where it is at the end."""
        url, model = self.server.base_url, self.server.model
        await store.publish(
            PolicyVersion(run="run", policy="policy", version=0, base_url=url, model=model)
        )
        features = run_features(store, RunConfig())
        gateway = Gateway(store, "run", upstreams=self.upstreams, features=features)
        gateway.start()
        stop = asyncio.Event()
        with environment(gateway.base_url):
            executor = InProcessExecutor(as_agent(self.agent))
            execution = AttemptRunner(store, gateway, executor, Verifier(self.verify))
            worker = Worker("run", execution, RunnerConfig(concurrency=2, drain=0.0), name="test")
            running = asyncio.create_task(worker.run(stop))
            try:
                yield
            finally:
                stop.set()
                await running
        await asyncio.to_thread(gateway.close)


async def until(store: Store, succeeded: int) -> None:
    while (await store.counts("run")).succeeded < succeeded:
        await store.wait(await store.cursor(), timeout=1.0)


async def sampled(store: Store, config: RunConfig, runner: RunnerSide, *, killed_at: int) -> Group:
    """The group of step 0 with its replays; everything is killed while these are made, when so many
    rollouts have succeeded."""
    tasks = TaskSampler(config, [{"input": "2 + 2"}])
    for killed in (True, False):
        state = await store.open_run("run", {})
        async with runner.working(store):
            grow = partial(request_branches, store, config)
            collector = Collector(config, store, state.epoch, tasks, requested=grow)
            collecting = asyncio.create_task(collector.collect(0))
            if killed:
                await until(store, killed_at)
                collecting.cancel()
            await asyncio.wait((collecting,))
    (group,) = collecting.result().groups
    return group
