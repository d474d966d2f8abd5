"""Responses and Messages with their own SDKs: the upstream only ever sees chat completions.

The SDK of Anthropic takes seconds to import, so only the tests that need it import it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, get_args

import httpx
import openai
import pytest
from aiohttp import web
from openai.types.responses import ResponseIncludable
from openai.types.responses.response_create_params import (
    ResponseCreateParamsBase,
    ResponseCreateParamsNonStreaming,
)
from openai.types.shared_params import Reasoning

from agentrl.core.config import RunConfig
from agentrl.runners.apis import messages, responses
from agentrl.runners.gateway.server import Gateway
from agentrl.runners.main import run_features
from tests.runners.conftest import rows

TOOL = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
    "additionalProperties": False,
}
FUNCTION = {"type": "function", "name": "f", "parameters": TOOL, "strict": True}
USER = {"role": "user", "content": "hello"}


@pytest.fixture
async def sdk(active: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(api_key=active.key) as client:
        yield client


@pytest.fixture
async def claude(bench: Any, active: Any) -> AsyncIterator[Any]:
    import anthropic

    url = bench.gateway.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(api_key=active.key, base_url=url) as client:
        yield client


def calls(*arguments: str) -> Any:
    """An answer of parallel tool calls, with a few words before them."""
    made = [
        {"id": f"call-{i}", "type": "function", "function": {"name": "f", "arguments": text}}
        for i, text in enumerate(arguments)
    ]
    return lambda body: {"role": "assistant", "content": "wait", "tool_calls": made}


# -- Responses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tools", [False, True])
async def test_responses_stream(bench: Any, active: Any, sdk: Any, tools: bool) -> None:
    bench.model.answer = calls('{"text": "a"}', "{}") if tools else bench.model.answer
    extra = {"tools": [FUNCTION]} if tools else {}
    events = []
    async with sdk.responses.stream(model="gpt-5", input="hello", **extra) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(event.type.removeprefix("response.") for event in events))
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        *(["function_call_arguments.delta", "function_call_arguments.done"] if tools else []),
        "completed",
    ]
    (row,) = await rows(bench, active)
    assert final.output_text == row.answer["content"] == ("wait" if tools else "echo hello")
    assert final.usage.output_tokens == 1
    if tools:
        assert [item.arguments for item in final.output[1:]] == ['{"text": "a"}', "{}"]
    assert row.exact


async def test_structured_output_and_logprobs(bench: Any, active: Any, sdk: Any) -> None:
    form = {"type": "json_schema", "name": "x", "schema": TOOL, "strict": True}
    answer = await sdk.responses.create(
        model="m",
        input="hello",
        text={"format": form},
        include=["message.output_text.logprobs"],
        extra_body={"top_k": 3, "stop": ["x"]},
    )
    assert [entry.logprob for entry in answer.output[0].content[0].logprobs] == [-0.5] * 10
    sent = bench.model.requests[0]
    inner = {"name": "x", "schema": TOOL, "strict": True}
    assert sent["response_format"] == {"type": "json_schema", "json_schema": inner}
    assert (sent["top_k"], sent["stop"]) == (3, ["x"])


# What leaves the answer as it is. Of `include`, what is not there has nothing to show.
IDLE = {
    "background_options": {"completion_window": "2h"},
    "image": {"context_compression": "auto"},
    "include": [*get_args(ResponseIncludable)],
    "max_tool_calls": 3,
    "metadata": {"a": "b"},
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "reasoning": {"summary": "auto", "generate_summary": "concise", "context": "all_turns"},
    "safety_identifier": "s",
    "service_tier": "flex",
    "store": False,
    "text": {"verbosity": "low"},
    "truncation": "auto",
    "user": "u",
}


@pytest.mark.parametrize("name", IDLE)
async def test_what_leaves_an_answer_as_it_is(bench: Any, active: Any, sdk: Any, name: str) -> None:
    answer = await sdk.responses.create(model="m", input="hello", **{name: IDLE[name]})
    assert answer.output_text == "echo hello"
    assert bench.model.requests[0]["messages"] == [USER]
    (row,) = await rows(bench, active)
    assert row.exact


def test_every_field_of_the_sdk_is_decided_upon() -> None:
    same = {"model", "parallel_tool_calls", "stream", "temperature", "top_logprobs", "top_p"}
    known = same | IDLE.keys() | responses.ALLOWED.keys() | responses.IDLE | responses.TRANSLATED
    fields = (
        ResponseCreateParamsNonStreaming.__annotations__ | ResponseCreateParamsBase.__annotations__
    )
    assert fields.keys() <= known
    assert {*get_args(ResponseIncludable)} <= responses.INCLUDED | {responses.LOGPROBS}
    told = {"effort"} | responses.REASONING.keys() | responses.NO_SUMMARY
    assert Reasoning.__annotations__.keys() <= told


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tools": [{"type": "local_shell"}]}, "tools[0].type"),
        ({"tools": [{"type": "computer_use_preview"}]}, "tools[0].type"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "x"}]}]},
            "tools[0].tools[0].type",
        ),
        ({"background": True}, "background"),
        ({"truncation": "always"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"include": ["everything"]}, "include"),
        ({"input": [{"type": "configuration_update", "tools": []}]}, "input[0]"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"reasoning": {"budget": 5}}, "reasoning"),
        ({"moderation": {"model": "x"}}, "moderation"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": []}, "input"),
        ({"text": {"format": "word"}}, "request"),
        ({"text": {"format": [["type", "text"]]}}, "request"),
        ({"text": "word"}, "request"),
        ({"reasoning": "high"}, "request"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content"),
    ],
)
async def test_what_responses_cannot_say_is_refused(
    bench: Any, active: Any, sdk: Any, extra: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await sdk.responses.create(**{"model": "m", "input": "hello"} | extra)
    assert refused.value.body["message"].startswith(f"{param}: ")
    assert bench.model.requests == []
    assert await rows(bench, active) == []


async def test_langchain_over_responses(bench: Any, active: Any) -> None:
    from langchain_openai import ChatOpenAI  # a second of imports

    model = ChatOpenAI(model="m", use_responses_api=True, api_key=active.key)
    with_tools = model.bind_tools([{"type": "function", "function": FUNCTION}])
    bench.model.answer = calls('{"text": "a"}')
    said = await with_tools.ainvoke("hello")
    assert said.tool_calls[0]["args"] == {"text": "a"}
    chunks = [chunk async for chunk in with_tools.astream("hello")]
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    assert whole.tool_calls[0]["args"] == {"text": "a"}  # type: ignore[attr-defined]
    assert len(await rows(bench, active)) == 2


# -- Messages --------------------------------------------------------------------------------------


async def test_messages_tools_in_parallel_and_their_results(
    bench: Any, active: Any, claude: Any
) -> None:
    bench.model.answer = calls('{"text":"a"}', '{"broken')
    tools = [{"name": "f", "description": "d", "input_schema": TOOL}]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    ask = {"model": "m", "max_tokens": 9, "tools": tools, "tool_choice": choice}
    first = await claude.messages.create(messages=[USER], **ask)
    assert first.stop_reason == "tool_use"
    said, a, b = first.content
    assert said.text == "wait"
    assert (a.id, a.input, b.input) == ("call-0", {"text": "a"}, {"INVALID_JSON": '{"broken'})
    results = [
        {"type": "tool_result", "tool_use_id": "call-0", "content": "r0"},
        {"type": "tool_result", "tool_use_id": "call-1", "content": "bad", "is_error": True},
        {"type": "text", "text": "go on"},
    ]
    turns = [USER, {"role": "assistant", "content": first.content}]
    await claude.messages.create(messages=[*turns, {"role": "user", "content": results}], **ask)
    sent = bench.model.requests[1]
    assert sent["messages"] == [
        USER,
        calls('{"text":"a"}', '{"broken')({}),
        {"role": "tool", "tool_call_id": "call-0", "content": "r0"},
        {"role": "tool", "tool_call_id": "call-1", "content": "Error: bad"},
        {"role": "user", "content": "go on"},
    ]
    assert (sent["tool_choice"], sent["parallel_tool_calls"]) == ("required", False)
    function = {"name": "f", "description": "d", "parameters": TOOL}
    assert sent["tools"] == [{"type": "function", "function": function}]


@pytest.mark.parametrize("stream", [False, True])
async def test_arguments_return_to_the_model_as_it_wrote_them(
    bench: Any, active: Any, claude: Any, stream: bool
) -> None:
    written = ['{ "text":"\\u00e9", "n":1.0}', '{"text": "b"}', ""]
    bench.model.answer = calls(*written)
    tools = [{"name": "f", "input_schema": TOOL}]
    ask = {"model": "m", "max_tokens": 9, "tools": tools}
    if stream:
        async with claude.messages.stream(messages=[USER], **ask) as events:
            first = await events.get_final_message()
    else:
        first = await claude.messages.create(messages=[USER], **ask)
    said = [block.model_dump(exclude_none=True) for block in first.content]
    said[2]["input"] = {"text": "edited"}  # what the agent says itself is not put right
    results = [
        {"type": "tool_result", "tool_use_id": f"call-{i}", "content": "r"} for i in range(3)
    ]
    turns = [USER, {"role": "assistant", "content": said}, {"role": "user", "content": results}]
    await claude.messages.create(messages=turns, **ask)
    sent = bench.model.requests[1]["messages"][1]["tool_calls"]
    returned = [call["function"]["arguments"] for call in sent]
    assert returned == [written[0], '{"text":"edited"}', written[2]]


@pytest.mark.parametrize("tools", [False, True])
async def test_messages_stream(bench: Any, active: Any, claude: Any, tools: bool) -> None:
    bench.model.answer = calls('{"text": "a"}', "{}") if tools else bench.model.answer
    extra = {"tools": [{"name": "f", "input_schema": TOOL}]} if tools else {}
    async with claude.messages.stream(
        model="claude", max_tokens=9, messages=[USER], **extra
    ) as stream:
        kinds = list(dict.fromkeys([event.type async for event in stream]))
        final = await stream.get_final_message()
    assert kinds[:3] == ["message_start", "content_block_start", "content_block_delta"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    (row,) = await rows(bench, active)
    assert final.content[0].text == row.answer["content"] == ("wait" if tools else "echo hello")
    assert final.stop_reason == ("tool_use" if tools else "end_turn")
    assert (final.usage.input_tokens, final.usage.output_tokens) == (1, 1)
    assert [block.input for block in final.content[1:]] == ([{"text": "a"}, {}] if tools else [])
    assert row.exact


@pytest.mark.parametrize("prefix", ["", "/v1", "/a/{id}", "/a/{id}/critic/v1", "/a/{id}/critic"])
async def test_messages_with_an_address_that_needs_no_version(
    bench: Any, active: Any, prefix: str
) -> None:
    """AI SDK appends /messages to ANTHROPIC_BASE_URL, and Anthropic's own SDK /v1/messages."""
    root = bench.gateway.base_url.removesuffix("/v1")
    body = {"model": "m", "max_tokens": 9, "messages": [USER]}
    async with httpx.AsyncClient() as http:
        url = f"{root}{prefix.format(id=active.id)}/messages"
        answer = await http.post(url, json=body, headers={"x-api-key": active.key})
    assert answer.json()["content"] == [{"type": "text", "text": "echo hello"}]
    (row,) = await rows(bench, active)
    assert row.role == ("critic" if "critic" in prefix else "agent")


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"thinking": {"type": "between_tools"}}, "thinking"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"messages": [USER, {"role": "assistant", "content": "I"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [USER, {"role": "user", "content": []}]}, "messages[1].content"),
        ({"messages": [{"role": "assistant", "content": []}]}, "messages"),
        ({"output_config": {"format": "word"}}, "request: a field is not of its type"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"compaction": {"type": "enabled"}}, "compaction"),
        ({"thread": {"type": "resume"}}, "thread"),
        ({"thread": "t"}, "request: a field is not of its type"),
        (
            {"thread": {"type": "continue", "previous_message_id": "m"}, "system": "s"},
            "system",
        ),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management"),
    ],
)
async def test_what_messages_cannot_say_is_refused(
    bench: Any, active: Any, extra: dict[str, Any], param: str
) -> None:
    body = {"model": "m", "max_tokens": 9, "messages": [USER]} | extra
    async with httpx.AsyncClient(base_url=bench.gateway.base_url) as http:
        answer = await http.post("/messages", json=body, headers={"x-api-key": active.key})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert answer.json()["type"] == "error"
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(param)
    assert bench.model.requests == []


