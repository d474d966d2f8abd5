"""The gateway over HTTP: what agents see, what is stored, and what happens when things break."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import httpx
import msgspec
import openai
import pytest
from aiohttp import web

from agentrl.core.errors import ConfigError, Invalid, StoreError, Unavailable
from agentrl.core.types import Sampling
from agentrl.runners.gateway import upstream
from agentrl.runners.gateway.refusals import RefusedError
from agentrl.runners.gateway.server import Gateway
from tests.runners.conftest import rows

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def http(bench: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=bench.gateway.base_url, timeout=20) as client:
        yield client


@pytest.fixture
async def sdk(active: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(api_key=active.id) as client:
        yield client


def key(active: Any) -> dict[str, str]:
    return {"authorization": f"Bearer {active.id}"}


async def ask(http: httpx.AsyncClient, active: Any, **extra: Any) -> httpx.Response:
    body = {"model": "gpt-4o", "messages": MESSAGES} | extra
    return await http.post("/chat/completions", json=body, headers=key(active))


async def test_a_call_is_captured_and_looks_like_openai(bench: Any, active: Any, sdk: Any) -> None:
    answer = await sdk.chat.completions.create(model="gpt-4o", messages=MESSAGES)
    assert answer.choices[0].message.content == "echo hello"
    assert answer.model == "gpt-4o"
    assert answer.choices[0].logprobs is None
    assert answer.model_extra == {}
    (row,) = await rows(bench, active)
    assert bytes(row.prompt.tolist()).decode() == json.dumps(MESSAGES)
    assert bytes(row.completion.tolist()).decode() == "echo hello"
    assert row.logprobs.tolist() == [-0.5] * 10
    assert (row.policy, row.version, row.finish, row.index) == ("policy", 7, "stop", 0)
    assert (row.sampling.temperature, row.sampling.max_tokens) == (0.7, 64)
    assert row.answer == {"role": "assistant", "content": "echo hello"}
    assert row.messages == MESSAGES
    assert row.started > 1e9
    assert 0 <= row.seconds < 20
    assert bench.model.requests[0]["model"] == "tiny"
    assert "authorization" not in bench.model.headers[0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reported", "version", "stored"),
    [([[0, 7], [4, 9]], 7, [(0, 7), (4, 9)]), ([[0, 8]], 8, [])],  # began after the header was sent
)
async def test_versions_of_a_call_are_stored_and_not_shown_to_the_agent(
    bench: Any, active: Any, http: Any, stream: bool, reported: Any, version: int, stored: Any
) -> None:
    bench.model.spans = reported
    answer = await ask(http, active, stream=stream)
    assert "agentrl" not in answer.text
    (row,) = await rows(bench, active)
    assert (row.version, row.spans) == (version, stored)


async def test_versions_of_unknown_tokens_are_that_of_the_first(
    bench: Any, active: Any, http: Any
) -> None:
    bench.model.spans, bench.model.knows_tokens = [[0, 7], [4, 9]], False
    await ask(http, active)
    (row,) = await rows(bench, active)
    assert (row.version, row.spans, row.exact) == (7, [], False)


@pytest.mark.parametrize("tools", [False, True])
async def test_streaming_with_the_openai_sdk(
    bench: Any, active: Any, sdk: Any, tools: bool
) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    extra = {"tools": [{"type": "function", "function": function}]} if tools else {}
    stream = await sdk.chat.completions.create(
        model="gpt-4o", messages=MESSAGES, stream=True, **extra
    )
    chunks = [chunk async for chunk in stream]
    assert all(chunk.choices[0].logprobs is None for chunk in chunks)
    assert all(not chunk.model_extra and chunk.model == "gpt-4o" for chunk in chunks)
    assert not any(chunk.choices[0].model_extra for chunk in chunks)
    (row,) = await rows(bench, active)
    assert row.exact
    if tools:
        assert row.finish == "tool_calls"
        assert row.answer["tool_calls"][0]["function"]["arguments"] == '{"text": "hello"}'
    else:
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert said == row.answer["content"] == "echo hello"
        assert bytes(row.completion.tolist()).decode() == "echo hello"


def hold_commits(
    bench: Any, monkeypatch: pytest.MonkeyPatch, *, written: bool = False
) -> tuple[asyncio.Semaphore, asyncio.Event]:
    """Calls that are stored wait, written or not, until the event; the semaphore counts them."""
    add, begun = bench.store.add_transitions, asyncio.Semaphore(0)
    home, release = asyncio.get_running_loop(), asyncio.Event()

    async def held(rows: Any) -> Any:
        found = await add(rows) if written else None
        if not release.is_set():
            home.call_soon_threadsafe(begun.release)
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(release.wait(), home))
        return found if written else await add(rows)

    monkeypatch.setattr(bench.store, "add_transitions", held)
    return begun, release


def number_answers(bench: Any) -> None:
    numbers = itertools.count()
    bench.model.answer = lambda body: {"role": "assistant", "content": f"answer {next(numbers)}"}


async def test_the_end_of_a_stream_waits_for_the_store(
    bench: Any, active: Any, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, release = hold_commits(bench, monkeypatch)
    body = {"model": "m", "messages": MESSAGES, "stream": True}
    seen = b""
    async with http.stream("POST", "/chat/completions", json=body, headers=key(active)) as response:
        chunks = response.aiter_raw()
        while b'"content": "o"' not in seen:  # the last letter comes before anything is stored
            seen += await anext(chunks)
        await asked.acquire()
        assert b'finish_reason": "stop' not in seen
        assert b"[DONE]" not in seen
        release.set()
        async for chunk in chunks:
            seen += chunk
    assert seen.endswith(b"data: [DONE]\n\n")
    assert len(await rows(bench, active)) == 1


@pytest.mark.parametrize("api", ["chat/completions", "responses"])
async def test_events_of_several_lines_are_captured(
    bench: Any, active: Any, http: httpx.AsyncClient, api: str
) -> None:
    async def wordy(request: web.Request, body: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number, event in enumerate(bench.model.chunks(body)):
            head = f": note\nid: {number}\nevent: part\n"
            data = json.dumps(event, indent=1).replace("\n", "\ndata: ")
            await response.write(f"{head}data: {data}\n\n".encode())
        await response.write(b"event: end\ndata: [DONE]\n\n")
        return response

    bench.model.then(wordy)
    body: dict[str, Any] = {"model": "m", "stream": True}
    body |= {"messages": MESSAGES} if api == "chat/completions" else {"input": "hello"}
    answer = await http.post(f"/{api}", json=body, headers=key(active))
    (row,) = await rows(bench, active)
    assert row.exact
    assert row.answer["content"] == "echo hello"
    assert "prompt_token_ids" not in answer.text
    if api == "chat/completions":
        assert ": note\nid: 1\nevent: part\ndata: {" in answer.text
        assert answer.text.endswith("event: end\ndata: [DONE]\n\n")


async def test_without_token_ids_a_call_is_kept_but_inexact(
    bench: Any, active: Any, http: httpx.AsyncClient
) -> None:
    bench.model.knows_tokens, bench.model.version = False, "²"
    assert (await ask(http, active)).status_code == 200
    (row,) = await rows(bench, active)
    assert not row.exact
    assert row.answer["content"] == "echo hello"
    assert row.version == 3  # the one the policy was published with


async def loop_of(gateway: Any) -> asyncio.AbstractEventLoop:
    async def running() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    return await asyncio.wrap_future(gateway.spawn(running()))


async def test_models_are_listed_once_they_are_known(bench: Any, http: Any) -> None:
    router, loop = bench.gateway.router, await loop_of(bench.gateway)
    assert (await http.get("/models")).status_code == 200
    served, router.policies = router.policies, {}  # as before the store was asked
    loop.call_soon_threadsafe(router.read.clear)
    asked = asyncio.create_task(http.get("/models"))
    await asyncio.wait([asked], timeout=0.2)
    assert not asked.done()
    router.policies = served
    loop.call_soon_threadsafe(router.read.set)
    assert [model["id"] for model in (await asked).json()["data"]] == ["policy", "tiny"]


def status(code: int, **headers: str) -> Callable[..., Any]:
    async def answer(request: web.Request, body: Any) -> web.Response:
        return web.json_response({"error": {"message": f"{code}!"}}, status=code, headers=headers)

    return answer


async def reset(request: web.Request, body: Any) -> None:
    request.transport.abort()  # type: ignore[union-attr]


async def html(request: web.Request, body: Any) -> web.Response:
    return web.Response(text="<html>", content_type="text/html")


async def odd(request: web.Request, body: Any) -> web.Response:
    return web.json_response({"choices": ["x"]})


async def empty(request: web.Request, body: Any) -> web.Response:
    return web.json_response({"choices": []})


async def half(request: web.Request, body: Any) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-length": "100"})
    await response.prepare(request)
    await response.write(b'{"choices"')
    request.transport.abort()  # type: ignore[union-attr]
    return response


ODD_PAUSE = status(503, **{"retry-after": "²"})  # a digit that is not a number


@pytest.mark.parametrize(
    "trouble", [status(500), status(503), status(429), ODD_PAUSE, reset, html, odd, half]
)
async def test_trouble_before_the_first_byte_is_repeated(
    bench: Any, active: Any, http: httpx.AsyncClient, trouble: Any
) -> None:
    bench.model.then(trouble, trouble)
    answer = await ask(http, active)
    assert answer.json()["choices"][0]["message"]["content"] == "echo hello"
    assert len(bench.model.requests) == 3
    assert len(await rows(bench, active)) == 1
    assert active.failures == {}


@pytest.mark.parametrize(("trouble", "code"), [(status(500), 500), (empty, 502), (html, 502)])
async def test_trouble_that_stays_is_reported_once(
    bench: Any, active: Any, http: httpx.AsyncClient, trouble: Any, code: int
) -> None:
    bench.model.then(*[trouble] * upstream.MAX_TRIES)
    answer = await ask(http, active)
    assert answer.status_code == code
    assert answer.headers["x-should-retry"] == "false"
    assert len(bench.model.requests) == upstream.MAX_TRIES
    assert list(active.failures.values())
    assert await rows(bench, active) == []
    assert (await ask(http, active)).status_code == 200  # the agent's own repetition mends it
    assert active.failures == {}


async def test_an_equal_call_beside_it_does_not_make_a_failure_good(
    bench: Any, active: Any, http: httpx.AsyncClient
) -> None:
    entered, failed = asyncio.Event(), asyncio.Event()

    async def wait(request: web.Request, body: Any) -> None:
        entered.set()
        await failed.wait()

    bench.model.then(wait, *[status(500)] * upstream.MAX_TRIES)
    twin = asyncio.create_task(ask(http, active))
    await entered.wait()
    assert (await ask(http, active)).status_code == 500
    failed.set()
    assert (await twin).status_code == 200
    assert len(active.failures) == 1
    assert (await ask(http, active)).status_code == 200
    assert active.failures == {}


async def test_a_dead_server_is_waited_for_until_it_is_back_elsewhere(
    bench: Any, active: Any, http: httpx.AsyncClient
) -> None:
    down = asyncio.Event()

    async def crash(request: web.Request, body: Any) -> None:
        down.set()
        await reset(request, body)

    bench.model.then(*[crash] * 1000)
    asking = asyncio.create_task(ask(http, active))
    await down.wait()
    await bench.model.stop()
    bench.model.script.clear()
    await bench.model.start()
    await bench.move(bench.model, version=9)
    assert (await asking).status_code == 200
    assert active.failures == {}


async def test_a_dead_server_is_given_up_at_the_deadline(bench: Any, http: Any) -> None:
    active = bench.gateway.register(await bench.attempt(timeout=0.2))
    await bench.model.stop()
    answer = await ask(http, active)
    assert answer.status_code in (502, 504)  # between two tries, or in the middle of one
    assert "unreachable" in answer.json()["error"]["message"]


@pytest.mark.parametrize("how", ["ends", "resets"])
async def test_a_stream_that_breaks_cuts_the_agent_off(
    bench: Any, active: Any, http: httpx.AsyncClient, how: str
) -> None:
    async def break_off(request: web.Request, body: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        event = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]}
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
        if how == "resets":
            await reset(request, body)
        return response

    bench.model.then(break_off)
    with pytest.raises(httpx.HTTPError):
        await ask(http, active, stream=True)
    expected = "half a stream" if how == "ends" else "unreachable"
    assert expected in next(iter(active.failures.values()))
    assert len(bench.model.requests) == 1
    assert await rows(bench, active) == []


@pytest.mark.parametrize("how", ["agent leaves", "attempt ends"])
async def test_nothing_goes_on_for_an_agent_that_is_gone(
    bench: Any, active: Any, http: httpx.AsyncClient, how: str
) -> None:
    entered, left = asyncio.Event(), asyncio.Event()

    async def hang(request: web.Request, body: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        entered.set()
        try:
            while True:
                await response.write(b": ping\n\n")
                await asyncio.sleep(0.01)
        finally:
            left.set()

    bench.model.then(hang)
    asking = asyncio.create_task(ask(http, active, stream=True))
    await entered.wait()
    if how == "agent leaves":
        asking.cancel()
    else:
        bench.gateway.unregister(active)
    await asyncio.wait_for(left.wait(), 10)
    (ended,) = await asyncio.gather(asking, return_exceptions=True)
    assert isinstance(ended, asyncio.CancelledError | httpx.HTTPError)
    assert await rows(bench, active) == []


async def test_a_call_that_came_as_its_attempt_ended_is_cut(bench: Any, active: Any) -> None:
    async def late() -> None:
        task = asyncio.create_task(asyncio.Event().wait())
        ending = threading.Thread(target=bench.gateway.unregister, args=(active,))
        ending.start()  # it sees no call yet
        ending.join()
        active.tasks.add(task)
        await asyncio.wait((task,), timeout=10)
        assert task.cancelled()

    await asyncio.wrap_future(bench.gateway.spawn(late()))


async def test_a_lost_lease_ends_the_calls(bench: Any, active: Any, http: Any) -> None:
    await bench.store.cancel([active.attempt.rollout.id])
    answer = await ask(http, active)
    assert answer.status_code == 403
    assert "lost its lease" in answer.json()["error"]["message"]


async def test_many_calls_at_once_are_not_queued(bench: Any, active: Any) -> None:
    together = asyncio.Barrier(250)

    async def meet(request: web.Request, body: Any) -> None:
        await together.wait()  # passes only if all 250 are in flight

    bench.model.then(*[meet] * 250)
    url = f"{bench.gateway.base_url}/chat/completions"
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=key(active)) as http:
        calls = [http.post(url, json={"model": "m", "messages": MESSAGES}) for _ in range(250)]
        answers = await asyncio.gather(*calls)
    assert {answer.status for answer in answers} == {200}


async def test_a_port_in_use_is_one_sentence(bench: Any) -> None:
    port = int(bench.gateway.base_url.split(":")[2].split("/")[0])
    with pytest.raises(ConfigError, match=rf"runner\.port = {port}: the gateway cannot listen"):
        Gateway(bench.store, "test", port=port).start()


async def endless(request: web.Request, body: Any) -> web.StreamResponse:
    """One token after another, with ids and log-probs, as long as somebody listens."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    first = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    await response.write(f"data: {json.dumps(first | {'prompt_token_ids': [1]})}\n\n".encode())
    logprobs = {"content": [{"logprob": -0.5}]}
    choice = {"index": 0, "delta": {"content": "a"}, "token_ids": [97], "logprobs": logprobs}
    while True:
        await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        await asyncio.sleep(0.001)


