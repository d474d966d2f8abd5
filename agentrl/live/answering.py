"""The process that runs users' functions on replies: verifiers and judges of next messages."""

from __future__ import annotations

import asyncio
import inspect
import math
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from agentrl.core import user_code
from agentrl.core.errors import AgentRLError, ConfigError
from agentrl.core.loading import kind_of, load_attribute
from agentrl.core.types import Scope, Trace
from agentrl.live.signals import VERIFIER, Reply, result_of, task_of
from agentrl.runners import scoring
from agentrl.runners.executors import child
from agentrl.store.rows import array_from_bytes, array_to_bytes

# isort: split


T = TypeVar("T")


NAMES = ("messages", "answer", "next")  # parameters of a judge of next messages


_encode = msgspec.msgpack.Encoder(enc_hook=array_to_bytes).encode


_decode = partial(msgspec.msgpack.decode, dec_hook=array_from_bytes)


class Settings(msgspec.Struct, frozen=True):
    """The functions that the process loads, relative to `root`."""

    root: str
    verifier: str = ""
    rewards: dict[str, str] = {}
    next_message: str = ""


class SignalRequest(msgspec.Struct, frozen=True):
    """A session to verify, or replies to judge."""

    trace: Trace | None = None
    replies: list[Reply] = []


class SignalResponse(msgspec.Struct, frozen=True):
    """Values in 0..1: `signals` of the verifier by name, or one value per reply (None: no signal).
    Or a `problem`: the predicate of a sentence, without text of the session."""

    signals: dict[str, float] = {}
    judged: list[float | None] = []
    problem: str = ""


def pack(message: msgspec.Struct) -> bytes:
    return child.pack(message, _encode)


async def read(stream: asyncio.StreamReader, kind: type[T]) -> T:
    """Like `child.read`, for messages with arrays."""
    return await child.read(stream, kind, decode=_decode)


class Answerer:
    """The user's functions. Raises ConfigError or AgentError if one cannot be used."""

    def __init__(self, settings: Settings) -> None:
        root, path = Path(settings.root), settings.next_message
        self._verifier, self._judge = None, None
        if settings.verifier or settings.rewards:
            self._verifier = scoring.load(settings.verifier, settings.rewards, root)
            if self._verifier.wants_workspace:
                raise ConfigError("verifier.path: a live session has no workspace to look at")
        if path:
            self._judge = _judge(load_attribute(path, root, key="live.signals.next_message"))

    async def answer(self, question: SignalRequest) -> SignalResponse:
        try:
            if question.trace is not None:
                return SignalResponse(signals=await self._verify(question.trace))
            return SignalResponse(judged=[await self._judged(reply) for reply in question.replies])
        except Nonsense as error:
            return SignalResponse(problem=str(error))
        except scoring.VerifierError:  # its message contains the returned value
            return SignalResponse(problem="returned no reward that can be stored")
        except Exception as error:  # noqa: BLE001 - user's code
            return SignalResponse(problem=f"raised {kind_of(error)}")

    async def _verify(self, trace: Trace) -> dict[str, float]:
        assert self._verifier is not None
        calls = trace.transitions
        task = {**trace.rollout.task, **task_of(calls)}
        rows = await self._verifier(task=task, result=result_of(calls), trace=trace)
        whole = [row for row in rows if row.scope is Scope.ROLLOUT]
        named = {VERIFIER if row.name == "outcome" else row.name: row.value for row in whole}
        return {name: _in_range(value) for name, value in named.items()}

    async def _judged(self, reply: Reply) -> float | None:
        assert self._judge is not None
        value = await self._judge(reply)
        return None if value is None else _in_range(value)


class Nonsense(Exception):
    """A value that is not a valid signal."""


def _in_range(value: Any) -> float:
    number = value if isinstance(value, int | float) else math.nan
    if not 0 <= number <= 1:
        what = f"{number:g}" if isinstance(value, int | float) else f"a {type(value).__name__}"
        raise Nonsense(f"returned {what}; return a number from 0 to 1, or nothing")
    return float(number)


def _judge(function: Callable[..., Any]) -> Callable[[Reply], Awaitable[Any]]:
    parameters = inspect.signature(function).parameters.values()
    wanted = [p.name for p in parameters if p.name in NAMES]
    foreign = [p.name for p in parameters if p.name not in NAMES and p.default is p.empty]
    if foreign or not wanted:
        raise ConfigError(
            f"live.signals.next_message has the parameters {[p.name for p in parameters]}; give it"
            f" one or more of {', '.join(NAMES)}"
        )

    async def judge(reply: Reply) -> Any:
        return await user_code.call(function, **{name: getattr(reply, name) for name in wanted})

    return judge


async def serve(settings: Settings, fd: int) -> None:
    """Report whether the functions could be loaded, then answer questions until the input ends."""
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=fd))
    try:
        answerer = Answerer(settings)
    except AgentRLError as error:
        writer.write(pack(SignalResponse(problem=str(error))))
        await writer.drain()
        return
    writer.write(pack(SignalResponse()))
    while True:
        try:
            question = await read(reader, SignalRequest)
        except asyncio.IncompleteReadError:
            return
        writer.write(pack(await answerer.answer(question)))


def main(arguments: Sequence[str]) -> None:
    asyncio.run(serve(msgspec.json.decode(arguments[0], type=Settings), int(arguments[1])))


if __name__ == "__main__":
    main(sys.argv[1:])
