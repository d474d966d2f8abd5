"""Whatever an agent says to a translated API is a chat completion or a refusal, never a crash."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.runners.dialects import (
    DIALECTS,
    UntranslatableError,
    google,
    messages,
    of,
    responses,
)
from agentrl.runners.dialects.base import CHAT
from agentrl.runners.dialects.conversation import ConversationMemory
from agentrl.runners.gateway.request import read_request

NAMES = sorted(
    {*responses.ALLOWED, *responses.IDLE, *responses.TRANSLATED}
    | {*messages.ALLOWED, *messages.IDLE, *messages.TRANSLATED}
    | {*google.ALLOWED, *google.IDLE, *google.TRANSLATED, "parts", "functionCall", "response"}
    | {"functionResponse", "functionDeclarations", "functionCallingConfig", "thought"}
    | {"type", "role", "content", "text", "source", "output", "name", "format", "effort", "stream"}
)
WORDS = ["user", "assistant", "message", "function_call", "function", "tool_use", "tool_result"]
WORDS += ["thinking", "image", "base64", "reasoning", "input_text", "text", "json_schema", "tool"]
WORDS += ["model", "ANY", "STRING"]
TRANSLATED = [responses.DIALECT, messages.DIALECT, google.dialect("m", stream=False)]
SAID = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
SAID |= {"input": "x"}
CONTENTS = {"contents": [{"parts": [{"text": "x"}]}]}
LEAVES = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(WORDS)
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5)
    ),
    max_leaves=30,
)
BODIES = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6)


@settings(max_examples=200, deadline=None)
@given(body=BODIES, dialect=st.sampled_from(TRANSLATED))
def test_any_request(body: dict[str, Any], dialect: Any) -> None:
    said = CONTENTS if dialect.tells_errors else SAID
    try:
        call = read_request(dialect, json.dumps(said | body).encode(), ConversationMemory(), 0)
    except UntranslatableError:
        return
    assert call.messages
    assert all("role" in message for message in call.messages)


@settings(max_examples=150, deadline=None)
@given(chunk=JSON, dialect=st.sampled_from(TRANSLATED))
def test_any_answer(chunk: Any, dialect: Any) -> None:
    said = CONTENTS if dialect.tells_errors else SAID
    call = read_request(dialect, json.dumps(said).encode(), ConversationMemory(), 0)
    assert call.translation is not None
    answer = {"model": "m", "choices": [{"message": chunk, "finish_reason": "stop"}]}
    try:
        whole = call.translation.whole(answer, 1)
    except (AttributeError, LookupError, TypeError, ValueError):
        return
    assert {"id", "responseId"} & msgspec.json.decode(whole).keys()


@pytest.mark.parametrize("dialect", [CHAT, responses.DIALECT, messages.DIALECT])
def test_text_that_is_no_unicode(dialect: Any) -> None:
    said = b'[{"role": "user", "content": "\\ud800"}]'
    raw = b'{"model": "m", "max_tokens": 5, "input": ' + said + b', "messages": ' + said + b"}"
    with pytest.raises(msgspec.DecodeError):
        read_request(dialect, raw, ConversationMemory(), 0)


def test_the_dialect_of_a_path() -> None:
    found = {of(f"/a/x/v1/{dialect.route}") for dialect in DIALECTS}
    assert found == set(DIALECTS)
    assert of("/v1/rewards") is CHAT
    assert of("/v1/rewards", anthropic=True) is messages.DIALECT
    assert of("/v1/messages/count_tokens") is messages.DIALECT
    assert of("/a/x/v1beta/models/m:countTokens") is google.DIALECT
