"""What is added to a call, taken from an answer, and shown to the agent."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from agentrl.core.types import Sampling
from agentrl.runners.apis.base import CHAT, Dialect
from agentrl.runners.apis.chat import ConversationMemory
from agentrl.runners.gateway.request import ModelRequest, read_request
from agentrl.runners.gateway.response import ModelResponse, ResponseChunk, read_chunk
from agentrl.runners.gateway.upstream import Route

TRAINED = Route("policy", 1, "http://x/v1", "tiny")


def call(dialect: Dialect = CHAT, *, index: int = 0, **body: Any) -> ModelRequest:
    return read_request(dialect, json.dumps(body).encode(), ConversationMemory(), index)


def sent(
    made: ModelRequest,
    route: Route = TRAINED,
    defaults: Sampling | None = None,
    *,
    capture: bool = True,
) -> tuple[dict[str, Any], Sampling]:
    raw, sampling = made.encode(route, defaults or Sampling(), capture=capture)
    return json.loads(raw), sampling


def part(body: dict[str, Any]) -> ResponseChunk:
    return read_chunk(json.dumps(body).encode())


def test_silence_is_filled_with_the_sampling_of_the_rollout() -> None:
    defaults = Sampling(temperature=0.5, top_p=0.9, top_k=4, max_tokens=16, seed=102)
    body, sampling = sent(call(index=2, temperature=None), defaults=defaults)
    assert body["temperature"] == 0.5
    assert (body["top_p"], body["top_k"], body["max_tokens"]) == (0.9, 4, 16)
    assert body["seed"] == 102
    assert sampling == defaults


def test_a_whole_number_with_a_point_is_recorded() -> None:
    """vLLM samples with top_k = 5.0 as with 5."""
    raw = b'{"messages": [], "top_k": 5.0, "max_tokens": 1e2, "seed": 2.5}'
    _, sampling = sent(read_request(CHAT, raw, ConversationMemory(), 0))
    assert (sampling.top_k, sampling.max_tokens, sampling.seed) == (5, 100, None)


def test_a_number_that_python_cannot_read_is_recorded_as_text() -> None:
    raw = b'{"messages": [{"role": "user", "a": [1e400, -1e400, %s, 2.5, 7]}]}' % (b"3" * 5000)
    made = read_request(CHAT, raw, ConversationMemory(), 0)
    assert made.messages[0]["a"] == ["1e400", "-1e400", "3" * 5000, 2.5, 7]
    body, _ = made.encode(TRAINED, Sampling(), capture=True)
    assert b"[1e400, -1e400, 333" in body


def test_sampling_that_is_no_number_is_the_servers_to_refuse() -> None:
    body, sampling = sent(call(temperature="hot", top_p=True, max_tokens=[1]))
    assert (body["temperature"], body["top_p"], body["max_tokens"]) == ("hot", True, [1])
    assert sampling == Sampling()


def answer_body(**extra: Any) -> dict[str, Any]:
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": "ab"},
        "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]},
        "token_ids": [5, 6],
    }
    return {"model": "tiny", "prompt_token_ids": [1, 2], "choices": [choice | extra]}


@pytest.mark.parametrize(
    "extra",
    [
        {"token_ids": None},
        {"token_ids": [5]},
        {"logprobs": None},
        {"token_ids": None, "logprobs": None},
    ],
)
def test_unknown_ids_or_logprobs_make_a_call_inexact(extra: dict[str, Any]) -> None:
    answer = ModelResponse()
    answer.add(part(answer_body(**extra)))
    row = answer.choices[0].transition(id="t", attempt="a", index=0)
    assert not row.exact
    assert len(row.logprobs) == 0


def test_a_streamed_function_call_adds_up() -> None:
    """The form before `tool_calls`, in which the name comes first."""
    answer = ModelResponse()
    for said in ({"name": "f", "arguments": ""}, {"arguments": '{"a"'}, {"arguments": ": 1}"}):
        choice = {"index": 0, "delta": {"content": None, "function_call": said}}
        answer.add(read_chunk(msgspec.json.encode({"choices": [choice]})))
    said = {"content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    assert answer.choices[0].message == said


@pytest.mark.parametrize(
    "body",
    [
        {"choices": "x"},
        {"choices": ["x"]},
        {"choices": [{"token_ids": [2**40]}]},
        {"choices": [{"token_ids": ["a"]}]},
        {"choices": [{"message": "x"}]},
    ],
)
def test_odd_answers_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises((msgspec.DecodeError, OverflowError, KeyError)):
        ModelResponse().add(part(body))


def test_what_is_left_of_an_answer_that_was_cut() -> None:
    answer = ModelResponse()
    head = {"token_ids": [7], "logprobs": {"content": [{"logprob": -1.0}]}}
    deltas = [{"content": "a"} | {"role": "assistant"}, {"role": "assistant"}, {"content": "c"}]
    choices = [{"index": i, "delta": delta} for i, delta in enumerate(deltas)]
    choices[0] |= head
    choices[2] |= {"token_ids": []}  # its tokens would have come after its text
    answer.add(part({"prompt_token_ids": [1], "choices": choices}))
    answer.add(part({"choices": [{"index": 3, "delta": {"content": "d"}} | head]}))
    answer.add(part({"choices": [{"index": 3, "delta": {}, "finish_reason": "stop"}]}))
    answer.cut("cut")
    left = {index: (choice.finish, choice.exact) for index, choice in answer.choices.items()}
    assert left == {0: ("cut", True), 2: ("cut", False), 3: ("stop", True)}
