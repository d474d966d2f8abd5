"""The gateway of a live run, with a fake policy server."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from agentrl.core.config import RunConfig, resolve
from agentrl.core.errors import Unavailable
from agentrl.core.types import (
    FEEDBACK,
    PolicyVersion,
    Purpose,
    Rollout,
    RolloutState,
    StepCommit,
    Transition,
)
from agentrl.live import gateway
from agentrl.live.gateway import LiveSessions, serve
from agentrl.live.records import RESULT_ENDED, Lanes, LiveState, chosen, ended, failed_calls
from agentrl.runners.feedback import session_group
from agentrl.store import base, open_store
from agentrl.store.base import Store
from agentrl.store.sqlite import SqliteStore
from tests.agentrl.live.shop import move, until
from tests.runners.conftest import FakeModel

RUN = "shop"
FIRST = Lanes(serving=0)


class Served:
    """A run of which only the gateway lives."""

    def __init__(self, config: RunConfig, store: Store, model: FakeModel) -> None:
        self.config, self.store, self.model = config, store, model
        self.url = ""
        self.stop, self.serving = asyncio.Event(), asyncio.get_running_loop().create_future()
        self.client = aiohttp.ClientSession()

    async def start(self) -> None:
        self.stop = asyncio.Event()
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        work = serve(self.config, listener, stop=self.stop, orphaned=threading.Event())
        self.serving = asyncio.ensure_future(work)

    async def end(self) -> None:
        """End the process as a kill does: its sessions stay open."""
        self.stop.set()
        await self.serving

    async def publish(self, *versions: int) -> None:
        table = {"policy": ""} | {f"policy@{v}": self.model.base_url for v in versions}
        for name, url in table.items():
            row = PolicyVersion(run=RUN, policy=name, version=0, base_url=url, model=name)
            await self.store.publish(row)

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.client.post(f"{self.url}/{path}", json=body, headers=sent) as answer:
            return answer.status, await answer.json()

    async def say(self, *texts: str, **headers: str) -> str:
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
        status, answer = await self.post("chat/completions", {"messages": messages}, **headers)
        assert status == 200, answer
        said: str = answer["choices"][0]["message"]["content"]
        return said

    async def claude(self, *texts: str, **headers: str) -> str:
        """What Anthropic's API answers to a conversation with instructions."""
        roles = ("user", "assistant")
        blocks = [[{"type": "text", "text": text}] for text in texts]
        messages = [{"role": roles[i % 2], "content": said} for i, said in enumerate(blocks)]
        body = {"model": "m", "max_tokens": 9, "system": "Be kind.", "messages": messages}
        status, answer = await self.post("messages", body, **headers)
        assert status == 200, answer
        text: str = answer["content"][0]["text"]
        return text

    async def groups(self, name: str) -> list[str]:
        base = session_group(RUN, name)
        return sorted(row.group.removeprefix(base) for row in await self.sessions())

    async def has_no_models(self) -> bool:
        async with self.client.get(f"{self.url}/models") as answer:
            return (await answer.json())["data"] == []

    async def sessions(self) -> list[Rollout]:
        return await self.store.rollouts(RUN)

    async def calls(self) -> list[Transition]:
        rows = await self.sessions()
        return [
            c for calls in (await self.store.calls([r.id for r in rows])).values() for c in calls
        ]


