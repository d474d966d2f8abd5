"""The in-process executor, for agents in Python: callables and LangChain runnables."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from agentrl.core import processes, user_code
from agentrl.core.errors import AgentError, AgentRLError
from agentrl.core.loading import load_attribute, raised
from agentrl.core.types import ErrorKind, Failure, Json
from agentrl.runners import executors
from agentrl.runners.executors import ExecutionResult, input_of, out_of_time
from agentrl.runners.scoring import failure_of, stored_result
from agentrl.runners.tracing import attempt_log
from agentrl.runners.tracing import core as tracing

if TYPE_CHECKING:
    from agentrl.runners.gateway.attribution import ActiveAttempt

Agent = Callable[[Json], Awaitable[Any]]
"""Maps a task's `input`, and no other field of the task, to the result."""


def load(path: str, root: Path) -> object:
    """Import the object "file.py:name" or "package.module:name".

    Raises ConfigError if the file, module or name does not exist or the import fails."""
    return load_attribute(path, root, key="agent.path")


def as_agent(obj: object) -> Agent:
    """Convert `obj` to an agent: a sync or async callable of one argument, a LangChain or LangGraph
    runnable, or a function without parameters that returns one of these (called here, once).

    Raises AgentError if it is none of them or the factory fails."""
    if isinstance(obj, type) or (callable(obj) and not hasattr(obj, "ainvoke")):
        signature = _signature(obj)
        if isinstance(obj, type) or (signature is not None and not signature.parameters):
            obj = _build(obj)
    if callable(getattr(obj, "ainvoke", None)):
        return partial(_invoke_runnable, obj)
    if not callable(obj) or isinstance(obj, type):
        raise AgentError(
            f"the agent is {_describe(obj)}; it must be a function of the task's input, a LangChain"
            " runnable, or a function without parameters that returns one of these"
        )
    if (signature := _signature(obj)) is not None:
        try:
            signature.bind(None)
        except TypeError:
            raise AgentError(
                f"the agent {_describe(obj)} must be callable with one argument, the task's input"
            ) from None
    return obj if _is_async(obj) else partial(_call_sync, obj)


async def _call_sync(function: Callable[[Json], Any], value: Json) -> Any:
    def call() -> Any:
        attempt_log.enter_agent()
        return function(value)

    result = await user_code.in_thread(call)
    # A sync function may return a coroutine, such as `lambda text: agent.ainvoke(text)`.
    return await result if inspect.isawaitable(result) else result


async def _invoke_runnable(runnable: Any, value: Json) -> Any:
    """Return a LangChain runnable's structured response, else the text of its last message."""
    arguments: list[Any] = [value if _takes_messages(runnable) else _state(value)]
    if getattr(runnable, "checkpointer", None):  # such a graph needs a thread id
        arguments.append({"configurable": {"thread_id": uuid.uuid4().hex}})
    output = await runnable.ainvoke(*arguments)
    if isinstance(output, Mapping):
        if output.get("structured_response") is not None:
            return output["structured_response"]
        if output.get("messages"):
            output = output["messages"][-1]
    return _text(output)


