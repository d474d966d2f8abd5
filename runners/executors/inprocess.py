"""Agents in the runner's own process: async tasks, or a thread for each rollout."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from agentrl import threads
from agentrl.runners.executors import ExecutionResult, contract, input_of, out_of_time
from agentrl.runners.executors.agents import Agent
from agentrl.runners.gateway.attribution import ActiveAttempt
from agentrl.runners.scoring.results import failure_of, json_size
from agentrl.runners.tracing import core as tracing
from agentrl.types import ErrorKind, Failure, Json


@dataclass(slots=True)
class InProcessExecutor:
    """Async agents share the worker's event loop and sync ones get a thread; with `threaded`,
    each rollout gets a thread, and an async agent an event loop of its own in it: one that blocks
    it holds up nobody, but clients that are bound to one loop cannot be shared."""

    agent: Agent
    threaded: bool = False
    sealed: bool = False
    limit: int | None = None

    async def start(self) -> None:
        """The agent is loaded already."""
        tracing.install()

    async def close(self) -> None:
        """There is nothing to end."""

    async def run(self, active: ActiveAttempt) -> ExecutionResult:
        agent = self._in_thread if self.threaded else self.agent
        return await in_trace(active.id, self._until_deadline(agent, active))

    async def _until_deadline(
        self, agent: Agent, active: ActiveAttempt
    ) -> tuple[Any, Failure | None]:
        """An agent that ignores its cancellation keeps running, and its result is dropped."""
        task = asyncio.create_task(run_guarded(agent, input_of(active)))
        try:
            await asyncio.wait({task}, timeout=active.left)
            if task.done():
                return task.result()
            return None, out_of_time(active)
        finally:
            task.cancel()  # nothing happens if it is done

    async def _in_thread(self, value: Json) -> Any:
        running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = []

        async def work() -> Any:
            loop = asyncio.get_running_loop()
            loop.set_default_executor(threads.DaemonThreads())
            running.append((loop, asyncio.current_task()))
            return await self.agent(value)

        try:
            return await threads.call(lambda: asyncio.run(work()))
        except asyncio.CancelledError:
            for loop, task in running:
                if task is not None:
                    with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                        loop.call_soon_threadsafe(task.cancel)
            raise


async def in_trace(attempt: str, work: Awaitable[tuple[Any, Failure | None]]) -> ExecutionResult:
    """Run an agent in the trace of an attempt; with its result come its rewards and spans."""
    with tracing.install().attempt(attempt) as log:
        result, failure = await work
    if json_size(result) > contract.LARGEST_RESULT:
        result, failure = None, contract.too_large("its result")
    spans = tracing.records(log, attempt)
    return ExecutionResult(
        result=result,
        failure=failure,
        rewards=log.rewards,
        spans=spans,
        needs_no_call=log.needs_no_call,
    )


async def run_guarded(agent: Agent, value: Json) -> tuple[Any, Failure | None]:
    """Result or failure of an agent, whatever it raises."""
    try:
        return await agent(value), None
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001
        return None, failure_of(ErrorKind.AGENT, error)  # the user's agent is a boundary
