"""Sessions of a deployed agent, which `agentrl gateway serve` records, and what people say of them.

A session is a rollout of evaluation with the step `SESSION`: no step trains it, a prune may remove
it once it has ended, and `agentrl data` mines and labels it.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from agentrl.errors import Invalid, NotFound
from agentrl.store.base import Store
from agentrl.types import Record, Reward, Scope, StepReward

SESSION = -1  # step of rollouts that are sessions
FEEDBACK, CORRECTION = "feedback", "correction"  # rewards; the note of the second is the text


class Feedback(Record, frozen=True):
    """What is known of a session, or of its `call`: a number from 0, from the end if negative.

    `value`: a thumb is 1 or 0, a rating from 0 to 1; an outcome that was seen, such as whether the
    answer was used, has a `name` of its own. `correction`: what the answer should have been."""

    session: str
    call: int | None = None  # of a correction by default the last
    name: str = FEEDBACK
    value: float | None = None
    correction: str | None = None
    note: str = ""


def session_group(run: str, session: str) -> str:
    """The group of the rollouts of a session, whose name may be private: it is hashed."""
    return f"{run}/{blake2b(session.encode(), digest_size=12).hexdigest()}"


async def give_feedback(store: Store, run: str, said: Feedback) -> str:
    """Reward a session of `run`, at any time; returns its rollout. A later value of the same name
    takes the place of an earlier one. Raises NotFound for a session or call that was not recorded,
    Invalid for feedback that says nothing."""
    rows = await store.rollouts(run, group=session_group(run, said.session))
    calls = (await store.calls([rows[-1].id])).get(rows[-1].id, []) if rows else []
    place = -1 if said.call is None else said.call
    if not -len(calls) <= place < len(calls):
        raise NotFound(f"run {run!r} has no call {place} of session {said.session!r}")
    if said.value is None and said.correction is None:
        raise Invalid("feedback has a value, a correction or both")
    about: dict[str, Any] = {
        "scope": Scope.TRANSITION,
        "target": calls[place].id,
        "source": FEEDBACK,
    }
    given = []
    if said.value is not None:
        where: dict[str, Any] = {"source": FEEDBACK} if said.call is None else about
        given.append(Reward(name=said.name, value=said.value, note=said.note, **where))
    if said.correction is not None:
        given.append(Reward(name=CORRECTION, value=0.0, note=said.correction, **about))
    await store.add_rewards([StepReward(rollout=rows[-1].id, reward=row) for row in given])
    return rows[-1].id
