"""Replays the first calls of a branch from the record of the rollout that it branches from.

Owns: the recorded calls that the attempt has not replayed yet.
Invariant: a call is answered from the record only if the agent repeats a recorded request: the same
role, conversation and tools. It gets the recorded response, with the same tokens. The first request
that is not in the record ends the replay, because the agent or one of its tools behaves
differently; later calls are sampled as in any other rollout.
In a branch without some roles (a counterfactual rollout) other policies play these roles, and new
requests do not end the replay. Recorded responses of a removed role are never replayed, so the
branch does not depend on that role's samples.
Writer: the gateway's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile

from agentrl.errors import StoreError
from agentrl.runners.gateway.attribution import ActiveAttempt, ReceivedCall
from agentrl.runners.gateway.features import Feature
from agentrl.runners.gateway.recorded import CUT, choices_of, question, question_of
from agentrl.runners.gateway.refusals import UpstreamError
from agentrl.runners.gateway.request import ModelRequest
from agentrl.store.base import Store
from agentrl.types import Branch, Transition


class Replays(Feature):
    """The feature: attempts of branches are answered from the record first."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def join(self, active: ActiveAttempt) -> None:
        if active.attempt.rollout.branch is not None:
            active.answers.append(Replay(self._store, active.attempt.rollout.branch).answer)


class Replay:
    """Answers the calls of one attempt from the record, which the first of them reads."""

    def __init__(self, store: Store, branch: Branch) -> None:
        self._store, self._branch = store, branch
        self._reading: asyncio.Task[Recording] | None = None

    async def answer(self, call: ReceivedCall) -> Sequence[Transition]:
        """Return the recorded calls that answer a call: see `Recording.take`."""
        if self._reading is None:
            self._reading = asyncio.create_task(recording(self._store, self._branch))
        try:
            recorded = await asyncio.shield(self._reading)
        except StoreError as error:
            why = f"the record of rollout {self._branch.rollout} cannot be read: {error}"
            call.fail(why)
            raise UpstreamError(why, final=True) from error
        return recorded.take(call.request, call.role)


@dataclass(slots=True)
class Recording:
    """The record of an ended rollout: the calls `left` to replay, in order, and those after the
    branch point (`later`). Other policies play the roles in `without`; `left` has no calls of
    these."""

    left: list[Transition]
    later: list[Transition]
    without: Collection[str] = ()

    def take(self, call: ModelRequest, role: str) -> list[Transition]:
        """Return the recorded calls that answer a request, one for each choice; an empty list if
        the policy has to answer it. Concurrent calls may arrive in any order."""
        if not self.left:
            return []
        n = choices_of(call)
        asked = question_of(call, role)
        found = [row for row in self.left if _recorded_question(row) == asked][:n]
        if found and len(found) == n:
            self.left = [row for row in self.left if row not in found]
            return found
        known = any(_recorded_question(row) == asked for row in (*self.left, *self.later))
        if not known and not self.without:
            self.left = []
        return []


async def recording(store: Store, branch: Branch) -> Recording:
    """Load the recording of a branch; empty if the record has been deleted."""
    trace = await store.trace(branch.rollout)
    return recorded_calls([] if trace is None else trace.transitions, branch)


def recorded_calls(calls: Sequence[Transition], branch: Branch) -> Recording:
    """Build the recording of a branch from a rollout's calls, up to the first one that was cut."""
    whole = list(takewhile(lambda row: row.finish != CUT, calls[: branch.calls]))
    left = [row for row in whole if row.role not in branch.without]
    return Recording(left, [*calls[len(whole) :]], branch.without)


def _recorded_question(row: Transition) -> bytes:
    return question(row.role, row.messages, row.tools, row.prompt.tolist())
