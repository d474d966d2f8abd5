"""`agentrl gateway serve`: sessions of a deployed agent, feedback about them, data sets of both."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from msgspec.structs import replace

from agentrl.algorithms.preferences.draft import Draft
from agentrl.algorithms.preferences.mining import MineSpec, mine
from agentrl.cli.live import check
from agentrl.core.config import RunConfig, resolve
from agentrl.core.errors import ConfigError, Invalid, NotFound
from agentrl.core.types import NewRollout, Purpose, Rollout, RolloutState
from agentrl.runners import sessions as module
from agentrl.runners.feedback import Feedback, give_feedback, session_group
from agentrl.runners.sessions import Sessions, serve
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.store.records import Item
from agentrl.store.sqlite import SqliteStore
from agentrl.trainer import check as check_training
from tests.runners.conftest import FakeModel

RUN = "shop"
Say = Callable[..., Awaitable[tuple[str, str]]]


@pytest.fixture
def settings(tmp_path: Path, model: FakeModel) -> Callable[..., RunConfig]:
    def make(**sessions: Any) -> RunConfig:
        upstreams = {"gpt": {"base_url": model.base_url, "model": "tiny"}}
        given = {"name": RUN, "store": f"sqlite:///{tmp_path}/shop.db", "sessions": sessions}
        return resolve({**given, "upstreams": upstreams}, source="test")

    return make


class Served:
    """A gateway that serves, and its clients."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self.session = url, session

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.post(f"{self.url}/{path}", json=body, headers=sent) as answer:
            return answer.status, await answer.json(), answer.headers

    async def say(self, *texts: str, **headers: str) -> tuple[str, str]:
        """The answer to a conversation, and the session that it was made in."""
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
        body = {"model": "gpt-4o", "messages": messages}
        status, answer, about = await self.post("chat/completions", body, **headers)
        assert status == 200, answer
        return answer["choices"][0]["message"]["content"], about["x-agentrl-session"]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Callable[[RunConfig], Awaitable[Served]]]:
    ends: list[tuple[asyncio.Event, asyncio.Task[None]]] = []
    async with aiohttp.ClientSession() as session:

        async def started(config: RunConfig) -> Served:
            url, stop = asyncio.get_running_loop().create_future(), asyncio.Event()
            ends.append(
                (stop, asyncio.create_task(serve(config, started=url.set_result, stop=stop)))
            )
            await asyncio.wait((url, ends[-1][1]), return_when=asyncio.FIRST_COMPLETED)
            return Served(url.result() if url.done() else await ends[-1][1], session)

        started.stop = lambda: end(*ends.pop())
        yield started
        for each in ends:
            await end(*each)


async def end(stop: asyncio.Event, task: asyncio.Task[None]) -> None:
    stop.set()
    await task


async def rollouts(store: Store) -> list[Rollout]:
    calls = await store.calls([row.id for row in await store.rollouts(RUN)])
    return [replace(row, transitions=calls[row.id]) for row in await store.rollouts(RUN)]


@pytest.fixture
async def shop(settings: Callable[..., RunConfig]) -> AsyncIterator[Store]:
    async with open_store(settings().store) as store:
        yield store


async def test_calls_are_sessions_by_header_conversation_or_key(start, settings, shop):
    served = await start(settings())
    first, a = await served.say("hi", x_session_id="a")
    await served.say("and?", x_session_id="a")
    said, b = await served.say("hello")
    _, other = await served.say("hello you")
    assert (await served.say("hello", said, "more"))[1] == b != other
    assert (first, a) == ("echo hi", "a")
    await start.stop()
    found = {row.group: row for row in await rollouts(shop)}
    assert sorted(len(row.transitions) for row in found.values()) == [1, 2, 2]
    row = found[session_group(RUN, "a")]
    assert row.state is RolloutState.SUCCEEDED
    assert [call.messages[0]["content"] for call in row.transitions] == ["hi", "and?"]
    assert all(call.exact and call.policy == "gpt" for call in row.transitions)


