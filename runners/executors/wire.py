"""What the runner and its warm processes tell each other: JSON with its length before it."""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec

from agentrl.runners.executors import Ran
from agentrl.runners.executors.keeper import HEADER
from agentrl.types import Json


class Settings(msgspec.Struct, frozen=True):
    """What a process is started with."""

    path: str
    root: str
    start: Literal["fork", "spawn"]
    framework_spans: bool = False


class Job(msgspec.Struct, frozen=True):
    """Runner to process: run the agent on this."""

    attempt: str
    input: Json


class Done(msgspec.Struct, frozen=True):
    """Process to runner."""

    attempt: str
    ran: Ran
    resident: int  # bytes of the process now


class Hello(msgspec.Struct, frozen=True):
    """A process's first words: what keeps it from working, if anything does."""

    problem: str | None = None


def pack(message: msgspec.Struct) -> bytes:
    body = msgspec.json.encode(message)
    return HEADER.pack(len(body)) + body


async def read(stream: asyncio.StreamReader) -> bytes:
    """The next message. Raises IncompleteReadError when there is none any more."""
    (size,) = HEADER.unpack(await stream.readexactly(HEADER.size))
    return await stream.readexactly(size)
