"""The texts of a candidate reach the model in every API; the agent and its memory see nothing."""

from __future__ import annotations

import json
from typing import Any

import httpx
import httpx2
import msgspec
import openai
import pytest

from agentrl.algorithms.prompt_search import Candidate, put_candidates
from agentrl.core.types import ErrorKind, PromptText
from agentrl.runners.apis.base import CHAT
from agentrl.runners.apis.base import TEXT as COMPLETIONS
from agentrl.runners.apis.chat import ConversationMemory
from agentrl.runners.gateway.features import PromptNotFoundError, apply_prompts
from agentrl.runners.gateway.request import read_request

SEED, NEW, TODAY = "Be brief.", "Answer in one word.", "\nToday is Monday."
TEXT = PromptText(component="solver", role="solver", seed=SEED, text=NEW)
TOOL = PromptText(component="look", role="solver", seed="Looks", text="Looks it up", tool="look")
USER = {"role": "user", "content": f"hello. {SEED}"}
LOOK = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}


async def active(bench: Any, *texts: PromptText) -> Any:
    found = Candidate(id="c", run="test", step=0, parents=[], state="proposed", texts=[*texts])
    await put_candidates(bench.store, "test", [found])
    return bench.gateway.register(await bench.attempt(candidate="c"))


async def read(bench: Any, active: Any) -> list[Any]:
    return await read_of(bench, active.attempt.rollout.id)


async def read_of(bench: Any, rollout: str) -> list[Any]:
    return list((await bench.store.trace(rollout)).transitions)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["system", "developer"])
async def test_chat_completions(bench: Any, stream: bool, role: str) -> None:
    attempt = await active(bench, TEXT, TOOL)
    messages = [{"role": role, "content": SEED + TODAY}, USER]
    async with openai.AsyncOpenAI(api_key=attempt.key) as sdk:
        answer = await sdk.chat.completions.create(
            model="solver",
            messages=messages,
            tools=[{"type": "function", "function": LOOK}],
            stream=stream,
            extra_headers={"baggage": "agentrl.role=solver"},
        )
        if stream:
            _ = [part async for part in answer]
    sent = bench.model.requests[0]
    want = [{"role": role, "content": NEW + TODAY}, USER]
    assert (sent["messages"], sent["tools"][0]["function"]["description"]) == (
        want,
        "Looks it up.",
    )
    (call,) = await read(bench, attempt)
    assert (call.role, call.messages, call.tools) == ("solver", want, sent["tools"])
    assert messages[0]["content"] == SEED + TODAY


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_instructions_of_every_turn_are_replaced_once(
    bench: Any, stream: bool
) -> None:
    attempt = await active(bench, TEXT)
    path = {"base_url": f"{bench.gateway.base_url[:-3]}/a/{attempt.id}/solver/v1"}
    async with openai.AsyncOpenAI(api_key=attempt.key, **path) as sdk:

        async def ask(**fields: Any) -> Any:
            fields |= {"model": "m", "instructions": SEED + TODAY}
            if not stream:
                return await sdk.responses.create(**fields)
            async with sdk.responses.stream(**fields) as events:
                return await events.get_final_response()

        first = await ask(input="a")
        second = await ask(previous_response_id=first.id, input="b")
    assert (first.output_text, second.output_text) == ("echo a", "echo b")
    assert first.instructions == SEED + TODAY  # the agent sees its own text
    for sent in bench.model.requests:
        assert [m["content"] for m in sent["messages"] if m["role"] == "system"] == [NEW + TODAY]
    assert len(bench.model.requests[1]["messages"]) == 4


async def test_a_developer_message_that_the_conversation_remembers(bench: Any) -> None:
    attempt = await active(bench, TEXT)
    path = {"base_url": f"{bench.gateway.base_url[:-3]}/a/{attempt.id}/solver/v1"}
    async with openai.AsyncOpenAI(api_key=attempt.key, **path) as sdk:
        asked = [{"role": "developer", "content": SEED}, USER]
        first = await sdk.responses.create(model="m", input=asked)
        await sdk.responses.create(model="m", previous_response_id=first.id, input="b")
    assert [sent["messages"][0]["content"] for sent in bench.model.requests] == [NEW, NEW]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parts", [False, True])