async def test_streams_and_other_apis_are_sessions_too(start, settings, shop):
    served = await start(settings())
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    status, answer, about = await served.post("messages", body)
    assert (status, answer["content"][0]["text"]) == (200, "echo hi")
    body["messages"] += [
        {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "more"},
    ]  # fmt: skip
    sent = {**body, "stream": True}
    async with served.session.post(f"{served.url}/messages", json=sent) as streamed:
        assert streamed.headers["x-agentrl-session"] == about["x-agentrl-session"]
        said = re.findall(rb'"text_delta","text":"(.)"', await streamed.read())
        assert b"".join(said) == b"echo more"
    count = {"model": "m", "messages": body["messages"]}
    assert (await served.post("messages/count_tokens", count))[0] == 200
    asked = {"model": "m", "input": "hi"}
    _, first, about = await served.post("responses", asked)
    asked = {"model": "m", "input": "more", "previous_response_id": first["id"]}
    status, _, then = await served.post("responses", asked)
    assert (status, then["x-agentrl-session"]) == (200, about["x-agentrl-session"])
    said = {"role": "user", "content": "hi"}
    refers = [said, {"type": "item_reference", "id": first["output"][0]["id"]}, said]
    status, _, then = await served.post("responses", {"model": "m", "input": refers})
    assert (status, then["x-agentrl-session"]) == (200, about["x-agentrl-session"])
    assert sorted(len(row.transitions) for row in await rollouts(shop)) == [2, 3]


async def test_what_is_redacted_is_nowhere_in_the_store(start, settings, shop, model, tmp_path):
    served = await start(settings(redact=[r"\d{4}-\d{4}", r"\S+@\S+"]))
    said, _ = await served.say("card 1234-5678 of me@home.net", x_session_id="me@home.net")
    assert "1234-5678" in said
    assert "1234-5678" in str(model.requests)
    await start.stop()
    (row,) = await rollouts(shop)
    (call,) = row.transitions
    assert call.messages[0]["content"] == "card [redacted] of [redacted]"
    assert call.answer["content"] == "echo card [redacted] of [redacted]"
    assert not any((call.exact, call.prompt, call.completion, call.logprobs))
    stored = b"".join(file.read_bytes() for file in tmp_path.glob("shop.db*"))
    assert b"1234-5678" not in stored
    assert b"home.net" not in stored


async def test_feedback_by_http_and_python_joins_calls_and_sessions_also_late(
    start, settings, shop
):
    served = await start(settings())
    for text in ("one", "two"):
        await served.say(text, x_session_id="s")
    post = {"session": "s", "call": 0, "value": 1.0, "note": "good"}
    assert (await served.post("feedback", post))[0] == 200
    await start.stop()
    await give_feedback(shop, RUN, Feedback(session="s", value=0.25))
    await give_feedback(shop, RUN, Feedback(session="s", name="bought", value=0.0))
    await give_feedback(shop, RUN, Feedback(session="s", name="bought", value=1.0))
    await give_feedback(shop, RUN, Feedback(session="s", correction="two!"))
    (row,) = await rollouts(shop)
    about = {(r.name, r.target): (r.value, r.note) for r in row.rewards}
    first, last = (call.id for call in row.transitions)
    assert about == {
        ("feedback", first): (1.0, "good"), ("feedback", None): (0.25, ""),
        ("bought", None): (1.0, ""), ("correction", last): (0.0, "two!"),
    }  # fmt: skip
    for wrong in (Feedback(session="t", value=1.0), Feedback(session="s", call=2, value=1.0)):
        with pytest.raises(NotFound, match="no call"):
            await give_feedback(shop, RUN, wrong)
    with pytest.raises(Invalid, match="a value, a correction"):
        await give_feedback(shop, RUN, Feedback(session="s"))


async def mined(store: Store, **spec: Any) -> tuple[list[Item], dict[str, int]]:
    made = Draft(store, "d", await store.draft_dataset("d", {"n": str(spec)}), 0.0)
    await mine(store, made, MineSpec(run=RUN, policy="gpt", **spec))
    found = await made.commit()
    return await store.items("d", found.version), dict(made.counts)


async def test_sessions_become_labels_pairs_and_demonstrations(start, settings, shop):
    served = await start(settings())
    for session, value in (("good", 1.0), ("bad", 0.0)):
        await served.say("hi", x_session_id=session)
        await served.say("more", x_session_id=session)
        await served.post("feedback", {"session": session, "value": value})
    await served.post("feedback", {"session": "bad", "call": 0, "value": 1, "correction": "Yes!"})
    items, counts = await mined(shop, how="label", reward="feedback")
    assert (items, counts["rollouts that have not ended"]) == ([], 2)
    await start.stop()
    items, _ = await mined(shop, how="label", reward="feedback")
    # Both sessions say the same, so their labels differ where people's do, and not by the answer.
    assert sorted(item.label for item in items) == [0.0, 1.0, 1.0]
    items, _ = await mined(shop, how="demonstration", reward="feedback")
    assert [item.kind for item in items] == ["demonstration"]
    (item,), _ = await mined(shop, how="correction")
    sides = await shop.sides(item.sides)
    better, worse = (sides[digest][0] for digest in item.sides)
    assert (better.answer["content"], better.messages) == ("Yes!", worse.messages)
    assert (better.exact, worse.exact) == (False, True)
    later = {"since": time.time() + 60, "how": "demonstration", "reward": "feedback"}
    assert await mined(shop, **later) == ([], {"older rollouts": 2})
    newer = {"least_version": 8, "how": "demonstration", "reward": "feedback"}
    assert await mined(shop, **newer) == ([], {"older rollouts": 2})


