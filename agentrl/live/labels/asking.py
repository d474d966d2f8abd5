"""Asks the verifier and the judge of next messages about sessions.

Owns: the processes of the user's functions and the judge's connections. Always true: an answer
that takes longer than `live.signals.timeout` ends its process; whatever goes wrong, the session
stays without this signal, and each kind of problem is said once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

import aiohttp
import msgspec

from agentrl.base.processes import environment_without_secrets
from agentrl.config import RunConfig
from agentrl.errors import AgentRLError, ConfigError

# isort: split
from agentrl.algorithms.judges.judge import JudgeClient
from agentrl.algorithms.judges.table import PointwiseJudge
from agentrl.live.labels.answering import Settings, SignalRequest, SignalResponse, pack, read
from agentrl.live.labels.signals import NEXT_MESSAGE, VERIFIER, Message, Reply
from agentrl.live.records.table import live_of
from agentrl.runners.processes.launcher import (
    LogPipe,
    ProcessLauncher,
    SupervisedProcess,
    SupervisorLost,
)
from agentrl.runners.processes.supervisor import ProcessSpec
from agentrl.store.base import Store
from agentrl.types import Trace

log = logging.getLogger("agentrl.live")
CHILD = ("-m", "agentrl.live.labels.answering")
PROCESSES = 2  # questions that are answered at the same time
LOADING = 120.0  # seconds for a user's file to be imported
LARGEST_PRINT = 2**16  # bytes that the user's functions may print about one session
ENDED = (asyncio.IncompleteReadError, ConnectionError, SupervisorLost, OSError)
RUBRIC = (
    "whether what came after its last answer, in `next`, shows that this answer helped: a user who "
    "thanks it or goes on with the task, a tool that works; not a user who repeats the question, "
    "corrects it or complains, or a tool that fails"
)


class Asker:
    """Asks about sessions; use as a context manager."""

    def __init__(self, store: Store, config: RunConfig) -> None:
        self._signals, self._root = live_of(config).signals, config.root
        self._verifies = bool(config.verifier.path or config.verifier.rewards)
        self._function = self._signals.next_message if ":" in self._signals.next_message else ""
        self._settings = Settings(
            root=str(config.root), verifier=config.verifier.path,
            rewards=dict(config.verifier.rewards), next_message=self._function,
        )  # fmt: skip
        self._launcher = ProcessLauncher(env=environment_without_secrets())
        self._free: asyncio.Queue[Answering | None] = asyncio.Queue()
        self._store, self._config, self._said = store, config, set[tuple[str, str]]()
        self._session = aiohttp.ClientSession()
        self._judge: JudgeClient | None = None

    async def __aenter__(self) -> Asker:
        """Start a process, so that a function that cannot be used is an error now."""
        name = self._signals.next_message
        if name and not self._function:
            judge = PointwiseJudge(upstream=name, rubric=self._signals.rubric or RUBRIC)
            self._judge = JudgeClient(NEXT_MESSAGE, judge, self._config, self._store, self._session)
        for _ in range(PROCESSES - 1):
            self._free.put_nowait(None)
        try:
            if self._verifies or self._function:
                await self._launcher.start()
                self._free.put_nowait(await Answering.start(self._launcher, self._settings))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()
        while not self._free.empty():
            if process := self._free.get_nowait():
                await process.end()
        await self._launcher.close()

    async def verify(self, trace: Trace) -> dict[str, float]:
        """The verifier's signals of a session, by name; empty if it has none."""
        if not self._verifies:
            return {}
        answer = await self._ask(VERIFIER, SignalRequest(trace=trace))
        return answer.signals

    async def judge(self, replies: Sequence[Reply], subject: str) -> dict[str, float]:
        """Judgements of what followed the answers of a session's calls, by call. subject: its
        rollout."""
        if not replies or not self._signals.next_message:
            return {}
        if self._judge is not None:
            values = await self._ask_model(self._judge, replies, subject)
        else:
            values = (await self._ask(NEXT_MESSAGE, SignalRequest(replies=[*replies]))).judged
        return {r.call: v for r, v in zip(replies, values, strict=False) if v is not None}

    async def _ask(self, what: str, question: SignalRequest) -> SignalResponse:
        process = await self._free.get()
        answer: SignalResponse | None = None
        try:
            if process is None:
                process = await Answering.start(self._launcher, self._settings)
            async with asyncio.timeout(self._signals.timeout):
                answer = await process.ask(question)
        except TimeoutError:
            self._say(what, "took too long", f"took longer than live.signals.timeout = "
                      f"{self._signals.timeout:g} s and was ended")  # fmt: skip
        except ENDED as error:
            self._say(what, "died", f"ended its process ({type(error).__name__})")
        except AgentRLError as error:
            self._say(what, "load", f"cannot be loaded: {error}")
        finally:
            if answer is None and process is not None:
                await asyncio.shield(process.end())
                process = None
            self._free.put_nowait(process)
        if answer is not None and answer.problem:
            self._say(what, answer.problem.split(maxsplit=1)[0], answer.problem)
        return answer or SignalResponse()

    async def _ask_model(
        self, judge: JudgeClient, replies: Sequence[Reply], subject: str
    ) -> list[float | None]:
        records = [_record(reply) for reply in replies]
        try:
            async with asyncio.timeout(self._signals.timeout):
                return await judge.score(records, subject)
        except TimeoutError:
            why = f"took longer than live.signals.timeout = {self._signals.timeout:g} s"
            self._say(NEXT_MESSAGE, "took too long", why)
        except (AgentRLError, KeyError) as error:
            self._say(NEXT_MESSAGE, "failed", f"gave no answer: {error}")
        finally:
            judge.forget_asked()  # else what was cancelled would be waited for
        return []

    def _say(self, what: str, kind: str, problem: str) -> None:
        """Say a problem once; sessions without a signal are counted by `agentrl live status`."""
        if (what, kind) not in self._said:
            self._said.add((what, kind))
            name = "the verifier" if what == VERIFIER else "live.signals.next_message"
            log.warning("%s %s; such sessions stay without this signal", name, problem)