def test_every_field_of_anthropics_sdk_is_decided_upon() -> None:
    from anthropic.types.beta.message_create_params import MessageCreateParamsBase

    same = {"model", "temperature", "top_k", "top_p"} | {"betas"}  # a header
    known = same | messages.ALLOWED.keys() | messages.IDLE | messages.TRANSLATED
    assert MessageCreateParamsBase.__annotations__.keys() <= known


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("lost", [False, True])
async def test_a_thread_of_the_tool_runner_has_what_it_does_not_send_again(
    bench: Any, active: Any, claude: Any, stream: bool, lost: bool
) -> None:
    from anthropic import beta_async_tool

    @beta_async_tool
    async def look(text: str) -> str:
        """Look."""
        if lost:
            active.memory.kept["threads"].clear()
        return f"seen {text}"

    ask: Any = {"model": "m", "max_tokens": 9, "system": "be brief", "tools": [look]}
    runner = claude.beta.messages.tool_runner(messages=[USER], stream=stream, **ask)
    async for turn in runner:
        last = await turn.get_final_message() if stream else turn
    assert last.content[0].text == "echo seen hello"
    first, second = await rows(bench, active)
    assert [*first.messages, second.messages[-1]["content"]] == [
        {"role": "system", "content": "be brief"},
        USER,
        "seen hello",
    ]
    assert second.messages[:2] == first.messages
    assert len(second.messages) == 4
    assert first.tools == second.tools != []
    assert first.processors == second.processors == {}


