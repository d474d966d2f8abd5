"""An answer that comes back is rendered as it was given, however its client sends it: the bodies
are those of the clients that are named."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from agentrl.runners.apis.chat import ConversationMemory

USER = {"role": "user", "content": "hello"}
WRITTEN = '{"text":  "\\u00e9", "n": 1.0}'
CUT = '{"text": "a", "n'


def call(arguments: str = WRITTEN, id: str = "c1", name: str = "f") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def answer(content: str | None, *calls: Any, **more: Any) -> dict[str, Any]:
    turn = {"role": "assistant", "content": content}
    return turn | ({"tool_calls": [*calls]} if calls else {}) | more


@pytest.fixture
async def http(bench: Any) -> AsyncIterator[httpx.AsyncClient]:
    active = bench.gateway.register(await bench.attempt())
    headers = {"authorization": f"Bearer {active.key}", "x-goog-api-key": active.key}
    async with httpx.AsyncClient(base_url=bench.gateway.base_url, headers=headers) as client:
        yield client


async def give(bench: Any, http: httpx.AsyncClient, path: str, body: Any, given: Any) -> Any:
    """Let the policy answer a call with `given`."""
    bench.model.answer = lambda _: given
    told = await http.post(path, json=body)
    assert told.status_code == 200, told.text
    return told.json()


async def turns(bench: Any, http: httpx.AsyncClient, path: str, body: Any) -> Any:
    """What the policy reads of a call, but for the user's first message."""
    await give(bench, http, path, body, answer("done"))
    assert bench.model.requests[-1]["messages"][0] == USER
    return bench.model.requests[-1]["messages"][1:]


RESULT = {"role": "tool", "tool_call_id": "c1", "content": "ok"}
CHAT = {"model": "m", "messages": [USER]}


# -- chat completions ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (answer("hi"), answer("hi", name="solver")),  # LangChain with a named agent
        (answer("hi"), answer([{"type": "text", "text": "hi"}], name="model")),  # type: ignore[arg-type]
        (answer(None, call()), answer(None, call('{"text":"é","n":1}'), name="model")),
        (answer("", call(CUT)), answer(None, call(json.dumps({"INVALID_JSON": CUT})))),
        (answer(None, call(CUT)), answer(None, call("{}"))),  # Strands and the AI SDK
        (answer(None, call("[1]")), answer(None, call("{}"))),
        (answer(None, call(CUT), call("{}", "c2")), answer(None, call("{}", "c2"), call(CUT))),
        (answer(None, call()), answer(None, call('{"n":1,"text":"é"}', "other"))),
        (answer("hi", reasoning=" hm\n"), answer("hi", reasoning_content="hm")),
    ],
)
async def test_an_answer_is_rendered_as_it_was_given(
    bench: Any, http: Any, given: Any, sent: Any
) -> None:
    await give(bench, http, "/chat/completions", CHAT, given)
    told = [RESULT | {"tool_call_id": one["id"]} for one in sent.get("tool_calls") or ()]
    body = CHAT | {"messages": [USER, sent, *told]}
    turn, *results = await turns(bench, http, "/chat/completions", body)
    assert turn == given | ({} if given["content"] else {"content": sent["content"]})
    ids = {one["id"] for one in given.get("tool_calls") or ()}
    assert {result["tool_call_id"] for result in results} == ids


@pytest.mark.parametrize(
    "sent",
    [
        answer("other", name="solver"),
        answer("hi", call(), name="solver"),  # with a call that the policy did not make
        answer("hi ", name="solver"),
    ],
)
async def test_what_the_agent_says_itself_is_left_alone(bench: Any, http: Any, sent: Any) -> None:
    await give(bench, http, "/chat/completions", CHAT, answer("hi"))
    body = CHAT | {"messages": [USER, sent]}
    assert await turns(bench, http, "/chat/completions", body) == [sent]


