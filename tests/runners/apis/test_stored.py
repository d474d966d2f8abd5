"""Stored responses, conversations and compactions, with OpenAI's SDK."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from agentrl.runners.gateway import stored_responses
from tests.runners.conftest import rows

FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
WRITTEN = '{"a":  1}'
MADE = {"id": "call-0", "type": "function", "function": {"name": "f", "arguments": WRITTEN}}
CALL = {"role": "assistant", "content": None, "tool_calls": [MADE]}
OUTPUT = {"type": "function_call_output", "call_id": "call-0", "output": "42"}


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def said(text: str) -> Any:
    return {"role": "assistant", "content": text}


SUMMARIZE = user(stored_responses.SUMMARIZE)
REPLACED = "The conversation before this was replaced by your summary of it:\n\necho summary"


def policy(body: Any) -> Any:
    """Calls f when asked to look, and summarizes when asked to."""
    last = body["messages"][-1]
    if last == SUMMARIZE:
        return {"role": "assistant", "content": "echo summary", "reasoning_content": "hm"}
    return CALL if last == user("look") else said(f"echo {last['content']}")


@pytest.fixture
async def active(bench: Any) -> Any:
    bench.model.answer = policy
    return bench.gateway.register(await bench.attempt())


@pytest.fixture
async def sdk(active: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(api_key=active.key, max_retries=0) as client:
        yield client


async def ask(sdk: Any, stream: bool, **body: Any) -> Any:
    """The whole response of a call."""
    if not stream:
        return await sdk.responses.create(model="m", **body)
    events = await sdk.responses.create(model="m", stream=True, **body)
    return [event async for event in events][-1].response


async def items_of(page: Any) -> list[Any]:
    return [item.model_dump(exclude_unset=True) async for item in page]


# -- compaction ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
async def test_a_compaction_is_a_call_of_the_policy(
    bench: Any, active: Any, sdk: Any, stream: bool, by_id: bool
) -> None:
    first = await ask(sdk, stream, input="look", tools=[FUNCTION])
    second = await ask(sdk, stream, input=[OUTPUT], previous_response_id=first.id)
    history = [user("look"), *first.output, OUTPUT, *second.output, user("why")]
    given: Any = {"input": history, "instructions": "be brief"}
    if by_id:
        given = {"input": "why", "previous_response_id": second.id, "instructions": "be brief"}
    compacted = await sdk.responses.compact(model="m", **given)
    assert (compacted.object, compacted.id[:5]) == ("response.compaction", "resp_")
    assert compacted.usage.output_tokens > 0
    output = [item.model_dump(exclude_unset=True, warnings=False) for item in compacted.output]
    assert [item.get("role", item["type"]) for item in output] == ["user", "user", "compaction"]
    again = await ask(sdk, stream, input=[*output, user("and now")])
    assert again.output_text == "echo and now"
    system = {"role": "system", "content": "be brief"}
    result = {"role": "tool", "tool_call_id": "call-0", "content": "42"}
    conversation = [user("look"), CALL, result, said("echo 42"), user("why")]
    *_, summary, last = await rows(bench, active)
    assert summary.messages == [system, *conversation, SUMMARIZE]
    assert summary.answer["content"] == "echo summary"
    assert summary.exact
    kept = [user("look"), user("why"), user(REPLACED)]
    assert last.messages == [*kept, user("and now")]
    twice = await sdk.responses.compact(model="m", input=[*output, *again.output])
    assert [item.type for item in twice.output] == ["message", "message", "compaction"]
    assert (await rows(bench, active))[-1].messages[2] == user(REPLACED)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"input": [], "instructions": "a"}, "there is nothing to compact"),
        ({"input": "a", "extra_body": {"stream": True}}, "stream: is not possible"),
        ({"input": "a", "extra_body": {"conversation": "conv_1"}}, "conversation: is not"),
        ({"previous_response_id": "resp_1"}, "is not a stored response of this attempt"),
    ],
)
async def test_what_cannot_be_compacted(
    bench: Any, active: Any, sdk: Any, body: Any, why: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=why):
        await sdk.responses.compact(model="m", **body)
    assert bench.model.requests == []


@pytest.mark.parametrize("sealed", ["gAAAAA", "YWdlbnRybDpobQ==", None])
async def test_a_compaction_of_another_server_is_refused(
    bench: Any, active: Any, sdk: Any, sealed: Any
) -> None:
    item = {"type": "compaction", "encrypted_content": sealed}
    with pytest.raises(openai.BadRequestError, match=r"input\[0\]: this compaction is of another"):
        await sdk.responses.create(model="m", input=[item, user("a")])
    assert bench.model.requests == []


# -- counts ----------------------------------------------------------------------------------------


async def test_input_tokens_are_counted_by_the_server(bench: Any, active: Any, sdk: Any) -> None:
    first = await sdk.responses.create(model="m", input="hello")
    counted = await sdk.responses.input_tokens.count(
        model="m", input="why", previous_response_id=first.id, instructions="be brief"
    )
    messages = [{"role": "system", "content": "be brief"}, user("hello"), said("echo hello")]
    sent = bench.model.requests[-1]["messages"]
    assert sent == [*messages, user("why")]
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == len(json.dumps(sent))
    assert len(await rows(bench, active)) == 1
    with pytest.raises(openai.BadRequestError, match="personality is not possible"):
        await sdk.responses.input_tokens.count(model="m", input="a", personality="friendly")


# -- stored responses ------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stored_response_is_retrieved_continued_and_deleted(
    bench: Any, active: Any, sdk: Any, stream: bool
) -> None:
    first = await ask(sdk, stream, input="look", tools=[FUNCTION], instructions="be brief")
    second = await ask(sdk, stream, input=[OUTPUT], previous_response_id=first.id)
    assert await sdk.responses.retrieve(first.id) == first
    assert (await sdk.responses.retrieve(second.id)).output_text == "echo 42"
    listed = await items_of(await sdk.responses.input_items.list(second.id, order="asc", limit=1))
    assert listed[0]["content"] == [{"type": "input_text", "text": "look"}]
    assert [item["type"] for item in listed] == ["message", "function_call", OUTPUT["type"]]
    assert listed[1]["arguments"] == WRITTEN
    assert listed == (await items_of(await sdk.responses.input_items.list(second.id)))[::-1]
    with pytest.raises(openai.BadRequestError, match="it is complete; only a response in the"):
        await sdk.responses.cancel(first.id)
    with pytest.raises(openai.BadRequestError, match="leave stream out"):
        await sdk.responses.retrieve(first.id, stream=True)
    with pytest.raises(openai.BadRequestError, match="'all' does not exist"):
        await sdk.responses.retrieve(first.id, include=["all"])
    await sdk.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="is not a stored response of this attempt"):
        await sdk.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="is not a stored response"):
        await ask(sdk, stream, input="a", previous_response_id=first.id)
    reference = {"type": "item_reference", "id": first.output[0].id}
    with pytest.raises(openai.BadRequestError, match="is not an item of this attempt"):
        await ask(sdk, stream, input=[reference, OUTPUT])
    third = await ask(sdk, stream, input="go on", previous_response_id=second.id)
    assert third.output_text == "echo go on"
    assert len(await rows(bench, active)) == 3


async def test_what_is_not_stored(bench: Any, active: Any, sdk: Any) -> None:
    unstored = await sdk.responses.create(model="m", input="hello", store=False)
    for id in (unstored.id, "resp_1"):
        for ask_for in (sdk.responses.retrieve, sdk.responses.delete, sdk.responses.cancel):
            with pytest.raises(openai.NotFoundError, match="unless store is false"):
                await ask_for(id)


async def test_an_attempt_sees_only_its_own(bench: Any, active: Any, sdk: Any) -> None:
    other = bench.gateway.register(await bench.attempt())
    first = await sdk.responses.create(model="m", input="hello")
    made = await sdk.conversations.create(items=[user("hello")])
    async with openai.AsyncOpenAI(api_key=other.key, max_retries=0) as stranger:
        with pytest.raises(openai.NotFoundError):
            await stranger.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError):
            await stranger.conversations.retrieve(made.id)
        with pytest.raises(openai.BadRequestError, match="is no conversation of this attempt"):
            await stranger.responses.create(model="m", input="hello", conversation=made.id)
    async with openai.AsyncOpenAI(api_key="nobody", max_retries=0) as nobody:
        with pytest.raises(openai.AuthenticationError):
            await nobody.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError, match=r"GET /v1/responses/\{id\}, DELETE /v1/resp"):
        await sdk.files.list()


# -- conversations ---------------------------------------------------------------------------------


async def test_a_conversation_session(bench: Any, active: Any, sdk: Any) -> None:
    """As openai-agents' OpenAIConversationsSession uses it."""
    made = await sdk.conversations.create(items=[], metadata={"a": "b"})
    assert made.metadata == {"a": "b"}
    first = await sdk.responses.create(model="m", input=[user("look")], tools=[FUNCTION])
    own = [item.model_dump(exclude_unset=True) for item in first.output]
    added = await sdk.conversations.items.create(made.id, items=[user("look"), *own])
    assert [item.type for item in added.data] == ["message", "function_call"]
    await sdk.conversations.items.create(made.id, items=[OUTPUT])
    kept = await items_of(await sdk.conversations.items.list(made.id, order="asc", limit=2))
    assert [item["type"] for item in kept] == ["message", "function_call", OUTPUT["type"]]
    assert (await sdk.responses.create(model="m", input=kept)).output_text == "echo 42"
    _, last = await rows(bench, active)
    assert last.messages[:2] == [user("look"), CALL]
    newest = (await sdk.conversations.items.list(made.id, limit=1)).data[0]
    assert newest.output == "42"
    same = await sdk.conversations.items.retrieve(newest.id, conversation_id=made.id)
    assert same.output == "42"
    await sdk.conversations.items.delete(newest.id, conversation_id=made.id)
    assert len(await items_of(await sdk.conversations.items.list(made.id))) == 2
    with pytest.raises(openai.NotFoundError, match="is no item of conversation"):
        await sdk.conversations.items.retrieve(newest.id, conversation_id=made.id)
    changed = await sdk.conversations.update(made.id, metadata={"c": "d"})
    assert (await sdk.conversations.retrieve(made.id)).metadata == changed.metadata == {"c": "d"}
    assert (await sdk.conversations.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError, match="make one with POST /v1/conversations"):
        await sdk.conversations.items.list(made.id)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keep", [False, True])