async def test_an_assistant_may_have_said_nothing(bench: Any, active: Any, claude: Any) -> None:
    bench.model.answer = lambda body: {"role": "assistant", "content": "", "tool_calls": []}
    ask = {"model": "m", "max_tokens": 9}
    first = await claude.messages.create(messages=[USER], **ask)
    assert first.content == []
    turns = [USER, {"role": "assistant", "content": first.content}, USER]
    await claude.messages.create(messages=turns, **ask)
    said = {"role": "assistant", "content": ""}
    assert bench.model.requests[1]["messages"] == [USER, said, USER]


async def test_tokens_are_counted_by_the_server(bench: Any, active: Any, claude: Any) -> None:
    tools = [{"name": "f", "input_schema": TOOL}]
    count = await claude.messages.count_tokens(
        model="m", system="be brief", messages=[USER], tools=tools
    )
    sent = bench.model.requests[0]
    assert sent["messages"] == [{"role": "system", "content": "be brief"}, USER]
    assert sent.keys() == {"model", "messages", "tools"}
    assert count.input_tokens == len(json.dumps(sent["messages"]))
    assert await rows(bench, active) == []


async def test_tokens_that_nobody_can_count(bench: Any, active: Any, claude: Any) -> None:
    import anthropic

    async def missing(request: web.Request, body: Any) -> web.Response:
        return web.json_response({"detail": "Not Found"}, status=404)

    async def refuse(request: web.Request, body: Any) -> web.Response:
        return web.json_response({"error": {"message": "no template"}}, status=400)

    bench.model.then(missing, refuse)
    ask = {"model": "m", "messages": [USER]}
    with pytest.raises(anthropic.NotFoundError, match="does not tell how many tokens"):
        await claude.messages.count_tokens(**ask)
    with pytest.raises(anthropic.BadRequestError, match="no template"):
        await claude.messages.count_tokens(**ask)
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]"):
        await claude.messages.count_tokens(model="m", messages=[{"role": "user", "content": 5}])
    with pytest.raises(anthropic.BadRequestError, match="not of its type"):
        await claude.messages.count_tokens(**ask, thinking="deep")
    assert active.failures == {}


