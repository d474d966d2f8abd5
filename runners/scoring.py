"""Scoring: the user's reward functions, called with task, result, trace and workspace; rewards that
an agent reports while it runs; results as JSON, and exceptions as `Failure` records.

The target of a `reward(...)` for a model call is first the span id in the `traceparent` of the
latest HTTP request, or of earlier requests if the latest one went to a tool. When the attempt has
ended and its calls are stored, `resolve_targets` replaces it by the call's id.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
from msgspec.structs import replace

from agentrl.core import user_code
from agentrl.core.errors import AgentError, AgentRLError, ConfigError, Invalid
from agentrl.core.loading import load_attribute
from agentrl.core.plugins import load_plugin
from agentrl.core.types import ErrorKind, Failure, Json, Reward, Scope, Span, Trace, Transition
from agentrl.core.user_code import cause_of
from agentrl.core.values import NotJsonError, as_json
from agentrl.runners.tracing import attempt_log
from agentrl.store.rows import check_reward, storable_text

AUDIT = "audit"  # name of the reward of `verifier.audit`
AUDITED = 4  # the second verifier scores one of this many rollouts
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
        audit: Callable[..., Any] | None = None,
    ) -> None:
        """`outcome`: the user's verifier. `rewards`: further functions by name. `range`: the lowest
        and the highest outcome. `audit`: a second verifier for every `AUDITED`th rollout; its
        reward "audit" is compared with the outcome, and its errors do not fail a rollout.

        Raises AgentError if a function requires other parameters."""
        functions = {**({} if outcome is None else {"outcome": outcome}), **(rewards or {})}
        self._range = range
        self._audit = None if audit is None else (audit, _declared(audit))
        self._sources = {name: (call, _declared(call)) for name, call in functions.items()}

    @property
    def functions(self) -> list[Callable[..., Any]]:
        return [function for function, _ in self._sources.values()]

    @property
    def wants_trace(self) -> bool:
        return self._wants("trace")

    @property
    def wants_workspace(self) -> bool:
        return self._wants("workspace")

    def _wants(self, argument: str) -> bool:
        functions = [*self._sources.values(), *([self._audit] if self._audit else [])]
        return any(argument in arguments for _, arguments in functions)

    async def __call__(
        self,
        *,
        task: Mapping[str, Json],
        result: Json,
        trace: Trace | None,
        workspace: object = None,
    ) -> list[Reward]:
        """Call the functions and, for a sample of rollouts, the second verifier."""
        values: dict[str, Any] = {"task": task, "result": result, "trace": trace}
        values["workspace"] = workspace
        return [*await self.rewards(values), *await self.audited(values)]

    async def rewards(self, values: Mapping[str, Any]) -> list[Reward]:
        """Call the reward functions except the second verifier and return their rewards; targets
        are not checked. values: those of `ARGUMENTS`, by name. Raises VerifierError for anything
        but numbers that can be stored, propagates exceptions of the functions, and raises
        UserCodeError in place of a raised object that is not an `Exception`."""
        rows: list[Reward] = []
        for name, (function, arguments) in self._sources.items():
            wanted = {argument: values[argument] for argument in arguments}
            returned = await user_code.call(function, **wanted)
            with user_code.contained():  # numbers may have user-defined classes
                rows += as_rewards(returned, name)
        try:
            for row in rows:
                check_reward(row, "the verifier")
                self._check_range(row)
        except Invalid as error:
            raise VerifierError(str(error)) from None
        return rows

    async def audited(
        self, values: Mapping[str, Any], seconds: float | None = None
    ) -> list[Reward]:
        """The second verifier's reward, if the rollout is in the sample, which depends on its
        content; none if it takes longer than `seconds`. Its exceptions are suppressed."""
        if self._audit is None:
            return []
        content = msgspec.json.encode((values["task"], values["result"]), order="sorted")
        if crc32(content) % AUDITED:
            return []
        function, arguments = self._audit
        try:
            async with asyncio.timeout(seconds):
                wanted = {name: values[name] for name in arguments}
                returned = await user_code.call(function, **wanted)
            with user_code.contained():
                rows = as_rewards(returned, AUDIT)
            audits = (row for row in rows if row.name in (AUDIT, "outcome"))
            first = [Reward(value=row.value, name=AUDIT) for row in audits][:1]
            for row in first:
                check_reward(row, "verifier.audit")
        except Exception as error:  # noqa: BLE001 - the user's function is a boundary
            why = user_code.text_of(error)
            logger.warning("verifier.audit raised %s; such rollouts are not compared", why)
            return []
        return first

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
    audit: str = "",
) -> Verifier:
    """Load the verifier `path` (a name or a function), the functions of `verifier.rewards`, each
    "file.py:name", "package.module:name" or an entry point of the group agentrl.rewards, and
    `verifier.audit`.

    Raises ConfigError or AgentError."""
    if not path and not rewards:
        raise ConfigError("verifier.path is missing: write it as file.py:name")
    if path and "outcome" in rewards:
        raise ConfigError("verifier.rewards.outcome and verifier.path are both set: leave one out")
    if audit and AUDIT in rewards:
        raise ConfigError(
            "verifier.audit and verifier.rewards.audit are both set: rename the latter"
        )
    outcome: Any = path or None
    if isinstance(path, str) and path:
        outcome = load_attribute(path, root, key="verifier.path")
    functions = {
        name: load_plugin("rewards", source, (), root, key=f"verifier.rewards.{name}")
        for name, source in rewards.items()
    }
    second = load_attribute(audit, root, key="verifier.audit") if audit else None
    return Verifier(outcome, functions, range, second)


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
    raw_texts = (row.name, row.source, row.note)
    name, source, note = (storable_text(str(text)) for text in raw_texts)
    fields = {"name": name, "source": source, "note": note, "scope": scope}
    return replace(row, value=_number(row.value, row.name), **fields)


def as_scope(scope: Scope | str) -> Scope:
    try:
        return Scope(scope)
    except ValueError:
        scopes = ", ".join(map(repr, map(str, Scope)))
        raise ValueError(f"there is no reward scope {scope!r:.80}; there is {scopes}") from None


def as_number(value: Any) -> float:
    """Convert a number of any class, such as an array of one number. Raises ValueError for anything
    else, including strings that `float` would parse, and dates."""
    # Dtype kind of numpy's arrays and scalars.
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    has_value = hasattr(value, "__float__") or hasattr(value, "__index__")
    if isinstance(value, str | bytes) or kind not in "biuf" or not has_value:
        raise ValueError("it is not a number")
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except TypeError as error:  # such as an array of several numbers
        raise ValueError(str(error)) from None


def _number(value: Any, name: object) -> float:
    try:
        number = as_number(value)
    except ValueError:
        why = f"the verifier returned {value!r:.80} as {name!r}; return a number"
        raise VerifierError(why) from None
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


MAX_TRACEBACK_CHARS = 20_000  # characters, from the end


logger = logging.getLogger("agentrl.runner")
SOURCE = "agent"
PENDING = "call:"  # prefix of an unresolved target, before the span ids of possible calls


def reward(
    value: float,
    name: str = "process",
    scope: Scope | str = Scope.TRANSITION,
    target: str | None = None,
) -> None:
    """Reward the agent's latest action; has no effect outside of a rollout.

    Scope "transition" rewards the latest model call of the current context: of this task or thread,
    else of the LangGraph node around it, else of the agent. Scope "role" rewards the role `target`,
    by default that of the latest call; scope "rollout" the whole rollout. Several rewards with the
    same name and target are all stored, if the attempt succeeds.
    Raises ValueError if the value is not a number, not finite or too large, the scope is unknown or
    does not allow a target, or no model call precedes a reward that needs one."""
    try:
        number = as_number(value)
    except ValueError:
        raise ValueError(f"a reward must be a number, not {value!r:.80}") from None
    row = Reward(number, storable_text(str(name)), as_scope(scope), target, SOURCE)
    if not math.isfinite(row.value):
        raise ValueError(f"a reward must be a finite number, not {row.value}")
    if row.scope is not Scope.ROLE and target is not None:
        raise ValueError(
            f"a reward of scope '{row.scope}' takes no target: 'transition' is for the latest model"
            " call, 'rollout' for the whole rollout; leave it out"
        )
    log = attempt_log.current()
    if log is None:
        return
    if log.ended:
        logger.warning("a reward %r came after the end of its rollout and is ignored", row.name)
        return
    if row.scope is not Scope.ROLLOUT and target is None:
        calls = " ".join(call.id for call in log.latest())
        if not calls:
            raise ValueError(
                f"there is no model call yet for a reward of scope '{row.scope}'; give it after"
                " the call, or with scope='rollout'"
            )
        row = replace(row, target=f"{PENDING}{calls}")
    try:
        check_reward(row, "the agent")
    except Invalid as error:
        raise ValueError(str(error)) from None
    log.rewards.append(row)


def resolve_targets(
    rows: Iterable[Reward], trace: Trace | None, spans: Sequence[Span]
) -> list[Reward]:
    """Replace span ids in the targets of rewards by stored calls or their roles. `trace`: the
    attempt from the store, `spans`: the attempt's spans in this process.

    A reward for a failed call, which was never stored, is dropped with a warning. Raises
    VerifierError for a target that is not a call or role of the attempt."""
    calls = trace.transitions if trace else []
    seats = trace.rollout.seats if trace else {}  # a seated role may have no call yet
    stored = _by_call(calls, spans)
    targets = {
        Scope.TRANSITION: {call.id for call in calls},
        Scope.ROLE: {call.role for call in calls}.union(seats),
    }
    resolved = []
    for row in rows:
        spans_named = row.target.removeprefix(PENDING) if row.target else ""
        is_pending = spans_named != (row.target or "")
        about = next((stored[c] for c in spans_named.split() if c in stored), None)
        if is_pending and about is not None:
            target = about.id if row.scope is Scope.TRANSITION else about.role
            resolved.append(replace(row, target=target))
        elif is_pending:
            logger.warning("a reward %r for a failed model call is dropped", row.name)
        elif row.scope is Scope.ROLLOUT or row.target in targets[row.scope]:
            resolved.append(row)
        else:
            names = ", ".join(sorted(targets[row.scope])[:20])
            raise VerifierError(
                f"the {row.source} gave the reward {row.name!r} to the {row.scope} {row.target!r},"
                " which this attempt does not have; it has"
                f" {names or 'none, as it made no model call'}{_how_to_name(row) if names else ''}"
            )
    return resolved


def _how_to_name(row: Reward) -> str:
    if row.scope is not Scope.ROLE:
        return ""
    return (
        ". Names of nodes, agents and models are roles only if the run file lists them: write"
        f' {row.target} = "policy" below [roles], or roles = ["{row.target}"] in a policy of'
        " [policies]; else reward a role that made a call"
    )


def _by_call(calls: Iterable[Transition], spans: Sequence[Span]) -> Mapping[str, Transition]:
    """Map span ids to the call of their request; for several choices, to the last one. Spans of
    user instrumentation between call and request are included."""
    parents = {span.id: span.parent for span in spans}
    by_span = {}
    for call in calls:
        span = call.span
        while span is not None:
            by_span[span] = call
            span = parents.get(span)
    return by_span


def failure_of(kind: ErrorKind, error: BaseException) -> Failure:
    error = cause_of(error)
    trace, text = storable_text("".join(traceback.format_exception(error))), as_text(error)
    message = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return Failure(kind=kind, message=message, traceback=trace[-MAX_TRACEBACK_CHARS:])


def stored_result(result: Any, failure: Failure | None) -> tuple[Json, Failure | None]:
    """Convert an agent's result to JSON values, which the verifier sees and the store keeps. One
    that has no JSON form is the agent's failure. Never raises."""
    try:
        return as_json(result), failure
    except NotJsonError as error:
        not_json = Failure(kind=ErrorKind.AGENT, message=error.at("the agent's result"))
        return None, failure or not_json


def as_text(value: object) -> str:
    """Return `str(value)` as text that every database can store. Never raises."""
    try:
        return storable_text(str(value))
    except BaseException:  # noqa: BLE001 - a user's class, or an int with too many digits
        return f"<{type(value).__name__} that has no text>"
