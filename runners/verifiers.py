"""Calling the user's verifier: task and result (and the trace, if it asks) to named rewards."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.errors import AgentError, AgentRLError
from agentrl.loading import load_attribute
from agentrl.runners import threads
from agentrl.types import Json, Reward, Trace

ARGUMENTS = ("task", "result", "trace")


class VerifierError(AgentRLError):
    """The verifier returned something that is not a reward."""


class Verifier:
    """A user's verifier, called with those of `task`, `result` and `trace` that it declares.

    It returns a number, the outcome, or a mapping of names to numbers, and may be async."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises AgentError when `function` asks for anything else."""
        self.function = function
        self.arguments = _declared(function)

    @property
    def wants_trace(self) -> bool:
        return "trace" in self.arguments

    async def __call__(
        self, *, task: Mapping[str, Json], result: Json, trace: Trace | None
    ) -> list[Reward]:
        """Raises VerifierError for anything but finite numbers, and what the function raises."""
        given = {"task": task, "result": result, "trace": trace}
        call = partial(self.function, **{name: given[name] for name in self.arguments})
        if inspect.iscoroutinefunction(self.function):
            returned = await call()
        else:
            returned = await threads.call(call)
            if isinstance(returned, Awaitable):
                returned = await returned
        return rewards(returned)


def load(path: str, root: Path) -> Verifier:
    """The verifier that "file.py:name" names. Raises ConfigError or AgentError."""
    return Verifier(load_attribute(path, root, key="verifier.path"))


def rewards(returned: object) -> list[Reward]:
    """Reward rows of a verifier's answer."""
    if isinstance(returned, Mapping):
        if not returned:
            raise VerifierError("the verifier returned no reward; return a number, or a mapping")
        return [Reward(name=str(name), value=_number(v, name)) for name, v in returned.items()]
    return [Reward(value=_number(returned, "outcome"))]


def _number(value: Any, name: object) -> float:
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise VerifierError(f"the verifier returned {value!r:.80} as {name!r}; return a number")
    number = float(value)
    if not math.isfinite(number):
        raise VerifierError(f"the verifier returned {number} as {name!r}; return a finite number")
    return number


def _declared(function: Callable[..., Any]) -> tuple[str, ...]:
    if not callable(function):
        raise AgentError(f"the verifier is a {type(function).__name__}, not a function")
    parameters = inspect.signature(function).parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return ARGUMENTS
    names = tuple(p.name for p in parameters if p.name in ARGUMENTS)
    foreign = [p.name for p in parameters if p.name not in ARGUMENTS and p.default is p.empty]
    if foreign or not names or inspect.Parameter.POSITIONAL_ONLY in kinds:
        raise AgentError(
            f"the verifier has the parameters ({', '.join(p.name for p in parameters)}); give it"
            f" one or more of {', '.join(ARGUMENTS)} by these names"
        )
    return names