async def test_errors_have_the_shape_of_messages(bench: Any, active: Any, claude: Any) -> None:
    import anthropic

    async def refuse(request: web.Request, body: Any) -> web.Response:
        return web.json_response({"error": {"message": "too long", "code": "x"}}, status=400)

    ask = {"model": "m", "max_tokens": 9, "messages": [USER]}
    bench.model.then(refuse, refuse)
    with pytest.raises(anthropic.BadRequestError, match="too long") as refused:
        await claude.messages.create(**ask)
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    bench.gateway.unregister(active)
    with pytest.raises(anthropic.PermissionDeniedError, match="has ended"):
        await claude.messages.create(**ask)
    stranger = claude.with_options(api_key="sk-ant-none", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError, match="belongs to no rollout"):
        await stranger.messages.create(**ask)
    models = [model.id async for model in claude.models.list()]
    assert models == ["policy", "tiny"]


# -- both ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", ["responses", "messages"])
async def test_a_repeated_stream_shows_what_is_stored(bench: Any, active: Any, api: str) -> None:
    async def broken(request: web.Request, body: Any) -> web.StreamResponse:
        """All of an answer in one chunk, which is held back, and then no proper end."""
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        choice = {"index": 0, "delta": {"content": "WRONG"}, "finish_reason": "stop"}
        await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        request.transport.abort()  # type: ignore[union-attr]
        return response

    bench.model.then(broken)
    said = {"input": "hello"} if api == "responses" else {"messages": [USER], "max_tokens": 9}
    async with httpx.AsyncClient(base_url=bench.gateway.base_url) as http:
        body = {"model": "m", "stream": True} | said
        answer = await http.post(f"/{api}", json=body, headers={"x-api-key": active.key})
    assert answer.status_code == 200
    assert "WRONG" not in answer.text
    first = "response.created" if api == "responses" else "message_start"
    assert answer.text.startswith(f"event: {first}\n")
    assert len(bench.model.requests) == 2
    (row,) = await rows(bench, active)
    assert row.answer["content"] == "echo hello"


