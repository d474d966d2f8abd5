"""Streams and answers as other servers than vLLM send them: what the agent's client can read
reaches the agent, recorded exactly, or as inexact; an error counts as the status that it means."""

from __future__ import annotations

import json
import logging
from codecs import BOM_UTF8
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from aiohttp import web

from agentrl.core.config import RunConfig, UpstreamConfig
from agentrl.runners.gateway.server import Gateway
from agentrl.runners.main import run_features
from tests.runners.apis.test_tool_calls import STREAMS
from tests.runners.conftest import ids, rows

USER = {"role": "user", "content": "hello"}
ASKED: dict[str, Any] = {
    "chat/completions": {"messages": [USER]},
    "responses": {"input": [USER]},
    "messages": {"messages": [USER], "max_tokens": 9},
}
TRANSLATED = ["responses", "messages"]
APIS = pytest.mark.parametrize("api", ["chat/completions", *TRANSLATED])
TEXT = {"content": "hi"}
BUSY = {"error": {"message": "no room now", "type": "overloaded_error", "code": 503}}
REFUSED = {"error": {"message": "prompt too long", "type": "BadRequestError", "code": 400}}


@pytest.fixture
async def gateway(bench: Any) -> AsyncIterator[Gateway]:
    judge = UpstreamConfig(base_url=bench.model.base_url, model="big")
    features = run_features(bench.store, RunConfig())
    gateway = Gateway(bench.store, "test", upstreams={"judge": judge}, features=features)
    gateway.start()
    yield gateway
    gateway.close()


async def ask(
    gateway: Gateway, active: Any, api: str, model: str = "m", **extra: Any
) -> httpx.Response:
    body = {"model": model} | ASKED.get(api, {}) | extra
    async with httpx.AsyncClient(base_url=gateway.base_url) as http:
        return await http.post(f"/{api}", json=body, headers={"x-api-key": active.key})