async def test_calls_continue_a_conversation(
    bench: Any, active: Any, sdk: Any, stream: bool, keep: bool
) -> None:
    id = (await sdk.conversations.create(items=[user("hello"), said("yes?")])).id
    first = await ask(sdk, stream, input="look", conversation=id, tools=[FUNCTION], store=keep)
    assert first.conversation.id == id
    await ask(sdk, stream, input=[OUTPUT], conversation={"id": id}, store=keep)
    one, two = await rows(bench, active)
    assert one.messages == [user("hello"), said("yes?"), user("look")]
    assert two.messages[:4] == [*one.messages, CALL]
    listed = await items_of(await sdk.conversations.items.list(id, order="asc"))
    kinds = ["message"] * 3 + ["function_call", "function_call_output", "message"]
    assert [item["type"] for item in listed] == kinds
    assert listed[-1]["content"][0]["text"] == "echo 42"
    with pytest.raises(openai.BadRequestError, match="leave one out"):
        await ask(sdk, stream, input="a", conversation=id, previous_response_id=first.id or "x")


async def test_conversations_are_bounded(
    bench: Any, active: Any, sdk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_responses, "MAX_BYTES", 1000)
    first = await sdk.conversations.create(items=[user("a" * 600)])
    with pytest.raises(openai.APIStatusError, match="at most 1000 bytes; delete one"):
        await sdk.conversations.create(items=[user("a" * 600)])
    second = await sdk.conversations.create(items=[user("a" * 10)])
    await sdk.responses.create(model="m", input="b" * 300, conversation=second.id)
    with pytest.raises(openai.APIStatusError, match="at most 1000 bytes"):
        await sdk.responses.create(model="m", input="b", conversation=second.id)
    await sdk.conversations.delete(first.id)
    await sdk.conversations.delete(second.id)
    second = await sdk.conversations.create()
    await sdk.responses.create(model="m", input="b", conversation=second.id)
    assert len(await rows(bench, active)) == 2


@pytest.mark.parametrize(
    ("items", "why"),
    [
        ([OUTPUT], "there is no call 'call-0' before this result"),
        ([{"type": "web_search_call", "id": "ws_1"}], "an item of type 'web_search_call'"),
        ([{"type": "item_reference", "id": "x"}], "is not an item of this attempt"),
    ],
)
async def test_items_that_no_call_could_be_rendered_from(
    bench: Any, active: Any, sdk: Any, items: Any, why: str
) -> None:
    made = await sdk.conversations.create()
    with pytest.raises(openai.BadRequestError, match=why):
        await sdk.conversations.items.create(made.id, items=items)
    with pytest.raises(openai.BadRequestError, match="files is not possible"):
        await sdk.conversations.create(extra_body={"files": []})
    for query in ({"limit": 0}, {"order": "up"}, {"after": "x"}, {"extra_query": {"page": 1}}):
        with pytest.raises(openai.BadRequestError):
            await sdk.conversations.items.list(made.id, **query)
    assert await items_of(await sdk.conversations.items.list(made.id)) == []
