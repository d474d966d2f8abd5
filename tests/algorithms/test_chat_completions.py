"""Completions outside of rollouts: whose they are, and how long is waited for them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from agentrl.algorithms import chat_completions as chat_completion
from agentrl.algorithms.chat_completions import Completion, complete, find_endpoint
from agentrl.core.config import resolve
from agentrl.core.errors import AgentRLError, TrainingError
from agentrl.core.types import PolicyVersion
from agentrl.store import open_store

GOOD = {"choices": [{"message": {"content": "yes"}}], "usage": {"prompt_tokens": 7}}


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    monkeypatch.setattr(chat_completion.asyncio, "sleep", sleep)
    return found


Ask = Callable[..., Any]


@pytest.fixture
async def ask(tmp_path: Path) -> AsyncIterator[Ask]:
    """ask(responses...): asks a policy whose server gives these, the last one again and again."""
    runners: list[web.AppRunner] = []

    async def asked(*responses: Any) -> Completion:
        left = list(responses)

        async def answer(request: web.Request) -> web.Response:
            assert await request.json() == {
                "model": "m", "messages": [{"role": "user", "content": "well?"}], "top_p": 0.5,
            }  # fmt: skip
            status, body, headers = left.pop(0) if len(left) > 1 else left[0]
            return web.json_response(body, status=status, headers=headers)

        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        runners.append(web.AppRunner(app))
        await runners[0].setup()
        await web.TCPSite(runners[0], "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runners[0].addresses[0][1]}/v1"
        async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
            config = resolve({"name": "run"}, source="test")
            await store.open_run("run", {})
            served = PolicyVersion(run="run", policy="policy", version=3, base_url=url, model="m")
            await store.publish(served)
            endpoint = await find_endpoint(store, config, "policy")
            assert endpoint.identity == "run/policy@3"
            async with aiohttp.ClientSession() as session:
                return await complete(session, endpoint, "well?", "the judge", top_p=0.5)

    yield asked
    for runner in runners:
        await runner.cleanup()


async def test_a_busy_server_is_asked_again_when_it_says(ask: Ask, waits: list[float]) -> None:
    busy, away = (429, {}, {"retry-after": "7"}), (503, {}, {})
    assert await ask(busy, away, (200, GOOD, {})) == Completion("yes", 7, 0)
    assert waits == [7.0, 1.0]


@pytest.mark.parametrize(
    ("response", "why", "tries", "kind"),
    [
        ((400, {"error": "too long"}, {}), "answered 400: .*too long", 1, TrainingError),
        ((413, {"error": "too long"}, {}), "answered 413: .*too long", 1, TrainingError),
        ((200, {"choices": []}, {}), "returned no chat completion", 1, TrainingError),
        ((404, {"error": "no such model"}, {}), "answered 404", 1, AgentRLError),
        ((401, {"error": "wrong key"}, {}), "answered 401", 1, AgentRLError),
        ((500, {}, {}), "answered 500", 8, AgentRLError),
    ],
)
async def test_what_waiting_does_not_help_is_an_error(
    ask: Ask, waits: list[float], response: Any, why: str, tries: int, kind: type[Exception]
) -> None:
    with pytest.raises(AgentRLError, match=f"^the judge: http.*{why}") as raised:
        await ask(response)
    assert type(raised.value) is kind  # whether it is because of the question
    assert len(waits) == tries - 1


async def test_an_upstream_of_one_text_is_not_asked(tmp_path: Path) -> None:
    config = resolve({"upstreams": {"mute": {"text": "no"}}}, source="test")
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        endpoint = await find_endpoint(store, config, "mute")
    async with aiohttp.ClientSession() as session:
        assert await complete(session, endpoint, "well?", "the judge") == Completion("no")
