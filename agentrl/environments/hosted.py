"""Where an environment is: in this process, or in processes of its own interpreter.

An environment with its own interpreter, or which needs a process for each rollout, is made in
processes of the pool, which play its rollouts, and in a helper, which answers all else.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cache
from typing import Any

import msgspec

import agentrl
from agentrl.config.derived import Named
from agentrl.environments.endpoints import endpoint
from agentrl.environments.playing import called, play_task, scores_of, with_outcome
from agentrl.environments.reference import checked_tasks, explained, kind_of, load_class, made
from agentrl.errors import ConfigError
from agentrl.runners.tracing import attempt_log
from agentrl.types import Json, Reward, Trace

PROGRAM = ("-P", "-m", "agentrl.environments.helper")
LARGEST_ANSWER = 2**28  # bytes
# Of environments' processes: what draws from a set of texts draws the same in all of them.
SAME = {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")}


class About(msgspec.Struct, frozen=True):
    """What the rest of a run must know of an environment."""

    kind: str  # run, open or verify
    roles: tuple[str, ...] = ()
    limit: int = 50
    alone: bool = False  # one rollout at a time in a process
    version: str = ""  # of agentrl in its interpreter


class Request(msgspec.Struct, frozen=True):
    """To the helper."""

    do: str  # describe, tasks, verify or solution
    named: Named
    given: Json = None
    result: Json = None
    attempt: str = ""  # in whose trace a verifier runs


class HelperAnswer(msgspec.Struct, frozen=True):
    """From the helper. `problem`: a sentence for the user."""

    value: Any = None
    problem: str = ""


def is_hosted(named: Named) -> bool:
    """Whether it runs in processes of its own. Raises ConfigError."""
    return bool(named.python) or load_class(named).isolation == "process"


@cache
def describe(named: Named) -> About:
    """Raises ConfigError if the environment cannot be made."""
    if not is_hosted(named):
        return about(named)
    found = msgspec.convert(ask(Request("describe", named)), About)
    if found.version != agentrl.__version__:
        raise ConfigError(
            f"environment = {named.name!r}: {named.python} has agentrl {found.version}, and this"
            f" is {agentrl.__version__}; {named.cure}"
        )
    return found


@cache
def tasks(named: Named, split: str) -> list[dict[str, Json]]:
    """The tasks of a split. Raises ConfigError."""
    if not is_hosted(named):
        return checked_tasks(named, split)
    found: list[dict[str, Json]] = ask(Request("tasks", named, split))
    return found


def solution(named: Named, given: Json) -> Any:
    """The plug-in's ground truth of an input. Raises ConfigError."""
    if is_hosted(named):
        return ask(Request("solution", named, given))
    environment = made(named)
    with explained(named, "raised in solution"):
        return environment.solution(given)


def agent(named: Named) -> Callable[[Json], Awaitable[Any]]:
    """What plays the environment's rollouts in this process. Raises ConfigError."""
    environment = made(named)

    async def play(given: Json) -> Any:
        return await play_task(environment, named.name, given, endpoint())

    return play


def verifier(named: Named) -> Callable[..., Awaitable[list[Reward]]]:
    """What scores the environment's rollouts."""
    helper, scores_itself = Helper(named), describe(named).kind != "verify"

    async def verify(task: dict[str, Json], result: Json, trace: Trace) -> list[Reward]:
        if scores_itself and isinstance(result, dict) and result.get("environment") == named.name:
            rows = msgspec.convert(result["rewards"], list[Reward])  # it has scored itself
            return with_outcome(rows, trace.transitions)
        if is_hosted(named):
            log = attempt_log.current()
            attempt = "" if log is None else log.attempt
            rows = await helper.ask(Request("verify", named, task, result, attempt))
            return msgspec.convert(rows, list[Reward])
        return await verified(named, task, result)

    return verify


def about(named: Named) -> About:
    environment = made(named)
    kind = kind_of(type(environment))
    return About(
        kind=kind, roles=tuple(environment.roles), limit=environment.limit,
        alone=environment.isolation == "process", version=agentrl.__version__,
    )  # fmt: skip


async def verified(named: Named, task: dict[str, Json], result: Json) -> list[Reward]:
    """The scores that the environment, made in this process, gives to an agent's result."""
    environment: Any = made(named)
    returned = await called(named.name, "verify", environment.verify, task, result)
    return scores_of(returned, named.name)


def ask(request: Request) -> Any:
    """The answer of a helper that is started for it. Raises ConfigError."""
    python = request.named.python or sys.executable
    with tempfile.TemporaryFile() as printed:
        try:
            started = subprocess.Popen(
                [python, *PROGRAM],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=printed,
                env=os.environ | SAME,
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(
                f"environment = {request.named.name!r}: the interpreter {python} cannot be started"
                f" ({error.strerror}); {request.named.cure}"
            ) from None
        with started as helper:
            assert helper.stdin is not None
            assert helper.stdout is not None
            with suppress(BrokenPipeError):
                helper.stdin.write(msgspec.json.encode(request) + b"\n")
                helper.stdin.flush()
            line = helper.stdout.readline()
            with suppress(BrokenPipeError):
                helper.stdin.close()
        printed.seek(0)
        return _value(request.named, python, line, printed.read().decode(errors="replace"))


def _value(named: Named, python: str, line: bytes, printed: str = "") -> Any:
    if line:
        answer = msgspec.json.decode(line, type=HelperAnswer)
        if answer.problem:
            raise ConfigError(answer.problem)
        return answer.value
    last = printed.strip().rpartition("\n")[2]
    known = f"environment = {named.name!r}"
    if "No module named" in last and "agentrl" in last:
        raise ConfigError(f"{known}: {python} has no agentrl that can play it; {named.cure}")
    raise ConfigError(f"{known}: its process of {python} ended without an answer: {last}")


class Helper:
    """A helper that answers one request after the other, started at the first. It ends with this
    process, and with a request that is cancelled."""

    def __init__(self, named: Named) -> None:
        self.named, self._python = named, named.python or sys.executable
        self.process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def ask(self, request: Request) -> Any:
        """Raises ConfigError with the helper's sentence."""
        async with self._turn:
            process = self.process = self.process or await self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(msgspec.json.encode(request) + b"\n")
                line = await process.stdout.readline()
            except BaseException:
                self._end()
                raise
            if not line:
                self._end()
            return _value(self.named, self._python, line, "see its output above")

    async def _start(self) -> asyncio.subprocess.Process:
        piped: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return await asyncio.create_subprocess_exec(
            self._python, *PROGRAM, **piped, env=os.environ | SAME, limit=LARGEST_ANSWER
        )

    def _end(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.kill()
        self.process = None
