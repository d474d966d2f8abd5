"""Calling the user's verifier: task and result (and the trace, if it asks) to rewards."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from agentrl import threads
from agentrl.errors import AgentError, AgentRLError
from agentrl.loading import load_attribute
from agentrl.store.rows import storable_text
from agentrl.types import Json, Reward, Scope, Trace

ARGUMENTS = ("task", "result", "trace")


class VerifierError(AgentRLError):
    """The verifier returned something that is not a reward."""


class Verifier:
    """A user's verifier, called with those of `task`, `result` and `trace` that it declares.

    It may be async and returns a number, the outcome; a mapping of names to numbers; or a `Reward`
    or a list of them, about the rollout, a role, or a transition of the trace by its id."""

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
        """Raises VerifierError for anything but finite numbers, and what the function raises.
        Whether the targets of rows exist is not looked at."""
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
    if isinstance(returned, Reward):
        return [_row(returned)]
    if isinstance(returned, Mapping | list | tuple) and not returned:
        raise VerifierError("the verifier returned no reward; return a number, or a mapping")
    if isinstance(returned, Mapping):
        return [
            Reward(name=storable_text(str(name)), value=_number(v, name))
            for name, v in returned.items()
        ]
    if isinstance(returned, list | tuple):
        return [_row(row) for row in returned]
    return [Reward(value=_number(returned, "outcome"))]


def _row(row: object) -> Reward:
    if not isinstance(row, Reward):
        raise VerifierError(f"the verifier returned {row!r:.80} in a list; return agentrl.Reward")
    try:
        scope = Scope(row.scope)
    except ValueError:
        known = ", ".join(map(repr, map(str, Scope)))
        message = f"the verifier returned the reward scope {row.scope!r:.80}; there is {known}"
        raise VerifierError(message) from None
    if not isinstance(row.target, str | None) or (row.target is None) != (scope is Scope.ROLLOUT):
        raise VerifierError(
            f"the verifier returned {row!r:.200}; give it a target exactly if it is about a role"
            " (its name) or a transition (the id of one in trace.transitions)"
        )
    return replace(
        row,
        value=_number(row.value, row.name),
        name=storable_text(str(row.name)),
        source=storable_text(str(row.source)),
        scope=scope,
    )


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