async def test_the_name_of_another_agent_is_kept(bench: Any, http: Any) -> None:
    """A supervisor reads by name which of its agents has said what."""
    await give(bench, http, "/chat/completions", CHAT, answer("hi"))
    said = [USER, {"role": "user", "content": "which?"}, answer("hi", name="critic")]
    body = CHAT | {"messages": said}
    assert await turns(bench, http, "/chat/completions", body) == said[1:]


async def test_repaired_arguments_are_what_the_agent_acted_on(bench: Any, http: Any) -> None:
    """LangChain's stream completes arguments that were cut off, and runs the tool with them."""
    await give(bench, http, "/chat/completions", CHAT, answer(None, call(CUT)))
    sent = answer(None, call('{"text": "a"}'))
    body = CHAT | {"messages": [USER, sent, RESULT]}
    assert (await turns(bench, http, "/chat/completions", body))[0] == sent


async def test_neighbouring_messages_of_chat_stay_apart(bench: Any, http: Any) -> None:
    """Unless they are one answer."""
    await give(bench, http, "/chat/completions", CHAT, answer("ab"))
    for parts in (["a", "b"], ["a", "c"]):
        body = CHAT | {"messages": [USER, *map(answer, parts)]}
        found = await turns(bench, http, "/chat/completions", body)
        assert found == ([answer("ab")] if parts == ["a", "b"] else [answer("a"), answer("c")])


def test_true_is_not_1() -> None:
    memory = ConversationMemory()
    said, key = memory.recall([USER], joined=False)
    memory.remember(answer(None, call('{"n":  true}')), key)
    for received, sent in (('{"n":true}', '{"n":  true}'), ('{"n":1}', '{"n":1}')):
        found, _ = memory.recall([*said, answer(None, call(received))], joined=False)
        assert found[1] == answer(None, call(sent))


def test_one_of_several_answers_to_the_same_conversation() -> None:
    """By the ids of its calls, or else the latest."""
    memory = ConversationMemory()
    said, key = memory.recall([USER], joined=False)
    for id, written in (("c1", '{"n":  1}'), ("c2", '{ "n": 1 }')):
        memory.remember(answer(None, call(written, id)), key)
    for id, given in (("c1", "c1"), ("c2", "c2"), ("none", "c2")):
        found, _ = memory.recall([*said, answer(None, call('{"n":1}', id))], joined=False)
        written = {"c1": '{"n":  1}', "c2": '{ "n": 1 }'}[given]
        assert found[1] == answer(None, call(written, given))


@pytest.mark.parametrize("calls", [5, [5], [{"function": 5}], [{"id": [], "function": {}}]])
def test_calls_of_any_form(calls: Any) -> None:
    memory = ConversationMemory()
    _, key = memory.recall([USER], joined=False)
    memory.remember(answer("hi"), key)
    said: Any = [USER, answer("hi", tool_calls=calls), 5, {"role": []}, {"role": "tool"}]
    assert memory.recall(said, joined=False)[0] == said


# -- Responses -------------------------------------------------------------------------------------

THOUGHT = {
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
}
WORDS = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
MORE = WORDS | {"content": "b"}
ITEM = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": WRITTEN}
SECOND = ITEM | {"call_id": "c2", "arguments": "{}"}
OUTPUTS = [{"type": "function_call_output", "call_id": id, "output": "ok"} for id in ("c1", "c2")]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("items", "given"),
    [
        ([ITEM, WORDS], answer("a", call())),  # openai, LangChain, openai-agents: words came later
        ([WORDS, ITEM, MORE, SECOND], answer("ab", call(), call("{}", "c2"))),
        (
            [THOUGHT, WORDS, THOUGHT, ITEM],
            answer("a", call(), reasoning_content="hmhm"),
        ),
        ([THOUGHT, ITEM, WORDS], answer("a", call(), reasoning_content="hm")),  # haystack
    ],
)
async def test_an_answer_is_one_turn_whatever_the_order_of_its_items(
    bench: Any, http: Any, items: list[Any], given: Any, known: bool
) -> None:
    ask = {"model": "m", "input": [USER]}
    if known:
        await give(bench, http, "/responses", ask, given)
    outputs = OUTPUTS[: len(given["tool_calls"])]
    turn, *_ = await turns(bench, http, "/responses", ask | {"input": [USER, *items, *outputs]})
    assert turn == given


