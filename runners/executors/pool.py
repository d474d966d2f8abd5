"""Warm processes: the agent is imported once and run many times, out of the runner's process.

Owns: the processes of the pool and what each of them runs.
Always true: a process that a rollout left in doubt (it ran out of time, it was stopped) gets no
other one, is replaced at once and ended as soon as it runs nothing else. When a process dies under
its only rollout, the agent did it; when it ran several, nobody knows which, and each of them is
lost through no fault of its own. Only at the start is an agent that does not load the user's error;
later the pool tries again, ever more rarely, and those who wait lose no more than an attempt.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from agentrl.config import AgentConfig, PoolRunnerConfig
from agentrl.errors import AgentError
from agentrl.runners.executors import Ran, contract, input_of, out_of_time
from agentrl.runners.executors.environment import MODEL
from agentrl.runners.executors.keeper import Spec
from agentrl.runners.executors.launcher import KEEPER, KeeperLost, Kept, Launcher, Printed
from agentrl.runners.executors.wire import LARGEST, Done, Hello, Job, Settings, pack, read
from agentrl.runners.gateway.attribution import Live
from agentrl.types import ErrorKind, Failure

log = logging.getLogger("agentrl.runner")
MB = 2**20
BACKOFF, LONGEST = 0.5, 30.0  # seconds until a process that did not start is started again
DIED = "loading the agent ended its process; what that wrote before says more"
CHILD = ("-m", "agentrl.runners.executors.child")


class Process:
    """One warm process, as the pool sees it."""

    def __init__(
        self,
        kept: Kept,
        printed: Printed,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.kept, self._printed, self._reader, self._writer = kept, printed, reader, writer
        self.jobs: dict[str, asyncio.Future[Ran]] = {}
        self.served, self.resident = 0, 0
        self.retired = False

    async def hello(self) -> str | None:
        """Waits until the agent is loaded; what keeps it from working."""
        try:
            return msgspec.json.decode(await read(self._reader), type=Hello).problem
        except (asyncio.IncompleteReadError, ConnectionError):
            return DIED

    def begin(self, live: Live) -> asyncio.Future[Ran]:
        future = self.jobs[live.id] = asyncio.get_running_loop().create_future()
        self._writer.write(pack(Job(live.id, input_of(live))))
        return future

    async def answers(self) -> None:
        """Hand out what it answers, until it ends."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                done = msgspec.json.decode(await read(self._reader, LARGEST), type=Done)
                self.served, self.resident = self.served + 1, done.resident
                self._printed.reset()
                if (future := self.jobs.get(done.attempt)) and not future.done():
                    future.set_result(done.ran)

    async def died(self) -> None:
        """Tell those who wait for it."""
        self.kept.kill()  # it may only have stopped to make sense
        failure = _death(await self._status(), len(self.jobs))
        for future in self.jobs.values():
            if not future.done():
                future.set_result(Ran(failure=failure))
        self._writer.close()

    async def end(self) -> None:
        """It and what it started are gone when this returns."""
        self.kept.kill()
        await self._status()

    async def _status(self) -> int:
        try:
            return await self.kept.wait()
        except KeeperLost:
            return -9


