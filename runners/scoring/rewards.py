"""Rewards that an in-process agent gives while it runs, from `reward(...)` to a stored row.

A row about a model call first names the call by the span id in its `traceparent`. When the attempt
has ended and its transitions are stored, `resolve_targets` replaces that by the transition's id.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from agentrl.runners.scoring.verifiers import VerifierError, as_scope
from agentrl.runners.tracing import attempt_log
from agentrl.store.rows import storable_text
from agentrl.types import Reward, Scope, Span, Trace, Transition

logger = logging.getLogger("agentrl.runner")
SOURCE = "agent"
PENDING = "call:"  # before the span id of a call, in a target that is not resolved yet


def reward(
    value: float,
    name: str = "process",
    scope: Scope | str = Scope.TRANSITION,
    target: str | None = None,
) -> None:
    """Reward what the agent just did; does nothing outside of a rollout.

    With scope "transition" the number is about the latest model call of this context: of this task
    or thread, else of the LangGraph node around it, else of the agent. With scope "role" it is
    about the role `target`, or that of the latest call; with scope "rollout" about the whole.
    Rows of one name about one thing stay several rows. They are kept if the attempt succeeds.
    Raises ValueError for a number that is not finite, for an unknown scope, for a target that the
    scope does not have, and where there is no model call yet that it could be about."""
    row = Reward(float(value), storable_text(str(name)), as_scope(scope), target, SOURCE)
    if not math.isfinite(row.value):
        raise ValueError(f"a reward must be a finite number, not {row.value}")
    if row.scope is not Scope.ROLE and target is not None:
        raise ValueError(
            f"a reward of scope '{row.scope}' takes no target: 'transition' is the latest model"
            " call, 'rollout' the whole; leave it out"
        )
    log = attempt_log.current()
    if log is None:
        return
    if row.scope is not Scope.ROLLOUT and target is None:
        call = log.latest()
        if call is None:
            raise ValueError(
                f"there is no model call yet for a reward of scope '{row.scope}'; give it after"
                " the call, or with scope='rollout'"
            )
        row = replace(row, target=f"{PENDING}{call.id}")
    log.rewards.append(row)


def resolve_targets(
    rows: Iterable[Reward], trace: Trace | None, spans: Sequence[Span]
) -> list[Reward]:
    """The agent's and the verifier's `rows` as they are stored. `trace` is the attempt as the store
    knows it, `spans` what it left in the process.

    An agent's row about a call that failed, and so was never stored, is dropped with a warning.
    Raises VerifierError for a target that is no transition, or no role, of the attempt."""
    transitions = trace.transitions if trace else []
    seats = trace.rollout.seats if trace else {}  # a role may lose before its first call
    made = _by_call(transitions, spans)
    targets = {
        Scope.TRANSITION: {transition.id for transition in transitions},
        Scope.ROLE: {transition.role for transition in transitions}.union(seats),
    }
    resolved = []
    for row in rows:
        call = row.target.removeprefix(PENDING) if row.target else ""
        if row.target != call and call in made:
            about = made[call]
            target = about.id if row.scope is Scope.TRANSITION else about.role
            resolved.append(replace(row, target=target))
        elif row.target != call and call:
            logger.warning("a reward %r is about a model call that failed; it is dropped", row.name)
        elif row.scope is Scope.ROLLOUT or row.target in targets[row.scope]:
            resolved.append(row)
        else:
            known = ", ".join(sorted(targets[row.scope])[:20])
            raise VerifierError(
                f"the {row.source} gave the reward {row.name!r} to the {row.scope} {row.target!r},"
                " which this attempt does not have; it has"
                f" {known or 'none: the attempt made no model call'}"
            )
    return resolved


def _by_call(transitions: Iterable[Transition], spans: Sequence[Span]) -> Mapping[str, Transition]:
    """The transition of each call; the last, where one call sampled several. Spans that the user's
    own instrumentation put between call and request lead to it too."""
    parents = {span.id: span.parent for span in spans}
    found = {}
    for transition in transitions:
        span = transition.span
        while span is not None:
            found[span] = transition
            span = parents.get(span)
    return found
