"""Bad input from both sides: the agent is told in its own API's words, and nothing is left over."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from aiohttp import web

from agentrl.core.http import MAX_TEXT_BYTES
from agentrl.runners.gateway import response, server, upstream
from agentrl.runners.gateway.server import Gateway
from tests.runners.conftest import rows

USER = {"role": "user", "content": "hello"}
ASK: dict[str, dict[str, Any]] = {
    "chat/completions": {"model": "m", "messages": [USER]},
    "completions": {"model": "m", "prompt": "hello"},
    "responses": {"model": "m", "input": "hello"},
    "messages": {"model": "m", "max_tokens": 9, "messages": [USER]},
}
TRANSLATED = ["responses", "messages"]
APIS = pytest.mark.parametrize("api", ["chat/completions", "completions", *TRANSLATED])


@pytest.fixture
async def http(bench: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Afterwards the gateway must be as it was before: no task, no call, no connection in use."""
    async with httpx.AsyncClient(base_url=bench.gateway.base_url, timeout=20) as client:
        yield client

    async def unwind() -> None:
        for active in bench.gateway.attempts.active():
            if active.tasks:
                await asyncio.wait(active.tasks, timeout=10)
            assert not active.tasks
            bench.gateway.unregister(active)

    await asyncio.wrap_future(bench.gateway.spawn(unwind()))
    assert bench.gateway.attempts.active() == []
    assert bench.gateway.attempts._keys == {}


@pytest.fixture
async def active(bench: Any) -> Any:
    return bench.gateway.register(await bench.attempt(), sealed=True)


def key(active: Any) -> dict[str, str]:
    return {"authorization": f"Bearer {active.key}"}


def reason(api: str, answer: httpx.Response) -> str:
    """The message of an error in that API's shape."""
    body = answer.json()
    error = body["error"]
    if api == "messages":
        assert body["type"] == "error"
        assert error.keys() == {"type", "message"}
    else:
        assert error.keys() == {"message", "type", "param", "code"}
    return str(error["message"])


@APIS
@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b"null", b"\xff\xfe\x00garbage", b"[" * 100_000, b'{"a":' * 100_000],
    ids=["empty", "half", "list", "null", "binary", "deep", "deeper"],
)
async def test_what_is_no_json_object(
    bench: Any, active: Any, http: httpx.AsyncClient, api: str, content: bytes
) -> None:
    answer = await http.post(f"/{api}", content=content, headers=key(active))
    assert answer.status_code == 400
    assert "not a JSON object" in reason(api, answer)
    assert bench.model.requests == []


async def test_a_form_is_sent_on_as_json(bench: Any, active: Any, http: httpx.AsyncClient) -> None:
    """wget and curl call every body a form if nobody says what it is."""
    headers = key(active) | {"content-type": "application/x-www-form-urlencoded"}
    content = json.dumps(ASK["chat/completions"]).encode()
    answer = await http.post("/chat/completions", content=content, headers=headers)
    assert answer.status_code == 200
    assert bench.model.headers[-1]["content-type"] == "application/json"


@APIS
async def test_what_is_no_gzip(bench: Any, active: Any, http: httpx.AsyncClient, api: str) -> None:
    headers = key(active) | {"content-encoding": "gzip"}
    answer = await http.post(f"/{api}", content=b"{}", headers=headers)
    assert answer.status_code == 400
    assert "does not decompress" in reason(api, answer)
    good = gzip.compress(json.dumps(ASK[api]).encode())
    answer = await http.post(f"/{api}", content=good, headers=headers)
    assert answer.status_code == 200
    assert len(bench.model.requests) == 1


@APIS
@pytest.mark.parametrize("stream", ["yes", 1, 0, [True]])
async def test_stream_is_true_or_false(
    bench: Any, active: Any, http: httpx.AsyncClient, api: str, stream: Any
) -> None:
    answer = await http.post(f"/{api}", json=ASK[api] | {"stream": stream}, headers=key(active))
    assert answer.status_code == 400
    assert reason(api, answer) == f"stream: {stream!r} is neither true nor false"
    assert bench.model.requests == []


@APIS
async def test_attempts_that_are_not_there(
    bench: Any, active: Any, http: httpx.AsyncClient, api: str
) -> None:
    base = bench.gateway.base_url.removesuffix("/v1")
    unknown = await http.post(f"{base}/a/nobody/v1/{api}", json=ASK[api])
    assert unknown.status_code == 404
    assert "there is no attempt 'nobody'" in reason(api, unknown)
    assert (await http.post(f"/{api}", json=ASK[api], headers=key(active))).status_code == 200
    bench.gateway.unregister(active)
    ended = await http.post(f"/{api}", json=ASK[api], headers=key(active))
    assert ended.status_code == 403
    assert "has ended" in reason(api, ended)
    assert len(bench.model.requests) == 1


