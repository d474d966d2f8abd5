"""A warm process of the pool: loads the agent once, then runs it whenever the runner says so.

With `fork` a template loads it and forks the processes of the pool, also the later ones, at next to
no cost; with `spawn` each process loads it.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from agentrl.errors import AgentRLError, ConfigError
from agentrl.runners.executors import ExecutionResult, agents
from agentrl.runners.executors.agents import Agent
from agentrl.runners.executors.inprocess import in_trace, run_guarded
from agentrl.runners.executors.supervisor import run_template
from agentrl.runners.executors.wire import (
    RunRequest,
    RunResponse,
    StartupReport,
    WorkerSettings,
    pack,
    read,
)
from agentrl.runners.scoring.results import as_json, failure_of
from agentrl.runners.tracing import core as tracing
from agentrl.threads import DaemonThreads
from agentrl.types import ErrorKind

PAGE = os.sysconf("SC_PAGE_SIZE")


def main(settings: WorkerSettings, fd: int) -> int:
    """`fd` is the template's control socket, or the process's own channel."""
    if settings.start == "spawn":
        return serve(fd, lambda: agents.as_agent(_load(settings)))
    problem, loaded = None, None
    try:
        loaded = _load(settings)
        _refuse_threads(settings.path)
    except AgentRLError as error:
        problem = error

    def build() -> Agent:
        if problem is not None:
            raise problem
        return agents.as_agent(loaded)  # clients and connections belong to one process

    gc.collect()
    gc.freeze()  # what is loaded by now stays shared between the processes
    run_template(socket.socket(fileno=fd), lambda channel: serve(channel, build))
    return 0


def serve(fd: int, build: Callable[[], Agent]) -> int:
    """Run agents until the runner closes the channel; the exit status."""
    return asyncio.run(_serve(socket.socket(fileno=fd), build))


async def _serve(channel: socket.socket, build: Callable[[], Agent]) -> int:
    asyncio.get_running_loop().set_default_executor(DaemonThreads())
    reader, writer = await asyncio.open_unix_connection(sock=channel)
    try:
        agent = build()
    except AgentRLError as error:
        writer.write(pack(StartupReport(str(error))))
        await writer.drain()
        return 1
    writer.write(pack(StartupReport()))
    running = set()
    while True:
        try:
            job = msgspec.json.decode(await read(reader), type=RunRequest)
        except asyncio.IncompleteReadError:
            return 0
        task = asyncio.create_task(_run(agent, job, writer))
        running.add(task)
        task.add_done_callback(running.discard)


async def _run(agent: Agent, job: RunRequest, writer: asyncio.StreamWriter) -> None:
    try:
        ran = await in_trace(job.attempt, run_guarded(agent, job.input))
        ran = replace(ran, result=as_json(ran.result))
        message = pack(RunResponse(job.attempt, ran, _resident()))
    except Exception as error:  # noqa: BLE001 - what the agent left here is a boundary
        failed = ExecutionResult(failure=failure_of(ErrorKind.AGENT, error))
        message = pack(RunResponse(job.attempt, failed, _resident()))
    writer.write(message)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * PAGE


def _load(settings: WorkerSettings) -> object:
    loaded = agents.load(settings.path, Path(settings.root))
    tracing.install()
    if settings.framework_spans:
        tracing.instrument_frameworks()
    return loaded


def _refuse_threads(path: str) -> None:
    """Native pools know how to live with a fork, Python's threads do not."""
    others = [thread.name for thread in threading.enumerate()[1:]]
    if others:
        raise ConfigError(
            f"agent.path = {path!r}: importing it started the threads {', '.join(others)}, which"
            " forked processes would lack; set runner.pool.start = 'spawn'"
        )


if __name__ == "__main__":
    sys.exit(main(msgspec.json.decode(sys.argv[1], type=WorkerSettings), int(sys.argv[2])))