def sends(*events: Any, before: bytes = b"") -> Any:
    """A server that sends these as events of a stream with status 200."""

    async def answer(request: web.Request, body: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(before)
        for event in events:
            data = event if isinstance(event, bytes) else f"data: {json.dumps(event)}\n\n".encode()
            await response.write(data)
        await response.write(b"data: [DONE]\n\n")
        return response

    return answer


def chunk(delta: Any, finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "token_ids": [1]} | more
    choice.setdefault("logprobs", {"content": [{"logprob": -0.5}] * len(choice["token_ids"])})
    return {"id": "c", "prompt_token_ids": [7], "choices": [choice]}


def read_calls(api: str, text: str) -> list[tuple[str, str, Any]]:
    """Id, name and arguments of the tool calls in a stream, in order."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    if api == "responses":
        assert events[-1]["type"] == "response.completed"
        items = events[-1]["response"]["output"]
        done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        assert done == items
        return [(i["call_id"], i["name"], json.loads(i["arguments"])) for i in items]
    assert events[-1]["type"] == "message_stop"
    heads = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    inputs = [json.loads(delta["partial_json"]) for delta in deltas]
    return [(h["id"], h["name"], given) for h, given in zip(heads, inputs, strict=True)]


CALLS = [("c0", "f", {"text": "a"}), ("c1", "g", {"text": "b"})]


@pytest.mark.parametrize("form", STREAMS)
@pytest.mark.parametrize("api", TRANSLATED)
async def test_tool_calls_are_translated(bench: Any, gateway: Any, api: str, form: str) -> None:
    active = gateway.register(await bench.attempt())
    parts = [chunk({"tool_calls": [part]}) for part in STREAMS[form]]
    bench.model.then(sends(*parts, chunk({}, "tool_calls")))
    answer = await ask(gateway, active, api, stream=True)
    assert sorted(read_calls(api, answer.text)) == CALLS
    (row,) = await rows(bench, active)
    assert row.exact
    assert sorted(call["id"] for call in row.answer["tool_calls"]) == ["c0", "c1"]


@pytest.mark.parametrize("form", STREAMS)
@pytest.mark.parametrize("who", ["policy", "frozen", "verifier"])
async def test_tool_calls_pass_unchanged(bench: Any, gateway: Any, who: str, form: str) -> None:
    active = gateway.attempts.register(await bench.attempt(), scoring=who == "verifier")
    parts = [chunk({"tool_calls": [part]}) for part in STREAMS[form]]
    bench.model.then(sends(*parts, chunk({}, "tool_calls")))
    model = "m" if who == "policy" else "judge"
    answer = await ask(gateway, active, "chat/completions", model, stream=True)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line[:7] == "data: {"]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas == [part["choices"][0]["delta"] for part in parts] + [{}]
    assert answer.text.endswith("data: [DONE]\n\n")
    found = await rows(bench, active)
    assert [len(row.answer["tool_calls"]) for row in found] == ([] if who == "verifier" else [2])


@pytest.mark.parametrize("api", TRANSLATED)
async def test_what_follows_a_call_keeps_its_place(bench: Any, gateway: Any, api: str) -> None:
    """Thinking and calls take turns, and the first call goes on after the second has begun."""
    active = gateway.register(await bench.attempt())
    function = {"name": "f", "arguments": '{"a":'}
    deltas: list[Any] = [{"reasoning_content": "one"}]
    deltas += [{"tool_calls": [{"index": 0, "id": "c0", "function": function}]}]
    deltas += [{"reasoning_content": "two"}, {"content": "so"}]
    deltas += [{"tool_calls": [{"index": 1, "id": "c1", "function": {"name": "g"}}]}]
    deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]}, {"content": "end"}]
    bench.model.then(sends(*map(chunk, deltas), chunk({}, "tool_calls")))
    text = (await ask(gateway, active, api, stream=True)).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    if api == "responses":
        kinds = [item["type"] for item in events[-1]["response"]["output"]]
        call, said = "function_call", "message"
        assert kinds == ["reasoning", call, "reasoning", said, call, said]
    else:
        heads = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
        assert heads == ["thinking", "tool_use", "thinking", "text", "tool_use", "text"]
        assert [e["index"] for e in events if e["type"] == "content_block_stop"] == [*range(6)]


async def test_a_stream_goes_on_if_its_tokens_cannot_be_read(
    bench: Any, gateway: Any, caplog: Any
) -> None:
    active = gateway.register(await bench.attempt())
    bench.model.then(sends(chunk(TEXT), chunk(TEXT, token_ids=["a"]), chunk(TEXT, "stop")))
    with caplog.at_level(logging.WARNING, "agentrl.runner"):
        answer = await ask(gateway, active, "chat/completions", stream=True)
    assert answer.text.count("hi") == 3
    (row,) = await rows(bench, active)
    assert (row.exact, row.answer["content"]) == (False, "hihihi")
    assert "a call is inexact, as its token ids are not readable" in caplog.text


# -- errors under the status 200 -------------------------------------------------------------------

OPENING = chunk({"role": "assistant", "content": ""}, token_ids=[])
NAMED = f"event: error\ndata: {json.dumps({'type': 'error'} | BUSY)}\n\n".encode()
BUSY_EVENTS: dict[str, Any] = {
    "vllm": [BUSY],
    "code as text": [{"error": {"message": "no room now", "code": "503"}}],
    "anthropic": [NAMED],
    "name only": [{"error": {"message": "no room now", "type": "ServiceUnavailableError"}}],
    "limited": [{"error": {"message": "no room now", "code": "rate_limit_exceeded"}}],
    "google": [{"error": {"message": "no room now", "status": "UNAVAILABLE"}}],
    "no event": [json.dumps(BUSY, indent=1).encode() + b"\n\n"],
    "old vllm": [{"object": "error", "message": "no room now", "code": 503}],
    "choices": [BUSY | {"choices": [{"index": 0, "delta": {}, "finish_reason": "error"}]}],
    "after its opening": [OPENING, BUSY],
    "after a comment": [b": PROCESSING\n\n", BUSY],
    "after both": [b": PROCESSING\n\n", OPENING, b": PROCESSING\n\n", BUSY],
}


@pytest.mark.parametrize("form", BUSY_EVENTS)
@APIS
async def test_an_error_before_any_text_is_tried_again(
    bench: Any, gateway: Any, api: str, form: str
) -> None:
    active = gateway.register(await bench.attempt())
    bench.model.then(*[sends(*BUSY_EVENTS[form])] * 7)  # more than of an error that may stay
    answer = await ask(gateway, active, api, stream=True)
    assert answer.status_code == 200
    assert "no room" not in answer.text
    assert len(bench.model.requests) == 8
    (row,) = await rows(bench, active)
    assert row.answer["content"] == "echo hello"
    assert active.failures == {}


@APIS
@pytest.mark.parametrize("stream", [False, True])
async def test_the_agents_mistake_is_told_at_once(
    bench: Any, gateway: Any, api: str, stream: bool
) -> None:
    async def whole(request: web.Request, body: Any) -> web.Response:
        return web.json_response(REFUSED)

    active = gateway.register(await bench.attempt())
    bench.model.then(*[sends(REFUSED) if stream else whole] * 2)  # also without capture fields
    answer = await ask(gateway, active, api, stream=stream)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "prompt too long"
    assert "prompt too long" in active.refused
    assert len(bench.model.requests) == 2
    assert await rows(bench, active) == []


@pytest.mark.parametrize("error", [{"error": "it broke"}, {"error": {"message": "it broke"}}])
async def test_an_error_without_a_status_ends_after_some_tries(
    bench: Any, gateway: Any, error: Any
) -> None:
    active = gateway.register(await bench.attempt())
    bench.model.then(*[sends(error)] * 6)
    answer = await ask(gateway, active, "chat/completions", stream=True)
    assert answer.status_code == 500
    assert "it broke" in answer.text
    assert "it broke" in next(iter(active.failures.values()))
    assert len(bench.model.requests) == 6


@APIS
async def test_an_error_after_text_keeps_its_reason(bench: Any, gateway: Any, api: str) -> None:
    active = gateway.register(await bench.attempt())
    bench.model.then(sends(chunk(TEXT), BUSY))
    with pytest.raises(httpx.RemoteProtocolError):
        await ask(gateway, active, api, stream=True)
    assert "no room now" in next(iter(active.failures.values()))
    assert len(bench.model.requests) == 1


async def test_half_a_stream_is_told_with_its_last_words(bench: Any, gateway: Any) -> None:
    active = gateway.register(await bench.attempt())
    bench.model.then(*[sends({"detail": "it broke"})] * 6)
    answer = await ask(gateway, active, "chat/completions", stream=True)
    assert answer.status_code == 502
    assert "half a stream" in answer.text
    assert "it broke" in answer.text


# -- log-probs and echo ----------------------------------------------------------------------------

ODD_LOGPROBS: dict[str, Any] = {
    "a null": {"content": [{"logprob": None}]},
    "a list": [],
    "a null token": {"content": [None]},
    "no content": {"content": {}},
    "nothing in a token": {"content": [{}]},
    "a text": {"content": [{"logprob": "-inf"}]},
    "a flag": True,
}


@pytest.mark.parametrize("form", ODD_LOGPROBS)
@pytest.mark.parametrize("stream", [False, True])
async def test_odd_logprobs_make_a_call_inexact(
    bench: Any, gateway: Any, stream: bool, form: str
) -> None:
    body = chunk(TEXT, "stop", logprobs=ODD_LOGPROBS[form]) | {"model": "m"}
    body["choices"][0]["message"] = TEXT | {"role": "assistant"}

    async def whole(request: web.Request, _: Any) -> web.Response:
        return web.json_response(body)

    active = gateway.register(await bench.attempt())
    bench.model.then(sends(body) if stream else whole)
    answer = await ask(gateway, active, "chat/completions", stream=stream, logprobs=True)
    assert answer.status_code == 200
    assert json.dumps(ODD_LOGPROBS[form], separators=(",", ":")) in answer.text.replace(": ", ":")
    (row,) = await rows(bench, active)
    assert (row.exact, row.answer["content"]) == (False, "hi")


@pytest.mark.parametrize("first", [None, -0.5])
async def test_an_echo_is_inexact(bench: Any, gateway: Any, first: float | None) -> None:
    """Its tokens begin with the prompt's, and only some servers show that by a null."""

    async def echo(request: web.Request, body: Any) -> web.Response:
        logprobs = {"token_logprobs": [first, -1.0], "tokens": ["a", "b"]}
        choice = {"index": 0, "text": "ab", "finish_reason": "stop", "logprobs": logprobs}
        choice |= {"token_ids": [1, 2], "prompt_token_ids": [1]}
        return web.json_response({"choices": [choice]})

    active = gateway.register(await bench.attempt())
    bench.model.then(echo)
    asked = {"prompt": "a", "echo": True, "logprobs": 1}
    answer = await ask(gateway, active, "completions", **asked)
    assert answer.json()["choices"][0]["logprobs"]["token_logprobs"] == [first, -1.0]
    (row,) = await rows(bench, active)
    assert (row.exact, len(row.logprobs)) == (False, 0)


@APIS
@pytest.mark.parametrize("stream", [False, True])
async def test_a_byte_order_mark_is_no_part_of_a_body(
    bench: Any, gateway: Any, api: str, stream: bool
) -> None:
    async def whole(request: web.Request, body: Any) -> web.Response:
        raw = BOM_UTF8 + json.dumps(bench.model.whole(body, request.path)).encode()
        return web.Response(body=raw, content_type="application/json")

    active = gateway.register(await bench.attempt())
    events = [chunk({"content": "echo hello"}, token_ids=ids("echo hello")), chunk({}, "stop")]
    bench.model.then(sends(*events, before=BOM_UTF8) if stream else whole)
    body = BOM_UTF8 + json.dumps({"model": "m", "stream": stream} | ASKED[api]).encode()
    async with httpx.AsyncClient(base_url=gateway.base_url) as http:
        answer = await http.post(f"/{api}", content=body, headers={"x-api-key": active.key})
    assert answer.status_code == 200
    assert BOM_UTF8 not in answer.content
    (row,) = await rows(bench, active)
    assert (row.answer["content"], len(row.completion)) == ("echo hello", 10 + stream)
    assert len(bench.model.requests) == 1


# -- the order of what a stream says ---------------------------------------------------------------


@APIS
async def test_what_follows_a_finish_reason_keeps_its_place(
    bench: Any, gateway: Any, api: str
) -> None:
    active = gateway.register(await bench.attempt())
    parts = [chunk({"content": "a-"}), chunk({"content": "b-"}, "stop"), chunk({"content": "c-"})]
    bench.model.then(sends(*parts))
    shown = (await ask(gateway, active, api, stream=True)).text
    places = [shown.index(f'"{letter}-"') for letter in "abc"]
    assert places == sorted(places)
    (row,) = await rows(bench, active)
    assert row.answer["content"] == "a-b-c-"


@pytest.mark.parametrize("api", TRANSLATED)
async def test_an_answer_has_one_of_several_choices(bench: Any, gateway: Any, api: str) -> None:
    """Also a call with the same index in two choices."""
    active = gateway.register(await bench.attempt())

    def part(index: int, call: Any, finish: str | None = None) -> Any:
        made = chunk({"tool_calls": [call]} if call else {}, finish)
        made["choices"][0]["index"] = index
        return made

    heads = [{"index": 0, "id": f"c{i}", "function": {"name": f"f{i}"}} for i in range(2)]
    bodies = [{"index": 0, "function": {"arguments": f'{{"n": {i}}}'}} for i in range(2)]
    events = [part(i, call[i]) for call in (heads, bodies) for i in range(2)]
    bench.model.then(sends(*events, part(0, None, "tool_calls"), part(1, None, "tool_calls")))
    answer = await ask(gateway, active, api, stream=True, n=2)
    assert read_calls(api, answer.text) == [("c0", "f0", {"n": 0})]
    assert [row.answer["tool_calls"][0]["id"] for row in await rows(bench, active)] == ["c0", "c1"]
