"""Plays environments in a runner; in tests with a scripted policy instead of a model."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from agentrl.core.config import RunConfig, resolve
from agentrl.core.config.derived import SCHEME, EnvironmentName
from agentrl.core.config.infrastructure import PoolConfig, PoolRunnerConfig, RunnerConfig
from agentrl.core.errors import ConfigError
from agentrl.core.types import Json, NewRollout, Scope, Trace, Transition
from agentrl.environments.hosted import (
    SAME,
    Message,
    Reply,
    describe,
    is_hosted,
    made,
    parse,
)
from agentrl.runners.executors import Executor
from agentrl.runners.gateway import recorded
from agentrl.runners.gateway.attribution import ActiveAttempt, ReceivedCall
from agentrl.runners.gateway.features import Feature
from agentrl.runners.main import PlayedEnvironment, Worker, attempt_runner
from agentrl.store import open_store
from agentrl.store.base import Store

# Processes with one rollout each; more than there are cores, because they mostly wait for calls.
MIN_PROCESSES = 8


def played_environment(config: RunConfig, root: Path) -> PlayedEnvironment | None:
    """The environment that plays the rollouts of a run, or None if an agent does. Raises
    ConfigError if it cannot be made here."""
    if not config.agent.path.startswith(f"{SCHEME}:"):
        return None
    _, named = parse(config.agent.path, root)
    describe(named)
    if is_hosted(named):
        return PlayedEnvironment(named.name, make_executor=partial(_executor, config, root, named))
    return PlayedEnvironment(named.name, role_rules=made(named).role_rules)


def _executor(config: RunConfig, root: Path, named: EnvironmentName) -> Executor:
    """A pool of processes of the environment's interpreter."""
    from agentrl.runners.executors.pool import PoolExecutor

    agent = replace(config.agent, env=SAME | config.agent.env)
    interpreter: Any = {"root": root, "python": named.python or sys.executable}
    return PoolExecutor(agent.path, agent, _pool(config, named), **interpreter)


def _pool(config: RunConfig, named: EnvironmentName) -> PoolRunnerConfig:
    runner, alone = config.runner, describe(named).alone
    if isinstance(runner, PoolRunnerConfig):
        if alone and runner.pool.rollouts > 1:
            raise ConfigError(
                f"runner.pool.rollouts = {runner.pool.rollouts}: the environment {named.name}"
                " plays one rollout at a time in a process; set 1"
            )
        return runner
    cores = os.cpu_count() or 1
    limit = max(cores, MIN_PROCESSES) if alone else cores
    processes = min(limit, runner.concurrency)
    rollouts = 1 if alone else math.ceil(runner.concurrency / processes)
    shared = {key: getattr(runner, key) for key in RunnerConfig.__struct_fields__}
    return PoolRunnerConfig(**shared, pool=PoolConfig(processes=processes, rollouts=rollouts))


RUN = "environment"


@dataclass(frozen=True)
class Played:
    """A rollout that has ended."""

    outcome: float | None
    rewards: dict[str, float]  # rewards of the whole rollout, by name
    by_role: dict[str, float]  # outcomes
    steps: list[float]  # rewards of its calls, in their order
    calls: list[Transition]
    problem: str  # why it failed, or ""


class Script(Feature):
    """Answers every call of a gateway."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply

    def join(self, active: ActiveAttempt) -> None:
        active.answers.append(self._answer)

    async def _answer(self, call: ReceivedCall) -> Sequence[Transition]:
        request = call.request
        message = await self.reply(call.role, request.messages, request.tools)
        called = "tool_calls" if message.get("tool_calls") else "stop"
        rows = recorded.fixed_answer("", request)
        return [replace(row, role=call.role, answer=message, finish=called) for row in rows]


class Stage:
    """Plays rollouts, one after another."""

    def __init__(
        self, store: Store, named: EnvironmentName, script: Script, timeout: float
    ) -> None:
        self._store, self._named, self._script = store, named, script
        self._timeout, self._count = timeout, 0

    async def play(self, task: dict[str, Json], reply: Reply) -> Played:
        """Play a task with the answers of `reply`."""
        self._script.reply = reply
        self._count += 1
        group = f"{RUN}/{self._count}"
        fields: Any = {"run": RUN, "group": group, "index": 0, "timeout": self._timeout}
        fields |= {"max_attempts": 1}
        await self._store.enqueue([NewRollout(id=f"{group}/0", task=task, **fields)])
        await self._store.settled(group)
        trace = await self._store.trace(f"{group}/0")
        assert trace is not None
        return _played(trace)


@asynccontextmanager
async def stage(
    named: EnvironmentName, timeout: float = 120.0, **tables: Any
) -> AsyncIterator[Stage]:
    """A runner of the environment. timeout: of one rollout, in seconds. tables: more of the run
    file. Raises ConfigError."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        config = _settings(named, folder, timeout, tables)
        script = Script(_nobody)
        async with open_store(config.store) as store:
            await store.open_run(RUN, {})
            verifier, root = config.verifier.path, Path(named.root)
            started = attempt_runner(
                *(store, RUN, config, root, RUN, None, verifier, [script]),
                find_environment=played_environment,
            )
            async with started as execution:
                stop = asyncio.Event()
                worker = Worker(RUN, execution, config.runner, name=RUN)
                working = asyncio.create_task(worker.run(stop))
                try:
                    yield Stage(store, named, script, timeout)
                finally:
                    stop.set()
                    await working


def _settings(
    named: EnvironmentName, folder: str, timeout: float, tables: dict[str, Any]
) -> RunConfig:
    agent = {"timeout": timeout, "calls_optional": True}
    data: dict[str, Any] = {"name": RUN, "root": named.root, "output": folder, "agent": agent}
    data |= {"environment": named.name, "environment_options": named.all_options}
    data |= {"upstreams": {"script": {"text": ""}}, "roles": {"*": "script"}}  # without a policy
    data |= {"runner": {"concurrency": 1, "processes": 1, "drain": 0.1}}
    return resolve(data | tables, source=f"environment {named.name}")


async def _nobody(role: str, messages: list[Message], tools: list[Any]) -> Message:
    return {"role": "assistant", "content": ""}


def _played(trace: Trace) -> Played:
    rows, failure = trace.rollout.rewards, trace.rollout.failure
    rewards = {row.name: row.value for row in rows if row.scope is Scope.ROLLOUT}
    roles = {str(row.target): row.value for row in rows if row.scope is Scope.ROLE}
    steps = [row.value for row in rows if row.scope is Scope.TRANSITION]
    why = failure.message if failure else ""
    return Played(rewards.get("outcome"), rewards, roles, steps, trace.transitions, why)
