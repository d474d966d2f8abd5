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

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import msgspec

from agentrl.runners.dialects.base import TEXT, UntranslatableError, data_event
from agentrl.runners.gateway.capture import ModelRequest, value
from agentrl.runners.gateway.routing import Route
from agentrl.store.base import Store
from agentrl.types import Branch, Json, Transition, float32, int32

MOST_CHOICES = 16_384  # per call, as in vLLM
CUT = "cut"  # `finish` of a choice whose end the agent did not receive
RECORD = Route(policy="record", version=None, base_url="the record of a rollout", model="")


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
        n = _choices(call)
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


def fixed_answer(text: str, call: ModelRequest) -> list[Transition]:
    """Return a fixed text as recorded calls without tokens, one for each requested choice. The
    stored transition is built from the response, not from these rows."""
    said = {"role": "assistant", "content": text}
    nothing: Any = {"prompt": int32(), "completion": int32(), "logprobs": float32()}
    row = Transition(str(call.index), "", 0, **nothing, exact=False, answer=said)
    return [row] * _choices(call)


def whole(rows: Sequence[Transition], call: ModelRequest) -> bytes:
    """Encode recorded choices as a policy server's response."""
    return msgspec.json.encode(_completion(rows, call))


async def stream(rows: Sequence[Transition], call: ModelRequest) -> AsyncIterator[bytes]:
    """Yield recorded choices as server-sent events: two chunks each, the second with its end."""
    body, text = _completion(rows, call), call.dialect is TEXT
    options = value(call.fields, "stream_options") or {}
    if not isinstance(options, dict):
        raise UntranslatableError("stream_options", f"{options!r:.80} is no object")
    choices, usage = body.pop("choices"), body.pop("usage")
    if not text:
        body["object"] = "chat.completion.chunk"
    for choice in choices:
        last: dict[str, Json] = {"text": ""} if text else {"delta": {}}
        last |= {"index": choice["index"], "finish_reason": choice["finish_reason"]}
        if not text:
            choice["delta"] = delta = dict(choice.pop("message"))
            if calls := delta.get("tool_calls"):
                delta["tool_calls"] = [{"index": i} | call for i, call in enumerate(calls)]
        for part in (choice | {"finish_reason": None}, last):
            yield data_event(body | {"choices": [part]})
    if options.get("include_usage"):
        yield data_event(body | {"choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


def _choices(call: ModelRequest) -> int:
    """How many are asked for. Raises UntranslatableError for what no server would take."""
    n = value(call.fields, "n") or 1
    if type(n) is not int or not 0 < n <= MOST_CHOICES:
        raise UntranslatableError("n", f"{n!r:.80} is no number from 1 to {MOST_CHOICES}")
    return n


def question_of(call: ModelRequest, role: str) -> bytes:
    return _question(role, call.messages, call.tools, value(call.fields, "prompt"))


def _recorded_question(row: Transition) -> bytes:
    return _question(row.role, row.messages, row.tools, row.prompt.tolist())


def _question(role: str, messages: list[dict[str, Json]], tools: Json, prompt: Json) -> bytes:
    """Return a key that is equal for equivalent requests. A prompt of token ids replaces missing
    messages; ids of tool calls are ignored, because agents may choose them freely."""
    asked = [role, [_without_ids(message) for message in messages] or prompt, tools]
    return msgspec.json.encode(asked, order="deterministic")


def _without_ids(message: dict[str, Json]) -> dict[str, Json]:
    plain = {name: said for name, said in message.items() if name != "tool_call_id"}
    if isinstance(calls := plain.get("tool_calls"), list):
        plain["tool_calls"] = [
            {k: v for k, v in call.items() if k != "id"} if isinstance(call, dict) else call
            for call in calls
        ]
    return plain


def _completion(rows: Sequence[Transition], call: ModelRequest) -> dict[str, Json]:
    text, row = call.dialect is TEXT, rows[0]
    choices = []
    for index, choice in enumerate(rows):
        answer = choice.answer or {}
        said = {"text": answer.get("content") or ""} if text else {"message": answer}
        head = {"index": index, "finish_reason": choice.finish}
        choices.append(head | _tokens(choice, text) | said)
    prompt, completion = len(row.prompt), sum(len(choice.completion) for choice in rows)
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {
        "id": f"cmpl-{row.id}",
        "object": "text_completion" if text else "chat.completion",
        "created": int(row.started),
        "model": "",
        "choices": choices,
        "prompt_token_ids": row.prompt.tolist(),
        "usage": usage | {"total_tokens": prompt + completion},
    }


def _tokens(row: Transition, text: bool) -> dict[str, Json]:
    """Return token ids and log-probs. The record has no token texts, so tokens are named by their
    ids, like vLLM's `return_tokens_as_token_ids`."""
    if not row.exact:
        return {"logprobs": None}
    names = [f"token_id:{token}" for token in row.completion]
    logprobs: dict[str, Json] = {"tokens": names, "token_logprobs": row.logprobs.tolist()}
    if not text:
        rest: dict[str, Json] = {"bytes": None, "top_logprobs": []}
        pairs = zip(names, row.logprobs, strict=True)
        logprobs = {"content": [{"token": name, "logprob": x, **rest} for name, x in pairs]}
    return {"token_ids": row.completion.tolist(), "logprobs": logprobs}
