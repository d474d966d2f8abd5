"""Whatever an agent says to a translated API is a chat completion or a refusal, never a crash."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import make_mocked_request
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.runners.apis import google, google_json, messages, responses
from agentrl.runners.apis.base import CHAT, Dialect, UntranslatableError
from agentrl.runners.apis.chat import ConversationMemory
from agentrl.runners.gateway.apis import GOOGLE, OWN, dialect_of
from agentrl.runners.gateway.request import read_request

NAMES = sorted(
    {*responses.ALLOWED, *responses.IDLE, *responses.TRANSLATED}
    | {*messages.ALLOWED, *messages.IDLE, *messages.TRANSLATED}
    | {*google_json.REQUEST, *google_json.CONFIG, *google_json.PART, *google_json.RESULT}
    | {*google_json.DECLARATION, "function_declarations", "function_call", "parts", "thought"}
    | {"functionDeclarations", "functionCallingConfig", "any_of", "nullable", "properties"}
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
    said = CONTENTS if dialect.reports_errors else SAID
    try:
        call = read_request(dialect, json.dumps(said | body).encode(), ConversationMemory(), 0)
    except UntranslatableError:
        return
    assert call.messages
    assert all("role" in message for message in call.messages)


@settings(max_examples=150, deadline=None)
@given(chunk=JSON, dialect=st.sampled_from(TRANSLATED))
def test_any_answer(chunk: Any, dialect: Any) -> None:
    said = CONTENTS if dialect.reports_errors else SAID
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
    def of(path: str, **headers: str) -> Dialect:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return dialect_of(make_mocked_request("POST", path, headers=named))

    assert {of(f"/a/x{path}") for path in OWN} == {CHAT}  # both have OpenAI's errors
    assert of("/a/x/v1/responses") is responses.DIALECT
    assert of("/a/x/v1/messages") is messages.DIALECT
    assert of("/a/x/messages") is messages.DIALECT
    assert of("/v1/rewards") is CHAT
    assert of("/v1/rewards", anthropic_version="2023-06-01") is messages.DIALECT
    assert of("/v1/messages/count_tokens") is messages.DIALECT
    assert of("/v1/messages/batches") is messages.DIALECT
    assert of("/a/x/v1beta/models/m:countTokens") is GOOGLE.dialect
    assert of("/v1/models/m:countTokens", anthropic_version="2023-06-01") is GOOGLE.dialect
    assert of("/v1beta/models/m") is CHAT
    assert of("/v1beta/models/m", x_goog_api_key="k") is GOOGLE.dialect
