"""Reasoning and items of earlier responses as unmodified clients send them back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

THOUGHT = "\nFirst é, then 2.\n"
WRITTEN = '{"text":"a",  "n":1.0}'
FUNCTION = {"name": "f", "arguments": WRITTEN}
CALL = {"id": "call-0", "type": "function", "function": FUNCTION}
TURN = {"role": "assistant", "content": None, "reasoning_content": THOUGHT, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call-0", "content": "42"}
USER = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "number"}}}
MESSAGES: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [USER]}
MESSAGES["tools"] = [{"name": "f", "input_schema": SCHEMA}]
TOOL = {"type": "function", "name": "f", "parameters": SCHEMA}
RESPONSES: dict[str, Any] = {"model": "m", "input": [USER], "tools": [TOOL]}
OUTPUT = {"type": "function_call_output", "call_id": "call-0", "output": "42"}
REWRITTEN = {"type": "function_call", "call_id": "call-0", "name": "f"}
REWRITTEN["arguments"] = '{"text":"a","n":1}'  # as JavaScript writes it


def think(body: dict[str, Any]) -> dict[str, Any]:
    if body["messages"][-1]["role"] == "user":
        return TURN
    return {"role": "assistant", "content": "It is 42."}


@pytest.fixture
async def http(bench: Any) -> AsyncIterator[httpx.AsyncClient]:
    bench.model.answer = think
    active = bench.gateway.register(await bench.attempt())
    headers = {"authorization": f"Bearer {active.key}"}
    async with httpx.AsyncClient(base_url=bench.gateway.base_url, headers=headers) as client:
        yield client


async def post(http: httpx.AsyncClient, path: str, body: Any) -> Any:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


# -- Messages --------------------------------------------------------------------------------------


def thinking_turn(blocks: list[Any], **changes: Any) -> list[Any]:
    """The conversation of the second call; `changes` of the thinking block."""
    thought, call = blocks
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "42"}
    said = [thought | changes, {**call, "input": {"text": "a", "n": 1}}]
    return [USER, {"role": "assistant", "content": said}, {"role": "user", "content": [result]}]


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_has_a_signature(bench: Any, http: Any, stream: bool) -> None:
    import anthropic

    url = bench.gateway.base_url.removesuffix("/v1")
    key = http.headers["authorization"].removeprefix("Bearer ")
    async with anthropic.AsyncAnthropic(api_key=key, base_url=url) as client:
        if stream:
            async with client.messages.stream(**MESSAGES) as events:
                kinds = [e.delta.type async for e in events if e.type == "content_block_delta"]
                first = await events.get_final_message()
            assert list(dict.fromkeys(kinds)) == [
                "thinking_delta",
                "signature_delta",
                "input_json_delta",
            ]
        else:
            first = await client.messages.create(**MESSAGES)
    blocks = [block.model_dump(exclude_none=True) for block in first.content]
    assert blocks[0]["thinking"] == THOUGHT
    assert blocks[0]["signature"]
    await post(http, "/messages", MESSAGES | {"messages": thinking_turn(blocks)})
    assert bench.model.requests[-1]["messages"] == [USER, TURN, RESULT]


@pytest.mark.parametrize(
    ("changes", "thought"),
    [
        ({"thinking": ""}, THOUGHT),  # display = "omitted"
        ({"thinking": THOUGHT.strip()}, THOUGHT),
        ({"thinking": "other"}, "other"),  # what the agent says itself is not put right
        ({"signature": ""}, THOUGHT),
        ({"signature": "EqQBCgIYAhIM", "thinking": "of Claude"}, "of Claude"),
    ],
)
async def test_thinking_returns_as_the_model_wrote_it(
    bench: Any, http: Any, changes: dict[str, Any], thought: str
) -> None:
    first = await post(http, "/messages", MESSAGES)
    turns = thinking_turn(first["content"], **changes)
    await post(http, "/messages", MESSAGES | {"messages": turns})
    assert bench.model.requests[-1]["messages"][1] == TURN | {"reasoning_content": thought}


# -- Responses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["v0", "responses/v1", "v1"])
@pytest.mark.parametrize("streaming", [False, True])
async def test_langchain_sends_reasoning_back(
    bench: Any, http: Any, version: Any, streaming: bool
) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    key = http.headers["authorization"].removeprefix("Bearer ")
    options: Any = {"use_responses_api": True, "streaming": streaming, "output_version": version}
    options["http_async_client"] = http
    model = ChatOpenAI(model="m", api_key=key, **options)
    with_tools = model.bind_tools([{"type": "function", "function": {"name": "f"}}])
    first = await with_tools.ainvoke([HumanMessage("hello")])
    turns = [HumanMessage("hello"), first, ToolMessage("42", tool_call_id="call-0")]
    assert (await with_tools.ainvoke(turns)).text == "It is 42."
    assert bench.model.requests[-1]["messages"] == [USER, TURN, RESULT]


@pytest.mark.parametrize("reference", [{"type": "item_reference"}, {}])
async def test_items_are_known_by_their_ids(bench: Any, http: Any, reference: Any) -> None:
    """The requests of the AI SDK: it refers to everything but tool calls."""
    thought, _ = (await post(http, "/responses", RESPONSES))["output"]
    said = [USER, reference | {"id": thought["id"]}, REWRITTEN, OUTPUT]
    (answer,) = (await post(http, "/responses", RESPONSES | {"input": said}))["output"]
    assert bench.model.requests[-1]["messages"] == [USER, TURN, RESULT]
    more = [*said, reference | {"id": answer["id"]}, USER]
    await post(http, "/responses", RESPONSES | {"input": more})
    told = {"role": "assistant", "content": "It is 42."}
    assert bench.model.requests[-1]["messages"] == [USER, TURN, RESULT, told, USER]


async def test_reasoning_is_known_by_its_id_or_its_seal(bench: Any, http: Any) -> None:
    """LangChain sends the id of reasoning that it has streamed, without the content."""
    thought, _ = (await post(http, "/responses", RESPONSES))["output"]
    empty = {"type": "reasoning", "summary": [], "content": [], "status": "in_progress"}
    for given in ({"id": thought["id"]}, {"encrypted_content": thought["encrypted_content"]}):
        said = [USER, empty | given, REWRITTEN, OUTPUT]
        await post(http, "/responses", RESPONSES | {"input": said})
        assert bench.model.requests[-1]["messages"] == [USER, TURN, RESULT]


@pytest.mark.parametrize("kind", ["item_reference", "reasoning"])
@pytest.mark.parametrize("whose", ["nobody", "a response that is not stored", "another attempt"])
async def test_unknown_items_are_refused(bench: Any, http: Any, kind: str, whose: str) -> None:
    unstored = RESPONSES | {"store": whose != "a response that is not stored"}
    id = (await post(http, "/responses", unstored))["output"][0]["id"]
    if whose == "another attempt":
        other = bench.gateway.register(await bench.attempt())
        http.headers["authorization"] = f"Bearer {other.key}"
    said = [USER, {"type": kind, "id": "rs_x" if whose == "nobody" else id}]
    answer = await http.post("/responses", json=RESPONSES | {"input": said})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "item_not_found"
    assert "send its content" in answer.json()["error"]["message"]


async def test_a_cut_stream_leaves_the_items_that_it_has_shown(bench: Any, http: Any) -> None:
    async with openai.AsyncOpenAI(api_key=http.headers["authorization"][7:]) as client:
        stream = await client.responses.create(**RESPONSES, stream=True)
        async for event in stream:
            if event.type == "response.output_item.done":
                break
        await stream.close()
    said = [USER, {"type": "item_reference", "id": event.item.id}, REWRITTEN, OUTPUT]
    await post(http, "/responses", RESPONSES | {"input": said})
    assert bench.model.requests[-1]["messages"][1]["reasoning_content"] == THOUGHT
