"""Recorded calls in the format of a policy server's responses, and the keys of their requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from agentrl.core.types import Json, Transition, float32, int32
from agentrl.runners.apis.base import TEXT, UntranslatableError, data_event
from agentrl.runners.gateway.request import ModelRequest, value
from agentrl.runners.gateway.upstream import Route

MAX_CHOICES = 16_384  # per call, as in vLLM
CUT = "cut"  # `finish` of a choice whose end the agent did not receive
RECORD = Route(policy="record", version=None, base_url="the record of a rollout", model="")


def fixed_answer(text: str, call: ModelRequest) -> list[Transition]:
    """Return a fixed text as recorded calls without tokens, one for each requested choice. The
    stored call is built from the response, not from these rows."""
    message = {"role": "assistant", "content": text}
    nothing: Any = {"prompt": int32(), "completion": int32(), "logprobs": float32()}
    row = Transition(str(call.index), "", 0, **nothing, exact=False, answer=message)
    return [row] * choices_of(call)


def whole(rows: Sequence[Transition], call: ModelRequest) -> bytes:
    """Encode recorded choices as a policy server's response."""
    return msgspec.json.encode(_completion(rows, call))


async def stream(rows: Sequence[Transition], call: ModelRequest) -> AsyncIterator[bytes]:
    """Yield recorded choices as server-sent events: two chunks each, the second with its end."""
    body, text = _completion(rows, call), call.dialect is TEXT
    options = value(call.fields, "stream_options") or {}
    if not isinstance(options, dict):
        raise UntranslatableError("stream_options", f"{options!r:.80} is not an object")
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


def choices_of(call: ModelRequest) -> int:
    """The number of requested choices. Raises UntranslatableError for an invalid number."""
    n = value(call.fields, "n") or 1
    if type(n) is not int or not 0 < n <= MAX_CHOICES:
        raise UntranslatableError("n", f"{n!r:.80} is not a number from 1 to {MAX_CHOICES}")
    return n


def question_of(call: ModelRequest, role: str) -> bytes:
    return question(role, call.messages, call.tools, value(call.fields, "prompt"))


def question(role: str, messages: list[dict[str, Json]], tools: Json, prompt: Json) -> bytes:
    """Return a key that is equal for equivalent requests. A prompt of token ids replaces missing
    messages; ids of tool calls are ignored, because agents may choose them freely."""
    parts = [role, [_without_ids(message) for message in messages] or prompt, tools]
    return msgspec.json.encode(parts, order="deterministic")


def _without_ids(message: dict[str, Json]) -> dict[str, Json]:
    plain = {name: content for name, content in message.items() if name != "tool_call_id"}
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
        output = {"text": answer.get("content") or ""} if text else {"message": answer}
        head = {"index": index, "finish_reason": choice.finish}
        choices.append(head | _tokens(choice, text) | output)
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
        unknown: dict[str, Json] = {"bytes": None, "top_logprobs": []}
        pairs = zip(names, row.logprobs, strict=True)
        logprobs = {"content": [{"token": name, "logprob": x, **unknown} for name, x in pairs]}
    return {"token_ids": row.completion.tolist(), "logprobs": logprobs}