async def test_calls_without_token_ids_are_mined_where_that_is_asked_for(
    start, settings, shop, model
):
    model.knows_tokens = False
    served = await start(settings())
    await served.say("hi", x_session_id="s")
    await served.post("feedback", {"session": "s", "value": 1})
    await start.stop()
    asked = {"how": "label", "reward": "feedback"}
    assert await mined(shop, **asked) == ([], {"rollouts with calls without token ids": 1})
    items, _ = await mined(shop, inexact=True, **asked)
    assert [item.label for item in items] == [1.0]


async def test_what_a_killed_process_had_recorded_is_ended_by_the_next(
    start, settings, shop, monkeypatch: pytest.MonkeyPatch
):
    async def die(self: Sessions, idle: float = 0.0) -> None:
        return None

    monkeypatch.setattr(module, "SESSION_LEASE", 1.0)
    monkeypatch.setattr(module, "RENEWAL_INTERVAL", 0.05)
    with monkeypatch.context() as patch:
        patch.setattr(Sessions, "end", die)
        served = await start(settings())
        for name in ("a", "b", "c"):
            await served.say("hi", x_session_id=name)
        await served.post("feedback", {"session": "a", "value": 1})
        await start.stop()
    assert {row.state for row in await shop.rollouts(RUN)} == {RolloutState.RUNNING}
    served = await start(settings())
    await served.say("still there?", x_session_id="a")  # at once, as a rollout of its own
    cursor, ended = 0, list[Rollout]()
    while len(ended) < 3:
        cursor = await shop.wait(cursor, timeout=5)
        ended = [row for row in await rollouts(shop) if row.state is RolloutState.SUCCEEDED]
    assert [len(row.transitions) for row in ended] == [1, 1, 1]
    assert sorted(len(row.rewards) for row in ended) == [0, 0, 1]
    newest = await give_feedback(shop, RUN, Feedback(session="a", value=0))
    assert newest not in [row.id for row in ended]


async def test_idle_sessions_end_and_old_ones_are_removed(
    start, settings, shop, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "RENEWAL_INTERVAL", 0.02)
    served = await start(settings(idle=0.05))
    await served.say("hi", x_session_id="s")
    cursor, (row,) = 0, await shop.rollouts(RUN)
    while row.state is not RolloutState.SUCCEEDED:
        cursor = await shop.wait(cursor, timeout=5)
        (row,) = await shop.rollouts(RUN)
    await shop.prune(run=RUN, older_than=60.0)
    assert await shop.rollouts(RUN) == [row]
    await shop.prune(run=RUN, older_than=0.0)
    assert await shop.rollouts(RUN) == []


async def test_only_callers_with_a_key_are_answered(
    start, settings, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CALLERS", "one two")
    served = await start(settings(key_env="CALLERS"))
    assert (await served.say("hi", authorization="Bearer two"))[0] == "echo hi"
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    for path in ("chat/completions", "feedback"):
        status, answer, _ = await served.post(path, body, authorization="Bearer three")
        assert (status, answer["error"]["code"]) == (401, 401)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Sessions]:
    """The sessions of each server that starts, which are not swept by themselves."""
    found: list[Sessions] = []

    async def keep(self: Sessions) -> None:
        found.append(self)
        await asyncio.Event().wait()

    monkeypatch.setattr(Sessions, "keep", keep)
    return found


async def test_a_session_is_idle_only_after_its_call_has_ended(start, settings, model, kept):
    async def long(request: web.Request, body: Any) -> None:
        (session,) = kept[0]._open.values()
        session.used -= 100.0  # it began so long ago

    model.then(long)
    served = await start(settings())
    said, name = await served.say("hi")
    await asyncio.wrap_future(kept[0].gateway.spawn(kept[0].end(50.0)))
    assert (await served.say("hi", said, "more"))[1] == name


