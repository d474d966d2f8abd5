"""Asks the verifier and the judge of next messages about sessions.

Owns: the processes of the user's functions and the judge's connections. Always true: an answer
that takes longer than `live.signals.timeout` ends its process; whatever goes wrong, the session
stays without this signal, and each kind of problem is said once.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

import aiohttp
import msgspec

from agentrl.base.processes import environment_without_secrets
from agentrl.config import RunConfig
from agentrl.errors import AgentRLError, ConfigError

# isort: split
from agentrl.algorithms.judges.judge import JudgeClient
from agentrl.config.rewards import PointwiseJudge
from agentrl.live.labels.answering import Settings, SignalRequest, SignalResponse, pack, read
from agentrl.live.labels.signals import NEXT_MESSAGE, VERIFIER, Message, Reply
from agentrl.runners.processes.launcher import (
    Channel,
    ProcessLauncher,
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
ANSWERED = re.compile(r"( answered \d+): .*", re.DOTALL)
ENDED = (asyncio.IncompleteReadError, ConnectionError, SupervisorLost, OSError)
RUBRIC = (
    "whether what came after its last answer, in `next`, shows that this answer helped: a user who "
    "thanks it or goes on with the task, a tool that works; not a user who repeats the question, "
    "corrects it or complains, or a tool that fails"
)


class Asker:
    """Asks about sessions; use as a context manager."""

    def __init__(self, store: Store, config: RunConfig) -> None:
        self._signals, self._root = config.live.signals, config.root
        self._verifies = bool(config.verifier.path or config.verifier.rewards)
        self._function = self._signals.next_message if ":" in self._signals.next_message else ""
        self._settings = Settings(
            root=str(config.root), verifier=config.verifier.path,
            rewards=dict(config.verifier.rewards), next_message=self._function,
        )  # fmt: skip
        self._launcher = ProcessLauncher(env=environment_without_secrets())
        self._free: asyncio.Queue[Channel | None] = asyncio.Queue()
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
        async with AsyncExitStack() as failing:
            failing.push_async_callback(self.__aexit__)
            if self._verifies or self._function:
                await self._launcher.start()
                self._free.put_nowait(await _started(self._launcher, self._settings))
            failing.pop_all()
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
                process = await _started(self._launcher, self._settings)
            async with asyncio.timeout(self._signals.timeout):
                answer = await _answer(process, question)
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
            why = ANSWERED.sub(r"\1", str(error))  # without the server's words about a user's
            self._say(NEXT_MESSAGE, "failed", f"gave no answer: {why}")
        finally:
            judge.forget_asked()  # the store has the answers
        return []

    def _say(self, what: str, kind: str, problem: str) -> None:
        """Say a problem once; sessions without a signal are counted by `agentrl live status`."""
        if (what, kind) not in self._said:
            self._said.add((what, kind))
            name = "the verifier" if what == VERIFIER else "live.signals.next_message"
            log.warning("%s %s; such sessions stay without this signal", name, problem)


def _record(reply: Reply) -> list[Message]:
    return [*reply.messages, reply.answer, {"next": reply.next}]


async def _started(launcher: ProcessLauncher, settings: Settings) -> Channel:
    """A process that has loaded the user's functions. Raises ConfigError."""
    argv = [sys.executable, *CHILD, msgspec.json.encode(settings).decode(), "3"]
    spec = ProcessSpec(argv=argv, env=environment_without_secrets(), folder=settings.root)
    process = await launcher.talk(spec, LARGEST_PRINT)
    try:
        async with asyncio.timeout(LOADING):
            problem = (await read(process.reader, SignalResponse)).problem
    except TimeoutError:
        problem = f"importing the verifier or judge takes longer than {LOADING:g} s"
    except ENDED:
        problem = "the process ended while loading the verifier or judge; see above"
    if problem:
        await process.end()
        raise ConfigError(problem)
    return process


async def _answer(process: Channel, question: SignalRequest) -> SignalResponse:
    process.printed.reset()
    process.writer.write(pack(question))
    await process.writer.drain()
    return await read(process.reader, SignalResponse)
