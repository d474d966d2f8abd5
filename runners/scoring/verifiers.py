"""Calls the user's reward functions with task, result, trace and workspace."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from agentrl.base import user_code
from agentrl.base.loading import load_attribute
from agentrl.errors import AgentError, AgentRLError, ConfigError, Invalid
from agentrl.plugins import load_plugin
from agentrl.store.limits import check_reward
from agentrl.store.rows import storable_text
from agentrl.types import Json, Reward, Scope, Trace

ARGUMENTS = ("task", "result", "trace", "workspace")


class VerifierError(AgentRLError):
    """The verifier returned an invalid reward."""


class Verifier:
    """The reward functions of a run. Each declares any of the parameters `task`, `result`, `trace`
    and `workspace`.

    Each may be async and returns a number, the reward with the function's name; a mapping of names
    to numbers; or one or more `Reward`s for the rollout, a role, or a call of the trace."""

    def __init__(
        self,
        outcome: Callable[..., Any] | None,
        rewards: Mapping[str, Callable[..., Any]] | None = None,
        range: tuple[float, float] | None = None,
    ) -> None:
        """`outcome`: the user's verifier. `rewards`: further functions by name. `range`: the lowest
        and the highest outcome.

        Raises AgentError if a function requires other parameters."""
        functions = {**({} if outcome is None else {"outcome": outcome}), **(rewards or {})}
        self._range = range
        self._sources = {name: (call, _declared(call)) for name, call in functions.items()}

    @property
    def wants_trace(self) -> bool:
        return any("trace" in arguments for _, arguments in self._sources.values())

    @property
    def wants_workspace(self) -> bool:
        return any("workspace" in arguments for _, arguments in self._sources.values())

    async def __call__(
        self,
        *,
        task: Mapping[str, Json],
        result: Json,
        trace: Trace | None,
        workspace: object = None,
    ) -> list[Reward]:
        """Call all functions and return their rewards; targets are not checked. Raises
        VerifierError for anything but numbers that can be stored, propagates exceptions of the
        functions, and raises UserCodeError for what they raise that is no exception."""
        given = {"task": task, "result": result, "trace": trace, "workspace": workspace}
        rows: list[Reward] = []
        for name, (function, arguments) in self._sources.items():
            own = {argument: given[argument] for argument in arguments}
            returned = await user_code.call(function, **own)
            with user_code.contained():  # numbers may be of the user's own classes
                rows += as_rewards(returned, name)
        try:
            for row in rows:
                check_reward(row, "the verifier")
                self._check_range(row)
        except Invalid as error:
            raise VerifierError(str(error)) from None
        return rows

    def _check_range(self, row: Reward) -> None:
        """Raise VerifierError for an outcome outside of `verifier.range`: it is a mistake of the
        function, and would shift the whole group."""
        if self._range is None or row.name != "outcome" or row.scope is Scope.TRANSITION:
            return
        low, high = self._range
        if not low <= row.value <= high:
            raise VerifierError(
                f"the verifier returned the outcome {row.value:g}, and verifier.range is {low:g} to"
                f" {high:g}"
            )


def load(
    path: str | Callable[..., Any],
    rewards: Mapping[str, str],
    root: Path,
    range: tuple[float, float] | None = None,
) -> Verifier:
    """Load the verifier `path` (a name or a function) and the functions of `verifier.rewards`, each
    "file.py:name", "package.module:name" or an entry point of the group agentrl.rewards.

    Raises ConfigError or AgentError."""
    if not path and not rewards:
        raise ConfigError("verifier.path is missing: write it as file.py:name")
    if path and "outcome" in rewards:
        raise ConfigError("verifier.rewards.outcome and verifier.path are both set: leave one out")
    outcome: Any = path or None
    if isinstance(path, str) and path:
        outcome = load_attribute(path, root, key="verifier.path")
    functions = {
        name: load_plugin("rewards", source, (), root, key=f"verifier.rewards.{name}")
        for name, source in rewards.items()
    }
    return Verifier(outcome, functions, range)


def as_rewards(returned: object, name: str = "outcome") -> list[Reward]:
    """Convert a reward function's return value to rewards; a number is the reward `name`."""
    if isinstance(returned, Reward):
        return [_row(returned)]
    if isinstance(returned, Mapping | list | tuple) and not returned:
        raise VerifierError("the verifier returned no reward; return a number, or a mapping")
    if isinstance(returned, Mapping):
        named = {storable_text(str(k)): _number(v, k) for k, v in returned.items()}
        if len(named) < len(returned):
            raise VerifierError("the verifier returned two names that are the same text: 1 and '1'")
        return [Reward(name=name, value=value) for name, value in named.items()]
    if isinstance(returned, list | tuple):
        return [_row(row) for row in returned]
    return [Reward(value=_number(returned, name), name=name)]


def _row(row: object) -> Reward:
    if not isinstance(row, Reward):
        raise VerifierError(f"the verifier returned {row!r:.80} in a list; return agentrl.Reward")
    try:
        scope = as_scope(row.scope)
    except ValueError as error:
        raise VerifierError(f"the verifier returned a reward, but {error}") from None
    if not isinstance(row.target, str | None) or (row.target is None) != (scope is Scope.ROLLOUT):
        raise VerifierError(
            f"the verifier returned {row!r:.200}; set a target only if its scope is a role (the"
            " role's name) or a call (an id in trace.transitions)"
        )
    given = (row.name, row.source, row.note)
    name, source, note = (storable_text(str(text)) for text in given)
    own = {"name": name, "source": source, "note": note, "scope": scope}
    return replace(row, value=_number(row.value, row.name), **own)


def as_scope(scope: Scope | str) -> Scope:
    try:
        return Scope(scope)
    except ValueError:
        known = ", ".join(map(repr, map(str, Scope)))
        raise ValueError(f"there is no reward scope {scope!r:.80}; there is {known}") from None


def as_number(value: Any) -> float:
    """A number of any class that is one, such as an array of one number. Raises ValueError for
    all else: a text that `float` would read, in any class of texts, and dates too."""
    kind = getattr(getattr(value, "dtype", None), "kind", "f")  # of numpy's arrays and scalars
    has_value = hasattr(value, "__float__") or hasattr(value, "__index__")
    if isinstance(value, str | bytes) or kind not in "biuf" or not has_value:
        raise ValueError("it is no number")
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except TypeError as error:  # such as an array of several
        raise ValueError(str(error)) from None


def _number(value: Any, name: object) -> float:
    try:
        number = as_number(value)
    except ValueError:
        what = f"the verifier returned {value!r:.80} as {name!r}; return a number"
        raise VerifierError(what) from None
    if not math.isfinite(number):
        raise VerifierError(f"the verifier returned {number} as {name!r}; return a finite number")
    return number


def _declared(function: Callable[..., Any]) -> tuple[str, ...]:
    if not callable(function):
        raise AgentError(f"the verifier is a {type(function).__name__}, not a function")
    parameters = inspect.signature(function).parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return ARGUMENTS[:3]  # a workspace must be declared explicitly
    names = tuple(p.name for p in parameters if p.name in ARGUMENTS)
    foreign = [p.name for p in parameters if p.name not in ARGUMENTS and p.default is p.empty]
    if foreign or not names or inspect.Parameter.POSITIONAL_ONLY in kinds:
        raise AgentError(
            f"the verifier has the parameters ({', '.join(p.name for p in parameters)}); give it"
            f" one or more of {', '.join(ARGUMENTS)} by these names"
        )
    return names