async def until_kept(bench: Any, active: Any) -> Any:
    """The transition that a call leaves when it was cut."""
    await asyncio.wait_for(asyncio.wrap_future(bench.gateway.unregister(active)), 10)
    (row,) = await rows(bench, active)
    return row


@pytest.mark.parametrize("how", ["agent leaves", "attempt ends"])
async def test_what_an_agent_read_before_it_left_is_kept(
    bench: Any, active: Any, http: httpx.AsyncClient, how: str
) -> None:
    bench.model.then(status(503), endless)
    seen = b""
    body = {"model": "m", "messages": MESSAGES, "stream": True}
    async with http.stream("POST", "/chat/completions", json=body, headers=key(active)) as answer:
        chunks = answer.aiter_raw()
        while seen.count(b'"a"') < 3:
            seen += await anext(chunks)
        if how == "attempt ends":
            row = await until_kept(bench, active)
    if how == "agent leaves":
        row = await until_kept(bench, active)
    assert (row.finish, row.exact, row.version) == ("cut", True, 3)
    assert row.prompt.tolist() == [1]
    assert len(row.completion) >= seen.count(b'"a"')
    assert row.logprobs.tolist() == [-0.5] * len(row.completion)
    assert row.answer["content"] == "a" * len(row.completion)
    assert active.failures == {}