async def test_what_a_killed_process_had_recorded_is_in_nobodys_way(
    start, settings, shop, kept, monkeypatch: pytest.MonkeyPatch
):
    async def die(self: Sessions, idle: float = 0.0) -> None:
        return None

    with monkeypatch.context() as patch:
        patch.setattr(Sessions, "end", die)
        served = await start(settings())
        for name in ("a", "b"):
            await served.say("hi", x_session_id=name)
        await start.stop()
    later = partial(open_store, clock=lambda: time.time() + 2 * module.SESSION_LEASE)
    monkeypatch.setattr(module, "open_store", later)
    served = await start(settings())
    assert await served.say("hi", x_session_id="c") == ("echo hi", "c")
    ended = [row for row in await rollouts(shop) if row.state is RolloutState.SUCCEEDED]
    assert [len(row.transitions) for row in ended] == [1, 1]


async def test_sessions_that_were_lost_together_block_no_new_ones(
    start, settings, shop, kept, monkeypatch: pytest.MonkeyPatch
):
    """Also when their leases end while the next process has sessions of its own."""

    async def die(self: Sessions, idle: float = 0.0) -> None:
        return None

    async def say(*names: str) -> None:
        said = [served.say("hi", x_session_id=name) for name in names]
        assert await asyncio.gather(*said) == [("echo hi", name) for name in names]

    passed = 0.0
    clock = partial(open_store, clock=lambda: time.time() + passed)
    monkeypatch.setattr(module, "open_store", clock)
    with monkeypatch.context() as patch:
        patch.setattr(Sessions, "end", die)
        served = await start(settings())
        await say(*"abcdefgh")
        await start.stop()
    passed = module.SESSION_LEASE / 2
    served = await start(settings())
    await say(*"ijklmnop")
    passed = module.SESSION_LEASE + 1
    await say(*"qrst")


async def test_what_a_late_claim_gets_is_the_next_session(start, settings, shop, kept):
    """Over HTTP a sweep's request may come after its repeat was answered that there is nothing."""
    served = await start(settings())
    await served.say("hi", x_session_id="a")
    claim, given = kept[0]._store.claim, list[Any]()

    async def sweeps_is_late(n: int, **more: Any) -> Any:
        given.append(more)
        if len(given) == 2:  # of the session, after it was enqueued: the first one comes now
            await claim(n, **given[0])
        return await claim(n, **more)

    kept[0]._store.claim = sweeps_is_late
    await asyncio.wrap_future(kept[0].gateway.spawn(kept[0]._sweep()))
    assert await served.say("hi", x_session_id="b") == ("echo hi", "b")
    assert len(given) == 2
    assert [len(row.transitions) for row in await rollouts(shop)] == [1, 1]


async def test_a_claim_id_whose_sessions_have_ended_is_replaced(start, settings, shop, kept):
    """A late claim got a session of a killed process, which somebody has cancelled since."""
    served = await start(settings())
    await served.say("hi", x_session_id="a")
    sessions = kept[0]
    lost = NewRollout(id="lost/0", run=RUN, group="lost", index=0, task={}, purpose=Purpose.EVAL)
    await shop.enqueue([lost])
    late = {"lease": 60.0, "run": RUN, "claim_id": sessions._claim_id}
    assert await sessions._store.claim(1, runner="late", **late)
    await shop.cancel([lost.id])
    assert await served.say("hi", x_session_id="b") == ("echo hi", "b")
    assert sessions._open["b"].active.recorded


async def test_equal_conversations_end_apart(start, settings, kept):
    served = await start(settings())
    (said, first), (_, other) = [await served.say("hi") for _ in range(2)]
    kept[0]._open[first].used -= 100.0
    await asyncio.wrap_future(kept[0].gateway.spawn(kept[0].end(50.0)))
    assert (await served.say("hi", said, "more"))[1] == other


