"""The verifier of a run as its audit calls it: like a runner, without a rollout or a store.

Invariants: an exception of a verifier costs one score; each call has its own copy of the task; and
no connection leaves this machine, as a judge may cost money (`offline`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agentrl.audit.attacks import Source
from agentrl.core.errors import AgentRLError
from agentrl.core.types import (
    Json,
    Purpose,
    Rollout,
    RolloutState,
    Scope,
    Trace,
    Transition,
    float32,
    int32,
    one_line,
)
from agentrl.core.user_code import text_of
from agentrl.runners.scoring import Verifier

AT_ONCE = 4  # calls of a verifier at the same time, as in a runner
KEY = "API_KEY"  # end of names of variables with keys of models, which are removed
UNREACHABLE = "http://127.0.0.1:9/v1"  # in place of models
_offline: ContextVar[list[str] | None] = ContextVar("offline", default=None)
_hooked: list[bool] = []


@dataclass(frozen=True, slots=True)
class Score:
    """A verifier's score of a result. value: None if it raised; then `problem` says why."""

    value: float | None
    problem: str = ""
    changed: bool = False  # whether the verifier changed the task in place


@dataclass(slots=True)
class Scorer:
    """Scores results of tasks. timeout: seconds of a call; first: seconds of the first call if that
    is more, because it may load something. name: of the reward that the run maximises."""

    verifier: Verifier
    timeout: float
    first: float = 0.0
    name: str = "outcome"
    workspace: Any = None  # of the task that is scored, if the verifier takes one
    refused: list[str] = field(default_factory=list)  # addresses that it would have called
    calls: int = 0
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))

    async def score(self, task: Mapping[str, Json], result: Json, calls: int = 0) -> Score:
        """Score a result. calls: model calls with tool calls before the answer, in the trace."""
        encoded = msgspec.json.encode(task)
        task_copy: dict[str, Json] = msgspec.json.decode(encoded)
        trace = trace_of(task_copy, result, calls) if self.verifier.wants_trace else None
        timeout = self.timeout if self.calls else max(self.timeout, self.first)
        async with self._slots:
            self.calls += 1
            try:
                with offline(self.refused):
                    async with asyncio.timeout(timeout):
                        rows = await self.verifier(
                            task=task_copy, result=result, trace=trace, workspace=self.workspace
                        )
            except TimeoutError:
                return Score(None, f"it ran longer than {timeout:g} s")
            except Exception as error:  # noqa: BLE001 - the user's verifier is a boundary
                return Score(None, one_line(text_of(error)))
        by_name = {(row.scope, row.name): row.value for row in reversed(rows)}
        of_run = by_name.get((Scope.ROLLOUT, self.name), by_name.get((Scope.ROLLOUT, "outcome")))
        roles = [row.value for row in rows if row.scope is Scope.ROLE and row.name == "outcome"]
        value = max(roles) if of_run is None and roles else of_run
        problem = "" if value is not None else "it returned no outcome"
        return Score(value, problem, changed=_is_changed(task_copy, encoded))


@dataclass(slots=True)
class Subject:
    """What is audited. solution: of an environment, from a task's input; isolated: whether it may
    be given programs that end the process; span: the lowest and the highest outcome, if declared;
    right: results that were right, by the JSON of their task."""

    name: str
    scorer: Scorer
    tasks: Sequence[Mapping[str, Json]]
    source: Source = field(default_factory=Source)
    solution: Callable[[Json], Awaitable[Any]] | None = None
    isolated: bool = True
    span: tuple[float, float] | None = None
    right: Mapping[bytes, Json] = field(default_factory=dict)


def _is_changed(task: Mapping[str, Any], encoded: bytes) -> bool:
    try:
        return msgspec.json.encode(task) != encoded
    except (TypeError, ValueError, ArithmeticError, RecursionError):  # it is no longer JSON
        return True