async def test_two_answers_in_a_row_stay_two(bench: Any, http: Any) -> None:
    """Codex asks again after an answer without a call, with nothing in between."""
    ask: Any = {"model": "m", "input": [USER]}
    await give(bench, http, "/responses", ask, answer("a"))
    await give(bench, http, "/responses", ask | {"input": [USER, WORDS]}, answer(None, call()))
    body = ask | {"input": [USER, WORDS, ITEM, OUTPUTS[0]]}
    assert await turns(bench, http, "/responses", body) == [
        answer("a"),
        answer(None, call()),
        RESULT,
    ]


@pytest.mark.parametrize("arguments", ["{}", json.dumps({"INVALID_JSON": CUT}), CUT])
async def test_malformed_arguments_come_back(bench: Any, http: Any, arguments: str) -> None:
    ask: Any = {"model": "m", "input": [USER]}
    await give(bench, http, "/responses", ask, answer(None, call(CUT)))
    body = ask | {"input": [USER, ITEM | {"arguments": arguments}, OUTPUTS[0]]}
    assert await turns(bench, http, "/responses", body) == [answer(None, call(CUT)), RESULT]


# -- Messages --------------------------------------------------------------------------------------

MESSAGES: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [USER]}
USE = {"type": "tool_use", "id": "c1", "name": "f", "input": {"text": "é", "n": 1}}
TOLD = {"type": "tool_result", "tool_use_id": "c1", "content": "ok"}


async def test_neighbouring_assistant_messages_are_one(bench: Any, http: Any) -> None:
    await give(bench, http, "/messages", MESSAGES, answer("ab", call()))
    said = [{"role": "assistant", "content": content} for content in ("a", [USE])]
    said.insert(1, {"role": "assistant", "content": [{"type": "text", "text": "b"}]})
    body = MESSAGES | {"messages": [USER, *said, {"role": "user", "content": [TOLD]}]}
    assert await turns(bench, http, "/messages", body) == [answer("ab", call()), RESULT]


async def test_an_empty_object_in_the_place_of_malformed_arguments(bench: Any, http: Any) -> None:
    await give(bench, http, "/messages", MESSAGES, answer(None, call(CUT)))
    use = {"role": "assistant", "content": [USE | {"input": {}}]}
    body = MESSAGES | {"messages": [USER, use, {"role": "user", "content": [TOLD]}]}
    assert await turns(bench, http, "/messages", body) == [answer(None, call(CUT)), RESULT]


async def test_what_is_not_read_inside_of_messages_is_listed(bench: Any, http: Any) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    tool = {"name": "f", "input_schema": {"type": "object"}, "input_examples": [{"text": "x"}]}
    said = {"role": "user", "content": [{"type": "text", "text": "hello"} | mark | {"x": 1}]}
    body = MESSAGES | {"messages": [said], "tools": [tool | mark | {"defer_loading": True}]}
    body["output_config"] = {"effort": "low", "task_budget": {"tokens": 5}}
    await give(bench, http, "/messages", body, answer("hi"))
    (row,) = (await bench.store.trace("r0")).transitions
    assert row.ignored == [
        "messages.text.x",
        "output_config.task_budget",
        "tools.defer_loading",
        "tools.input_examples",
    ]


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        (
            "/messages",
            MESSAGES | {"messages": [{"role": "user", "content": [TOLD]}]},
            "messages[0]",
        ),
        ("/responses", {"model": "m", "input": [USER, OUTPUTS[0]]}, "input[1]"),
        (
            "/responses",
            {"model": "m", "input": [USER, OUTPUTS[0] | {"type": "custom_tool_call_output"}]},
            "input[1]",
        ),
    ],
)
async def test_a_result_without_its_call_is_refused(
    bench: Any, http: Any, path: str, body: Any, where: str
) -> None:
    refused = await http.post(path, json=body)
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert message.startswith(where)
    assert "there is no call 'c1' before this result" in message
    assert bench.model.requests == []
