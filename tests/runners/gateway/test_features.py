"""Parts join the gateway through hooks of an attempt, and the gateway serves without any."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from aiohttp import web
from msgspec.structs import replace

from agentrl.core.config import PolicyConfig, RunConfig
from agentrl.core.errors import StoreError
from agentrl.core.types import Branch, Transition, float32, int32
from agentrl.runners.gateway.attribution import ActiveAttempt, ReceivedCall
from agentrl.runners.gateway.features import Feature
from agentrl.runners.gateway.server import Gateway
from agentrl.runners.gateway.upstream import Upstream
from agentrl.runners.main import run_features
from tests.runners.conftest import rows

USER, SYSTEM = {"role": "user", "content": "hello"}, {"role": "system", "content": "Be brief."}


class Outside(Feature):
    """What a package outside of the library could add, for attempts of one rollout."""

    def __init__(self, rollout: str) -> None:
        self.rollout, self.joined, self.passed = rollout, list[str](), list[ReceivedCall]()

    def add_to(self, app: web.Application, upstream: Upstream) -> None:
        async def hello(request: web.Request) -> web.Response:
            return web.Response(text="hello")

        app.router.add_get("/outside", hello)

    def join(self, active: ActiveAttempt) -> None:
        self.joined.append(active.id)
        if active.attempt.rollout.id == self.rollout:
            active.changes.append(self.change)
            active.answers.append(self.answer)
            active.records.append(self.record)

    def change(self, call: ReceivedCall) -> ReceivedCall:
        self.passed.append(call)
        return replace(call, caller=call.caller._replace(role="guest"))

    async def answer(self, call: ReceivedCall) -> Sequence[Transition]:
        if call.request.messages[-1]["content"] != "who?":
            return []
        nothing: Any = {"prompt": int32(), "completion": int32(), "logprobs": float32()}
        said = {"role": "assistant", "content": "a feature"}
        return [Transition("x", "", 0, **nothing, exact=False, answer=said, role=call.role)]

    def record(self, call: ReceivedCall, row: Transition) -> Transition:
        said = {"role": "assistant", "content": f"[redacted by {call.role}]"}
        return replace(row, answer=said)


async def ask(gateway: Gateway, active: ActiveAttempt, *messages: Any, api: str = "") -> Any:
    body = {"model": "m", "messages": list(messages)} if not api else {"model": "m", "input": "x"}
    async with httpx.AsyncClient(base_url=gateway.base_url, timeout=20) as client:
        return await client.post(
            f"/{api or 'chat/completions'}",
            json=body,
            headers={"authorization": f"Bearer {active.key}"},
        )


async def test_a_feature_of_a_package_changes_answers_records_and_serves(bench: Any) -> None:
    first, second = await bench.attempt(), await bench.attempt()
    feature = Outside(first.rollout.id)
    gateway = Gateway(bench.store, "test", features=[feature])
    gateway.start()
    try:
        joined, other = gateway.register(first), gateway.register(second)
        with gateway.scoring(first):
            assert feature.joined == [joined.id, other.id]  # and not the verifier's
        said = [
            (await ask(gateway, active, {"role": "user", "content": text})).json()
            for active in (joined, other)
            for text in ("who?", "hello")
        ]
        async with httpx.AsyncClient() as client:
            root = gateway.base_url.removesuffix("/v1")
            assert (await client.get(f"{root}/outside")).text == "hello"
    finally:
        await asyncio.to_thread(gateway.close)
    texts = [answer["choices"][0]["message"]["content"] for answer in said]
    assert texts == ["a feature", "echo hello", "echo who?", "echo hello"]
    mine, others = await rows(bench, joined), await rows(bench, other)
    assert [row.role for row in mine] == ["guest"] * 2
    assert [(row.answer or {})["content"] for row in mine] == ["a feature", "[redacted by guest]"]
    assert [row.role for row in others] == ["agent"] * 2
    assert [(row.answer or {})["content"] for row in others] == texts[2:]
    assert len(feature.passed) == 2  # the other attempt's calls do not pass it


async def test_the_gateway_serves_without_features(bench: Any) -> None:
    gateway = Gateway(bench.store, "test")
    gateway.start()
    try:
        active = gateway.register(await bench.attempt())
        answer = await ask(gateway, active, SYSTEM, USER)
    finally:
        await asyncio.to_thread(gateway.close)
    assert answer.json()["choices"][0]["message"]["content"] == "echo hello"
    assert bench.model.requests[-1]["messages"] == [SYSTEM, USER]
    assert [row.messages for row in await rows(bench, active)] == [[SYSTEM, USER]]


async def test_a_call_that_is_parsed_again_is_changed_again(bench: Any) -> None:
    """Each try leaves half a response of the Responses API, which nobody has read."""
    attempt = await bench.attempt()
    feature = Outside(attempt.rollout.id)

    async def broken(request: web.Request, body: Any) -> web.StreamResponse:
        made = bench.model.whole(body, request.path)
        made["choices"][0]["message"]["tool_calls"] = [{"function": 7}]
        return web.json_response(made)

    bench.model.then(broken, broken)
    gateway = Gateway(bench.store, "test", features=[feature])
    gateway.start()
    try:
        active = gateway.register(attempt)
        answer = await ask(gateway, active, api="responses")
    finally:
        await asyncio.to_thread(gateway.close)
    assert answer.status_code == 200, answer.text
    texts = [part["text"] for item in answer.json()["output"] for part in item["content"]]
    assert texts == ["echo x"]  # nothing of the tries before
    first, second, third = feature.passed
    assert first.request.translation is not second.request.translation
    assert second.raw == third.raw == first.raw
    with pytest.raises(AttributeError):
        first.raw = b""  # type: ignore[misc]


async def test_a_record_that_cannot_be_read_fails_the_attempt(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source,) = await bench.run(lambda task: 1, {"input": "x"})
    trace, broken = bench.store.trace, True

    async def failing(rollout: str) -> Any:
        if broken and rollout == source.id:
            raise StoreError("the disk is gone")
        return await trace(rollout)

    monkeypatch.setattr(bench.store, "trace", failing)
    heard = []

    async def agent(task: Any) -> None:
        nonlocal broken
        async with httpx.AsyncClient(base_url=bench.gateway.base_url, timeout=20) as client:
            parent = {"traceparent": f"00-{bench.gateway.attempts.active()[0].id}-{'1' * 16}-01"}
            body = {"model": "m", "messages": [USER]}
            heard.append(await client.post("/chat/completions", json=body, headers=parent))
        broken = False

    branch = Branch(rollout=source.id, calls=1)
    (rollout,) = await bench.run(agent, {"input": "x"}, branch=branch, max_attempts=2)
    assert [answer.status_code for answer in heard] == [502, 200]
    assert f"the record of rollout {source.id} cannot be read" in heard[0].text
    assert (rollout.attempts, rollout.failure) == (2, None)


async def test_a_prompt_is_counted_as_it_is_sent(bench: Any) -> None:
    """The server counts the messages that its template gets, not those of the agent."""
    counted = []

    class Template(Feature):
        def add_to(self, app: web.Application, upstream: Upstream) -> None:
            async def adapt(route: Any, messages: Any) -> Any:
                return [USER | {"content": "adapted"}]

            upstream.adapters.append(adapt)

    async def too_long(request: web.Request, body: Any) -> web.StreamResponse:
        return web.json_response({"error": {"message": "too long"}}, status=400)

    def tokenize(body: Any) -> web.Response:
        counted.append(body["messages"])
        return web.json_response({"count": 10, "max_model_len": 40})

    bench.model.tokenize = tokenize
    bench.model.then(too_long)
    gateway = Gateway(bench.store, "test", features=[Template()])
    gateway.start()
    try:
        active = gateway.register(await bench.attempt())
        answer = await ask(gateway, active, SYSTEM, USER)
    finally:
        await asyncio.to_thread(gateway.close)
    assert answer.status_code == 200, answer.text
    assert counted == [[USER | {"content": "adapted"}]]
    assert bench.model.requests[-1]["max_tokens"] == 30
    assert json.dumps(bench.model.requests[-1]["messages"]) == json.dumps(counted[0])
    (row,) = await rows(bench, active)
    assert row.messages == [SYSTEM, USER]  # as the agent said it


def test_the_features_of_a_run(bench: Any) -> None:
    names = [type(one).__name__ for one in run_features(bench.store, RunConfig())]
    assert names == ["RoleRules", "CandidatePrompts", "Replays", "ChatTemplates", "StoredImages"]
    as_sent = RunConfig(policy=PolicyConfig(unsupported_roles="as_sent"))
    sent = [type(one).__name__ for one in run_features(bench.store, as_sent)]
    assert sent == [name for name in names if name != "ChatTemplates"]