def _record(reply: Reply) -> list[Message]:
    return [*reply.messages, reply.answer, {"next": reply.next}]


class Answering:
    """The handle of a process with the user's functions."""

    def __init__(
        self,
        supervised: SupervisedProcess,
        printed: LogPipe,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._supervised, self._printed = supervised, printed
        self._reader, self._writer = reader, writer

    @classmethod
    async def start(cls, launcher: ProcessLauncher, settings: Settings) -> Answering:
        """Start a process and wait until it has loaded the functions. Raises ConfigError."""
        ours, theirs = socket.socketpair()
        printed = LogPipe(LARGEST_PRINT)
        out = await printed.open()
        fds = [os.open(os.devnull, os.O_RDONLY), out, out, theirs.detach()]
        argv = [sys.executable, *CHILD, msgspec.json.encode(settings).decode(), "3"]
        spec = ProcessSpec(argv=argv, env=environment_without_secrets(), folder=settings.root)
        try:
            supervised = await launcher.launch(spec, fds)
        except (SupervisorLost, OSError):
            ours.close()
            raise
        one = cls(supervised, printed, *await asyncio.open_unix_connection(sock=ours))
        try:
            async with asyncio.timeout(LOADING):
                problem = (await read(one._reader, SignalResponse)).problem
        except TimeoutError:
            problem = f"importing the verifier or judge takes longer than {LOADING:g} s"
        except ENDED:
            problem = "the process ended while loading the verifier or judge; see above"
        if problem:
            await one.end()
            raise ConfigError(problem)
        return one

    async def ask(self, question: SignalRequest) -> SignalResponse:
        self._printed.reset()
        self._writer.write(pack(question))
        await self._writer.drain()
        return await read(self._reader, SignalResponse)

    async def end(self) -> None:
        """Kill the process and its descendants, and wait for their end."""
        self._supervised.kill()
        with suppress(SupervisorLost):
            await self._supervised.wait()
        self._writer.close()
