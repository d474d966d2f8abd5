"""A warm process of the pool, and the messages between it and the runner: JSON with its length
before it. The process loads the agent once, then runs it whenever the runner says so.

With `fork` a template loads it and forks the processes of the pool, also the later ones, at next to
no cost; with `spawn` each process loads it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from msgspec.structs import replace

from agentrl.errors import AgentRLError, ConfigError
from agentrl.processes import freeze_loaded
from agentrl.runners.executors import ExecutionResult
from agentrl.runners.executors.inprocess import Agent, as_agent, in_trace, load, run_guarded
from agentrl.runners.executors.supervisor import HEADER, run_template
from agentrl.runners.scoring.results import as_json, failure_of
from agentrl.runners.tracing import core as tracing
from agentrl.threads import DaemonThreads
from agentrl.types import ErrorKind, Json

T = TypeVar("T")
PAGE = os.sysconf("SC_PAGE_SIZE")


class WorkerSettings(msgspec.Struct, frozen=True):
    """What a process is started with."""

    path: str
    root: str
    start: Literal["fork", "spawn"]
    framework_spans: bool = False


class StartupReport(msgspec.Struct, frozen=True):
    """The first message of a process: what keeps it from working, if anything does."""

    problem: str | None = None


class RunRequest(msgspec.Struct, frozen=True):
    """Runner to process: run the agent on this."""

    attempt: str
    input: Json


class RunResponse(msgspec.Struct, frozen=True):
    """Process to runner."""

    attempt: str
    ran: ExecutionResult
    resident: int  # bytes of memory of the process now


def pack(message: msgspec.Struct) -> bytes:
    body = msgspec.json.encode(message)
    return HEADER.pack(len(body)) + body


async def read(stream: asyncio.StreamReader, kind: type[T], most: int = 2**32) -> T:
    """The next message, of the given kind. Raises IncompleteReadError after the last one,
    ConnectionError when it has more than `most` bytes or is of another kind."""
    (size,) = HEADER.unpack(await stream.readexactly(HEADER.size))
    if size > most:
        raise ConnectionError(f"a message of {size} bytes")
    try:
        return msgspec.json.decode(await stream.readexactly(size), type=kind)
    except msgspec.DecodeError as error:
        raise ConnectionError(f"a message that is no {kind.__name__}: {error}") from None


def main(settings: WorkerSettings, fd: int) -> int:
    """`fd` is the template's control socket, or the process's own channel."""
    if settings.start == "spawn":
        return asyncio.run(serve(fd, lambda: as_agent(_load(settings))))
    problem, loaded = None, None
    try:
        loaded = _load(settings)
        # Native thread pools survive a fork, Python's threads do not.
        if others := [thread.name for thread in threading.enumerate()[1:]]:
            raise ConfigError(
                f"agent.path = {settings.path!r}: importing it started the threads"
                f" {', '.join(others)}, which forked processes would lack; set"
                " runner.pool.start = 'spawn'"
            )
    except AgentRLError as error:
        problem = error

    def build() -> Agent:
        if problem is not None:
            raise problem
        return as_agent(loaded)  # clients and connections belong to one process

    freeze_loaded()  # so it stays shared between the processes
    run_template(socket.socket(fileno=fd), lambda channel: asyncio.run(serve(channel, build)))
    return 0


def _load(settings: WorkerSettings) -> object:
    loaded = load(settings.path, Path(settings.root))
    tracing.install()
    if settings.framework_spans:
        tracing.instrument_frameworks()
    return loaded


async def serve(fd: int, build: Callable[[], Agent]) -> int:
    """Run agents until the runner closes the channel; the exit status."""
    asyncio.get_running_loop().set_default_executor(DaemonThreads())
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=fd))
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
            request = await read(reader, RunRequest)
        except asyncio.IncompleteReadError:
            return 0
        task = asyncio.create_task(_run(agent, request, writer))
        running.add(task)
        task.add_done_callback(running.discard)


async def _run(agent: Agent, request: RunRequest, writer: asyncio.StreamWriter) -> None:
    def packed(ran: ExecutionResult) -> bytes:
        resident = int(Path("/proc/self/statm").read_bytes().split()[1]) * PAGE
        return pack(RunResponse(request.attempt, ran, resident))

    try:
        ran = await in_trace(request.attempt, run_guarded(agent, request.input))
        message = packed(replace(ran, result=as_json(ran.result)))
    except Exception as error:  # noqa: BLE001 - rewards and spans of the agent are a boundary
        message = packed(ExecutionResult(failure=failure_of(ErrorKind.AGENT, error)))
    writer.write(message)


if __name__ == "__main__":
    sys.exit(main(msgspec.json.decode(sys.argv[1], type=WorkerSettings), int(sys.argv[2])))
