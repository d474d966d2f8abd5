"""Features of the gateway: their protocol, and two features, candidate prompts and replays. The
gateway depends on no feature. It calls each when the server is created (`add_to`), and before the
first call of each attempt (`join`). Changes that a feature adds to an attempt apply only to that
attempt.

Candidate prompts replace the agent's prompt texts in requests to the model. Invariant: the rest of
a message, such as the date, is kept; unchanged messages are sent as the received bytes; neither the
agent nor the memory of its conversation sees the change.

A replay answers the first calls of a branch from the record of the rollout that it branches from,
and owns the recorded calls that are not replayed yet. Invariant: a call is answered from the record
only if the agent repeats a recorded request: the same role, conversation and tools. It gets the
recorded response, with the same tokens. The first request that is not in the record ends the
replay, because the agent or one of its tools behaves differently; later calls are sampled as in any
other rollout. In a branch without some roles (a counterfactual rollout) other policies play these
roles, and new requests do not end the replay. Recorded responses of a removed role are never
replayed, so the branch does not depend on that role's samples. Writer: the gateway's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import AnyStr

import msgspec
from aiohttp import web

from agentrl.core.errors import StoreError
from agentrl.core.types import INSTRUCTION_ROLES, Branch, Json, PromptText, Transition
from agentrl.runners.gateway.attribution import ActiveAttempt, ReceivedCall
from agentrl.runners.gateway.recorded import CUT, choices_of, question, question_of
from agentrl.runners.gateway.refusals import RefusedError, UpstreamError
from agentrl.runners.gateway.request import ModelRequest
from agentrl.runners.gateway.upstream import Upstream
from agentrl.store.base import Store

Change = Callable[[ReceivedCall], ReceivedCall]
"""Returns another call in place of the agent's; in `ActiveAttempt.changes`. A call is changed again
if it is parsed again."""

Answer = Callable[[ReceivedCall], Awaitable[Sequence[Transition]]]
"""Returns the choices that answer a call in place of the policy, or none; in
`ActiveAttempt.answers`."""

Record = Callable[[ReceivedCall, Transition], Transition]
"""Returns the row to be stored in place of a call's; in `ActiveAttempt.records`."""


class Feature:
    """Base class of features; does nothing."""

    def add_to(self, app: web.Application, upstream: Upstream) -> None:
        """Add middlewares and routes to the server before it starts, or adapters to the client of
        policy servers. Runs on the gateway's event loop."""

    def join(self, active: ActiveAttempt) -> None:
        """Add to the changes, answers and records of an attempt, or replace its image policy. Not
        called for a verifier's."""


MAX_OFFSET = 512  # bytes; a text that begins within them is replaced without parsing
SEARCHED_START = 64  # characters of a text to search for first
Object = dict[str, Json]


class PromptNotFoundError(Exception):
    """The agent's request lacks the text that a candidate replaces."""


class CandidatePrompts(Feature):
    """The feature that gives attempts of a candidate its prompt texts."""

    def join(self, active: ActiveAttempt) -> None:
        if prompts := active.attempt.prompts:
            active.roles = {*active.roles, *(prompt.role for prompt in prompts)}
            active.changes.append(_with_prompts)


def _with_prompts(call: ReceivedCall) -> ReceivedCall:
    try:
        apply_prompts(call.request, call.role, call.active.attempt.prompts)
    except PromptNotFoundError as error:
        call.fail(str(error))
        raise RefusedError(400, "prompt_not_found", str(error)) from None
    return call


def apply_prompts(request: ModelRequest, role: str, prompts: Sequence[PromptText]) -> None:
    """Replace the texts of `role` in a request. Raises PromptNotFoundError, naming the role."""
    for prompt in prompts:
        if prompt.role == role:
            _apply(request, prompt)


def _apply(request: ModelRequest, prompt: PromptText) -> None:
    key, items = ("tools", request.tools) if prompt.tool else ("messages", request.messages)
    if prompt.tool and all(_function(tool).get("name") != prompt.tool for tool in items):
        return
    sent = request.fields.get(key)
    if not prompt.seed and sent:
        items.insert(0, {"role": "system", "content": prompt.text})
        request.fields[key] = [items[0], *_list(sent)]
        return
    for at, item in enumerate(items if sent else ()):
        new = _tool(item, prompt) if prompt.tool else _message(item, prompt)
        if new is not None:
            items[at] = new
            changed = _spliced(sent, prompt) if at == 0 else None
            if changed is None:
                changed = _list(sent)
                changed[at] = new
            request.fields[key] = changed
            return
    where = f"description of tool {prompt.tool!r}" if prompt.tool else "system message"
    raise PromptNotFoundError(
        f"role {prompt.role!r}: no {where} of this call has the text of prompts.components."
        f"{prompt.component}, {prompt.seed[:60]!r}; give the text as the agent sends it"
    )


