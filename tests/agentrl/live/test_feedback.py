"""Feedback on live sessions over HTTP: tokens, statuses, redaction, and sessions that opt out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from agentrl.core.config import RunConfig, resolve
from agentrl.core.errors import Unavailable
from agentrl.core.types import PolicyVersion, StepCommit
from agentrl.live.gateway import LiveSessions
from agentrl.live.records import TOKEN, Lanes, live_state, secret_of, token_of, user_id
from agentrl.store import open_store
from tests.agentrl.live.sessions import RUN
from tests.agentrl.live.shop import move
from tests.agentrl.live.test_people import on_disk
from tests.runners.conftest import FakeModel

CANARY = "CANARY-7131"


class Front:
    """A gateway of a live run in this process, and an agent's calls."""

    def __init__(self, store, sessions, http) -> None:
        self.store, self.sessions, self.http = store, sessions, http
        self.url = sessions.gateway.base_url

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.http.post(f"{self.url}/{path}", json=body, headers=sent) as answer:
            return answer.status, await answer.json(), answer.headers

    async def say(self, text: str, session: str, **headers: str) -> str:
        """Say a text in a session; returns its token, if the answer has one."""
        body = {"model": "m", "messages": [{"role": "user", "content": text}]}
        found = await self.post("chat/completions", body, x_session_id=session, **headers)
        status, answer, about = found
        assert status == 200, answer
        assert answer["choices"][0]["message"]["content"] == f"echo {text}"
        return about.get(TOKEN, "")

    async def end(self, session: str) -> None:
        assert (await self.post("sessions/end", {"session": session}))[0] == 200

    async def feed(self, session: str, token: str = "", **said: Any) -> tuple[int, str]:
        """The status of feedback, and what was wrong."""
        given = {TOKEN: token} if token else {}
        status, answer, _ = await self.post("feedback", {"session": session, **said}, **given)
        return status, answer.get("error", {}).get("message", "")


@pytest.fixture
async def model() -> AsyncIterator[FakeModel]:
    model = FakeModel()
    await model.start()
    yield model
    await model.stop()


@asynccontextmanager
async def front(tmp_path, model, **tables: Any) -> AsyncIterator[Front]:
    given = {"name": RUN, "store": f"sqlite:///{tmp_path}/store.db", "output": str(tmp_path)}
    config: RunConfig = resolve({**given, **tables}, source="test")
    async with open_store(config.store) as store, aiohttp.ClientSession() as http:
        await store.open_run(RUN, {})
        for policy in ("policy", "policy@0"):
            row = PolicyVersion(
                run=RUN, policy=policy, version=0, base_url=model.base_url, model="tiny"
            )
            await store.publish(row)
        await move(store, Lanes(serving=0), kind="first", version=0)
        sessions = LiveSessions(store, config)
        await sessions.take_over()
        await asyncio.to_thread(sessions.gateway.start)
        tasks = [sessions.gateway.spawn(work) for work in (sessions.keep(), sessions.follow())]
        try:
            yield Front(store, sessions, http)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wrap_future(sessions.gateway.spawn(sessions.end()))
            await asyncio.to_thread(sessions.gateway.close)


async def test_feedback_needs_the_token_of_its_session(tmp_path, model):
    async with front(tmp_path, model) as shop:
        token, other = await shop.say("hi", "a"), await shop.say("hi", "b")
        assert token != other
        status, why = await shop.feed("a", value=1.0)
        assert (status, why) == (401, f"feedback needs {TOKEN}, a header of its session's answers")
        for wrong in (other, token[:-1], "é", "none"):
            status, why = await shop.feed("a", wrong, value=1.0)
            assert (status, why) == (403, f"the {TOKEN} is not that of session 'a'")
        assert (await shop.feed("nobody", token, value=1.0))[0] == 403
        assert all(not row.rewards for row in await shop.store.rollouts(RUN))
        assert await shop.feed("a", token, value=1.0) == (200, "")
        assert await shop.feed("a", token, value=0.0) == (200, "")  # twice: the last counts
        (given,) = [r for row in await shop.store.rollouts(RUN) for r in row.rewards]
        assert given.value == 0.0


async def test_feedback_that_is_no_signal_is_refused(tmp_path, model):
    async with front(tmp_path, model) as shop:
        token = await shop.say("hi", "a")
        wrong = {
            "not between 0 and 1": {"value": 1e9},
            "is not posted; choose another": {"value": 1.0, "name": "verifier"},
            "needs a value, a correction or both": {"note": "well"},
            "Expected `float | null`": {"value": "good"},
            "unknown field": {"value": 1.0, "user": "other"},
        }
        for why, said in wrong.items():
            status, message = await shop.feed("a", token, **said)
            assert status == 400
            assert why in message
        assert (await shop.feed("a", token, value=1.0, call=7))[0] == 404
        assert not (await shop.store.rollouts(RUN))[0].rewards