@APIS
async def test_a_lease_that_ran_out(bench: Any, active: Any, http: Any, api: str) -> None:
    await bench.store.cancel([active.attempt.rollout.id])
    answer = await http.post(f"/{api}", json=ASK[api], headers=key(active))
    assert answer.status_code == 403
    assert "lost its lease" in reason(api, answer)
    assert await rows(bench, active) == []


@APIS
async def test_bodies_that_are_too_large(
    bench: Any, active: Any, monkeypatch: pytest.MonkeyPatch, http: Any, api: str
) -> None:
    assert server.MAX_REQUEST_BYTES > 2**26
    monkeypatch.setattr(server, "MAX_REQUEST_BYTES", 1000)
    small = Gateway(bench.store, "test")
    small.start()
    try:
        mine = small.register(active.attempt)
        url = f"{small.base_url}/{api}"
        answer = await http.post(url, content=b" " * 1001, headers=key(mine))
        assert answer.status_code == 413
        assert "larger than 1000 bytes" in reason(api, answer)
    finally:
        small.close()


@APIS
async def test_text_for_which_no_context_has_room(active: Any, http: Any, api: str) -> None:
    """It is refused before it is parsed, which would hold up all other calls."""
    body = ASK[api] | {"metadata": {"note": "x" * MAX_TEXT_BYTES}}
    answer = await http.post(f"/{api}", json=body, headers=key(active))
    assert answer.status_code == 413
    assert f"more than {MAX_TEXT_BYTES} bytes of text" in reason(api, answer)
    assert active.calls == 0


async def test_large_bodies_pass(bench: Any, active: Any, http: httpx.AsyncClient) -> None:
    message = {"role": "user", "content": "x" * 2**23}
    body = {"model": "m", "messages": [message]}
    bench.model.answer = lambda body: {"role": "assistant", "content": "ok"}
    bench.model.prompt = lambda body: {}
    answer = await http.post("/chat/completions", json=body, headers=key(active))
    assert answer.status_code == 200
    (row,) = await rows(bench, active)
    assert row.messages == [message]


@pytest.mark.parametrize("n", [3, "x"])
async def test_n_of_each_kind(bench: Any, active: Any, http: Any, n: Any) -> None:
    async def refuse(request: web.Request, body: Any) -> web.Response | None:
        if isinstance(body["n"], int):
            return None
        return web.json_response({"error": {"message": "n is not a number"}}, status=400)

    bench.model.then(refuse, refuse)
    body = {"model": "m", "messages": [USER], "n": n}
    answer = await http.post("/chat/completions", json=body, headers=key(active))
    assert answer.status_code == (200 if n == 3 else 400)
    assert len(await rows(bench, active)) == (3 if n == 3 else 0)


async def html(request: web.Request, body: Any) -> web.Response:
    return web.Response(text="<html>gateway time-out</html>", content_type="text/html")


async def missing(request: web.Request, body: Any) -> web.Response:
    return web.Response(status=404, text="<html>nothing here</html>", content_type="text/html")


async def stranger(request: web.Request, body: Any) -> web.Response:
    return web.json_response({"choices": [{"index": 0, "message": "?"}]})


async def overflow(request: web.Request, body: Any) -> web.Response:
    return web.json_response({"choices": [{"index": 0, "message": {}, "token_ids": [2**40]}]})


async def stream(request: web.Request, body: Any) -> web.StreamResponse:
    """Half of one, whether or not it was asked for."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    event = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]}
    await response.write(f"data: {json.dumps(event)}\n\n".encode())
    return response


async def reset(request: web.Request, body: Any) -> None:
    request.transport.abort()  # type: ignore[union-attr]


@APIS
@pytest.mark.parametrize("trouble", [html, stranger, overflow, stream, reset])
async def test_an_upstream_that_answers_nonsense(
    bench: Any, active: Any, http: Any, api: str, trouble: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "MAX_TRIES", 2)
    active.deadline += 0.3 - active.left if trouble is reset else 0  # that is repeated until then
    bench.model.then(*[trouble] * (10_000 if trouble is reset else 2))
    answer = await http.post(f"/{api}", json=ASK[api], headers=key(active))
    assert answer.status_code in (502, 504)
    assert "at http://127.0.0.1" in reason(api, answer) or answer.status_code == 504
    assert await rows(bench, active) == []
    assert len(active.failures) == 1


@APIS
@pytest.mark.parametrize("stream", [False, True])
async def test_an_upstream_that_answers_too_much(
    bench: Any, active: Any, http: Any, api: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response, "MAX_ANSWER_BYTES", 2**16)
    monkeypatch.setattr(response, "MAX_STREAM_BYTES", 2**17)
    bench.model.answer = lambda body: {"role": "assistant", "content": "x" * 2**17}
    bench.model.chunks = lambda body: [{"choices": [], "padding": "x" * 2**17}]
    answer = await http.post(f"/{api}", json=ASK[api] | {"stream": stream}, headers=key(active))
    assert answer.status_code == 502
    assert "is the most that the gateway reads" in reason(api, answer)
    assert await rows(bench, active) == []
    assert len(bench.model.requests) == len(active.failures) == 1


async def test_a_stream_of_too_many_events(
    bench: Any, active: Any, http: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent has read some of it by then: the connection is cut."""
    monkeypatch.setattr(response, "MAX_STREAM_BYTES", 2**17)
    bench.model.answer = lambda body: {"role": "assistant", "content": "x" * 1000}
    body = ASK["chat/completions"] | {"stream": True}
    with pytest.raises(httpx.RemoteProtocolError):
        await http.post("/chat/completions", json=body, headers=key(active))
    (message,) = active.failures.values()
    assert "more than 131072 bytes" in message