# -- both, on the real server ----------------------------------------------------------------------


async def test_both_on_the_embedded_server(store: Any, tiny_llama_dir: Path) -> None:
    import anthropic

    from agentrl.algorithms.engines.embedded.server import EmbeddedServer
    from agentrl.algorithms.model.load import load_model
    from agentrl.core.types import NewRollout, PolicyVersion

    model, tokenizer = load_model(str(tiny_llama_dir), "float32", "cpu")
    server = EmbeddedServer(model, tokenizer, name="tiny")
    await server.start()
    gateway = Gateway(store, "test", features=run_features(store, RunConfig()))
    try:
        async with server.updating():
            await server.publish(4)
        version = PolicyVersion(
            run="test", policy="policy", version=4, base_url=server.base_url, model=server.model
        )
        await store.publish(version)
        gateway.start()
        new = NewRollout(id="r", run="test", group="g", index=0, task={})
        await store.enqueue([new])
        (attempt,) = await store.claim(1, runner="x", lease=60.0, run="test")
        active = gateway.register(attempt, sealed=True)
        url = gateway.base_url
        async with openai.AsyncOpenAI(api_key=active.key, base_url=url) as sdk:
            first = await sdk.responses.create(model="m", input="hello", max_output_tokens=5)
            assert first.usage is not None
            assert first.usage.output_tokens <= 5
            stream = await sdk.responses.create(
                model="m",
                input="again",
                previous_response_id=first.id,
                max_output_tokens=5,
                stream=True,
            )
            events = [event async for event in stream]
            assert events[-1].type in ("response.completed", "response.incomplete")
            said = events[-1].response.output_text
        url = url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(api_key=active.key, base_url=url) as claude:
            third = await claude.messages.create(model="m", max_tokens=5, messages=[USER])
            count = await claude.messages.count_tokens(model="m", messages=[USER])
        found = list((await store.trace("r")).transitions)
        assert [row.exact for row in found] == [True] * 3
        assert [row.version for row in found] == [4] * 3
        assert found[1].answer["content"] == said
        assert len(found[2].prompt) == third.usage.input_tokens == count.input_tokens
        assert json.dumps(found[1].messages).count("hello") == 1
    finally:
        gateway.close()
        await server.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_translation_is_not_called_the_servers_fault(
    bench: Any, active: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def fail(*_: Any) -> bytes:
        raise KeyError("of a bug")

    monkeypatch.setattr(messages.MessagesTranslation, "part", fail)
    body = {"model": "m", "max_tokens": 5, "messages": [USER], "stream": stream}
    async with httpx.AsyncClient(base_url=bench.gateway.base_url, timeout=20) as http:
        answer = await http.post("/messages", json=body, headers={"x-api-key": active.key})
    assert answer.status_code == 502
    assert "a bug of agentrl (KeyError: 'of a bug')" in answer.json()["error"]["message"]
    assert "is not a completion" not in answer.text


def test_thoughts_that_are_shown_although_a_client_wants_none_are_told() -> None:
    def ignored(**thinking: str) -> list[str]:
        return messages.ignored({"messages": [], "thinking": thinking})

    assert ignored(type="adaptive") == []
    assert ignored(type="adaptive", display="omitted") == ["thinking"]  # Claude Code's
    assert ignored(type="disabled") == ["thinking"]