async def test_anthropic_system(bench: Any, parts: bool, stream: bool) -> None:
    import anthropic  # takes seconds

    attempt = await active(bench, TEXT)
    system: Any = SEED + TODAY
    if parts:
        system = [{"type": "text", "text": "You are x."}, {"type": "text", "text": SEED + TODAY}]
    url = f"{bench.gateway.base_url[:-3]}/a/{attempt.id}/solver"
    async with anthropic.AsyncAnthropic(api_key=attempt.key, base_url=url) as sdk:
        asked: Any = {"model": "m", "max_tokens": 9, "system": system, "messages": [USER]}
        if stream:
            async with sdk.messages.stream(**asked) as events:
                assert (await events.get_final_text()).startswith("echo hello.")
        else:
            await sdk.messages.create(**asked)
    first = bench.model.requests[0]["messages"][0]["content"]
    assert NEW + TODAY in (first if isinstance(first, str) else first[-1]["text"])
    assert bench.model.requests[0]["messages"][-1] == USER


async def test_a_node_of_a_graph_reads_the_text_of_its_role(bench: Any) -> None:
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph

    bench.gateway.attempts.roles = frozenset({"solver", "critic"})
    found = Candidate(id="c", run="test", step=0, parents=[], state="proposed", texts=[TEXT])
    await put_candidates(bench.store, "test", [found])

    async with httpx2.AsyncClient() as client:
        chat = ChatOpenAI(model="gpt", http_async_client=client)

        async def node(state: MessagesState) -> Any:
            said = [("system", SEED + TODAY), ("user", state["messages"][-1].content)]
            return {"messages": [await chat.ainvoke(said)]}

        graph = StateGraph(MessagesState)
        graph.add_node("solver", node)
        graph.add_node("critic", node)
        graph.add_edge(START, "solver")
        graph.add_edge("solver", "critic")
        (row,) = await bench.run(graph.compile(), {"input": "x"}, candidate="c")
    assert row.failure is None, row.failure
    read = {call.role: call.messages[0]["content"] for call in await read_of(bench, row.id)}
    assert read == {"solver": NEW + TODAY, "critic": SEED + TODAY}


async def test_other_roles_keep_their_texts(bench: Any) -> None:
    attempt = await active(bench, TEXT)
    said = [{"role": "system", "content": SEED}, USER]
    async with openai.AsyncOpenAI(api_key=attempt.key) as sdk:
        await sdk.chat.completions.create(model="critic", messages=said)
    assert bench.model.requests[0]["messages"] == said


async def test_a_message_is_put_in_front_where_the_agent_has_none(bench: Any) -> None:
    attempt = await active(bench, PromptText(component="agent", role="agent", seed="", text=NEW))
    async with openai.AsyncOpenAI(api_key=attempt.key) as sdk:
        await sdk.chat.completions.create(model="m", messages=[USER])
    assert bench.model.requests[0]["messages"] == [{"role": "system", "content": NEW}, USER]


@pytest.mark.parametrize("prompt", [TEXT, TOOL])
async def test_what_is_not_found_is_refused_by_role(bench: Any, prompt: PromptText) -> None:
    attempt = await active(bench, prompt)
    body = {"model": "m", "messages": [{"role": "system", "content": "Other."}, USER]}
    body["tools"] = [{"type": "function", "function": LOOK | {"description": "Other."}}]
    url = f"{bench.gateway.base_url[:-3]}/a/{attempt.id}/solver/v1/chat/completions"
    async with httpx.AsyncClient() as client:
        answer = await client.post(url, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "prompt_not_found")
    assert "role 'solver'" in answer.json()["error"]["message"]
    assert not bench.model.requests


