"""A process of the pool: it loads the agent once and runs rollouts, several at a time."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from agentrl.core import processes
from agentrl.core.errors import AgentRLError, ConfigError
from agentrl.core.processes import DaemonThreads, freeze_loaded
from agentrl.core.types import ErrorKind, Json
from agentrl.core.user_code import UserCodeLoop
from agentrl.runners.executors import ExecutionResult
from agentrl.runners.executors.inprocess import Agent, as_agent, in_trace, load, run_apart
from agentrl.runners.executors.supervisor import HEADER, run_template
from agentrl.runners.scoring import failure_of
from agentrl.runners.tracing import core as tracing

T = TypeVar("T")
ADDRESSES = ("_PROXY", "_BASE_URL", "_API_BASE", "_API_KEY")  # ends of names of variables


class WorkerSettings(msgspec.Struct, frozen=True):
    """Command-line settings of a warm process."""

    path: str
    root: str
    start: Literal["fork", "spawn"]


class StartupReport(msgspec.Struct, frozen=True):
    """First message of a process: why it cannot work, or None."""

    problem: str | None = None


class RunRequest(msgspec.Struct, frozen=True):
    """Message to a process: run the agent on an input."""

    attempt: str
    input: Json


class RunResponse(msgspec.Struct, frozen=True):
    """Message from a process: the result of an attempt."""

    attempt: str
    ran: ExecutionResult
    memory: int  # bytes of the process that count towards its memory limit
    changed: list[str] = []  # names of state that the rollout changed for later ones


def pack(
    message: msgspec.Struct, encode: Callable[[msgspec.Struct], bytes] = msgspec.json.encode
) -> bytes:
    body = encode(message)
    return HEADER.pack(len(body)) + body


async def read(
    stream: asyncio.StreamReader,
    kind: type[T],
    max_bytes: int = 2**32,
    decode: Callable[..., T] = msgspec.json.decode,
) -> T:
    """Read the next message, a `kind`. Raises IncompleteReadError at the end of the stream, and
    ConnectionError if the message has more than `max_bytes` bytes or another type."""
    (size,) = HEADER.unpack(await stream.readexactly(HEADER.size))
    if size > max_bytes:
        raise ConnectionError(f"a message of {size} bytes")
    try:
        return decode(await stream.readexactly(size), type=kind)
    except msgspec.DecodeError as error:
        raise ConnectionError(f"the message is not a {kind.__name__}: {error}") from None


def main(settings: WorkerSettings, fd: int) -> int:
    """Run the template process with its control socket `fd`, or a worker process with its channel
    `fd`."""
    if settings.start == "spawn":
        return _run_loop(serve(fd, lambda: as_agent(_load(settings))))
    problem, loaded = None, None
    try:
        loaded = _load(settings)
        # Native thread pools survive a fork, Python threads do not.
        if threads := [thread.name for thread in threading.enumerate()[1:]]:
            raise ConfigError(
                f"agent.path = {settings.path!r}: importing it started the threads"
                f" {', '.join(threads)}, which do not exist in forked processes; set"
                " runner.pool.start = 'spawn'"
            )
    except AgentRLError as error:
        problem = error

    def build() -> Agent:
        if problem is not None:
            raise problem
        return as_agent(loaded)  # after the fork: connections cannot be shared by processes

    freeze_loaded()  # so that forked processes share its memory
    run_template(socket.socket(fileno=fd), lambda channel: _run_loop(serve(channel, build)))
    return 0


def _run_loop(work: Coroutine[Any, Any, int]) -> int:
    with asyncio.Runner(loop_factory=UserCodeLoop) as runner:
        return runner.run(work)


def _load(settings: WorkerSettings) -> object:
    loaded = load(settings.path, Path(settings.root))
    tracing.install()
    return loaded


async def serve(fd: int, build: Callable[[], Agent]) -> int:
    """Run agents until the runner closes the channel; return the exit status."""
    asyncio.get_running_loop().set_default_executor(DaemonThreads())
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=fd))
    try:
        agent = build()
    except AgentRLError as error:
        writer.write(pack(StartupReport(str(error))))
        await writer.drain()
        return 1
    writer.write(pack(StartupReport()))
    before = _surroundings()
    running = set()
    while True:
        try:
            request = await read(reader, RunRequest)
        except asyncio.IncompleteReadError:
            return 0
        task = asyncio.create_task(_run(agent, request, writer, before))
        running.add(task)
        task.add_done_callback(running.discard)


def _surroundings() -> dict[str, str]:
    """State that a rollout can change for later ones: environment variables and the working
    directory."""
    try:
        folder = str(Path.cwd())
    except OSError:  # it was deleted
        folder = ""
    return {**os.environ, "the working directory": folder}


def _changed(before: dict[str, str]) -> list[str]:
    """Names of changed state. Libraries add variables; an added variable counts only if it is an
    address or a key."""
    after = _surroundings()
    added = (name for name in after.keys() - before.keys() if name.upper().endswith(ADDRESSES))
    return sorted({*added, *(name for name, value in before.items() if after.get(name) != value)})


async def _run(
    agent: Agent, request: RunRequest, writer: asyncio.StreamWriter, before: dict[str, str]
) -> None:
    def packed(ran: ExecutionResult) -> bytes:
        return pack(RunResponse(request.attempt, ran, processes.private_bytes(), _changed(before)))

    try:
        ran = await in_trace(request.attempt, run_apart(agent, request.input))
        message = packed(ran)
    except Exception as error:  # noqa: BLE001 - the agent's rewards and spans may not be encodable
        message = packed(ExecutionResult(failure=failure_of(ErrorKind.AGENT, error)))
    writer.write(message)


if __name__ == "__main__":
    sys.exit(main(msgspec.json.decode(sys.argv[1], type=WorkerSettings), int(sys.argv[2])))