@APIS
async def test_an_upstream_without_the_route(bench: Any, active: Any, http: Any, api: str) -> None:
    bench.model.then(missing)
    answer = await http.post(f"/{api}", json=ASK[api], headers=key(active))
    assert answer.status_code == 404
    assert "nothing here" in reason(api, answer)


@APIS
async def test_an_upstream_that_hangs(bench: Any, active: Any, http: Any, api: str) -> None:
    left = asyncio.Event()

    async def hang(request: web.Request, body: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    bench.model.then(hang)
    active.deadline += 0.2 - active.left
    answer = await http.post(f"/{api}", json=ASK[api], headers=key(active))
    assert answer.status_code == 504
    assert "ran out of time" in reason(api, answer)
    await asyncio.wait_for(left.wait(), 10)
    assert await rows(bench, active) == []


@pytest.mark.parametrize("api", ["chat/completions", *TRANSLATED])
@pytest.mark.parametrize("trouble", [stream, html])
async def test_a_stream_that_breaks_never_looks_complete(
    bench: Any, active: Any, http: Any, api: str, trouble: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "MAX_TRIES", 1)
    bench.model.then(trouble)
    ask = http.post(f"/{api}", json=ASK[api] | {"stream": True}, headers=key(active))
    if trouble is html:
        assert "text/html when it was asked for a stream" in reason(api, await ask)
    else:
        with pytest.raises(httpx.RemoteProtocolError):
            await ask
    assert await rows(bench, active) == []
    assert len(active.failures) == 1


@pytest.mark.parametrize("api", ["chat/completions", *TRANSLATED])
async def test_an_agent_that_leaves_mid_stream(
    bench: Any, active: Any, http: Any, api: str
) -> None:
    left = asyncio.Event()

    async def endless(request: web.Request, body: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        event = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]}
        try:
            while True:
                await response.write(f"data: {json.dumps(event)}\n\n".encode())
                await asyncio.sleep(0.01)
        finally:
            left.set()

    bench.model.then(endless)
    body = ASK[api] | {"stream": True}
    async with http.stream("POST", f"/{api}", json=body, headers=key(active)) as answer:
        assert answer.status_code == 200
        await anext(answer.aiter_raw())
    await asyncio.wait_for(left.wait(), 10)
    await asyncio.wait_for(asyncio.wrap_future(bench.gateway.unregister(active)), 10)
    (row,) = await rows(bench, active)
    assert (row.finish, row.exact) == ("cut", False)
    assert set(row.answer["content"]) == {"a"}


@pytest.mark.parametrize("api", ["chat/completions", *TRANSLATED])
async def test_trouble_before_the_first_byte_is_repeated_for_streams_too(
    bench: Any, active: Any, http: Any, api: str
) -> None:
    async def busy(request: web.Request, body: Any) -> web.Response:
        return web.json_response({"error": {"message": "busy"}}, status=503)

    bench.model.then(busy, reset, html)
    body = ASK[api] | {"stream": True}
    answer = await http.post(f"/{api}", json=body, headers=key(active))
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert len(bench.model.requests) == 4
    assert len(await rows(bench, active)) == 1
    assert active.failures == {}