async def test_an_agent_that_ignores_the_refusal_is_not_scored(bench: Any) -> None:
    found = Candidate(id="c", run="test", step=0, parents=[], state="proposed", texts=[TEXT])
    await put_candidates(bench.store, "test", [found])

    async def agent(text: str) -> str:
        async with openai.AsyncOpenAI(api_key="x") as sdk:
            try:
                await sdk.chat.completions.create(model="solver", messages=[USER])
            except openai.BadRequestError:
                return "fine"
        return "played"

    (row,) = await bench.run(agent, {"input": "x"}, candidate="c", max_attempts=1)
    assert (row.failure.kind, row.rewards) == (ErrorKind.MODEL, [])
    assert "role 'solver'" in row.failure.message


def request(**body: Any) -> Any:
    raw = msgspec.json.encode({"model": "m"} | body)
    return read_request(CHAT, raw, ConversationMemory(), 0)


def test_messages_that_do_not_change_are_sent_as_they_came() -> None:
    raw = b'{"messages":[{"role":"system","content":"Be brief."},'
    raw += b'{"role": "user",  "content":"\\u0061"}]}'
    call = read_request(CHAT, raw, ConversationMemory(), 0)
    apply_prompts(call, "solver", [TEXT])
    assert b'{"role": "user",  "content":"\\u0061"}' in msgspec.json.encode(call.fields)
    assert call.messages[1] == {"role": "user", "content": "a"}


def test_two_components_of_a_role() -> None:
    second = PromptText(component="more", role="solver", seed="Think.", text="Do not think.")
    said = [{"role": "system", "content": SEED}, {"role": "developer", "content": "Think."}]
    call = request(messages=said)
    apply_prompts(call, "solver", [TEXT, second])
    assert msgspec.json.decode(msgspec.json.encode(call.fields))["messages"] == call.messages
    assert [m["content"] for m in call.messages] == [NEW, "Do not think."]


def test_a_tool_that_the_call_does_not_offer_is_no_mistake() -> None:
    call = request(messages=[USER])
    apply_prompts(call, "solver", [TOOL])
    assert call == request(messages=[USER])


def test_a_text_prompt_has_no_system_message() -> None:
    call = read_request(COMPLETIONS, b'{"prompt": "x"}', ConversationMemory(), 0)
    for prompt in (TEXT, PromptText(component="a", role="solver", seed="", text="b")):
        with pytest.raises(PromptNotFoundError):
            apply_prompts(call, "solver", [prompt])


async def test_a_verifier_asks_in_its_own_words(bench: Any) -> None:
    attempt = await active(bench, TEXT)
    with bench.gateway.scoring(attempt.attempt) as own:
        assert bench.gateway.attempts.find(own).attempt.prompts == []


@pytest.mark.parametrize("said", ["Be b{}", "Be brief. Be brief, {}", "{} Be brief, {}"])
def test_a_long_text_of_which_only_the_beginning_comes_before_it(said: str) -> None:
    seed = "Be brief, " * 20 + "and kind."
    call = request(messages=[{"role": "system", "content": said.format(seed, seed)}])
    apply_prompts(call, "solver", [PromptText(component="s", role="solver", seed=seed, text="!")])
    want = said.format("!", seed)
    assert call.messages[0]["content"] == want
    assert msgspec.json.decode(msgspec.json.encode(call.fields))["messages"] == call.messages


@pytest.mark.parametrize("before", [[], [USER]])
def test_a_text_in_any_encoding_and_place(before: list[Any]) -> None:
    """The quick way, on bytes, and the slow one give the same."""
    prompt = PromptText(component="s", role="solver", seed='Say "ü".\n', text='Say "é".\n')
    said = [*before, {"role": "system", "content": f"{prompt.seed}{TODAY}"}, USER]
    for raw in (json.dumps({"messages": said}).encode(), msgspec.json.encode({"messages": said})):
        call = read_request(CHAT, raw, ConversationMemory(), 0)
        apply_prompts(call, "solver", [prompt])
        want = [*before, {"role": "system", "content": f"{prompt.text}{TODAY}"}, USER]
        assert call.messages == want
        assert msgspec.json.decode(msgspec.json.encode(call.fields))["messages"] == want