@pytest.fixture
async def served(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    """A parameter has further settings."""
    (tmp_path / "runs").mkdir()
    given: dict[str, Any] = {"name": RUN, "store": f"sqlite:///{tmp_path}/shop.db"}
    more: dict[str, Any] = getattr(request, "param", {})
    given |= {
        "output": str(tmp_path / "runs"),
        "live": {"running": True, "people": {"token": False}, **more.get("live", {})},
        "policy": {"model": "x"},
        "sessions": more.get("sessions", {}),
    }
    config, model = resolve(given, source="test"), FakeModel(version=None)
    await model.start()
    async with open_store(config.store) as store:
        await store.open_run(RUN, {})
        served = Served(config, store, model)
        await served.publish(0)
        await move(store, FIRST, kind="first", version=0)
        await served.start()
        yield served
        await served.end()
        await served.client.close()
    await model.stop()


async def test_a_session_is_a_training_rollout_of_its_own(served: Served) -> None:
    first = await served.say("hi", x_session_id="ada", x_user_id="u1")
    await served.say("hi", first, "and?", x_session_id="ada", x_user_id="u1", x_agentrl_end="1")
    (row,) = await ended(served.store, RUN)
    assert (row.purpose, row.step, row.state) == (Purpose.TRAIN, -1, RolloutState.SUCCEEDED)
    assert row.seats == {"policy": "policy@0"}
    assert (row.task["lane"], row.task["version"]) == ("serving", 0)
    assert row.task["user"] not in ("", "u1")
    assert row.result[RESULT_ENDED] > 0
    assert {(call.policy, call.version) for call in await served.calls()} == {("policy@0", 0)}


async def test_a_session_that_goes_on_after_its_end_is_another_one(served: Served) -> None:
    for text in ("one", "two", "three"):
        await served.say(text, x_session_id="ada")
        status, _ = await served.post("sessions/end", {"session": "ada"})
        assert status == 200
    rows = await ended(served.store, RUN)
    base = min(row.group for row in rows)
    assert sorted(row.group for row in rows) == [base, f"{base}-2", f"{base}-3"]
    status, said = await served.post("feedback", {"session": "ada", "value": 1})
    assert (status, said) == (200, {"rollout": f"{base}-3/0"})
    (last,) = [row for row in await served.sessions() if row.rewards]
    assert last.reward(FEEDBACK) == 1
    assert (await served.post("sessions/end", {"session": "nobody"}))[0] == 404
    assert (await served.post("feedback", {"session": "nobody", "value": 1}))[0] == 404


async def test_a_name_whose_trained_session_was_deleted_is_recorded_again(served: Served) -> None:
    await served.say("one", x_session_id="ada", x_agentrl_end="1")
    (row,) = await ended(served.store, RUN)
    state = await served.store.run(RUN)
    assert state is not None
    await served.store.claim_groups(RUN, state.epoch, 1, groups=[row.group])
    step = StepCommit(
        run=RUN, epoch=state.epoch, step=0, groups=[row.group], metrics={}, versions={},
        checkpoint=None,
    )  # fmt: skip
    await served.store.commit_step(step)
    await served.store.forget([row.id])
    await served.say("two", x_session_id="ada", x_agentrl_end="1")
    (again,) = await ended(served.store, RUN)
    assert again.group == f"{row.group}-2"
    status, said = await served.post("feedback", {"session": "ada", "value": 1})
    assert (status, said) == (200, {"rollout": again.id})


async def test_the_next_process_goes_on_with_open_sessions(served: Served) -> None:
    named = await served.say("hi", x_session_id="ada")
    unnamed = await served.say("hello")
    await served.end()
    await served.start()
    await served.say("hi", named, "more", x_session_id="ada")
    await served.say("hello", unnamed, "more")
    rows = await served.sessions()
    assert [row.state for row in rows] == [RolloutState.RUNNING] * 2
    assert [row.attempts for row in rows] == [1, 1]
    assert [call.index for call in await served.calls()] == [0, 1, 0, 1]
    assert (await served.post("sessions/end", {"session": "ada"}))[0] == 200
    assert len(await ended(served.store, RUN)) == 1


async def test_a_call_that_was_perhaps_not_read_is_answered_again_and_trained_once(
    served: Served,
) -> None:
    first = await served.say("hi", x_session_id="ada")
    read = await served.say("hi", first, "and?", x_session_id="ada")
    await served.end()
    await served.start()
    asked = len(served.model.requests)
    assert await served.say("hi", first, "and?", x_session_id="ada") == read
    assert len(served.model.requests) == asked
    *_, call = await served.calls()
    assert call.repeats == f"{call.attempt}-1"
    await served.say("hi", first, "and?", x_session_id="ada")  # asked once more, on purpose
    assert len(served.model.requests) == asked + 1
    assert [call.repeats is None for call in await served.calls()] == [True, True, False, True]


async def test_calls_of_a_retired_version_go_on_with_the_serving_one(served: Served) -> None:
    await served.publish(0, 1)
    await move(served.store, Lanes(serving=0, candidate=1, share=1.0), kind="candidate", version=1)

    async def seated() -> bool:
        await served.say("hi", x_session_id=f"s{len(await served.sessions())}")
        return "policy@1" in [row.seats["policy"] for row in await served.sessions()]

    await until(seated, what="a session goes to the candidate")
    await served.store.open_run(RUN, {})  # nothing is published any longer
    await until(served.has_no_models, what="the gateway knows that")
    waiting = asyncio.create_task(served.say("hi", x_session_id="waits"))
    group = session_group(RUN, "waits")

    async def begun() -> list[Rollout]:
        return await served.store.rollouts(RUN, group=group)

    (ours,) = await until(begun, what="the session has begun")
    assert (ours.task["lane"], ours.seats) == ("candidate", {"policy": "policy@1"})
    await served.publish(0)
    await move(served.store, FIRST, kind="rolled back", version=1)
    async with asyncio.timeout(20):
        await waiting
    ((call,),) = (await served.store.calls([ours.id])).values()
    assert call.policy == "policy@0"


async def test_nothing_of_a_user_who_opts_out_is_stored(served: Served) -> None:
    assert await served.say("hi", x_session_id="ada", x_agentrl_opt_out="1")
    assert await served.sessions() == []


def test_a_share_of_new_sessions_goes_to_the_candidate() -> None:
    lanes = Lanes(serving=3, candidate=5, share=0.25)
    drawn = [chosen(lanes, f"run/{number}") for number in range(2000)]
    assert 0.22 < drawn.count(5) / 2000 < 0.28
    assert chosen(FIRST, "run/1") == 0


async def test_users_are_answered_while_the_store_cannot_be_written(
    served: Served, monkeypatch: Any
) -> None:
    await served.say("hi", x_session_id="before")

    async def full(*_: object) -> None:
        raise Unavailable("the disk is full")

    with monkeypatch.context() as patch:
        for verb in ("enqueue", "add_transitions"):
            patch.setattr(SqliteStore, verb, full)
        assert await served.say("more", x_session_id="before")
        assert await served.say("hi", x_session_id="new")
        assert await served.say("more", x_session_id="new")
    assert [call.messages[-1]["content"] for call in await served.calls()] == ["hi"]
    await served.say("hi", x_session_id="after")
    assert len(await served.calls()) == 2


HIDDEN = {"sessions": {"redact": [r"\d{4}"]}}


@pytest.mark.parametrize("served", [{}, HIDDEN], indirect=True)
async def test_conversations_without_a_name_go_on_as_one_after_a_kill(served: Served) -> None:
    first = await served.claude("my card is 1234", x_user_id="ann")
    plain = await served.say("my card is 5678")
    await served.end()
    await served.start()
    await served.claude("my card is 1234", first, "and?", x_user_id="ann")
    await served.say("my card is 5678", plain, "and?")
    rows = await served.sessions()
    calls = await served.store.calls([row.id for row in rows])
    assert [len(calls[row.id]) for row in rows] == [2, 2]


def gemini(*texts: str) -> tuple[str, Any]:
    roles = ("user", "model")
    contents = [{"role": roles[i % 2], "parts": [{"text": text}]} for i, text in enumerate(texts)]
    system = {"parts": [{"text": "Be"}, {"text": " kind."}]}
    return "/v1beta/models/m:generateContent", {"systemInstruction": system, "contents": contents}


def responses(*texts: str) -> tuple[str, Any]:
    kinds, roles = ("input_text", "output_text"), ("user", "assistant")
    said = [
        {"type": "message", "role": roles[i % 2], "content": [{"type": kinds[i % 2], "text": text}]}
        for i, text in enumerate(texts)
    ]
    return "/v1/responses", {"model": "m", "instructions": "Be kind.", "input": said}


@pytest.mark.parametrize("served", [HIDDEN], indirect=True)
@pytest.mark.parametrize("ask", [gemini, responses])
async def test_conversations_of_other_apis_go_on_as_one_after_a_kill(
    served: Served, ask: Any
) -> None:
    for texts in (("card 1234",), ("card 1234", "echo card 1234", "and?")):
        path, body = ask(*texts)
        async with served.client.post(served.url.removesuffix("/v1") + path, json=body) as answer:
            assert answer.status == 200, await answer.text()
            assert "echo" in await answer.text()
        await served.end()
        await served.start()
    (row,) = await served.sessions()
    assert len((await served.store.calls([row.id]))[row.id]) == 2


@pytest.mark.parametrize("served", [HIDDEN], indirect=True)
async def test_a_redacted_answer_is_not_given_again(served: Served) -> None:
    served.model.answer = lambda _: {"role": "assistant", "content": "Dial 1234."}
    for _ in range(2):
        assert await served.say("how?", x_session_id="ada") == "Dial 1234."
        await served.end()
        await served.start()


async def test_another_user_who_says_the_same_gets_a_session_of_its_own(served: Served) -> None:
    for after_kill in (False, True):
        first = await served.say("hi", x_user_id="ann")
        if after_kill:
            await served.end()
            await served.start()
        before = len(await served.sessions())
        await served.say("hi", first, "more", x_user_id="eve")
        assert len(await served.sessions()) == before + 1
        await served.say("hi", first, "more", x_user_id="ann")
        assert len(await served.sessions()) == before + 1


async def test_a_session_that_never_ends_goes_on_as_another_one(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "MAX_SESSION_CALLS", 2)
    for n in range(5):
        await served.say(f"q{n}", x_session_id="ada")
    assert await served.groups("ada") == ["", "-2", "-3"]
    assert len(await ended(served.store, RUN)) == 2
    said, texts = "", ["hello"]
    for _ in range(3):
        said = await served.say(*texts)
        texts += [said, "more"]
    unnamed = [row for row in await served.sessions() if "session" in row.task]
    assert {row.task["session"] for row in unnamed} == {unnamed[0].task["session"]}
    assert len(unnamed) == 2


async def test_a_session_that_lost_its_lease_is_answered(served: Served) -> None:
    await served.say("hi", x_session_id="ada")
    await served.store.cancel([row.id for row in await served.sessions()])
    assert await served.say("more", x_session_id="ada")


async def test_calls_without_an_answer_are_counted_unless_the_client_leaves(served: Served) -> None:
    async def breaks(*_: Any) -> web.Response:
        return web.json_response({"error": {"message": "out of memory"}}, status=501)

    reached = asyncio.Event()

    async def hangs(*_: Any) -> None:
        reached.set()
        await asyncio.Event().wait()

    messages = [{"role": "user", "content": "hi"}]
    for n in range(2):
        served.model.then(*[breaks] * 20)
        sent = {"messages": messages, "n": n + 1}
        status, _ = await served.post("chat/completions", sent, x_session_id="ada")
        assert status >= 500
        served.model.script.clear()
    (row,) = await served.sessions()
    assert failed_calls(row) == 2
    served.model.then(hangs)
    leaves = asyncio.create_task(served.say("bye", x_session_id="ada"))
    await reached.wait()
    leaves.cancel()
    await served.end()
    await served.start()
    for failed in (2, 3):
        await served.say("hello", x_session_id="ada")
        (row,) = await served.sessions()
        assert failed_calls(row) == failed
        served.model.then(*[breaks] * 20)
        await served.post("chat/completions", {"messages": messages}, x_session_id="ada")
        served.model.script.clear()


@pytest.mark.parametrize(
    ("leaves", "failed"),
    [(None, 0), (gateway.MIN_CLIENT_WAIT, 0), (0.0, 1)],
    ids=["is answered at last", "its client leaves", "its client has waited for long"],
)
async def test_a_call_that_is_tried_again_fails_if_its_client_gives_up(
    served: Served, monkeypatch: pytest.MonkeyPatch, leaves: float | None, failed: int
) -> None:
    monkeypatch.setattr(gateway, "MIN_CLIENT_WAIT", leaves)

    async def breaks(*_: Any) -> web.Response:
        return web.json_response({"error": {"message": "busy"}}, status=500)

    reached, free = asyncio.Event(), asyncio.Event()

    async def waits(*_: Any) -> None:
        reached.set()
        await free.wait()

    served.model.then(breaks, waits)
    call = asyncio.create_task(served.say("hi", x_session_id="ada"))
    await reached.wait()
    await served.say("meanwhile", x_session_id="ada")
    (row,) = await served.sessions()
    assert failed_calls(row) == 0
    if leaves is None:
        free.set()
        await call
    else:
        call.cancel()
        await asyncio.wait([call])
    await served.say("and then", x_session_id="ada")
    (row,) = await served.sessions()
    assert failed_calls(row) == failed


async def test_a_store_that_is_away_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gateway, "LANES_POLL_INTERVAL", 0.001)
    monkeypatch.setattr(base, "MAX_PAUSE", 0.004)
    fails, seen = iter([True] * 9 + [False] + [True] * 9), list[Any]()

    async def waits(cursor: int, *, timeout: float | None) -> int:
        if (away := next(fails, None)) is None:
            raise asyncio.CancelledError
        if away:
            raise Unavailable("the disk is full")
        return 7

    async def state() -> LiveState:
        return LiveState()

    store, known = SimpleNamespace(wait=waits), SimpleNamespace(state=state)
    sessions: Any = SimpleNamespace(_store=store, _documents=known, _run=RUN, _follow=seen.append)
    sessions._read = partial(LiveSessions._read, sessions)
    with pytest.raises(asyncio.CancelledError):
        await LiveSessions.follow(sessions)
    assert caplog.text.count("the lanes of run shop cannot be read: the disk is full") == 2
    assert seen == [None]