def _state(value: Json) -> Json:
    """The state of a graph that begins with a text or a list of chat messages."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if (
        isinstance(value, list)
        and value
        and all(isinstance(m, dict) and "role" in m for m in value)
    ):
        return {"messages": value}
    return value


def _takes_messages(runnable: Any) -> bool:
    """Whether a runnable is a model or begins with one: it takes text or messages, not a state."""
    inner = getattr(runnable, "first", None) or getattr(runnable, "bound", None)
    return hasattr(runnable, "agenerate_prompt") or (inner is not None and _takes_messages(inner))


def _text(message: Any) -> Any:
    """Return the text of a LangChain message or chat message dict; anything else unchanged."""
    if isinstance(message, Mapping):
        content = message.get("content")
        return content if "role" in message and isinstance(content, str) else message
    text = getattr(message, "text", None) if hasattr(message, "content") else None
    return str(text) if isinstance(text, str) else message


def _build(factory: Any) -> object:
    try:
        with user_code.contained():
            built = factory()
    except AgentRLError:
        raise
    except Exception as error:  # the user's factory is a boundary
        raise AgentError(
            f"building the agent with {_describe(factory)} raised {raised(error)}"
        ) from error
    if inspect.iscoroutine(built):
        built.close()
        raise AgentError(
            f"{_describe(factory)} takes no argument, so it should build the agent, but it is"
            " async; make it a plain function, or let it take the task's input"
        )
    return built


def _signature(obj: Any) -> inspect.Signature | None:
    """Return the signature of a callable, or None if it is unknown."""
    try:
        return inspect.signature(obj)
    except (TypeError, ValueError):
        return None


def _is_async(obj: Any) -> bool:
    while isinstance(obj, partial):
        obj = obj.func
    return inspect.iscoroutinefunction(obj) or inspect.iscoroutinefunction(type(obj).__call__)


def _describe(obj: Any) -> str:
    name = getattr(obj, "__qualname__", None)
    return f"{name!r}" if name else f"of type {type(obj).__name__!r}"


@dataclass(slots=True)
class InProcessExecutor:
    """Runs async agents on the worker's event loop and sync agents in threads. With `threaded`,
    each attempt has a thread, and an async agent its own event loop there: a blocking agent then
    does not block others, but clients that are bound to a loop cannot be shared."""

    agent: Agent
    threaded: bool = False
    sealed: bool = False
    limit: int | None = None

    async def start(self) -> None:
        tracing.install()

    async def close(self) -> None:
        """Do nothing."""

    async def run(self, active: ActiveAttempt) -> ExecutionResult:
        return await in_trace(active.id, self._until_deadline(active))

    async def _until_deadline(self, active: ActiveAttempt) -> tuple[Any, Failure | None]:
        """Run the agent until its deadline; one that ignores cancellation continues unobserved. A
        result after the deadline does not count, even if the agent blocked the event loop."""
        agent = self._in_thread if self.threaded else self.agent
        task = asyncio.create_task(run_guarded(agent, input_of(active)))
        try:
            await asyncio.wait({task}, timeout=active.left)
            in_time = task.done() and active.left > 0
            return task.result() if in_time else (None, out_of_time(active))
        finally:
            task.cancel()

    async def _in_thread(self, value: Json) -> Any:
        running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = []

        async def work() -> Any:
            loop = asyncio.get_running_loop()
            loop.set_default_executor(processes.DaemonThreads())
            running.append((loop, asyncio.current_task()))
            attempt_log.enter_agent()
            return await self.agent(value)

        try:
            return await user_code.in_thread(lambda: asyncio.run(work()))
        except asyncio.CancelledError:
            for loop, task in running:
                if task is not None:
                    with contextlib.suppress(RuntimeError):  # the loop is already closed
                        loop.call_soon_threadsafe(task.cancel)
            raise


async def in_trace(attempt: str, work: Awaitable[tuple[Any, Failure | None]]) -> ExecutionResult:
    """Await an agent in the trace of an attempt; return its result as JSON, its rewards, spans."""
    with tracing.install().attempt(attempt) as log:
        result, failure = await work
        result, failure = stored_result(result, failure)
    if len(msgspec.json.encode(result)) > executors.MAX_RESULT_BYTES:
        message = executors.too_large("its result")
        result, failure = None, Failure(kind=ErrorKind.AGENT, message=message)
    fields: Any = {"rewards": [*log.rewards], "needs_no_call": log.needs_no_call}
    spans = tracing.records(log, attempt)
    return ExecutionResult(result=result, failure=failure, spans=spans, **fields)


async def run_apart(agent: Agent, value: Json) -> tuple[Any, Failure | None]:
    """`run_guarded` in a separate task, which the agent may cancel."""
    return await asyncio.create_task(run_guarded(agent, value))


async def run_guarded(agent: Agent, value: Json) -> tuple[Any, Failure | None]:
    """Run an agent; return its result, or the failure for anything that it raises."""
    attempt_log.enter_agent()
    try:
        return await user_code.awaited(agent(value)), None
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001
        # An environment's fault is not the agent's.
        kind = getattr(user_code.cause_of(error), "kind", None)
        kind = kind if isinstance(kind, ErrorKind) else ErrorKind.AGENT
        return None, failure_of(kind, error)  # the user's agent is a boundary
