"""The server over real HTTP, with the clients that agents use."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from openai import AsyncOpenAI

from agentrl.algorithms.engines.embedded.server import EmbeddedServer
from agentrl.algorithms.model.load import load_model
from agentrl.core.errors import PolicyError

HELLO = [{"role": "user", "content": "Hello"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "query", "parameters": {}}}]
CALL = '<tool_call>\n{"name": "query", "arguments": {"sql": "SELECT 1"}}\n</tool_call>'


@pytest.fixture
async def http(server: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.base_url.removesuffix("/v1")) as client:
        yield client


@pytest.fixture
async def openai(server: Any) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
        yield client


async def chat(http: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await http.post("/v1/chat/completions", json={"messages": HELLO, **body})


async def test_an_answer_has_its_tokens_and_their_log_probs(
    server: Any, http: httpx.AsyncClient
) -> None:
    response = await chat(
        http, model="any", logprobs=True, return_token_ids=True, temperature=0.7, seed=3
    )
    answer = response.json()
    choice = answer["choices"][0]
    prompt = server.tokenizer.apply_chat_template(HELLO, add_generation_prompt=True)["input_ids"]
    assert response.headers["x-policy-version"] == "0"
    assert response.headers["x-processors"] == "none"
    assert answer["model"] == "any"
    assert answer["prompt_token_ids"] == prompt
    assert choice["finish_reason"] == "length"
    assert choice["message"] == {
        "role": "assistant",
        "content": server.tokenizer.decode(choice["token_ids"], skip_special_tokens=True),
    }
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 16,
        "total_tokens": len(prompt) + 16,
    }
    with torch.no_grad():
        logits = server.network(torch.tensor([prompt + choice["token_ids"]])).logits[0]
    expected = torch.log_softmax(logits / 0.7, -1)[len(prompt) - 1 : -1]
    expected = expected.gather(1, torch.tensor(choice["token_ids"])[:, None])[:, 0]
    found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    np.testing.assert_allclose(found, expected, atol=1e-4)


async def test_what_is_not_asked_for_is_not_sent(http: httpx.AsyncClient) -> None:
    answer = (await chat(http)).json()
    assert "prompt_token_ids" not in answer
    assert "token_ids" not in answer["choices"][0]
    assert answer["choices"][0]["logprobs"] is None


async def test_sixty_four_calls_of_all_lengths_at_once(server: Any) -> None:
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=server.base_url, limits=limits, timeout=60) as client:

        async def ask(number: int) -> dict[str, Any]:
            messages = [{"role": "user", "content": f"{number} " * (number % 17 + 1)}]
            body = {"messages": messages, "max_tokens": number % 9 + 1, "return_token_ids": True}
            return dict((await client.post("/chat/completions", json=body)).json())

        answers = await asyncio.gather(*map(ask, range(64)))
    for number, answer in enumerate(answers):
        text = server.tokenizer.decode(answer["prompt_token_ids"])
        assert f"user\n{number} " in text
        assert 1 <= len(answer["choices"][0]["token_ids"]) <= number % 9 + 1


async def test_same_seed_same_answer(http: httpx.AsyncClient) -> None:
    texts = [
        (await chat(http, temperature=1.0, seed=seed)).json()["choices"][0]["message"]["content"]
        for seed in (5, 5, 6, -5)
    ]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


async def test_several_choices_differ(http: httpx.AsyncClient) -> None:
    answer = (await chat(http, n=4, temperature=1.0, seed=1)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 4
    assert answer["usage"]["completion_tokens"] == 64


async def test_stop_strings_end_the_text_but_not_the_tokens(
    http: httpx.AsyncClient, say: Callable[[str], None]
) -> None:
    say("one two three")
    choice = (await chat(http, stop=["x", "two"], return_token_ids=True)).json()["choices"][0]
    assert choice["message"]["content"] == "one "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "two")
    assert len(choice["token_ids"]) > 1
    say("one two three")
    streamed = (await chat(http, stop=["x", "two"], stream=True)).text.split("\n\n")
    (last,) = json.loads(streamed[-3].removeprefix("data: "))["choices"]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "two")
    say("one")
    assert "stop_reason" not in (await chat(http, stop=["x", "two"])).json()["choices"][0]


# -- clients that agents use -----------------------------------------------------------------------
async def test_openai_client_gets_tool_calls(
    openai: AsyncOpenAI, say: Callable[[str], None]
) -> None:
    say(f"Let me see.\n{CALL}\n{CALL}")
    answer = await openai.chat.completions.create(
        model="policy", messages=HELLO, tools=TOOLS, max_tokens=200
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert [call.function.name for call in choice.message.tool_calls] == ["query", "query"]
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"sql": "SELECT 1"}


async def test_openai_client_streams_all_fields(
    openai: AsyncOpenAI, say: Callable[[str], None]
) -> None:
    say(f"Let me see.\n{CALL}")
    stream = await openai.chat.completions.create(
        model="policy",
        messages=HELLO,
        tools=TOOLS,
        max_tokens=200,
        logprobs=True,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True},
    )
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    assert len([delta for delta in deltas if delta.content]) > 1
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in calls] == [(0, "query")]
    assert json.loads(calls[0].function.arguments) == {"sql": "SELECT 1"}
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    tokens = [token for chunk in chunks[:-1] for token in chunk.choices[0].token_ids]
    logprobs = [entry for chunk in chunks[:-1] for entry in chunk.choices[0].logprobs.content]
    assert chunks[-1].usage.completion_tokens == len(tokens) == len(logprobs)
    assert len(chunks[0].prompt_token_ids) == chunks[-1].usage.prompt_tokens


async def test_malformed_and_truncated_calls_are_content(
    openai: AsyncOpenAI, say: Callable[[str], None]
) -> None:
    for text, limit, reason in [("<tool_call>x</tool_call>", 99, "stop"), (CALL, 8, "length")]:
        say(text)
        answer = await openai.chat.completions.create(
            model="policy", messages=HELLO, tools=TOOLS, max_tokens=limit
        )
        choice = answer.choices[0]
        assert (choice.finish_reason, choice.message.tool_calls) == (reason, None)
        assert text.startswith(choice.message.content)
        assert choice.message.content


async def test_tool_choice_none_leaves_the_text_alone(
    http: httpx.AsyncClient, say: Callable[[str], None]
) -> None:
    say(CALL)
    body = {"tools": TOOLS, "tool_choice": "none", "max_tokens": 200}
    choice = (await chat(http, **body)).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


@pytest.mark.parametrize("streaming", [False, True])
async def test_langchain_model_calls_tools(
    server: Any, say: Callable[[str], None], streaming: bool
) -> None:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def query(sql: str) -> str:
        """Run one SQL query."""
        return sql

    say(CALL)
    async with httpx.AsyncClient() as client:
        model = ChatOpenAI(
            model="policy", base_url=server.base_url, api_key="none", max_tokens=200,
            streaming=streaming, http_async_client=client,
        )  # fmt: skip
        answer = await model.bind_tools([query]).ainvoke("Hello")
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [
        ("query", {"sql": "SELECT 1"})
    ]


async def test_completions_take_text_and_tokens(openai: AsyncOpenAI, server: Any) -> None:
    tokens = server.tokenizer("Hello")["input_ids"]
    answers = [
        await openai.completions.create(
            model="policy", prompt=prompt, logprobs=1, extra_body={"return_token_ids": True}
        )
        for prompt in ("Hello", tokens)
    ]
    choices = [answer.choices[0] for answer in answers]
    assert choices[0].text == choices[1].text
    assert choices[0].prompt_token_ids == tokens
    assert len(choices[0].logprobs.token_logprobs) == len(choices[0].token_ids) == 16
    stream = await openai.completions.create(model="policy", prompt="Hello", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == choices[0].text


async def test_models_and_health(http: httpx.AsyncClient, server: Any) -> None:
    await server.publish(4)
    assert (await http.get("/v1/models")).json()["data"][0]["id"] == "policy"
    assert (await http.get("/health")).json() == {"status": "ok", "version": 4}


# -- versions --------------------------------------------------------------------------------------


async def test_a_client_that_leaves_is_not_waited_for(server: Any, http: httpx.AsyncClient) -> None:
    started = threading.Event()
    server.network.register_forward_pre_hook(lambda *args: started.set())
    call = asyncio.create_task(chat(http, max_tokens=400, temperature=1.0, n=16))
    await asyncio.to_thread(started.wait, 30)
    call.cancel()
    async with server.updating():  # waits for the engine to let go of it
        assert server._admission.engine.rows.n == 0


# -- bad input -------------------------------------------------------------------------------------
ONE = '{"messages": [{"role": "user", "content": "x"}], '
BAD = [
    ("{", "not JSON"),
    ("[]", "Expected `object`"),
    ("{}", "missing required field `messages`"),
    ('{"messages": "hi"}', "messages is not a list"),
    ('{"messages": []}', "messages is empty"),
    (ONE + '"temperature": "hot"}', "temperature"),
    (ONE + '"max_tokens": 0}', "max_tokens"),
    (ONE + '"tool_choice": "required"}', "guided"),
    (ONE + '"temperature": 1e-39}', "use 0"),
    (ONE + '"top_k": 100000000000000000000}', "top_k"),
]


async def test_bad_requests_get_a_sentence(http: httpx.AsyncClient) -> None:
    for body, says in BAD:
        response = await http.post("/v1/chat/completions", content=body)
        assert response.status_code == 400, body
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error", body
        assert says in error["message"]
        assert (await chat(http, max_tokens=1)).status_code == 200, body


async def test_a_prompt_beyond_the_context_names_both_numbers(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", json={"prompt": [5] * 600})
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["code"] == "context_length_exceeded"
    assert "512" in error["message"]
    assert "600" in error["message"]
    assert (
        "use a model with a longer context" in error["message"]
    )  # max_context is more than its own
    assert (await http.post("/v1/completions", json={"prompt": [5] * 511})).status_code == 200


async def test_a_token_outside_the_vocabulary_is_refused(http: httpx.AsyncClient) -> None:
    for token in (-1, 512, 2**40):
        response = await http.post("/v1/completions", json={"prompt": [5, token]})
        assert response.status_code == 400, token
        assert str(token) in response.json()["error"]["message"]
        assert (await chat(http, max_tokens=1)).status_code == 200, token


async def test_unknown_fields_are_ignored_and_unknown_paths_are_not(
    http: httpx.AsyncClient,
) -> None:
    assert (await chat(http, user="me", parallel_tool_calls=True)).status_code == 200
    response = await http.get("/v2/nothing")
    assert response.status_code == 404
    assert "/v2/nothing" in response.json()["error"]["message"]


async def test_broken_weights_are_a_server_error(server: Any, http: httpx.AsyncClient) -> None:
    with torch.no_grad():
        server.network.model.norm.weight.fill_(float("nan"))
    response = await chat(http)
    assert response.status_code == 500
    assert "not finite" in response.json()["error"]["message"]
    assert "not finite" in (await chat(http, stream=True)).text


async def test_an_engine_that_ends_is_the_failure_of_its_server(
    server: Any, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = asyncio.create_task(server.wait_for_failure())
    given_up = asyncio.create_task(server.wait_for_failure())
    await asyncio.sleep(0)
    given_up.cancel()

    def broken(*given: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(threading, "excepthook", lambda args: None)  # the thread's own report
    monkeypatch.setattr(server._admission.engine.rows, "source", broken)
    answer = await chat(http)
    assert answer.status_code == 503
    assert "the embedded engine ended with KeyError: 'a bug'" in answer.text
    async with asyncio.timeout(60):
        assert "KeyError: 'a bug'" in str(await waiting)


async def test_a_taken_port_is_a_sentence(server: Any, tiny_model_dir: Path) -> None:
    port = httpx.URL(server.base_url).port
    assert port is not None
    second = EmbeddedServer(*load_model(tiny_model_dir, device="cpu"), port=port)
    with pytest.raises(PolicyError, match=rf"cannot listen on 127\.0\.0\.1:{port}.*engine\.port"):
        await second.start()
    await second.close()


async def test_closing_refuses_what_is_in_flight(server: Any, http: httpx.AsyncClient) -> None:
    started = threading.Event()
    server.network.register_forward_pre_hook(lambda *args: started.set())
    call = asyncio.create_task(chat(http, max_tokens=480, temperature=1.0, n=16))
    await asyncio.to_thread(started.wait, 30)
    await server.close()
    assert (await call).status_code in (200, 503)
    await server.close()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
async def test_a_large_prompt_is_refused_and_holds_nobody_up(
    server: Any, http: httpx.AsyncClient, path: str
) -> None:
    """It is read beside the event loop, which answers others meanwhile."""
    threads: set[str] = set()
    codec, encode = server._routes._codec, server._routes._codec._encode_aside

    def noted(*given: Any) -> Any:
        threads.add(threading.current_thread().name)
        return encode(*given)

    codec._encode_aside = noted
    for text in ("Ada, " * 20_000, "Ada, " * 900_000):  # below and above the largest body
        messages = [*HELLO, {"role": "tool", "content": text}]
        refused = await http.post(path, json={"messages": messages, "prompt": text})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "leaves no room to answer; shorten the messages or" in error["message"]
    assert not threads  # by their bytes
    codec.most_bytes = 2**30
    text = "Ada, " * 20_000
    messages = [*HELLO, {"role": "tool", "content": text}]
    refused = await http.post(path, json={"messages": messages, "prompt": text})
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert threads == {"large-requests_0"}
    assert server._chat._prompts.size < 10_000
    assert codec._pieces.size < 10_000
    assert (await chat(http)).status_code == 200