def trace_of(task: Mapping[str, Json], result: Json, calls: int = 0) -> Trace:
    """The trace of a rollout that made one call, or `calls` with empty tool calls before it."""
    task_input = task.get("input", "")
    text = task_input if isinstance(task_input, str) else str(task_input)
    prompt: list[dict[str, Any]] = [{"role": "user", "content": text}]
    if isinstance(task_input, list) and all(
        isinstance(message, dict) and "role" in message for message in task_input
    ):
        prompt = [dict(message) for message in task_input]
    answers: list[dict[str, Any]] = []
    for number in range(calls):
        function = {"name": "tool", "arguments": "{}"}
        tool_call = {"id": f"call_{number}", "type": "function", "function": function}
        answers.append({"role": "assistant", "content": "", "tool_calls": [tool_call]})
    text = result if isinstance(result, str) else msgspec.json.encode(result).decode()
    answers.append({"role": "assistant", "content": text})
    rows, messages = list[Transition](), list[dict[str, Json]](prompt)
    for number, answer in enumerate(answers):
        none = int32()
        rows.append(
            Transition(
                id=f"audit-{number}", attempt="audit", index=number, prompt=none, completion=none,
                logprobs=float32(), exact=False, messages=[*messages], answer=answer,
            )
        )  # fmt: skip
        messages += [answer]
        for tool_call in answer.get("tool_calls", ()):
            messages.append({"role": "tool", "tool_call_id": tool_call["id"], "content": ""})
    rollout = Rollout(
        id="audit/0/0", run="audit", group="audit/0", index=0, task=dict(task),
        purpose=Purpose.TRAIN, state=RolloutState.SUCCEEDED, step=0, attempts=1, attempt="audit",
        result=result, failure=None,
    )  # fmt: skip
    return Trace(rollout=rollout, attempt="audit", transitions=rows, spans=[])


class CallRefusedError(AgentRLError, OSError):
    """A connection that an audit does not make."""


@contextlib.contextmanager
def offline(refused: list[str]) -> Iterator[None]:
    """Refuse connections of this context to other machines, and to models. Their addresses are
    added to `refused`."""
    if not _hooked:
        _hooked.append(True)
        sys.addaudithook(_refuse)  # cannot be removed; idle outside of this context
    token = _offline.set(refused)
    try:
        yield
    finally:
        _offline.reset(token)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in ("socket.connect", "socket.getaddrinfo"):
        return
    refused = _offline.get()
    if refused is None:
        return
    if event == "socket.getaddrinfo":
        host, port = str(arguments[0]), arguments[1]
    else:
        where = arguments[1]
        if not (isinstance(where, tuple) and where):
            return  # a socket of this machine's file system
        host, port = str(where[0]), where[1]
    local = host in ("localhost", "::1", "0.0.0.0", "None", "") or host.startswith("127.")
    if local and str(port) != "9":
        return
    refused.append(f"{host}:{port}")
    raise CallRefusedError(f"an audit makes no calls to {host}:{port}")


class EndedError(BaseException):
    """Raised in place of the end of this process when an answer that the verifier runs exits."""


ended: list[int] = []  # exit codes with which answers would have ended this process
end_process = os._exit


def _survive(code: int) -> None:
    if os.getpid() != _auditor_pid:
        end_process(code)  # a child that the verifier has forked
    ended.append(code)
    raise EndedError("it would have ended the process of the verifier")


_auditor_pid = 0


def isolate() -> None:
    """Prepare a process that only audits: answers cannot end it, and models cannot be called."""
    global _auditor_pid
    _auditor_pid = os.getpid()
    os._exit = _survive  # type: ignore[assignment]
    for name in [name for name in os.environ if name.endswith(KEY)]:
        del os.environ[name]
    for name in ("OPENAI", "ANTHROPIC"):
        os.environ[f"{name}_BASE_URL"], os.environ[f"{name}_API_KEY"] = UNREACHABLE, "audit"
