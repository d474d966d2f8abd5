"""An environment played by a real runner, whose models are scripted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agentrl.core.config import RunConfig, resolve
from agentrl.core.loading import load_attribute
from agentrl.core.types import Rollout
from agentrl.environments.hosted import parse
from agentrl.environments.runner import played_environment
from agentrl.runners.executors.factory import make_executor
from tests.runners.conftest import Bench
from tests.runners.conftest import bench as bench
from tests.runners.conftest import impatient as impatient
from tests.runners.conftest import model as model
from tests.runners.conftest import runner as runner
from tests.runners.conftest import store as store

HERE = Path(__file__).parent
Play = Callable[..., Awaitable[list[Rollout]]]


def settings(name: str, **tables: Any) -> RunConfig:
    """The settings of a run with this environment of `worlds.py`."""
    data = {"name": "test", "root": str(HERE), "environment": f"worlds.py:{name}"}
    return resolve(data | tables, source="run.toml")


@pytest.fixture
async def play(bench: Bench) -> AsyncIterator[Play]:
    """Plays all tasks of a split, `times` each; later keywords are those of `Bench.run`."""
    started: list[Any] = []

    async def played(
        config: RunConfig, split: str = "train", times: int = 1, **options: Any
    ) -> list[Rollout]:
        environment = played_environment(config, HERE)
        gateway = bench.gateway.base_url
        make = environment and environment.make_executor
        given = make() if make else None
        executor = make_executor(config, root=HERE, gateway=gateway, runner="test", given=given)
        started.append(executor)
        await executor.start()
        verifier = load_attribute(config.verifier.path, HERE, key="verifier.path")
        tasks = load_attribute(getattr(config.tasks, split), HERE, key=f"tasks.{split}")
        known = {"verifier": verifier, "calls_optional": False} | options
        rollouts = await bench.run(executor, *tasks * times, **known)
        traces = [await bench.store.trace(rollout.id) for rollout in rollouts]
        return [
            replace(rollout, transitions=trace.transitions)
            for rollout, trace in zip(rollouts, traces, strict=True)
        ]

    yield played
    for executor in started:
        await executor.close()


def named(config: RunConfig) -> Any:
    return parse(config.agent.path, HERE)[1]
