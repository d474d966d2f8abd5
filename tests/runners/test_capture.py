"""What is added to a call, taken from an answer, and shown to the agent."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from agentrl.runners.capture import CHAT, TEXT, Answer, Call, read_call, transition
from agentrl.types import Sampling


def call(api: str = CHAT, *, defaults: Sampling | None = None, index: int = 0, **body: Any) -> Call:
    return read_call(api, json.dumps(body).encode(), defaults or Sampling(), index)


def test_silence_is_filled_with_the_sampling_of_the_rollout() -> None:
    defaults = Sampling(temperature=0.5, top_p=0.9, top_k=4, max_tokens=16, seed=100)
    made = call(defaults=defaults, index=2, temperature=None)
    sent = json.loads(made.encode("tiny"))
    assert sent["temperature"] == 0.5
    assert (sent["top_p"], sent["top_k"], sent["max_tokens"]) == (0.9, 4, 16)
    assert sent["seed"] == 102  # the third call of the attempt
    assert made.sampling == msgspec.structs.replace(defaults, seed=102)


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
    made = call(defaults=Sampling(temperature=1, max_tokens=99, seed=1), **said)
    sent = json.loads(made.encode("tiny"))
    added = {"model": "tiny", "logprobs": True, "return_token_ids": True}
    assert sent == said | added
    assert made.sampling == Sampling(temperature=0, top_p=0.1, max_tokens=5, seed=3)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b"\xff\xfe\x00", b"null"])
def test_what_is_not_a_json_object(raw: bytes) -> None:
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
        read_call(CHAT, raw, Sampling(), 0)


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
    plain = json.loads(call(model="gpt").tidy(answer_body()))
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
    assert json.loads(asked.tidy(answer_body())) == answer_body() | {"model": "gpt"}


def test_a_whole_answer_is_read_exactly() -> None:
    answer = Answer()
    answer.absorb(answer_body())
    made = call(model="gpt", messages=[{"role": "user", "content": "q"}], tools=[{"a": 1}])
    row = transition(answer.choices[0], made, id="t", attempt="a", index=0)
    assert (list(row.prompt), list(row.completion), list(row.logprobs)) == (
        [1, 2],
        [5, 6],
        [-1, -2],
    )
    assert row.exact
    assert row.answer == {"role": "assistant", "content": "ab"}
    assert row.messages == [{"role": "user", "content": "q"}]
    assert row.tools == [{"a": 1}]


@pytest.mark.parametrize("extra", [{"token_ids": None}, {"token_ids": [5]}, {"logprobs": None}])
def test_unknown_ids_or_logprobs_make_a_call_inexact(extra: dict[str, Any]) -> None:
    answer = Answer()
    answer.absorb(answer_body(**extra))
    row = transition(answer.choices[0], call(), id="t", attempt="a", index=0)
    assert not row.exact
    assert len(row.logprobs) == 0


def test_a_stream_adds_up_to_the_whole() -> None:
    def chunk(delta: dict[str, Any], finish: str | None = None, **extra: Any) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish} | extra]}

    def tool(index: int, **function: str) -> dict[str, Any]:
        head = {"id": f"c{index}"} if "name" in function else {}
        return {"tool_calls": [{"index": index, "function": function} | head]}

    answer = Answer()
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
    held = [answer.absorb(part) for part in parts]
    assert held == [False] * 6 + [True, True]
    assert answer.complete
    choice = answer.choices[0]
    assert (choice.prompt, choice.tokens, choice.logprobs) == ([1], [2, 3, 4], [-1.0, -2.0, -2.0])
    assert choice.message == {
        "role": "assistant",
        "content": "hello",
        "tool_calls": [
            {"type": "function", "id": "c0", "function": {"name": "f", "arguments": '{"a":1}'}},
            {"type": "function", "id": "c1", "function": {"name": "g", "arguments": "{}"}},
        ],
    }


def test_completions() -> None:
    made = call(TEXT, model="gpt", prompt="once")
    assert json.loads(made.encode("tiny"))["logprobs"] == 1
    answer = Answer()
    answer.absorb(
        {
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
    )
    row = transition(answer.choices[0], made, id="t", attempt="a", index=0)
    assert (list(row.prompt), list(row.completion), list(row.logprobs)) == ([8], [9], [-0.25])
    assert row.messages == [{"role": "user", "content": "once"}]
    assert row.answer == {"role": "assistant", "content": "upon"}
    assert row.finish == "length"