class Pool:
    """`runner.pool.processes` of them, each running `runner.pool.rollouts` at a time."""

    sealed = False

    def __init__(
        self, path: str, agent: AgentConfig, runner: PoolRunnerConfig, *, root: Path
    ) -> None:
        """`path` names the agent, relative to `root`. Of this process's environment, which holds
        the keys of store and database, it gets what Python and the model's clients need, and
        `agent.pass_env`."""
        self.config, self.memory = runner.pool, runner.memory_mb * MB
        self.processes = self.config.processes or min(os.cpu_count() or 1, runner.concurrency)
        self.limit: int | None = self.processes * self.config.rollouts
        settings = Settings(path, str(root), self.config.start, runner.framework_spans)
        self._program = (*CHILD, msgspec.json.encode(settings).decode())
        self._forks = self.config.start == "fork"
        patterns = (*contract.PYTHON, *MODEL, *agent.pass_env)
        self._env = contract.passed(os.environ, patterns) | agent.env
        self._launcher = Launcher(self._program if self._forks else KEEPER, self._env)
        self._places: asyncio.Queue[Process] = asyncio.Queue()
        self._following: dict[Process, asyncio.Task[None]] = {}
        self._starting: set[asyncio.Task[None]] = set()
        self._problem: str | None = None  # why the last process did not start
        self._closed = asyncio.Event()

    async def start(self) -> None:
        """Returns when all processes are warm."""
        await self._launcher.start()
        for problem in await asyncio.gather(*(self._add() for _ in range(self.processes))):
            if problem is not None:
                raise AgentError(problem)

    async def close(self) -> None:
        self._closed.set()
        await asyncio.gather(*self._starting)
        await asyncio.gather(*(process.end() for process in self._following))
        await asyncio.gather(*self._following.values())
        await self._launcher.close()

    async def run(self, live: Live) -> Ran:
        try:
            async with asyncio.timeout(live.left):
                process = await self._take()
        except TimeoutError:
            why = f": {self._problem}" if self._problem else ""
            message = f"no process of the pool was ready within the attempt's time{why}"
            return Ran(failure=Failure(kind=ErrorKind.LOST_RUNNER, message=message))
        future = process.begin(live)
        try:
            await asyncio.wait({future}, timeout=live.left)
            return future.result() if future.done() else Ran(failure=out_of_time(live))
        finally:
            del process.jobs[live.id]
            await self._put_back(process, in_doubt=not future.done())

    async def _take(self) -> Process:
        while True:
            process = await self._places.get()
            if not process.retired:
                return process

    async def _put_back(self, process: Process, *, in_doubt: bool) -> None:
        worn = process.served >= self.config.recycle_after or (
            0 < self.config.recycle_mb * MB < process.resident
        )
        if in_doubt or worn:
            self._retire(process)
        if not process.retired:
            self._places.put_nowait(process)
        elif not process.jobs:
            process.kept.kill()
            if in_doubt:
                await asyncio.shield(process.end())

    def _retire(self, process: Process) -> None:
        """No more rollouts for this one; another takes its place."""
        if not process.retired and not self._closed.is_set():
            task = asyncio.create_task(self._replace())
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)
        process.retired = True

    async def _replace(self) -> None:
        pause = BACKOFF
        while not self._closed.is_set():
            self._problem = await self._add()
            if self._problem is None:
                return
            log.warning("no new process in the pool, trying again: %s", self._problem)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), pause)
            pause = min(2 * pause, LONGEST)

    async def _add(self) -> str | None:
        """One more process, with as many places as it runs rollouts; or why there is none."""
        try:
            process = await self._launch()
        except KeeperLost:
            return DIED
        problem = await process.hello()
        process.retired = problem is not None  # nobody is to replace it but who asked for it
        self._following[process] = asyncio.create_task(self._follow(process))
        if problem is None:
            for _ in range(self.config.rollouts):
                self._places.put_nowait(process)
        return problem

    async def _follow(self, process: Process) -> None:
        await process.answers()
        self._retire(process)
        await process.died()
        del self._following[process]

    async def _launch(self) -> Process:
        ours, theirs = socket.socketpair()
        null = os.open(os.devnull, os.O_RDONLY)
        spec = Spec()
        if not self._forks:
            spec = Spec(argv=[sys.executable, *self._program, "3"], env=self._env)
        if self.memory:
            spec["memory"] = self.memory
        printed = Printed(contract.LARGEST_PRINT)
        out = await printed.open()
        try:
            kept = await self._launcher.launch(spec, [null, out, out, theirs.fileno()])
        except KeeperLost:
            ours.close()
            raise
        finally:
            os.close(null)
            os.close(out)
            theirs.close()
        return Process(kept, printed, *await asyncio.open_unix_connection(sock=ours))


def _death(status: int, together: int) -> Failure:
    how = contract.ending(status)
    if together == 1:
        return Failure(kind=ErrorKind.AGENT, message=f"the agent's process {how}")
    message = f"the process {how} while it ran {together} rollouts"
    return Failure(kind=ErrorKind.LOST_RUNNER, message=message)