def _spliced(sent: Json, prompt: PromptText) -> Json:
    """Replace the seed in the encoded list, if it is in the first item; None otherwise. Avoids
    parsing about 40 kB again, which would take as long as reading the whole call."""
    if type(sent) is not msgspec.Raw:
        return None
    raw, old, new = memoryview(sent), _encoded(prompt.seed), _encoded(prompt.text)
    at = _find(raw[: MAX_OFFSET + len(old)].tobytes(), old)
    return None if at < 0 else msgspec.Raw(b"".join((raw[:at], new, raw[at + len(old) :])))


@lru_cache(maxsize=256)
def _encoded(text: str) -> bytes:
    return msgspec.json.encode(text)[1:-1]


def _list(sent: Json) -> list[Json]:
    return (
        msgspec.json.decode(sent, type=list[msgspec.Raw]) if type(sent) is msgspec.Raw else [*sent]
    )


def _message(message: Object, prompt: PromptText) -> Object | None:
    """Return the message with the candidate's text; None if it does not contain the seed."""
    content = message.get("content")
    if message.get("role") not in INSTRUCTION_ROLES:
        return None
    if isinstance(content, str):
        replaced = _replaced(content, prompt)
        return None if replaced is None else message | {"content": replaced}
    parts: list[Json] = content if isinstance(content, list) else []
    for index, part in enumerate(parts):
        text = part.get("text") if isinstance(part, dict) else None
        if isinstance(text, str) and (replaced := _replaced(text, prompt)) is not None:
            new = [*parts[:index], part | {"text": replaced}, *parts[index + 1 :]]
            return message | {"content": new}
    return None


def _tool(tool: Object, prompt: PromptText) -> Object | None:
    function = _function(tool)
    if function.get("name") != prompt.tool:
        return None
    replaced = _replaced(str(function.get("description", "")), prompt)
    return None if replaced is None else tool | {"function": function | {"description": replaced}}


def _function(tool: Object) -> Object:
    function = tool.get("function")
    return function if isinstance(function, dict) else {}


def _replaced(text: str, prompt: PromptText) -> str | None:
    at = _find(text, prompt.seed)
    return None if at < 0 else text[:at] + prompt.text + text[at + len(prompt.seed) :]


def _find(text: AnyStr, part: AnyStr) -> int:
    """Like `text.find(part)`, which is slow for a long part because of its preprocessing."""
    at = text.find(part[:SEARCHED_START])
    return at if at < 0 or text.startswith(part, at) else text.find(part)


class Replays(Feature):
    """The first calls of branches are answered from the record."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def join(self, active: ActiveAttempt) -> None:
        if active.attempt.rollout.branch is not None:
            active.answers.append(Replay(self._store, active.attempt.rollout.branch).answer)


class Replay:
    """Answers the calls of one attempt from the record, which is read at the first call."""

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
    """The record of an ended rollout: the calls `left` to replay, in order, and the calls after the
    branch point (`later`). Other policies play the roles in `without`; `left` does not contain
    their calls."""

    left: list[Transition]
    later: list[Transition]
    without: Collection[str] = ()

    def take(self, call: ModelRequest, role: str) -> list[Transition]:
        """Return the recorded calls that answer a request, one for each choice; an empty list if
        the policy must answer it. Concurrent calls may arrive in any order."""
        if not self.left:
            return []
        n = choices_of(call)
        requested = question_of(call, role)
        matching = [row for row in self.left if _recorded_question(row) == requested][:n]
        if matching and len(matching) == n:
            self.left = [row for row in self.left if row not in matching]
            return matching
        is_recorded = any(_recorded_question(row) == requested for row in (*self.left, *self.later))
        if not is_recorded and not self.without:
            self.left = []
        return []


async def recording(store: Store, branch: Branch) -> Recording:
    """Load the recording of a branch; empty if the record has been deleted."""
    trace = await store.trace(branch.rollout)
    return recorded_calls([] if trace is None else trace.transitions, branch)


def recorded_calls(calls: Sequence[Transition], branch: Branch) -> Recording:
    """Build the recording of a branch from a rollout's calls, up to the first truncated one."""
    complete = list(takewhile(lambda row: row.finish != CUT, calls[: branch.calls]))
    left = [row for row in complete if row.role not in branch.without]
    return Recording(left, [*calls[len(complete) :]], branch.without)


def _recorded_question(row: Transition) -> bytes:
    return question(row.role, row.messages, row.tools, row.prompt.tolist())
