"""What the runner and its warm processes tell each other: JSON with its length before it."""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec

from agentrl.runners.executors import ExecutionResult
from agentrl.runners.executors.supervisor import HEADER
from agentrl.types import Json

LARGEST = 64 * 2**20  # bytes of an answer: result, rewards and spans


class WorkerSettings(msgspec.Struct, frozen=True):
    """What a process is started with."""

    path: str
    root: str
    start: Literal["fork", "spawn"]
    framework_spans: bool = False


class RunRequest(msgspec.Struct, frozen=True):
    """Runner to process: run the agent on this."""

    attempt: str
    input: Json


class RunResponse(msgspec.Struct, frozen=True):
    """Process to runner."""

    attempt: str
    ran: ExecutionResult
    resident: int  # bytes of the process now


class StartupReport(msgspec.Struct, frozen=True):
    """A process's first words: what keeps it from working, if anything does."""

    problem: str | None = None


def pack(message: msgspec.Struct) -> bytes:
    body = msgspec.json.encode(message)
    return HEADER.pack(len(body)) + body


async def read(stream: asyncio.StreamReader, most: int = 2**32) -> bytes:
    """The next message. Raises IncompleteReadError when there is none any more, ConnectionError
    when it has more than `most` bytes."""
    (size,) = HEADER.unpack(await stream.readexactly(HEADER.size))
    if size > most:
        raise ConnectionError(f"a message of {size} bytes")
    return await stream.readexactly(size)
