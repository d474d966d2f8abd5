"""An API that another package brings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from aiohttp import web

from agentrl.runners.dialects import ModelApi, model_apis
from agentrl.runners.dialects.base import CHAT, Dialect
from tests.factories import Register


class Asked:
    """The translation of `{"ask": text}`, answered by `{"said": text}`."""

    begun = False

    def __init__(self, body: Any, memory: Any) -> None:
        self.chat = {"model": "m", "messages": [{"role": "user", "content": body["ask"]}]}
        self.ignored = ["mood"] if "mood" in body else []

    def whole(self, completion: Any, prompt_tokens: int) -> bytes:
        said = completion["choices"][0]["message"]["content"]
        return f'{{"said": "{said}"}}'.encode()

    def part(self, chunk: Any, prompt_tokens: int) -> bytes:
        raise NotImplementedError

    end = part


ASKING = Dialect("chat/completions", lambda status, code, why: {"wrong": [status, why]}, Asked)


async def answer(endpoints: Any, caller: Any, request: web.Request) -> web.StreamResponse:
    return await endpoints.call(ASKING, caller, request)


API = ModelApi(answer, ASKING, header="x-asking", models=lambda names: {"data": [*names]})


@pytest.fixture(autouse=True)
def installed(register: Register) -> Iterator[None]:
    register("agentrl.dialects", "/v2/{where}/ask", f"{__name__}:API")
    model_apis.cache_clear()
    yield
    model_apis.cache_clear()


async def test_its_calls_are_recorded_and_its_errors_are_its_own(bench: Any) -> None:
    active = bench.gateway.register(await bench.attempt())
    url = f"{bench.gateway.base_url.removesuffix('/v1')}/a/{active.id}"
    async with httpx.AsyncClient(base_url=url) as client:
        asked = await client.post("/v2/here/ask", json={"ask": "why", "mood": 1})
        assert asked.json() == {"said": "echo why"}
        refused = await client.post("/v2/here/ask", json={})
        assert refused.json()["wrong"][0] == refused.status_code == 400
        unknown = await client.post("/v2/here/ask/again", json={})
        assert "there is POST /v1/chat/completions" in unknown.json()["wrong"][1]
        assert "POST /v2/{where}/ask" in unknown.json()["wrong"][1]
        listed = await client.get("/v1/models", headers={"x-asking": "1"})
        assert listed.json() == {"data": ["policy", "tiny"]}
        other = await client.post("/v1/nothing", json={})
        assert other.json().keys() == CHAT.error(404, "", "").keys()
    (row,) = (await bench.store.trace(active.attempt.rollout.id)).transitions
    assert (row.messages, row.ignored) == ([{"role": "user", "content": "why"}], ["mood"])
