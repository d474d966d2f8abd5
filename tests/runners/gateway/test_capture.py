"""What is added to a call, taken from an answer, and shown to the agent."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from agentrl.runners.dialects import Dialect
from agentrl.runners.dialects.base import CHAT, TEXT
from agentrl.runners.dialects.conversation import ConversationMemory
from agentrl.runners.gateway.request import ModelRequest, read_request
from agentrl.runners.gateway.response import ModelResponse, ResponseChunk, read_chunk
from agentrl.runners.gateway.upstream import Route
from agentrl.types import Sampling

TRAINED = Route("policy", 1, "http://x/v1", "tiny")
FROZEN = Route("judge", None, "http://x/v1", "", frozen=True)


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


def test_the_agents_words_are_never_changed() -> None:
    said = {
        "model": "gpt",
        "temperature": 0,
        "top_p": 0.1,
        "max_completion_tokens": 5,
        "seed": 3,
        "stop": ["x"],
        "unheard_of": {"a": 1},
        "messages": [{"role": "user", "content": "é"}],
    }
    defaults = Sampling(temperature=1, max_tokens=99, seed=1)
    body, sampling = sent(call(**said), defaults=defaults)
    added = {"model": "tiny", "logprobs": True, "return_token_ids": True}
    assert body == said | added
    assert sampling == Sampling(temperature=0, top_p=0.1, max_tokens=5, seed=3)


def test_what_is_passed_on_keeps_its_bytes() -> None:
    raw = (
        b'{"model": "m", "messages": [ {"content":"\\u00e9", "x": 1.50e+1} ], "big": 1' + b"0" * 30
    )
    made = read_request(CHAT, raw + b"}", ConversationMemory(), 0)
    body, _ = made.encode(TRAINED, Sampling(), capture=True)
    assert b'[ {"content":"\\u00e9", "x": 1.50e+1} ]' in body
    assert b'"big":1' + b"0" * 30 in body


def test_a_number_that_python_cannot_read_is_recorded_as_text() -> None:
    raw = b'{"messages": [{"role": "user", "a": [1e400, -1e400, %s, 2.5, 7]}]}' % (b"3" * 5000)
    made = read_request(CHAT, raw, ConversationMemory(), 0)
    assert made.messages[0]["a"] == ["1e400", "-1e400", "3" * 5000, 2.5, 7]
    body, _ = made.encode(TRAINED, Sampling(), capture=True)
    assert b"[1e400, -1e400, 333" in body


def test_a_frozen_endpoint_is_asked_what_the_agent_asked() -> None:
    defaults = Sampling(temperature=0.5, top_k=4, max_tokens=16, seed=100)
    said = {"model": "gpt", "messages": [{"role": "user", "content": "q"}], "top_p": 0.5}
    body, sampling = sent(call(**said), FROZEN, defaults, capture=False)
    assert body == said
    assert sampling == Sampling(top_p=0.5)


def test_sampling_that_is_no_number_is_the_servers_to_refuse() -> None:
    body, sampling = sent(call(temperature="hot", top_p=True, max_tokens=[1]))
    assert (body["temperature"], body["top_p"], body["max_tokens"]) == ("hot", True, [1])
    assert sampling == Sampling()


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b"\xff\xfe\x00", b"null"])
def test_what_is_not_a_json_object(raw: bytes) -> None:
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
        read_request(CHAT, raw, ConversationMemory(), 0)


def answer_body(**extra: Any) -> dict[str, Any]:
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": "ab"},
        "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]},
        "token_ids": [5, 6],
    }
    return {"model": "tiny", "prompt_token_ids": [1, 2], "choices": [choice | extra]}


def test_the_agent_sees_only_what_it_asked_for() -> None:
    plain = json.loads(part(answer_body()).encode_for(call(model="gpt")))
    assert plain == {
        "model": "gpt",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": "ab"},
                "logprobs": None,
            }
        ],
    }
    asked = call(model="gpt", logprobs=True, return_token_ids=True)
    assert json.loads(part(answer_body()).encode_for(asked)) == answer_body() | {"model": "gpt"}


def test_a_whole_answer_is_read_exactly() -> None:
    answer = ModelResponse()
    answer.add(part(answer_body()))
    made = call(model="gpt", messages=[{"role": "user", "content": "q"}], tools=[{"a": 1}])
    row = answer.choices[0].transition(id="t", attempt="a", index=0)
    assert (list(row.prompt), list(row.completion), list(row.logprobs)) == (
        [1, 2],
        [5, 6],
        [-1, -2],
    )
    assert row.exact
    assert row.answer == {"role": "assistant", "content": "ab"}
    assert made.messages == [{"role": "user", "content": "q"}]
    assert made.tools == [{"a": 1}]


@pytest.mark.parametrize("extra", [{"token_ids": None}, {"token_ids": [5]}, {"logprobs": None}])
def test_unknown_ids_or_logprobs_make_a_call_inexact(extra: dict[str, Any]) -> None:
    answer = ModelResponse()
    answer.add(part(answer_body(**extra)))
    row = answer.choices[0].transition(id="t", attempt="a", index=0)
    assert not row.exact
    assert len(row.logprobs) == 0


def test_a_stream_adds_up_to_the_whole() -> None:
    def chunk(delta: dict[str, Any], finish: str | None = None, **extra: Any) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish} | extra]}

    def tool(index: int, **function: str) -> dict[str, Any]:
        head = {"id": f"c{index}"} if "name" in function else {}
        return {"tool_calls": [{"index": index, "function": function} | head]}

    answer = ModelResponse()
    parts = [
        chunk({"role": "assistant", "content": ""}) | {"prompt_token_ids": [1]},
        chunk({"content": "he"}, token_ids=[2], logprobs={"content": [{"logprob": -1.0}]}),
        chunk({"content": "llo"}, token_ids=[3, 4], logprobs={"content": [{"logprob": -2.0}] * 2}),
        chunk(tool(0, name="f", arguments='{"a"')),
        chunk(tool(0, arguments=":1}")),
        chunk(tool(1, name="g", arguments="{}")),
        chunk({}, "tool_calls"),
        {"choices": [], "usage": {"total_tokens": 3}},
    ]
    held = [answer.add(part(body)) for body in parts]
    assert held == [False] * 6 + [True, True]
    assert answer.complete
    choice = answer.choices[0]
    assert [list(v) for v in (choice.prompt, choice.tokens, choice.logprobs)] == [
        [1],
        [2, 3, 4],
        [-1.0, -2.0, -2.0],
    ]
    assert choice.message == {
        "role": "assistant",
        "content": "hello",
        "tool_calls": [
            {"type": "function", "id": "c0", "function": {"name": "f", "arguments": '{"a":1}'}},
            {"type": "function", "id": "c1", "function": {"name": "g", "arguments": "{}"}},
        ],
    }


def test_a_streamed_function_call_adds_up() -> None:
    """The form before `tool_calls`, in which the name comes first."""
    answer = ModelResponse()
    for said in ({"name": "f", "arguments": ""}, {"arguments": '{"a"'}, {"arguments": ": 1}"}):
        choice = {"index": 0, "delta": {"content": None, "function_call": said}}
        answer.add(read_chunk(msgspec.json.encode({"choices": [choice]})))
    said = {"content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    assert answer.choices[0].message == said


def test_completions() -> None:
    made = call(TEXT, model="gpt", prompt="once")
    assert sent(made)[0]["logprobs"] == 1
    answer = ModelResponse()
    body = {
        "choices": [
            {
                "index": 0,
                "text": "upon",
                "finish_reason": "length",
                "logprobs": {"token_logprobs": [-0.25]},
                "token_ids": [9],
                "prompt_token_ids": [8],
            }
        ]
    }
    answer.add(part(body))
    row = answer.choices[0].transition(id="t", attempt="a", index=0)
    assert (list(row.prompt), list(row.completion), list(row.logprobs)) == ([8], [9], [-0.25])
    assert made.messages == [{"role": "user", "content": "once"}]
    assert row.answer == {"role": "assistant", "content": "upon"}
    assert row.finish == "length"


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


def test_prompt_ids_alone_do_not_make_a_call_exact() -> None:
    answer = ModelResponse()
    answer.add(part(answer_body(token_ids=None, logprobs=None)))
    assert not answer.choices[0].transition(id="t", attempt="a", index=0).exact


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