async def test_what_a_stream_had_shown_is_stored_when_the_server_stops(
    start, settings, shop, model
):
    async def hang(request: web.Request, body: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        (first, second, *_) = model.chunks(body)
        for event in (first, second):
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await asyncio.Event().wait()
        raise AssertionError

    model.then(hang)
    served = await start(settings())
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with served.session.post(f"{served.url}/chat/completions", json=body) as answer:
        seen = b""
        while b'"content": "e"' not in seen:
            seen += await answer.content.readany()
        await start.stop()
    (row,) = await rollouts(shop)
    assert row.state is RolloutState.SUCCEEDED
    (call,) = row.transitions
    assert (call.finish, call.answer["content"]) == ("cut", "e")


async def test_a_body_of_wrong_types_or_bytes_is_refused(start, settings):
    served = await start(settings())
    await served.say("hi")
    for path, body in (
        ("responses", b'{"model": "m", "input": "hi", "previous_response_id": ["r"]}'),
        ("chat/completions", b'{"model": "\xff"}'),
        ("chat/completions", b'{"model": ' + b"[" * 10**5),
        ("feedback", b'{"session": "\xff"}'),
    ):
        async with served.session.post(f"{served.url}/{path}", data=body) as answer:
            assert answer.status == 400, (body[:60], await answer.text())
            assert (await answer.json())["error"]["message"], body[:60]


async def test_headers_that_are_no_text_are_refused_or_passed_by(
    start, settings, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CALLERS", "one")
    for given, sent, status in (
        ({"key_env": "CALLERS"}, b"authorization: Bearer \xff", 401),
        ({}, b"x-title: caf\xe9", 200),
        ({}, b"x-session-id: caf\xe9", 400),
    ):
        served = await start(settings(**given))
        body = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n" + sent
        )
        head += b"\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        port = int(served.url.split(":")[2].split("/")[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + body)
        answer = await reader.read()
        writer.close()
        assert answer.split()[1] == str(status).encode(), answer
        await start.stop()


async def test_googles_header_has_a_key_too(start, settings, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CALLERS", "one")
    served = await start(settings(key_env="CALLERS"))
    body = {"contents": [{"parts": [{"text": "hi"}]}]}
    url = served.url.removesuffix("/v1") + "/v1beta/models/m:generateContent"
    async with served.session.post(url, json=body, headers={"x-goog-api-key": "one"}) as answer:
        assert (answer.status, bool(answer.headers.get("x-agentrl-session"))) == (200, True)


async def test_a_caller_who_leaves_early_costs_no_other_its_session(
    start, settings, kept, monkeypatch: pytest.MonkeyPatch
):
    served = await start(settings())
    entered, left, release = asyncio.Event(), asyncio.Event(), asyncio.Event()
    home, enqueue, find = asyncio.get_running_loop(), SqliteStore.enqueue, Sessions._find

    async def slow(self: Any, new: Any) -> None:
        await enqueue(self, new)
        home.call_soon_threadsafe(entered.set)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(release.wait(), home))

    async def watched(self: Sessions, request: web.Request) -> Any:
        try:
            return await find(self, request)
        finally:
            home.call_soon_threadsafe(left.set)

    with monkeypatch.context() as patch:
        patch.setattr(SqliteStore, "enqueue", slow)
        patch.setattr(Sessions, "_find", watched)
        leaving = asyncio.create_task(served.say("hi", x_session_id="a"))
        await entered.wait()
        leaving.cancel()
        await left.wait()
    following = asyncio.create_task(served.say("hi", x_session_id="b"))
    release.set()
    assert await following == ("echo hi", "b")


async def test_a_server_whose_sessions_are_kept_no_more_ends(
    start, settings, monkeypatch: pytest.MonkeyPatch
):
    async def broken(self: Sessions) -> None:
        raise LookupError("a bug")

    monkeypatch.setattr(Sessions, "_sweep", broken)
    ended = asyncio.create_task(serve(settings(), started=lambda url: None, stop=asyncio.Event()))
    with pytest.raises(LookupError, match="a bug"):
        await asyncio.wait_for(ended, 10)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tasks": {"train": "t.jsonl"}}, r"\[tasks\] has no effect"),
        ({"runner": {"processes": 3}}, "reads only host and port"),
        ({"runner": {"host": "0.0.0.0"}}, "set sessions.key_env"),
        ({"upstreams": {}}, r"set \[upstreams.NAME\], which answers"),
    ],
)
def test_settings_without_effect_are_refused(settings, more: Any, message: str):
    given = {"upstreams": {"gpt": {"text": "hi"}}, **more}
    with pytest.raises(ConfigError, match=message):
        check(resolve(given, source="test"))


def test_a_wrong_expression_and_training_with_sessions_are_refused(settings):
    with pytest.raises(ConfigError, match="redact has"):
        settings(redact=["("])
    with pytest.raises(ConfigError, match="gateway serve"):
        check_training(settings(idle=5.0))