async def test_an_agent_too_slow_to_read_holds_up_nobody(
    bench: Any, active: Any, http: Any
) -> None:
    """A client that stops reading is stopped by its deadline, with its connections."""
    sent = asyncio.Event()

    async def flood(request: web.Request, body: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        said = {"choices": [{"index": 0, "delta": {"content": "a" * 2**16}}]}
        event = f"data: {json.dumps(said)}\n\n".encode()
        try:
            while True:
                await response.write(event)
        finally:
            sent.set()

    bench.model.then(flood)
    active.deadline += 0.5 - active.left
    body = ASK["chat/completions"] | {"stream": True}
    async with http.stream("POST", "/chat/completions", json=body, headers=key(active)) as answer:
        assert answer.status_code == 200
        await asyncio.wait_for(sent.wait(), 10)


BIG = ["18446744073709552000", "-9223372036854775809", "1" * 400, "1e400", "-1E+999"]


@pytest.mark.parametrize("number", BIG, ids=lambda number: number[:9])
async def test_a_number_of_any_size_is_passed_on_and_stored(
    bench: Any, active: Any, http: Any, number: str
) -> None:
    """JavaScript writes the largest integer of 64 bits as 18446744073709552000."""
    schema = '{"type": "object", "properties": {"n": {"maximum": ' + number + "}}}"
    tool = '{"type": "function", "function": {"name": "f", "parameters": ' + schema + "}}"
    user = '{"role": "user", "content": "q", "weight": ' + number + "}"
    body = f'{{"model": "m", "messages": [{user}], "tools": [{tool}], "x": {number}}}'
    seen = []

    async def read(request: Any, _: Any) -> None:
        seen.append(await request.text())

    bench.model.then(read)
    answer = await http.post("/chat/completions", content=body, headers=key(active))
    assert answer.status_code == 200, answer.text
    assert f'"maximum": {number}' in seen[0]
    assert f'"weight": {number}' in seen[0]
    (row,) = await rows(bench, active)
    stored = row.tools[0]["function"]["parameters"]["properties"]["n"]["maximum"]
    assert (stored, row.messages[0]["weight"]) == (number, number)


@pytest.mark.parametrize("number", BIG[:3], ids=lambda number: number[:9])
@pytest.mark.parametrize("api", ["messages", "responses", "google"])
async def test_integers_of_any_size_are_translated(
    bench: Any, active: Any, http: Any, api: str, number: str
) -> None:
    function = {"name": "f", "description": "d"}
    schema = {"type": "object", "properties": {"n": {"maximum": int(number)}}}
    path, body = {
        "messages": (
            "/messages",
            {"max_tokens": 5, "messages": [USER], "tools": [function | {"input_schema": schema}]},
        ),
        "responses": (
            "/responses",
            {"input": "q", "tools": [{"type": "function"} | function | {"parameters": schema}]},
        ),
        "google": (
            "/models/m:generateContent",
            {"contents": [{"parts": [{"text": "q"}]}],
             "tools": [{"functionDeclarations": [function | {"parameters": schema}]}]},
        ),
    }[api]  # fmt: skip
    answer = await http.post(path, json={"model": "m"} | body, headers=key(active))
    assert answer.status_code == 200, answer.text
    sent = bench.model.requests[0]["tools"][0]["function"]["parameters"]
    assert sent["properties"]["n"]["maximum"] == int(number)
    (row,) = await rows(bench, active)
    stored = row.tools[0]["function"]["parameters"]["properties"]["n"]["maximum"]
    assert stored == number


async def test_an_answer_may_have_integers_of_any_size(bench: Any, active: Any, http: Any) -> None:
    said = {"role": "assistant", "content": "4", "usage": {"seed": 2**64}}
    bench.model.answer = lambda body: said
    answer = await http.post("/chat/completions", json=ASK["chat/completions"], headers=key(active))
    assert answer.json()["choices"][0]["message"] == said
    (row,) = await rows(bench, active)
    assert row.answer == said | {"usage": {"seed": str(2**64)}}


@pytest.mark.parametrize(("depth", "status"), [(100, 200), (700, 200), (2000, 400)])
async def test_a_deep_schema_is_passed_on_and_stored_or_refused(
    bench: Any, active: Any, http: Any, depth: int, status: int
) -> None:
    deep = '{"a": ' * depth + "1" + "}" * depth
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {deep}}}}}'
    body = f'{{"model": "m", "messages": [], "tools": [{tool}]}}'
    answer = await http.post("/chat/completions", content=body, headers=key(active))
    assert answer.status_code == status, answer.text
    assert len(await rows(bench, active)) == (status == 200)


@pytest.mark.parametrize("number", BIG[:3], ids=lambda number: number[:9])
@pytest.mark.parametrize("name", ["seed", "max_tokens", "top_k", "temperature", "min_p"])
async def test_sampling_beyond_all_bounds_is_the_server_s_to_refuse(
    bench: Any, active: Any, http: Any, name: str, number: str
) -> None:
    body = f'{{"model": "m", "messages": [{json.dumps(USER)}], "{name}": {number}}}'
    answer = await http.post("/chat/completions", content=body, headers=key(active))
    assert answer.status_code == 200, answer.text
    assert bench.model.requests[0][name] == int(number)
    (row,) = await rows(bench, active)
    assert getattr(row.sampling, name, None) in (None, 0, 1.0)