async def test_a_cut_call_waits_for_the_store_however_often_it_is_cut(
    bench: Any, active: Any, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, release = hold_commits(bench, monkeypatch)
    bench.model.then(endless)
    body = {"model": "m", "messages": MESSAGES, "stream": True}
    async with http.stream("POST", "/chat/completions", json=body, headers=key(active)) as answer:
        chunks, seen = answer.aiter_raw(), b""
        while b'"a"' not in seen:
            seen += await anext(chunks)
    await asyncio.wait_for(writing.acquire(), 10)
    over = asyncio.wrap_future(bench.gateway.unregister(active))  # cuts it a second time
    assert not over.done()
    release.set()
    await asyncio.wait_for(over, 10)
    (row,) = await rows(bench, active)
    assert row.finish == "cut"


async def test_a_cut_call_that_cannot_be_stored_is_the_models_failure(
    bench: Any, active: Any, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(rows: Any) -> Any:
        raise StoreError("the disk is full")

    monkeypatch.setattr(bench.store, "add_transitions", broken)
    bench.model.then(endless)
    body = {"model": "m", "messages": MESSAGES, "stream": True}
    async with http.stream("POST", "/chat/completions", json=body, headers=key(active)) as answer:
        chunks, seen = answer.aiter_raw(), b""
        while b'"a"' not in seen:
            seen += await anext(chunks)
    await asyncio.wait_for(asyncio.wrap_future(bench.gateway.unregister(active)), 10)
    assert "the disk is full" in next(iter(active.failures.values()))


async def test_a_rollout_whose_agent_stops_reading_has_its_call(bench: Any) -> None:
    async def agent(value: str) -> str:
        async with openai.AsyncOpenAI() as client:
            ask = client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
            async with await ask as stream:
                async for chunk in stream:
                    if said := chunk.choices[0].delta.content:
                        return said
        raise AssertionError

    bench.model.then(endless)
    (rollout,) = await bench.run(agent, {"input": "x"})
    trace = await bench.store.trace(rollout.id)
    assert rollout.state == "succeeded"
    assert [row.finish for row in trace.transitions] == ["cut"]


async def pinged(request: web.Request, body: Any) -> web.StreamResponse:
    """A comment, and then the whole answer in one event."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b": ping\n\n")
    choice = {"index": 0, "delta": {"content": "answer 0"}, "finish_reason": "stop"}
    await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
    return response


@pytest.mark.parametrize(
    "api",
    [
        "chat/completions",
        "messages",
        "another",
        "after a comment",
    ],
)
async def test_a_retry_gets_the_answer_that_was_stored_and_not_read(
    bench: Any, active: Any, http: httpx.AsyncClient, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that gives up during the commit would leave a call that no agent acted on."""
    done, release = hold_commits(bench, monkeypatch, written=True)
    number_answers(bench)
    path = "/messages" if api == "messages" else "/chat/completions"
    body = {"model": "m", "max_tokens": 5, "messages": MESSAGES}
    if api == "after a comment":
        bench.model.then(pinged, pinged)
        body["stream"] = True

    def ask(**more: Any) -> Any:
        return http.post(path, json=body | more, headers=key(active))

    given_up = asyncio.create_task(ask())
    await asyncio.wait_for(done.acquire(), 10)
    given_up.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await given_up
    await asyncio.wrap_future(bench.gateway.spawn(calls_end(active)))
    release.set()
    if api == "another":  # request, which is sampled
        answer = await ask(stream=False)
        assert "answer 1" in answer.text
    answer = await ask()
    assert "answer 0" in answer.text
    stored = [row.answer["content"] for row in await rows(bench, active)]
    assert stored == (["answer 0", "answer 1"] if api == "another" else ["answer 0"])
    assert "answer" in (await ask()).text  # later equal calls are sampled
    assert len(await rows(bench, active)) == len(stored) + 1


async def calls_end(active: Any) -> None:
    while active.tasks:
        await asyncio.wait(active.tasks)


async def test_a_call_has_the_same_seed_in_whichever_order_calls_arrive(
    bench: Any, http: httpx.AsyncClient
) -> None:
    async def seeds(texts: list[str], fence: int = 1, seed: int | None = 5) -> dict[str, int]:
        attempt = await bench.attempt(sampling=Sampling(seed=seed))
        active = bench.gateway.register(msgspec.structs.replace(attempt, fence=fence))
        found = {}
        for number, text in enumerate(texts):
            messages = [{"role": "user", "content": text}]
            assert (await ask(http, active, messages=messages)).status_code == 200
            found[f"{text}{texts[:number].count(text)}"] = bench.model.requests[-1].get("seed")
        return found

    known = await seeds(["a", "b", "a", "c"])
    assert len({*known.values()}) == 4
    assert await seeds(["c", "a", "a", "b"]) == known
    again = await seeds(["a", "b", "a", "c"], fence=2)  # another try is another sample
    assert not {*again.values()} & {*known.values()}
    assert await seeds(["a"], seed=None) == {"a0": None}


async def test_the_seed_of_the_agent_comes_first(bench: Any, http: httpx.AsyncClient) -> None:
    active = bench.gateway.register(await bench.attempt(sampling=Sampling(seed=5)))
    await ask(http, active, seed=3)
    assert bench.model.requests[-1]["seed"] == 3


async def test_a_request_that_is_not_json_uses_up_no_call(
    bench: Any, active: Any, http: httpx.AsyncClient
) -> None:
    active.max_calls = 1
    for content in (b"{", b"[]", b"\xff", b'{"messages": [], "stream": "yes"}'):
        refused = await http.post("/chat/completions", content=content, headers=key(active))
        assert refused.status_code == 400
    assert active.calls == 0
    assert (await ask(http, active)).status_code == 200
    assert (await ask(http, active)).status_code == 403
    (row,) = await rows(bench, active)
    assert row.index == 0


async def test_a_call_that_a_feature_refuses_fails_until_an_equal_one_succeeds(
    active: Any, http: httpx.AsyncClient
) -> None:
    """Such as one that lacks the text which a candidate replaces."""
    refusals = ["first", "second"]

    def refuse(call: Any) -> Any:
        if refusals:
            call.fail(why := refusals.pop(0))
            raise RefusedError(400, "prompt_not_found", why)
        return call

    active.changes.append(refuse)
    for _ in range(2):
        assert (await ask(http, active)).status_code == 400
    assert active.failures == {0: "first", 1: "second"}
    assert (await ask(http, active, messages=[*MESSAGES, *MESSAGES])).status_code == 200
    assert active.failures == {0: "first", 1: "second"}
    assert (await ask(http, active)).status_code == 200
    assert active.failures == {}


async def test_each_of_two_equal_calls_that_nobody_read_answers_a_retry(
    bench: Any, active: Any, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, release = hold_commits(bench, monkeypatch, written=True)
    number_answers(bench)
    given_up = []
    for _ in range(2):
        given_up.append(asyncio.create_task(ask(http, active)))
        await asyncio.wait_for(stored.acquire(), 10)
    for call in given_up:
        call.cancel()
        await asyncio.wait([call])
    await asyncio.wrap_future(bench.gateway.spawn(calls_end(active)))
    release.set()
    said = [(await ask(http, active)).json()["choices"][0]["message"]["content"] for _ in range(3)]
    assert said[:2] == ["answer 0", "answer 1"]
    assert said == [row.answer["content"] for row in await rows(bench, active)]


@pytest.mark.parametrize(("stream", "times"), [(False, 1), (False, 2), (True, 1)])
async def test_a_retry_gets_an_answer_of_which_the_store_did_not_say_whether_it_has_it(
    bench: Any,
    active: Any,
    http: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    times: int,
    stream: bool,
) -> None:
    add, errors = bench.store.add_transitions, [Unavailable("the connection broke")] * times

    async def broken(rows: Any) -> Any:
        found = await add(rows)
        if errors:
            raise errors.pop()
        return found

    number_answers(bench)
    monkeypatch.setattr(bench.store, "add_transitions", broken)
    if stream:
        bench.model.then(pinged)
    for number in range(times):
        if stream:
            with pytest.raises(httpx.RemoteProtocolError):  # it has had a comment
                await ask(http, active, stream=True)
        else:
            error = (await ask(http, active, stream=False)).json()["error"]
            assert error["code"] == "call_not_stored"
        assert "the connection broke" in active.failures[number]
    assert "answer 0" in (await ask(http, active, stream=stream)).text
    assert [row.answer["content"] for row in await rows(bench, active)] == ["answer 0"]
    assert active.failures == {}


async def test_a_retry_is_sampled_if_the_store_refused_the_first_answer(
    bench: Any, active: Any, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, errors = bench.store.add_transitions, [Invalid("not to be stored")]

    async def refusing(rows: Any) -> Any:
        if errors:
            raise errors.pop()
        return await add(rows)

    number_answers(bench)
    monkeypatch.setattr(bench.store, "add_transitions", refusing)
    assert (await ask(http, active)).status_code == 502
    assert "answer 1" in (await ask(http, active)).text


async def test_a_retry_gets_the_answer_whose_end_could_not_be_sent(
    bench: Any, active: Any, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent had a comment only when its connection broke, which no cancellation tells."""
    write, broken = web.StreamResponse.write, []
    home = await loop_of(bench.gateway)

    async def once_broken(response: web.StreamResponse, data: bytes) -> None:
        if b"answer 0" in data and asyncio.get_running_loop() is home and not broken:
            broken.append(data)
            raise ConnectionResetError
        await write(response, data)

    monkeypatch.setattr(web.StreamResponse, "write", once_broken)
    bench.model.then(pinged, pinged)
    with pytest.raises(httpx.RemoteProtocolError):
        await ask(http, active, stream=True)
    assert len(await rows(bench, active)) == 1
    assert "answer 0" in (await ask(http, active, stream=True)).text
    assert broken
    assert len(await rows(bench, active)) == 1
