"""Sessions of a deployed agent, recorded by `agentrl gateway serve`, and users' feedback on them.

A session is an evaluation rollout with the step `SESSION`: it is never trained on, a prune may
remove it after its end, and `agentrl data` mines and labels it.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from agentrl.core.errors import Invalid, NotFound
from agentrl.core.types import CORRECTION, FEEDBACK, Record, Reward, Scope, StepReward
from agentrl.store.base import Store

RENEWAL_INTERVAL = 10.0  # seconds: a session's lease is renewed


class Feedback(Record, frozen=True):
    """Feedback on a session or on one `call`, an index that may be negative.

    `value`: 1 or 0 for a thumb, 0 to 1 for a rating; an observed outcome, such as whether the
    answer was used, has its own `name`. `correction`: the answer that the agent should have
    given."""

    session: str
    call: int | None = None  # default: the session, or the last call for a correction
    name: str = FEEDBACK
    value: float | None = None
    correction: str | None = None
    note: str = ""


def session_group(run: str, session: str) -> str:
    """The group id of a session's rollouts. The session's name may be private, so it is hashed."""
    return f"{run}/{blake2b(session.encode(), digest_size=12).hexdigest()}"


async def give_feedback(store: Store, run: str, feedback: Feedback, group: str = "") -> str:
    """Store feedback as rewards of a session, at any time; returns the session's rollout. A later
    value replaces an earlier one of the same name. group: of the session's rollouts. Raises
    NotFound for an unrecorded session or call, Invalid for feedback without value and
    correction."""
    rows = await store.rollouts(run, group=group or session_group(run, feedback.session))
    calls = (await store.calls([rows[-1].id])).get(rows[-1].id, []) if rows else []
    index = -1 if feedback.call is None else feedback.call
    if not -len(calls) <= index < len(calls):
        raise NotFound(f"run {run!r} has no call {index} of session {feedback.session!r}")
    if feedback.value is None and feedback.correction is None:
        raise Invalid("feedback needs a value, a correction or both")
    target = calls[index].id
    about: dict[str, Any] = {"scope": Scope.TRANSITION, "target": target, "source": FEEDBACK}
    rewards = []
    if feedback.value is not None:
        where: dict[str, Any] = {"source": FEEDBACK} if feedback.call is None else about
        rewards.append(
            Reward(name=feedback.name, value=feedback.value, note=feedback.note, **where)
        )
    if feedback.correction is not None:
        rewards.append(Reward(name=CORRECTION, value=0.0, note=feedback.correction, **about))
    await store.add_rewards([StepReward(rollout=rows[-1].id, reward=row) for row in rewards])
    return rows[-1].id
