"""The user's verifier and judge in processes of their own: hanging, dying, raising, nonsense."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentrl.core.config import resolve
from agentrl.core.errors import ConfigError
from agentrl.live.labels import Asker
from agentrl.live.signals import Reply
from agentrl.store import open_store
from tests.agentrl.live.sessions import RUN, ended

CODE = """
import os, subprocess, sys, time
from pathlib import Path

def verify(task, result, trace):
    Path("pids").open("a").write(f"{os.getpid()}\\n")
    if "hang" in result:
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        Path("pids").open("a").write(f"{child.pid}\\n")
        time.sleep(1000)
    if "die" in result:
        os._exit(3)
    if "raise" in result:
        raise ValueError("no such order")
    if "leave" in result:
        sys.exit(1)
    if "text" in result:
        return "very good"
    if "huge" in result:
        return 7
    if "two" in result:
        return {"outcome": 1.0, "polite": 0.5}
    print("a line of the user's")
    return float(task["input"] == "hello" and task["version"] == 1 and len(trace.transitions) == 1)

async def judge(answer, next):
    words = next[-1]["content"]
    if words == "hang":
        time.sleep(1000)
    return {"thanks": 1.0, "no": 0, "?": None}.get(words, words)

def wrong(prompt):
    return 1.0
"""


@pytest.fixture
async def store(tmp_path):
    async with open_store(f"sqlite:///{tmp_path}/store.db") as opened:
        await opened.open_run(RUN, {})
        yield opened


def settings(tmp_path: Path, **signals):
    (tmp_path / "mine.py").write_text(CODE)
    config = {
        "name": RUN, "root": str(tmp_path), "verifier": {"path": "mine.py:verify"},
        "live": {"signals": {"timeout": 30.0, **signals}},
    }  # fmt: skip
    return resolve(config, source="test")


async def trace_of(store, answer, question="hello"):
    return await store.trace(await ended(store, answer, question, answer))


def reply(words, call="c"):
    return Reply(call=call, messages=[], answer={"content": "x"}, next=[{"content": words}])


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def test_the_verifier_sees_the_session_and_may_give_several_signals(store, tmp_path):
    async with Asker(store, settings(tmp_path)) as asker:
        assert await asker.verify(await trace_of(store, "fine")) == {"verifier": 1.0}
        assert await asker.verify(await trace_of(store, "ok", "bye")) == {"verifier": 0.0}
        found = await asker.verify(await trace_of(store, "two"))
        assert found == {"verifier": 1.0, "polite": 0.5}


async def test_a_verifier_that_hangs_is_killed_with_what_it_started(store, tmp_path, caplog):
    async with Asker(store, settings(tmp_path, timeout=1.0)) as asker:
        begun = time.monotonic()
        assert await asker.verify(await trace_of(store, "hang")) == {}
        assert time.monotonic() - begun < 20.0
        pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
        assert len(pids) == 2
        assert not any(map(is_alive, pids))
    async with Asker(store, settings(tmp_path)) as asker:
        assert await asker.verify(await trace_of(store, "fine")) == {"verifier": 1.0}
    assert "the verifier took longer than live.signals.timeout = 1 s" in caplog.text


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("raise", "the verifier raised ValueError ({root}/mine.py:14)"),
        ("leave", "the verifier raised SystemExit ("),
        ("die", "the verifier ended its process"),
        ("text", "the verifier returned no reward that can be stored"),
        ("huge", "the verifier returned 7; return a number from 0 to 1"),
    ],
)
async def test_a_problem_is_said_once_and_the_session_stays_without_signal(
    store, tmp_path, caplog, answer, said
):
    async with Asker(store, settings(tmp_path)) as asker:
        with caplog.at_level(logging.WARNING, "agentrl.live"):
            for n in range(2):
                assert await asker.verify(await trace_of(store, f"{answer} {n}")) == {}
            assert await asker.verify(await trace_of(store, "fine")) == {"verifier": 1.0}
    (line,) = [record.getMessage() for record in caplog.records]
    assert said.format(root=tmp_path) in line
    assert "such sessions stay without this signal" in line
    assert "no such order" not in line  # what an error says may be a user's words
    assert "very good" not in line


async def test_the_judge_sees_what_came_next(store, tmp_path, caplog):
    async with Asker(store, settings(tmp_path, next_message="mine.py:judge")) as asker:
        asked = [reply("thanks", "a"), reply("no", "b"), reply("?", "c")]
        assert await asker.judge(asked, "s") == {"a": 1.0, "b": 0.0}
        assert await asker.judge([], "s") == {}
        assert await asker.judge([reply("other")], "s") == {}
    assert "live.signals.next_message returned a str; return a number from 0 to 1" in caplog.text


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("mine.py:wrong", "has the parameters"),
        ("mine.py:none", "it has no 'none'"),
        ("gone.py:judge", "there is no file"),
    ],
)
async def test_a_function_that_cannot_be_used_is_an_error_at_the_start(store, tmp_path, path, why):
    asker = Asker(store, settings(tmp_path, next_message=path))
    with pytest.raises(ConfigError, match=why):
        async with asker:
            pass


def judged_by(timeout=1.0, **upstream):
    signals = {"next_message": "gpt", "timeout": timeout}
    upstreams = {"gpt": upstream or {"base_url": "http://127.0.0.1:9/v1"}}
    return resolve(
        {"name": RUN, "live": {"signals": signals}, "upstreams": upstreams}, source="test"
    )


async def test_a_model_judges_what_came_next_and_its_answer_is_kept_with_the_session(
    store, tmp_path
):
    id = await ended(store, "s", "q", "a")
    async with Asker(store, judged_by(text='{"reason": "CANARY", "score": 7}')) as asker:
        assert await asker.judge([reply("thanks")], id) == {"c": pytest.approx(0.7)}
    assert (await store.stats()).rows["judgements"] == 1
    await store.forget([id])
    assert (await store.stats()).rows["judgements"] == 0


async def test_a_model_that_answers_nonsense_or_never_is_no_signal(store, tmp_path, caplog):
    for upstream in ({"text": "I like it"}, {}):
        async with Asker(store, judged_by(**upstream)) as asker:
            assert await asker.judge([reply("thanks")], "s") == {}
    assert "the answer is not a JSON object" in caplog.text
    assert "live.signals.next_message took longer than" in caplog.text


class Slow:
    """A server that answers once it is told to, and counts who asks."""

    def __init__(self, text: str) -> None:
        self.text, self.asked, self.may = text, 0, asyncio.Event()
        self.reached = asyncio.Event()

    async def answer(self, request):
        self.asked += 1
        self.reached.set()
        await self.may.wait()
        choices = [{"index": 0, "message": {"role": "assistant", "content": self.text}}]
        return web.json_response({"choices": choices})


@asynccontextmanager
async def serving(slow: Slow):
    app = web.Application()
    app.router.add_post("/v1/chat/completions", slow.answer)
    async with TestServer(app, host="127.0.0.1") as server:
        yield f"http://127.0.0.1:{server.port}/v1"


async def test_a_session_that_gives_up_cancels_no_answer_that_another_waits_for(store):
    slow = Slow('{"reason": "", "score": 10}')
    async with serving(slow) as url, Asker(store, judged_by(base_url=url, timeout=60.0)) as asker:
        first, second = (asyncio.create_task(asker.judge([reply("thanks")], n)) for n in "ab")
        await slow.reached.wait()
        first.cancel()
        await asyncio.wait([first])
        slow.may.set()
        assert await second == {"c": 1.0}
    assert slow.asked == 1


async def test_a_question_that_nobody_waits_for_is_asked_no_longer(store):
    """Otherwise those of a server that hangs would use up all places."""
    slow = Slow('{"reason": "", "score": 10}')
    async with serving(slow) as url, Asker(store, judged_by(base_url=url, timeout=60.0)) as asker:
        for n in range(40):
            slow.reached.clear()
            asking = asyncio.create_task(asker.judge([reply(f"thanks {n}")], "s"))
            await slow.reached.wait()
            asking.cancel()
            await asyncio.wait([asking])
        again = asyncio.create_task(asker.judge([reply("thanks 0")], "s"))  # it is asked anew
        slow.may.set()
        assert await again == {"c": 1.0}


async def test_what_a_server_says_of_a_failure_is_not_said(store, caplog):
    async def refuse(request):
        return web.json_response({"error": {"message": "CANARY is no word"}}, status=400)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", refuse)
    async with TestServer(app, host="127.0.0.1") as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        async with Asker(store, judged_by(base_url=url)) as asker:
            assert await asker.judge([reply("CANARY")], "s") == {}
    assert "answered 400" in caplog.text
    assert "CANARY" not in caplog.text