async def test_feedback_on_what_is_deleted_is_gone_and_the_name_can_be_used_again(tmp_path, model):
    async with front(tmp_path, model) as shop:
        token = await shop.say("hi", "a")
        await shop.end("a")
        (row,) = await shop.store.rollouts(RUN)
        await shop.store.forget([row.id])
        status, why = await shop.feed("a", token, value=1.0)
        assert (status, why) == (410, "session 'a' is deleted, or was never recorded")
        token = await shop.say("hi again", "a")
        assert (await shop.feed("a", token, value=1.0))[0] == 200


async def test_feedback_without_tokens_where_the_run_file_says_so(tmp_path, model):
    async with front(tmp_path, model, live={"people": {"token": False}}) as shop:
        assert await shop.say("hi", "a") == ""
        assert (await shop.feed("a", value=1.0))[0] == 200
        status, why = await shop.feed("b", value=1.0)
        assert (status, why) == (404, "session 'b' is deleted, or was never recorded")


async def test_users_are_stored_as_hashes_and_feedback_is_redacted(tmp_path, model):
    hidden = {"sessions": {"redact": [r"CANARY-\d+", r"\S+@home"]}}
    async with front(tmp_path, model, **hidden) as shop:
        token = await shop.say(f"card {CANARY}", "ann@home", x_user_id="ann@home")
        said = {"note": f"by {CANARY}", "correction": f"not {CANARY}!", "name": "ann@home"}
        assert (await shop.feed("ann@home", token, value=1.0, **said))[0] == 200
        (row,) = await shop.store.rollouts(RUN)
        secret = await secret_of(shop.store, shop.sessions._config)
        assert row.task["user"] == user_id(secret, "ann@home")
        notes = {reward.name: reward.note for reward in row.rewards}
        assert notes == {"correction": "not [redacted]!", "[redacted]": "by [redacted]"}
    assert on_disk(tmp_path, CANARY) == on_disk(tmp_path, "ann@home") == []


async def test_nothing_of_a_session_that_opts_out_is_kept(tmp_path, model, caplog):
    """It is answered as ever. Who opts out later takes back what was recorded before."""
    async with front(tmp_path, model) as shop:
        assert await shop.say(f"secret {CANARY}", "a", x_agentrl_opt_out="1") == ""
        assert await shop.say(f"more {CANARY}", "a") == ""  # once is enough for the session
        await shop.end("a")
        assert (await shop.feed("a", "0" * 32, value=1.0, note=CANARY))[0] == 403
        assert await shop.store.rollouts(RUN) == []
        token = await shop.say("first", "b")
        assert len(await shop.store.rollouts(RUN)) == 1
        assert await shop.say("no, keep nothing", "b", x_agentrl_opt_out="1") == ""
        assert await shop.store.rollouts(RUN) == []
        assert (await shop.feed("b", token, value=1.0))[0] == 410
        for text in ("one", "two", "three"):
            await shop.say(text, "c")
            await shop.end("c")
        await shop.say("no, keep nothing", "c", x_agentrl_opt_out="1")  # of earlier ones, too
        assert await shop.store.rollouts(RUN) == []
        assert (await live_state(shop.store, RUN)).lanes.serving == 0
    assert on_disk(tmp_path, CANARY) == []
    assert CANARY not in caplog.text


async def test_a_session_that_is_being_trained_when_it_opts_out_is_deleted_afterwards(
    tmp_path, model
):
    async with front(tmp_path, model) as shop:
        await shop.say("first", "a")
        await shop.end("a")
        state = await shop.store.run(RUN)
        (group,) = await shop.store.claim_groups(RUN, state.epoch, 1, timeout=0)
        await shop.say("no, keep nothing", "a", x_agentrl_opt_out="1")
        assert len(await shop.store.rollouts(RUN)) == 1
        step = {"step": 0, "versions": {}, "checkpoint": None, "metrics": {}}
        commit = StepCommit(run=RUN, epoch=state.epoch, groups=[group.id], **step)
        await shop.store.commit_step(commit)
        await asyncio.wrap_future(shop.sessions.gateway.spawn(shop.sessions._sweep()))
        assert await shop.store.rollouts(RUN) == []


