"""The pool executor: warm processes, which import the agent once and run it many times.

With `fork`, a template process loads the agent and forks all processes of the pool, replacements
too, at next to no cost; with `spawn`, each process loads it. Runner and process exchange
length-prefixed JSON.

Owns: the processes of the pool and their pending rollouts.
Invariant: a process whose rollout timed out or was stopped gets no further rollouts; it is replaced
at once and ended when its other rollouts are done. The same applies to a process in which a rollout
changed variables or the working directory, or made no call while earlier ones had. If a process
dies during one rollout, the agent failed; if it had several, each fails as `lost_runner`, because
the cause is unknown. An agent that does not load is an error at the start; later the pool retries
with exponential backoff.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from agentrl.core.config import AgentConfig
from agentrl.core.config.infrastructure import PoolRunnerConfig
from agentrl.core.errors import AgentError
from agentrl.core.types import ErrorKind, Failure
from agentrl.runners.executors import (
    ExecutionResult,
    command,
    ended_its_process,
    input_of,
    out_of_time,
)
from agentrl.runners.executors.child import (
    RunRequest,
    RunResponse,
    StartupReport,
    WorkerSettings,
    pack,
    read,
)
from agentrl.runners.executors.command import (
    SUPERVISOR,
    Channel,
    ProcessLauncher,
    SupervisorLost,
    explained,
    withheld,
)
from agentrl.runners.executors.supervisor import ProcessSpec
from agentrl.runners.gateway.attribution import ActiveAttempt

log = logging.getLogger("agentrl.runner")


MB = 2**20


RECYCLE_AFTER = 1000  # rollouts after which a process is replaced, as agents leak


LARGE = 0.8  # share of `runner.memory_mb` above which a process is replaced


MAX_RESPONSE_BYTES = 64 * MB  # bytes of a response: result, rewards and spans


FIRST_START_PAUSE, MAX_START_PAUSE = 0.5, 30.0  # seconds between starts that fail; doubles


DIED_LOADING = "the process ended while loading the agent; see its output above"


CHILD = ("-m", "agentrl.runners.executors.child")


class WarmProcess:
    """The pool's handle on one warm process."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.requests: dict[str, asyncio.Future[ExecutionResult]] = {}
        self.running: dict[str, ActiveAttempt] = {}  # attempts by request
        self.served, self.memory = 0, 0
        self.changed = False  # whether a rollout changed state for later ones
        self.retired = False

    async def wait_until_loaded(self) -> str | None:
        """Wait until the agent is loaded; return None, or the problem that prevents it."""
        try:
            return (await read(self.channel.reader, StartupReport)).problem
        except (asyncio.IncompleteReadError, ConnectionError):
            return DIED_LOADING

    def submit(self, active: ActiveAttempt) -> asyncio.Future[ExecutionResult]:
        future = self.requests[active.id] = asyncio.get_running_loop().create_future()
        self.running[active.id] = active
        self.channel.writer.write(pack(RunRequest(active.id, input_of(active))))
        return future

    def forget(self, active: ActiveAttempt) -> None:
        del self.requests[active.id], self.running[active.id]

    async def read_responses(self) -> None:
        """Resolve the future of each response, until the process ends."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                response = await read(self.channel.reader, RunResponse, MAX_RESPONSE_BYTES)
                self.served, self.memory = self.served + 1, response.memory
                if response.changed and not self.changed:
                    self.changed = True
                    log.warning(
                        "a rollout changed %s in its process of the pool, which gets no further"
                        " rollouts: let the agent leave these as they are",
                        ", ".join(response.changed),
                    )
                self.channel.printed.reset()
                if (future := self.requests.get(response.attempt)) and not future.done():
                    future.set_result(response.ran)

    async def fail_pending(self) -> None:
        """End the process and fail its pending attempts."""
        status = await self.channel.end()  # the process may be alive, after an invalid message
        how = command.describe_exit(status)
        together = len(self.requests)
        message = f"the process {how} while it ran {together} rollouts"
        lost = Failure(kind=ErrorKind.LOST_RUNNER, message=message)
        for id, future in self.requests.items():
            if not future.done():
                failure = lost if together > 1 else ended_its_process(self.running[id], how)
                future.set_result(ExecutionResult(failure=failure))


class PoolExecutor:
    """`runner.pool.processes` warm processes, each running `runner.pool.rollouts` at a time."""

    sealed = False

    def __init__(
        self,
        path: str,
        agent: AgentConfig,
        runner: PoolRunnerConfig,
        *,
        root: Path,
        python: str = sys.executable,
    ) -> None:
        """`path`: the agent, relative to `root`. `python`: interpreter of the processes. The pool
        inherits only the variables that Python and model clients need, and `agent.pass_env`: others
        may hold keys of the store."""
        self.config, self.memory = runner.pool, runner.memory_mb * MB
        self.large = LARGE * self.memory
        self.processes = self.config.processes or min(os.cpu_count() or 1, runner.concurrency)
        self.limit: int | None = self.processes * self.config.rollouts
        settings = WorkerSettings(path, str(root), self.config.start)
        self._program = (*CHILD, msgspec.json.encode(settings).decode())
        self._forks = self.config.start == "fork"
        patterns = (*command.PYTHON, *command.MODEL, *agent.pass_env)
        self._env = command.passed_environment(patterns) | agent.env
        self._python, self._calls_optional = python, agent.calls_optional
        if self._forks:
            self._launcher = ProcessLauncher(self._program, self._env, python)
        else:
            self._launcher = ProcessLauncher(SUPERVISOR, self._env)
        self._places: asyncio.Queue[WarmProcess] = asyncio.Queue()
        self._following: dict[WarmProcess, asyncio.Task[None]] = {}
        self._starting: set[asyncio.Task[None]] = set()
        self._problem: str | None = None  # why the latest process did not start
        self._closed = asyncio.Event()

    async def start(self) -> None:
        """Start all processes and wait until they have loaded the agent."""
        await self._launcher.start()
        for problem in await asyncio.gather(*(self._add() for _ in range(self.processes))):
            if problem is not None:
                raise AgentError(problem + withheld(problem, self._env))

    async def close(self) -> None:
        self._closed.set()
        await asyncio.gather(*self._starting)
        await asyncio.gather(*(process.channel.end() for process in self._following))
        await asyncio.gather(*self._following.values())
        await self._launcher.close()

    async def run(self, active: ActiveAttempt) -> ExecutionResult:
        try:
            async with asyncio.timeout(active.left):
                while (process := await self._places.get()).retired:
                    pass
        except TimeoutError:
            why = f": {self._problem}" if self._problem else ""
            message = f"no process of the pool was ready within the attempt's time{why}"
            return ExecutionResult(failure=Failure(kind=ErrorKind.LOST_RUNNER, message=message))
        future = process.submit(active)
        try:
            await asyncio.wait({future}, timeout=active.left)
            if future.done() and active.left > 0:
                ran = future.result()
                silent = not (active.calls or ran.needs_no_call or self._calls_optional)
                if silent and process.served > 1:  # an earlier rollout may be the cause
                    process.changed = True
                return self._explained(ran)
            return ExecutionResult(failure=out_of_time(active))
        finally:
            process.forget(active)
            await self._put_back(process, suspect=not future.done())

    def _explained(self, ran: ExecutionResult) -> ExecutionResult:
        return (
            ran if ran.failure is None else replace(ran, failure=explained(ran.failure, self._env))
        )

    async def _put_back(self, process: WarmProcess, *, suspect: bool) -> None:
        used_up = process.served >= RECYCLE_AFTER or 0 < self.large < process.memory
        if suspect or used_up or process.changed:
            self._retire(process)
        if not process.retired:
            self._places.put_nowait(process)
        elif not process.requests:
            process.channel.supervised.kill()
            if suspect:
                await asyncio.shield(process.channel.end())

    def _retire(self, process: WarmProcess) -> None:
        """Submit no more rollouts to this process, and start its replacement."""
        if not process.retired and not self._closed.is_set():
            task = asyncio.create_task(self._replace())
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)
        process.retired = True

    async def _replace(self) -> None:
        pause = FIRST_START_PAUSE
        while not self._closed.is_set():
            self._problem = await self._add()
            if self._problem is None:
                return
            self._problem += withheld(self._problem, self._env)
            log.warning("no new process in the pool, trying again: %s", self._problem)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), pause)
            pause = min(2 * pause, MAX_START_PAUSE)

    async def _add(self) -> str | None:
        """Start a process and add its slots to the queue; return the problem if that failed."""
        try:
            process = await self._launch()
        except SupervisorLost:
            return DIED_LOADING
        except OSError as error:
            return f"a process cannot be started: {error}"
        problem = await process.wait_until_loaded()
        process.retired = problem is not None  # the caller decides whether to start another
        self._following[process] = asyncio.create_task(self._follow(process))
        if problem is None:
            for _ in range(self.config.rollouts):
                self._places.put_nowait(process)
        return problem

    async def _follow(self, process: WarmProcess) -> None:
        await process.read_responses()
        self._retire(process)
        await process.fail_pending()
        del self._following[process]

    async def _launch(self) -> WarmProcess:
        spec = ProcessSpec()
        if not self._forks:
            spec = ProcessSpec(argv=[self._python, *self._program, "3"], env=self._env)
        if self.memory:
            spec["memory"] = self.memory
        return WarmProcess(await self._launcher.talk(spec, command.MAX_PRINTED_BYTES))
