"""Answers the first calls of a branch from the record of the rollout that it branches from.

Owns: which calls of a record its attempt has still to repeat.
Always true: a call is answered from the record only where the agent asks what it asked then, as the
same role, in the same conversation with the same tools; it gets the policy's own answer of then,
with the same tokens. The first question that is not in the record ends the replay: the agent, or
one of its tools, does not behave as it did, and what follows is sampled like any other rollout.
In a branch without some roles (a counterfactual rollout) other policies play these roles, and new
questions do not end the replay. No recorded answer of a removed role is ever repeated, so the
branch does not depend on what that role sampled.
Who may write: the gateway's event loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import msgspec

from agentrl.runners.dialects.openai import TEXT
from agentrl.runners.gateway.capture import ModelRequest, value
from agentrl.runners.gateway.routing import Route
from agentrl.store.base import Store
from agentrl.types import Branch, Json, Transition, float32, int32

CUT = "cut"  # the `finish` of a choice whose end the agent did not wait for
RECORD = Route(policy="record", version=None, base_url="the record of a rollout", model="")


@dataclass(slots=True)
class Recording:
    """Of a rollout that has ended. `left` are its calls still to be repeated, in order, `later`
    those that it made from the branch on. `without`: roles that others play; none of theirs is
    left."""

    left: list[Transition]
    later: list[Transition]
    without: Collection[str] = ()

    def take(self, call: ModelRequest, role: str) -> list[Transition]:
        """The record of a request, one call per choice; empty where the policy is to be asked.

        Calls that the agent makes at the same time come in any order."""
        if not self.left:
            return []
        question, n = _question_of(call, role), value(call.fields, "n") or 1
        found = [row for row in self.left if _recorded_question(row) == question][:n]
        if found and len(found) == n:
            self.left = [row for row in self.left if row not in found]
            return found
        known = any(_recorded_question(row) == question for row in (*self.left, *self.later))
        if not known and not self.without:
            self.left = []
        return []


async def recording(store: Store, branch: Branch) -> Recording:
    """What a branch repeats. A record that is gone has nothing to repeat."""
    trace = await store.trace(branch.rollout)
    return recorded_calls([] if trace is None else trace.transitions, branch)


def recorded_calls(calls: Sequence[Transition], branch: Branch) -> Recording:
    """What a branch repeats of these calls. One whose end the agent did not wait for ends it."""
    whole = list(takewhile(lambda row: row.finish != CUT, calls[: branch.calls]))
    left = [row for row in whole if row.role not in branch.without]
    return Recording(left, [*calls[len(whole) :]], branch.without)


def repeat_call(row: Transition, call: ModelRequest, **known: Any) -> Transition:
    """A recorded call as one of the attempt that repeats it."""
    source = row.repeats or row.id
    return msgspec.structs.replace(
        row, repeats=source, messages=call.messages, tools=call.tools, **known
    )


def fixed_answer(text: str, call: ModelRequest) -> list[Transition]:
    """A fixed answer as if it were recorded, for every choice that is asked for; it has no tokens.

    It is no call of an attempt: what is stored of it is read from the answer."""
    row = Transition(
        id=str(call.index),
        attempt="",
        index=0,
        prompt=int32(),
        completion=int32(),
        logprobs=float32(),
        exact=False,
        answer={"role": "assistant", "content": text},
    )
    return [row] * (value(call.fields, "n") or 1)


def whole(rows: Sequence[Transition], call: ModelRequest) -> bytes:
    """The recorded choices as a policy server would send them."""
    text = call.dialect is TEXT
    choices = [
        {"index": index, "finish_reason": row.finish, **_tokens(row, text), **_content(row, text)}
        for index, row in enumerate(rows)
    ]
    return msgspec.json.encode(_body(rows, "" if text else "chat.completion", choices, usage=True))


async def stream(rows: Sequence[Transition], call: ModelRequest) -> AsyncIterator[bytes]:
    """The same as server-sent events."""
    text, options = call.dialect is TEXT, value(call.fields, "stream_options") or {}
    kind = "" if text else "chat.completion.chunk"
    for index, row in enumerate(rows):
        said = _content(row, text) if text else {"delta": _delta(row.answer or {})}
        nothing: dict[str, Json] = {"text": ""} if text else {"delta": {}}
        first = {"index": index, "finish_reason": None, **_tokens(row, text), **said}
        last = {"index": index, "finish_reason": row.finish, **nothing}
        for choice in (first, last):
            yield _event(_body(rows, kind, [choice]))
    if options.get("include_usage"):
        yield _event(_body(rows, kind, [], usage=True))
    yield b"data: [DONE]\n\n"


def _question_of(call: ModelRequest, role: str) -> bytes:
    return _question(role, call.messages, call.tools, value(call.fields, "prompt"))


def _recorded_question(row: Transition) -> bytes:
    return _question(row.role, row.messages, row.tools, row.prompt.tolist())


def _question(role: str, messages: list[dict[str, Json]], tools: Json, prompt: Json) -> bytes:
    """What makes two requests the same. A prompt of token ids is told by these; ids of tool calls
    are left out, because agents may number them as they like."""
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


def _body(
    rows: Sequence[Transition], kind: str, choices: list[Json], *, usage: bool = False
) -> dict[str, Json]:
    row = rows[0]
    prompt, completion = len(row.prompt), sum(len(row.completion) for row in rows)
    body = {
        "id": f"cmpl-{row.id}",
        "object": kind or "text_completion",
        "created": int(row.started),
        "model": "",
        "choices": choices,
        "prompt_token_ids": row.prompt.tolist(),
    }
    if usage:
        total = prompt + completion
        body["usage"] = {
            "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total
        }  # fmt: skip
    return body


def _content(row: Transition, text: bool) -> dict[str, Json]:
    answer = row.answer or {}
    return {"text": answer.get("content") or ""} if text else {"message": answer}


def _delta(answer: dict[str, Json]) -> dict[str, Json]:
    calls = answer.get("tool_calls")
    if not calls:
        return answer
    return answer | {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]}


def _tokens(row: Transition, text: bool) -> dict[str, Json]:
    """Ids and log-probs; of the tokens' texts there is no record, so they are named by their ids,
    as vLLM's `return_tokens_as_token_ids` does."""
    if not row.exact:
        return {"logprobs": None}
    names = [f"token_id:{token}" for token in row.completion]
    logprobs: dict[str, Json] = {"tokens": names, "token_logprobs": row.logprobs.tolist()}
    if not text:
        rest: dict[str, Json] = {"bytes": None, "top_logprobs": []}
        pairs = zip(names, row.logprobs, strict=True)
        logprobs = {"content": [{"token": name, "logprob": x, **rest} for name, x in pairs]}
    return {"token_ids": row.completion.tolist(), "logprobs": logprobs}


def _event(body: dict[str, Json]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