async def test_tokens_are_never_made_without_the_secret(tmp_path, model, monkeypatch):
    """The gateway that takes over an open session does not know the secret at once."""
    async with front(tmp_path, model) as shop:
        token = await shop.say("hi", "a")
        monkeypatch.setattr(shop.sessions, "end", lambda: asyncio.sleep(0))  # as if killed
    known, tries = secret_of, []

    async def late(store, config):
        tries.append(1)
        if len(tries) < 3:
            raise Unavailable("not now")
        return await known(store, config)

    monkeypatch.setattr("agentrl.live.records.secret_of", late)
    async with front(tmp_path, model) as shop:
        assert await shop.say("hi again", "a") == token
    with pytest.raises(ValueError, match="not known yet"):
        token_of(b"", "a")


async def test_what_a_user_has_in_other_fields_of_a_call_is_redacted(tmp_path, model):
    hidden = {"sessions": {"redact": [r"CANARY-\d+"]}}
    async with front(tmp_path, model, **hidden) as shop:
        function = {"name": "f", "description": f"for {CANARY}", "parameters": {}}
        body = {
            "model": "m", "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"type": "function", "function": function}], "guided_regex": CANARY,
        }  # fmt: skip
        status, said, _ = await shop.post("chat/completions", body, x_session_id="a")
        assert status == 200, said
        (row,) = await shop.store.rollouts(RUN)
        ((call,),) = (await shop.store.calls([row.id])).values()
        assert call.processors == {"guided_regex": '"[redacted]"'}
    assert on_disk(tmp_path, CANARY) == []


async def test_a_session_is_of_its_user_alone(tmp_path, model):
    """Who guesses a session's name adds no call, ends nothing, deletes nothing and cannot vote."""
    body = {"model": "m", "messages": [{"role": "user", "content": "buy"}]}
    async with front(tmp_path, model) as shop:
        token = await shop.say("hi", "a", x_user_id="ann")
        assert await shop.say("more", "a", x_user_id="ann") == token
        for ended in (False, True):
            for other in ({"x_user_id": "eve"}, {}, {"x_agentrl_opt_out": "1"}):
                sent = ("chat/completions", body), ("sessions/end", {"session": "a"})
                for path, what in sent:
                    status, said, about = await shop.post(path, what, x_session_id="a", **other)
                    assert (status, TOKEN in about) == (403, False), said
            (row,) = await shop.store.rollouts(RUN)
            assert row.state.terminal is ended
            assert len((await shop.store.calls([row.id]))[row.id]) == 2
            end = ("sessions/end", {"session": "a"})
            assert (await shop.post(*end, x_user_id="ann"))[0] == 200
            assert (await shop.post(*end, **{TOKEN: token}))[0] == 200
            assert (await shop.post(*end, **{TOKEN: token[::-1]}))[0] == 403
        token = await shop.say("hi", "b")  # of nobody
        assert await shop.say("more", "b", x_user_id="eve") == token


PAGE = {"host": "shop.example:80", "origin": "http://shop.example"}  # a name that a page resolved


PAGES = [
    ({**PAGE, "content-type": "application/json"}, 403),
    ({"content-type": "text/plain"}, 415),
    ({"content-type": "text/plain; charset=application/json"}, 415),
    ({"content-type": "application/x-www-form-urlencoded"}, 415),
    ({"content-type": "", "origin": "null"}, 415),
    ({"content-type": "application/json", "origin": "https://shop.example"}, 200),  # asked first
    ({"content-type": "application/json; charset=utf-8", "host": "localhost"}, 200),
]


async def test_a_web_page_teaches_nothing(tmp_path, model):
    body, taught = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}', 0
    async with front(tmp_path, model) as shop:
        for headers, status in PAGES:
            url = f"{shop.url}/chat/completions"
            async with shop.http.post(url, data=body, headers=headers) as answer:
                assert answer.status == status, (headers, await answer.text())
            taught += status == 200
            assert len(await shop.store.rollouts(RUN)) == taught, headers
            if status == 403:  # nor is anything read
                async with shop.http.get(f"{shop.url}/models", headers=headers) as answer:
                    assert answer.status == 403


async def test_a_session_takes_so_much_feedback(tmp_path, model, monkeypatch):
    monkeypatch.setattr("agentrl.live.gateway.MAX_FEEDBACK", 3)
    async with front(tmp_path, model) as shop:
        token = await shop.say("hi", "a")
        found = [(await shop.feed("a", token, name=f"n{n}", value=1.0))[0] for n in range(5)]
        assert found == [200, 200, 200, 429, 429]
