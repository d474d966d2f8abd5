"""Every field of a request acts, is refused with a sentence, or cannot change the answer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from tests.algorithms.engines.test_embedded import CALL, TOOLS, chat, http, openai

__all__ = ["http", "openai"]  # fixtures
ARGUMENTS = [
    '{"sql":"SELECT 1"}',
    '{ "sql" : "S\\u00e9\\/" }',
    '{"a": 1.50, "b":12345678901234567890123}',
    '{"b":1,"a":2,"b":3}',
]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_tools_continues_its_tokens(
    say: Callable[[str], None], stream: bool, openai: Any
) -> None:
    for arguments in ARGUMENTS:
        say(CALL.replace('{"sql": "SELECT 1"}', arguments))
        await continues_its_tokens(openai, arguments, stream)


async def continues_its_tokens(openai: Any, arguments: str, stream: bool) -> None:
    turns: list[Any] = [{"role": "user", "content": "Hello"}]
    ask: Any = {"model": "m", "tools": TOOLS, "max_tokens": 200}
    ask["extra_body"] = {"return_token_ids": True}
    if stream:
        async with openai.chat.completions.stream(messages=turns, **ask) as events:
            first = await events.get_final_completion()
        whole = await openai.chat.completions.create(messages=turns, **ask)
    else:
        first = whole = await openai.chat.completions.create(messages=turns, **ask)
    message = first.choices[0].message
    assert message.tool_calls[0].function.arguments == arguments
    call = {"id": "1", "type": "function"}
    call["function"] = {"name": "query", "arguments": message.tool_calls[0].function.arguments}
    turns += [{"role": "assistant", "content": None, "tool_calls": [call]}]
    turns += [{"role": "tool", "content": "1", "tool_call_id": "1"}]
    second = await openai.chat.completions.create(messages=turns, **ask)
    known = whole.prompt_token_ids + whole.choices[0].token_ids
    assert second.prompt_token_ids[: len(known)] == known


@pytest.mark.parametrize("stream", [False, True])
async def test_the_likeliest_tokens_are_of_the_sampling_distribution(
    server: Any, openai: Any, stream: bool
) -> None:
    turns: Any = [{"role": "user", "content": "Hello"}]
    ask = {"model": "m", "messages": turns, "temperature": 0.7, "seed": 3, "max_tokens": 5}
    ask |= {"logprobs": True, "top_logprobs": 20, "stream": stream, "n": 2}
    answer = await openai.chat.completions.create(**ask, extra_body={"return_token_ids": True})
    found: dict[int, list[Any]] = {0: [], 1: []}
    tokens: dict[int, list[int]] = {0: [], 1: []}
    prompt: list[int] = []
    for part in [part async for part in answer] if stream else [answer]:
        prompt = prompt or part.prompt_token_ids
        for choice in part.choices:
            found[choice.index] += choice.logprobs.content
            tokens[choice.index] += choice.token_ids
    for index in range(2):
        with torch.no_grad():
            logits = server.network(torch.tensor([prompt + tokens[index]])).logits[0]
        expected = torch.log_softmax(logits / 0.7, -1)[len(prompt) - 1 : -1].topk(20)
        values = [[one.logprob for one in each.top_logprobs] for each in found[index]]
        np.testing.assert_allclose(values, expected.values, atol=1e-4)
        assert all(
            likely.token == server.tokenizer.decode([int(token)])
            for each, ids in zip(found[index], expected.indices, strict=True)
            for likely, token in zip(each.top_logprobs[:3], ids, strict=False)
        )


async def test_requests_for_other_numbers_of_tokens_share_a_batch(openai: Any) -> None:
    turns: Any = [{"role": "user", "content": "Hello"}]
    for wanted in (0, 1, 7):
        answer = await openai.chat.completions.create(
            model="m", messages=turns, logprobs=True, top_logprobs=wanted, max_tokens=3
        )
        sizes = [len(each.top_logprobs) for each in answer.choices[0].logprobs.content]
        assert sizes == [wanted] * 3


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_have_the_likeliest_tokens_and_offsets(openai: Any, stream: bool) -> None:
    ask = {"model": "m", "prompt": "Hello", "max_tokens": 4, "logprobs": 2, "temperature": 1.0}
    answer = await openai.completions.create(**ask, seed=1, stream=stream)
    parts = [part async for part in answer] if stream else [answer]
    found = [part.choices[0].logprobs for part in parts]
    tokens = [token for one in found for token in one.tokens]
    offsets = [offset for one in found for offset in one.text_offset]
    assert offsets == [sum(map(len, tokens[:n])) for n in range(4)]
    for one in found:
        for token, p, top in zip(one.tokens, one.token_logprobs, one.top_logprobs, strict=True):
            assert top[token] == p
            assert len(top) in (2, 3)


REFUSED: dict[str, Any] = {
    "response_format": {"type": "json_object"},
    "structured_outputs": {"choice": ["a"]},
    "guided_json": {},
    "guided_regex": "a",
    "tool_choice": {"type": "function", "function": {"name": "query"}},
    "function_call": {"name": "query"},
    "functions": [{"name": "query"}],
    "frequency_penalty": 1.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 100},
    "min_p": 0.1,
    "min_tokens": 3,
    "bad_words": ["x"],
    "allowed_token_ids": [5],
    "best_of": 3,
    "echo": True,
    "suffix": "x",
    "skip_special_tokens": False,
    "continue_final_message": True,
    "include_reasoning": False,
    "modalities": ["text", "audio"],
    "web_search_options": {},
}
NEUTRAL: dict[str, Any] = {
    "response_format": {"type": "text"},
    "tool_choice": "auto",
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "min_p": 0,
    "bad_words": [],
    "best_of": 1,
    "modalities": ["text"],
    "user": "me",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "parallel_tool_calls": True,
}


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_what_would_change_the_answer_is_refused(http: httpx.AsyncClient, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "max_tokens": 1}
    for name, value in REFUSED.items():
        refused = await http.post(f"/v1/{path}", json={**body, name: value})
        error = refused.json().get("error", {})
        assert (refused.status_code, error.get("param")) == (400, name)
        assert name in error["message"]
        assert "leave it out" in error["message"]
        assert (await http.post(f"/v1/{path}", json={**body, name: None})).status_code == 200, name


async def test_a_number_out_of_range_is_refused(http: httpx.AsyncClient) -> None:
    for field in (
        '"min_p": 1e400',
        '"logit_bias": {"5": 1e400}',
        '"messages": [{"role": "user", "content": "x", "n": 1e400}]',
        '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": 1e400}}}]',
        '"temperature": 1e39',
    ):
        raw = f'{{"messages": [{{"role": "user", "content": "x"}}], "max_tokens": 1, {field}}}'
        refused = await http.post("/v1/chat/completions", content=raw)
        assert refused.status_code == 400, field
        assert "invalid_request_error" in refused.json()["error"]["type"], field
        assert (await chat(http, max_tokens=1)).status_code == 200, field


async def test_what_changes_nothing_is_answered(http: httpx.AsyncClient) -> None:
    assert (await chat(http, **NEUTRAL, max_tokens=1)).status_code == 200


async def test_top_logprobs_without_logprobs_or_too_many_are_refused(
    http: httpx.AsyncClient,
) -> None:
    assert "logprobs = true" in (await chat(http, top_logprobs=2)).text
    assert (await chat(http, top_logprobs=21, logprobs=True)).status_code == 400


async def test_a_field_that_no_list_names_is_said_once(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "agentrl.algorithm"):
        for _ in range(2):
            assert (await chat(http, make_it_rhyme=True, max_tokens=1)).status_code == 200
    assert [record.args for record in caplog.records] == [("make_it_rhyme",)]


@pytest.mark.parametrize("stream", [False, True])
async def test_one_call_at_a_time(openai: Any, say: Callable[[str], None], stream: bool) -> None:
    turns: Any = [{"role": "user", "content": "Hello"}]
    ask: Any = {"model": "m", "messages": turns, "tools": TOOLS, "max_tokens": 200}
    for parallel, count in ((False, 1), (True, 2)):
        say(CALL + "\n" + CALL)
        if stream:
            async with openai.chat.completions.stream(
                parallel_tool_calls=parallel, **ask
            ) as events:
                answer = await events.get_final_completion()
        else:
            answer = await openai.chat.completions.create(parallel_tool_calls=parallel, **ask)
        assert len(answer.choices[0].message.tool_calls) == count
        assert answer.choices[0].finish_reason == "tool_calls"


async def test_tokens_may_end_an_answer_and_its_end_be_ignored(
    http: httpx.AsyncClient, server: Any, say: Callable[[str], None]
) -> None:
    say("one two three")
    (two, *_) = server.tokenizer(" two")["input_ids"]
    body = {"return_token_ids": True, "max_tokens": 20}
    choice = (await chat(http, stop_token_ids=[two], **body)).json()["choices"][0]
    assert (choice["token_ids"][-1], choice["finish_reason"]) == (two, "stop")
    say("one")
    choice = (await chat(http, ignore_eos=True, **body)).json()["choices"][0]
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (20, "length")


async def test_effort_reaches_a_template_that_has_it(http: httpx.AsyncClient, server: Any) -> None:
    turns = [{"role": "user", "content": "x"}]
    server.tokenizer.chat_template = "{{ reasoning_effort | default('none') }} {{ verbosity }}"
    answer = await chat(
        http, reasoning_effort="low", verbosity="high", messages=turns, return_token_ids=True
    )
    assert server.tokenizer.decode(answer.json()["prompt_token_ids"]) == "low high"


async def test_effort_decides_thinking_as_with_vllm(http: httpx.AsyncClient, server: Any) -> None:
    """The gateway counts the tokens of prompts so, see `agentrl.runners.gateway.upstream`."""
    server.tokenizer.chat_template = "{{ enable_thinking }}"
    turns = [{"role": "user", "content": "x"}]
    for effort, thinking in (("none", "False"), ("low", "True")):
        body = {"messages": turns, "return_token_ids": True, "reasoning_effort": effort}
        ids = (await chat(http, **body)).json()["prompt_token_ids"]
        assert server.tokenizer.decode(ids) == thinking, effort
        body["chat_template_kwargs"] = {"enable_thinking": thinking == "False"}  # comes first
        ids = (await chat(http, **body)).json()["prompt_token_ids"]
        assert server.tokenizer.decode(ids) != thinking, effort
