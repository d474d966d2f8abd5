"""Rewards that a Python agent reports with `reward(...)` while it runs.

The target of a reward for a model call is first the span id in the `traceparent` of the latest HTTP
request, and of those before it that it may be about if that one reached a tool. When the attempt
has ended and its calls are stored, `resolve_targets` replaces it by the call's id.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from agentrl.errors import Invalid
from agentrl.runners.scoring.verifiers import VerifierError, as_number, as_scope
from agentrl.runners.tracing import attempt_log
from agentrl.store.limits import check_reward
from agentrl.store.rows import storable_text
from agentrl.types import Reward, Scope, Span, Trace, Transition

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
    Raises ValueError if the value is no number, not finite or too large, the scope is unknown or
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
            known = ", ".join(sorted(targets[row.scope])[:20])
            raise VerifierError(
                f"the {row.source} gave the reward {row.name!r} to the {row.scope} {row.target!r},"
                " which this attempt does not have; it has"
                f" {known or 'none, as it made no model call'}{_how_to_name(row) if known else ''}"
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
    """Map span ids to the call of their request, the last one of a call with several choices.
    Spans of the user's own instrumentation between call and request are included."""
    parents = {span.id: span.parent for span in spans}
    found = {}
    for call in calls:
        span = call.span
        while span is not None:
            found[span] = call
            span = parents.get(span)
    return found
