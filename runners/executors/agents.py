"""What users bring as an agent, behind one protocol: an async function from input to result."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from agentrl import threads
from agentrl.errors import AgentError
from agentrl.loading import load_attribute
from agentrl.types import Json

Agent = Callable[[Json], Awaitable[Any]]
"""Given a task's `input` and nothing else of the task, it returns the result."""


def load(path: str, root: Path) -> object:
    """What "file.py:name" or "package.module:name" names.

    Raises ConfigError when there is no such file, module or name, or its import fails."""
    return load_attribute(path, root, key="agent.path")


def as_agent(obj: object) -> Agent:
    """The agent that `obj` is: a sync or async callable of one argument, a LangChain or LangGraph
    runnable, or a function without parameters that builds one of these (called here, once).

    Raises AgentError when it is none of them or the factory fails."""
    if _is_factory(obj):
        obj = _build(obj)
    if callable(getattr(obj, "ainvoke", None)):
        return partial(_invoke_runnable, obj)
    if not callable(obj) or isinstance(obj, type):
        raise AgentError(
            f"the agent is {_describe(obj)}; it must be a function of the task's input, a LangChain"
            " runnable, or a function without parameters that returns one of these"
        )
    if _parameters(obj) is not None and not _takes_one(obj):
        raise AgentError(
            f"the agent {_describe(obj)} must be callable with one argument, the task's input"
        )
    if _is_async(obj):
        return obj
    return partial(_call_sync, obj)


async def _call_sync(function: Callable[[Json], Any], value: Json) -> Any:
    result = await threads.call(function, value)
    # A sync function may hand out a coroutine, such as `lambda text: agent.ainvoke(text)`.
    return await result if inspect.isawaitable(result) else result


async def _invoke_runnable(runnable: Any, value: Json) -> Any:
    if isinstance(value, str):
        value = {"messages": [{"role": "user", "content": value}]}
    if getattr(runnable, "checkpointer", None):  # such a graph refuses to run without a thread id
        config = {"configurable": {"thread_id": uuid.uuid4().hex}}
        return _result_of(await runnable.ainvoke(value, config))
    return _result_of(await runnable.ainvoke(value))


def _result_of(output: Any) -> Any:
    """What an agent answered: its structured response, else the text of its last message."""
    if isinstance(output, Mapping):
        if output.get("structured_response") is not None:
            return output["structured_response"]
        if output.get("messages"):
            return _text(output["messages"][-1])
    return _text(output)


def _text(message: Any) -> Any:
    """Text of a LangChain message or a chat message as a dict; anything else as it is."""
    if isinstance(message, Mapping):
        content = message.get("content")
        return content if "role" in message and isinstance(content, str) else message
    text = getattr(message, "text", None) if hasattr(message, "content") else None
    return str(text) if isinstance(text, str) else message


def _is_factory(obj: object) -> bool:
    if isinstance(obj, type):
        return True
    return callable(obj) and not hasattr(obj, "ainvoke") and _parameters(obj) == []


def _build(factory: Any) -> object:
    try:
        built = factory()
    except Exception as error:  # the user's factory is a boundary
        raise AgentError(
            f"building the agent with {_describe(factory)} raised {type(error).__name__}: {error}"
        ) from error
    if inspect.iscoroutine(built):
        built.close()
        raise AgentError(
            f"{_describe(factory)} takes no argument, so it should build the agent, but it is"
            " async; make it a plain function, or let it take the task's input"
        )
    return built


def _parameters(obj: Any) -> list[inspect.Parameter] | None:
    """Parameters of a callable; None where Python cannot tell."""
    try:
        return list(inspect.signature(obj).parameters.values())
    except (TypeError, ValueError):
        return None


def _takes_one(obj: Any) -> bool:
    try:
        inspect.signature(obj).bind(None)
    except TypeError:
        return False
    return True


def _is_async(obj: Any) -> bool:
    while isinstance(obj, partial):
        obj = obj.func
    return inspect.iscoroutinefunction(obj) or inspect.iscoroutinefunction(type(obj).__call__)


def _describe(obj: Any) -> str:
    name = getattr(obj, "__qualname__", None)
    return f"{name!r}" if name else f"of type {type(obj).__name__!r}"
