"""Sampling that a learner does not compute is recorded with the call, and said."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from aiohttp import web

from agentrl.runners.apis.base import CHAT, TEXT
from agentrl.runners.apis.chat import ConversationMemory
from agentrl.runners.gateway.request import read_request

USER = {"role": "user", "content": "q"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"name": "f", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
NAMED = {"type": "function", "function": {"name": "f"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


def processors(**body: Any) -> dict[str, str]:
    dialect = TEXT if "prompt" in body else CHAT
    raw = json.dumps(body).encode()
    return read_request(dialect, raw, ConversationMemory(), 0).processors


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("frequency_penalty", 1.5),
        ("presence_penalty", -0.1),
        ("repetition_penalty", 1.05),
        ("repetition_penalty", 0.5),
        ("min_p", 0.05),
        ("typical_p", 0.9),
        ("logit_bias", {"50256": -100}),
        ("bad_words", ["no"]),
        ("min_tokens", 3),
        ("stop_token_ids", [7]),
        ("allowed_token_ids", [1, 2]),
        ("ignore_eos", True),
        ("use_beam_search", True),
        ("best_of", 4),
        ("response_format", {"type": "json_object"}),
        ("response_format", FORMAT),
        ("structured_outputs", {"choice": ["yes", "no"]}),
        ("guided_json", SCHEMA),
        ("guided_regex", "a+"),
        ("guided_choice", ["a"]),
        ("grammar", "root ::= 'a'"),
        ("regex", "a+"),
        ("tool_choice", "required"),
        ("tool_choice", NAMED),
        ("function_call", {"name": "f"}),
        ("thinking_token_budget", 0),
        ("vllm_xargs", {"x": 1}),
        ("invented_tomorrow", 0.5),
    ],
)
def test_an_option_that_changes_the_distribution_is_found(name: str, value: Any) -> None:
    for prompt in ({"messages": [USER]}, {"prompt": "q"}):
        found = processors(model="m", **prompt, **{name: value})
        assert [*found] == [name]
        assert found[name] == json.dumps(value)[:200]


def test_a_tool_with_a_strict_schema_may_be_written_under_a_grammar() -> None:
    strict = [{"type": "function", "function": FUNCTION | {"strict": True}}]
    assert processors(messages=[USER], tools=strict) == {"tools.strict": "true"}
    assert processors(messages=[USER], tools=TOOLS) == {}


def test_options_at_rest_and_options_of_the_prompt_or_the_response_are_none() -> None:
    rest = {"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
    rest |= {"min_p": 0, "logit_bias": None, "bad_words": [], "min_tokens": 0, "best_of": 1}
    rest |= {"response_format": {"type": "text"}, "tool_choice": "auto", "guided_json": None}
    rest |= {"ignore_eos": False, "structured_outputs": None, "stop_token_ids": []}
    plain = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 1, "stop": ["x"], "n": 2}
    plain |= {"stream": True, "logprobs": True, "top_logprobs": 2, "user": "u", "max_tokens": 5}
    plain |= {"chat_template_kwargs": {"enable_thinking": False}, "parallel_tool_calls": False}
    plain |= {"prediction": {"type": "content", "content": "x"}, "prompt_cache_options": {"a": 1}}
    assert processors(model="m", messages=[USER], **rest, **plain) == {}


def test_a_number_or_a_nesting_that_cannot_be_read_is_recorded_as_it_came() -> None:
    for value in ("1e400", "9" * 5000, "[" * 2000):
        raw = f'{{"messages": [], "min_p": {value}{"]" * value.count("[")}}}'.encode()
        try:
            request = read_request(CHAT, raw, ConversationMemory(), 0)
        except RecursionError:
            assert value.startswith("[")  # refused with 400
        else:
            assert request.processors == {"min_p": value[:200]}


APIS: list[tuple[str, dict[str, Any], str]] = [
    ("/chat/completions", {"messages": [USER], "tools": TOOLS, "tool_choice": "required"},
     "tool_choice"),
    ("/chat/completions", {"messages": [USER], "response_format": FORMAT}, "response_format"),
    ("/completions", {"prompt": "q", "frequency_penalty": 1.5}, "frequency_penalty"),
    ("/responses", {"input": "q", "text": {"format": {"type": "json_schema", "name": "a",
                                                      "schema": SCHEMA}}}, "response_format"),
    ("/responses", {"input": "q", "tools": [{"type": "function", **FUNCTION}],
                    "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ("/messages", {"max_tokens": 5, "messages": [USER], "tool_choice": {"type": "any"},
                   "tools": [{"name": "f", "input_schema": SCHEMA}]}, "tool_choice"),
    ("/messages", {"max_tokens": 5, "messages": [USER],
                   "tools": [{"name": "f", "input_schema": SCHEMA, "strict": True}]},
     "tools.strict"),
    ("/models/m:generateContent",
     {"contents": [{"parts": [{"text": "q"}]}], "tools": [{"functionDeclarations": [FUNCTION]}],
      "toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "tool_choice"),
    ("/models/m:generateContent",
     {"contents": [{"parts": [{"text": "q"}]}],
      "generationConfig": {"responseSchema": SCHEMA, "presencePenalty": 1}},
     "presence_penalty, response_format"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "names"),
    APIS,
)
async def test_it_is_stored_with_the_call_and_said_once(
    bench: Any, path: str, body: dict[str, Any], names: str, caplog: pytest.LogCaptureFixture
) -> None:
    active = bench.gateway.register(await bench.attempt())
    headers = {"authorization": f"Bearer {active.key}"}
    async with httpx.AsyncClient(base_url=bench.gateway.base_url, headers=headers) as http:
        for _ in range(2):
            answer = await http.post(path, json={"model": "m"} | body)
            assert answer.status_code == 200, answer.text
    rows = (await bench.store.trace(active.attempt.rollout.id)).transitions
    assert [", ".join(row.processors) for row in rows] == [names, names]
    assert caplog.text.count(f"calls with {names} are not sampled from the policy's own") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_without_processors_samples_from_the_policys_own_distribution(
    bench: Any, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The embedded server, and frameworks whose tools have strict schemas by default."""

    async def plain(request: web.Request, body: Any) -> web.StreamResponse:
        if not stream:
            headers = {"x-processors": "none"}
            return web.json_response(bench.model.whole(body, request.path), headers=headers)
        return await bench.model.stream(request, body, {"x-processors": "none"})

    bench.model.then(plain)
    strict = [{"type": "function", "function": FUNCTION | {"strict": True}}]
    body = {"model": "m", "messages": [USER], "tools": strict, "stream": stream}
    active = bench.gateway.register(await bench.attempt())
    headers = {"authorization": f"Bearer {active.key}"}
    async with httpx.AsyncClient(base_url=bench.gateway.base_url, headers=headers) as http:
        answers = [await http.post("/chat/completions", json=body) for _ in range(2)]
    assert "x-processors" not in answers[0].headers
    first, second = (await bench.store.trace(active.attempt.rollout.id)).transitions
    assert (first.processors, second.processors) == ({}, {"tools.strict": "true"})
    assert caplog.text.count("are not sampled from the policy's own") == 1


async def test_nothing_is_said_about_a_call_that_the_server_refuses(
    bench: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The embedded server has no processors."""

    async def refuses(request: web.Request, body: Any) -> web.StreamResponse:
        return web.json_response({"error": {"message": "min_p = 0.1: leave it out"}}, status=400)

    bench.model.then(refuses, refuses)  # also without the fields that capture adds
    body = {"model": "m", "messages": [USER], "min_p": 0.1}
    active = bench.gateway.register(await bench.attempt())
    headers = {"authorization": f"Bearer {active.key}"}
    async with httpx.AsyncClient(base_url=bench.gateway.base_url, headers=headers) as http:
        answer = await http.post("/chat/completions", json=body)
    assert (answer.status_code, "leave it out" in answer.text) == (400, True)
    assert "min_p" not in caplog.text
