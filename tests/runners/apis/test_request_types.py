"""No field of a request is dropped in silence: those of the SDKs' types are sent, listed
or is refused."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import Any

import pytest
from anthropic.types.beta.message_create_params import MessageCreateParamsNonStreaming as Messages
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming

from agentrl.runners.apis import messages, responses
from agentrl.runners.apis.base import Dialect, UntranslatableError
from agentrl.runners.apis.chat import ConversationMemory
from agentrl.runners.gateway.request import NEUTRAL, PLAIN, read_request
from tests.runners.apis.request_types import TEXT, samples

USER = {"role": "user", "content": "x"}
# What says nothing to a policy, or asks for what is so anyway.
RESPONSES_WITHOUT_EFFECT = (
    r"input\[\](\.\w+)?\.(id|status|type)",
    r".*\.prompt_cache_breakpoint.*",
    r".*\.output_text\.logprobs\[\].*",  # of an answer, that come back
    r".*\.format\.text(\.type)?",
    r"include\[\]",  # what is there anyway
    r"input\[\]\.reasoning\.(encrypted_content|summary.*)",  # of another server, beside the thought
    r"reasoning\.mode|store|tool_choice|truncation",  # their usual values
)
MESSAGES_WITHOUT_EFFECT = (
    r".*\.cache_control.*",
    r"messages\[\]\.clear_at",  # never, its usual value; test_harness_fields has the other
    r".*\.thinking\.signature",  # of another server, beside the thought
    r"service_tier|speed|thread\.create.*",  # their usual values
    r"thinking\.(adaptive.*|enabled\.display)",  # likewise
    r"tool_choice\.(auto|none).*",  # without tools
    r".*\.type",
)


def responses_request(body: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(body.get("input"), list):
        return {"input": "x"} | body
    call = {"type": "function_call", "call_id": TEXT, "name": TEXT, "arguments": "{}"}
    thought = {"content": [{"type": "reasoning_text", "text": "hm"}]}
    items = [(thought if item.get("type") == "reasoning" else {}) | item for item in body["input"]]
    return body | {"input": [USER, call, *items]}


def messages_request(body: dict[str, Any]) -> dict[str, Any]:
    call = {"type": "tool_use", "id": TEXT, "name": TEXT, "input": {}}
    said = body["messages"]
    end = [USER] if said[-1]["role"] in ("assistant", "system") else []
    return body | {"messages": [USER, {"role": "assistant", "content": [call]}, *said, *end]}


def outcome(dialect: Dialect, body: dict[str, Any]) -> tuple[str, list[str]] | None:
    """What of a request is sent, and what is listed; None if it is refused."""
    try:
        call = read_request(dialect, json.dumps(body).encode(), ConversationMemory(), 0)
    except UntranslatableError:
        return None
    return json.dumps(call.fields, sort_keys=True), call.ignored


@pytest.mark.parametrize(
    ("kind", "dialect", "request_of", "without_effect", "fields"),
    [
        pytest.param(
            *(ResponseCreateParamsNonStreaming, responses.DIALECT, responses_request),
            *(RESPONSES_WITHOUT_EFFECT, 700),
            id="responses",
        ),
        pytest.param(
            *(Messages, messages.DIALECT, messages_request),
            *(MESSAGES_WITHOUT_EFFECT, 1500),
            id="messages",
        ),
    ],
)
def test_no_field_is_dropped_in_silence(
    kind: Any, dialect: Dialect, request_of: Any, without_effect: tuple[str, ...], fields: int
) -> None:
    effects: dict[str, set[str]] = defaultdict(set)
    passed_on: set[str] = set()
    for path, value, without in samples(kind):
        found = outcome(dialect, request_of(value))
        passed_on |= json.loads(found[0]).keys() if found else set()
        other = None if without is None else outcome(dialect, request_of(without))
        if found is None or other is None:
            effects[path].add("refused" if found is None else "sent")
        elif found[0] != other[0]:
            effects[path].add("sent")
        else:
            names = {re.findall(r"\w+", entry)[-1] for entry in found[1]}
            listed = found[1] != other[1] or names & {*re.findall(r"\w+", path)}
            effects[path].add("listed" if listed else "silent")
    usual = re.compile("|".join(f"({one})" for one in without_effect))
    silent = [p for p, how in effects.items() if "silent" in how and not usual.fullmatch(p)]
    assert len(effects) > fields
    assert silent == []
    # A policy server knows no others. `betas` is a header's.
    assert passed_on - PLAIN - NEUTRAL.keys() <= {"betas"}


def test_what_a_responses_request_lists() -> None:
    function = {"type": "function", "name": "f", "strict": False, "defer_loading": True}
    space = {"type": "namespace", "name": "s", "description": "files", "tools": [function]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "async": True}
    part = {"type": "output_text", "text": "a", "annotations": [{"type": "file_path"}]}
    said = {"role": "assistant", "content": [part | {"logprobs": [1]}], "phase": "commentary"}
    include = ["reasoning.encrypted_content", "file_search_call.results"]
    body = {"input": [USER, call, said], "tools": [space], "include": include}
    sent, listed = outcome(responses.DIALECT, body | {"truncation": "auto"}) or ("", [])
    assert listed == [
        "truncation",
        "include: file_search_call.results",
        "input.function_call.async",
        "input.message.content.output_text.annotations",
        "input.message.phase",
        "tools.namespace.description",
        "tools.function.defer_loading",
    ]
    offered = {"type": "function", "function": {"name": "s__f", "strict": False}}
    assert json.loads(sent)["tools"] == [offered]


def test_what_a_messages_request_lists() -> None:
    text = {"type": "text", "text": "a", "citations": [{"type": "page_location"}]}
    result = {"type": "tool_result", "tool_use_id": TEXT, "content": [text]}
    thinking = {"type": "adaptive", "block_binding": {"prefix_mismatch_behavior": "error"}}
    body = {"max_tokens": 5, "system": [text], "thinking": thinking}
    asked = messages_request(body | {"messages": [{"role": "user", "content": [result]}]})
    assert (outcome(messages.DIALECT, asked) or ("", []))[1] == [
        "thinking.block_binding",
        "messages.tool_result.text.citations",
        "system.text.citations",
    ]


@pytest.mark.parametrize(
    ("thinking", "listed"),
    [
        ({"type": "adaptive"}, []),
        ({"type": "enabled", "budget_tokens": 1024}, ["thinking.budget_tokens"]),
        (
            {"type": "enabled", "budget_tokens": 9, "display": "omitted"},
            ["thinking", "thinking.budget_tokens"],
        ),
        ({"type": "disabled"}, ["thinking"]),
    ],
)
def test_how_long_to_think_is_the_policys_decision(thinking: Any, listed: list[str]) -> None:
    body = {"max_tokens": 5, "messages": [USER], "thinking": thinking}
    asked = read_request(messages.DIALECT, json.dumps(body).encode(), ConversationMemory(), 0)
    assert asked.ignored == listed
    assert not asked.fields.keys() & {"thinking", "reasoning_effort"}


def test_thinking_that_the_policy_does_not_have_is_refused_by_its_name() -> None:
    body = {"max_tokens": 5, "messages": [USER], "thinking": {"type": "between_tools"}}
    with pytest.raises(UntranslatableError, match="between_tools"):
        read_request(messages.DIALECT, json.dumps(body).encode(), ConversationMemory(), 0)
