"""vLLM servers of somebody else, with a stand-in: what is possible there, and their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from agentrl.algorithms.engines.vllm_child import CONTROL
from agentrl.algorithms.engines.vllm_fleet import VllmFleet
from agentrl.algorithms.engines.vllm_serving import HOLD, OPEN, Serving
from agentrl.errors import PolicyError

CALL = {"model": "policy", "messages": []}


class FakeVllm:
    """Answers as vLLM does, and lists what it was asked to load."""

    def __init__(self) -> None:
        self.version, self.dev, self.lora, self.name, self.key = "0.30.0", True, True, "base", ""
        self.loads: list[str] = []
        self.calls = 0
        self.answer = asyncio.Event()
        self.answer.set()
        self.port = 0
        self.runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        self.runner = web.AppRunner(app, shutdown_timeout=0.01)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()
        self.port = self.runner.addresses[0][1]

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
        self.runner = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        allowed = not self.key or request.headers.get("authorization") == f"Bearer {self.key}"
        if request.path.startswith("/v1/") and not allowed:
            return web.Response(status=401)
        match request.path:
            case "/health":
                return web.Response()
            case "/version":
                return web.json_response({"version": self.version})
            case "/is_paused" | "/reset_prefix_cache":
                return web.json_response({"success": True}, status=200 if self.dev else 404)
            case "/v1/models":
                cards = [{"id": "policy", "parent": self.name}, {"id": self.name}]
                return web.json_response({"data": cards})
            case "/v1/load_lora_adapter" if not self.lora:
                return web.Response(status=404)
            case "/v1/load_lora_adapter" | "/collective_rpc":
                body = await request.json()
                if not body:
                    return web.Response(status=400)
                self.loads.append(body.get("lora_path") or body["kwargs"]["weights_path"])
                return web.Response(text="Success")
        self.calls += 1
        await self.answer.wait()
        return web.json_response({"path": request.path})


@pytest.fixture
async def theirs() -> AsyncIterator[list[FakeVllm]]:
    servers = [FakeVllm(), FakeVllm()]
    for server in servers:
        await server.start()
    yield servers
    for server in servers:
        await server.stop()


@pytest.fixture
async def fleet_of(
    theirs: list[FakeVllm],
) -> AsyncIterator[Callable[..., VllmFleet]]:
    made: list[VllmFleet] = []

    def make(**given: Any) -> VllmFleet:
        made.append(VllmFleet([server.url for server in theirs], **{"start_timeout": 5.0} | given))
        return made[-1]

    yield make
    for fleet in made:
        await fleet.stop()
        await fleet.stop()


def serving(number: int, **adapters: Path) -> Serving:
    versions = dict.fromkeys(adapters or ["base"], number)
    return Serving(Path(f"w{number}"), Path("t"), adapters, versions)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"version": "0.29.4"}, r"127\.0\.0\.1:\d+ is 0\.29\.4; start 0\.30 or newer there"),
        ({"dev": False}, r"takes no new weights; start it with VLLM_SERVER_DEV_MODE=1"),
        ({"key": "secret"}, r"refused /v1/models \(401\); set engine\.vllm\.key_env"),
        ({"name": "another"}, r"different models \(base, another\)"),
    ],
)
async def test_servers_that_cannot_be_published_to_are_a_sentence(
    theirs: list[FakeVllm],
    fleet_of: Callable[..., VllmFleet],
    broken: dict[str, Any],
    message: str,
) -> None:
    for name, value in broken.items():
        setattr(theirs[1], name, value)
    with pytest.raises(PolicyError, match=message):
        await fleet_of().probe()


async def test_a_server_that_is_not_there_is_a_sentence(
    theirs: list[FakeVllm], fleet_of: Callable[..., VllmFleet]
) -> None:
    await theirs[1].stop()
    with pytest.raises(
        PolicyError, match=r"for 0\.1 s \(engine\.vllm\.start_timeout\); start vLLM"
    ):
        await fleet_of(start_timeout=0.1).probe()


@pytest.mark.parametrize(
    ("adapters", "lora", "hot"), [(True, True, True), (True, False, False), (False, True, False)]
)
async def test_adapters_are_loaded_by_name_where_all_servers_can(
    theirs: list[FakeVllm],
    fleet_of: Callable[..., VllmFleet],
    adapters: bool,
    lora: bool,
    hot: bool,
) -> None:
    theirs[1].lora = lora
    fleet = fleet_of(adapters=adapters)
    await fleet.probe()
    assert (fleet.hot, fleet.name) == (hot, "base")


async def ask(fleet: VllmFleet, path: str = "/v1/chat/completions", **headers: str) -> Any:
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(fleet.url + path, json=CALL) as reply,
    ):
        return reply.status, reply.headers.get("x-policy-version"), await reply.read()


async def test_calls_are_spread_and_updates_go_everywhere(
    theirs: list[FakeVllm], fleet_of: Callable[..., VllmFleet]
) -> None:
    fleet = fleet_of(adapters=True, api_key="secret")
    theirs[0].key = "secret"
    key = {CONTROL.decode(): fleet.key}
    await fleet.probe()
    await fleet.start(serving(3, policy=Path("a3")))
    assert [server.loads for server in theirs] == [["a3"], ["a3"]]

    for server in theirs:
        server.answer.clear()
    calls = [asyncio.create_task(ask(fleet)) for _ in range(4)]
    while not all(server.calls == 2 for server in theirs):
        await asyncio.sleep(0)
        assert not any(call.done() for call in calls)
    hold = asyncio.create_task(ask(fleet, HOLD, **key))
    for server in theirs:
        server.answer.set()
    assert {(await call)[:2] for call in calls} == {(200, "3")}
    assert (await hold)[0] == 200
    late = asyncio.create_task(ask(fleet))
    assert await ask(fleet, "/reset_prefix_cache", **key) == (
        200,
        None,
        b'[{"success": true},{"success": true}]',
    )
    assert not late.done()
    await ask(fleet, f"{OPEN}?policy=4", **key)
    assert (await late)[:2] == (200, "4")


async def test_only_who_has_the_key_may_do_more_than_ask_the_model(
    theirs: list[FakeVllm], fleet_of: Callable[..., VllmFleet]
) -> None:
    fleet = fleet_of()
    await fleet.probe()
    await fleet.start(serving(0))
    for path in ("/collective_rpc", "/v1/load_lora_adapter", HOLD, OPEN, "/version"):
        assert (await ask(fleet, path))[0] == 404
    assert [server.loads for server in theirs] == [["w0"], ["w0"]]


async def test_a_server_that_was_restarted_has_the_newest_weights_before_it_answers(
    theirs: list[FakeVllm], fleet_of: Callable[..., VllmFleet]
) -> None:
    fleet = fleet_of()
    await fleet.probe()
    await fleet.start(serving(0))
    ended = asyncio.create_task(fleet.ended())
    for server in theirs:
        server.answer.clear()
    calls = [asyncio.create_task(ask(fleet)) for _ in range(2)]
    while not all(server.calls == 1 for server in theirs):
        await asyncio.sleep(0)
        assert not any(call.done() for call in calls)
    await theirs[1].stop()
    assert theirs[1].url in await ended
    theirs[0].answer.set()
    assert sorted([(await call)[0] for call in calls]) == [200, 503]
    held = asyncio.create_task(ask(fleet))
    theirs[1].answer.set()
    await theirs[1].start()
    again = asyncio.create_task(fleet.start(serving(5)))
    assert (await held)[:2] == (200, "5")
    await again
    assert theirs[1].loads == ["w0", "w5"]
