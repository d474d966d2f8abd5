"""vLLM servers of somebody else, with a stand-in: what is possible there, and their end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentrl.algorithms.engines.vllm import fleet as vllm_fleet
from agentrl.algorithms.engines.vllm.fleet import VllmFleet
from agentrl.algorithms.engines.vllm.protocol import HOLD, OPEN, ServedModel
from agentrl.core.access import Access
from agentrl.core.errors import PolicyError
from tests.algorithms.engines.fake_vllm import FakeVllm

CALL = {"model": "policy", "messages": []}


@pytest.fixture
async def theirs() -> AsyncIterator[list[FakeVllm]]:
    servers = [FakeVllm(), FakeVllm()]
    for server in servers:
        await server.start()
    yield servers
    for server in servers:
        await server.stop()


@pytest.fixture
async def fleet_of(theirs: list[FakeVllm]) -> AsyncIterator[Callable[..., VllmFleet]]:
    made: list[VllmFleet] = []

    def make(**given: Any) -> VllmFleet:
        made.append(VllmFleet([server.url for server in theirs], **{"start_timeout": 60.0} | given))
        return made[-1]

    yield make
    for fleet in made:
        await fleet.stop()
        await fleet.stop()


SERVING = ServedModel(Path("w"), Path("t"))


async def test_callers_send_a_key_that_the_servers_never_see(
    theirs: list[FakeVllm], fleet_of: Callable[..., VllmFleet]
) -> None:
    for server in theirs:
        server.key = "servers-key"
    fleet = fleet_of(api_key="servers-key", access=Access(("callers-key",)))
    await fleet.start(SERVING)
    await fleet.request("POST", f"{OPEN}?=0")
    async with aiohttp.ClientSession() as http:
        for key, status in (("servers-key", 401), ("callers-key", 200)):
            sent = {"authorization": f"Bearer {key}"}
            url = f"{fleet.url}/v1/chat/completions"
            async with http.post(url, json=CALL, headers=sent) as reply:
                assert reply.status == status


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"version": "0.29.4"}, r"127\.0\.0\.1:\d+ is 0\.29\.4; start 0\.30 or newer there"),
        ({"dev": False}, r"accepts no new weights; start it with VLLM_SERVER_DEV_MODE=1"),
        ({"key": "secret"}, r"refused /v1/models \(401\); set engine\.vllm\.key_env"),
        ({"name": "another"}, r"different models \(base, another\)"),
    ],
)
async def test_servers_that_cannot_be_published_to_are_a_sentence(
    theirs: list[FakeVllm], fleet_of: Callable[..., VllmFleet], broken: dict[str, Any], message: str
) -> None:
    for name, value in broken.items():
        setattr(theirs[1], name, value)
    with pytest.raises(PolicyError, match=message):
        await fleet_of().probe()


async def test_a_server_that_is_not_there_is_a_sentence(
    theirs: list[FakeVllm], fleet_of: Callable[..., VllmFleet]
) -> None:
    await theirs[1].stop()
    with pytest.raises(PolicyError, match=r"for 0\.1 s; start vLLM"):
        await fleet_of(start_timeout=0.1).probe()


@pytest.mark.parametrize(
    ("adapters", "lora", "refuses"),
    [
        (True, True, ""),
        (True, False, "vLLM was not started with --enable-lora"),
        (False, True, "all weights are trained"),
    ],
)
async def test_adapters_are_loaded_by_name_where_all_servers_can(
    theirs: list[FakeVllm],
    fleet_of: Callable[..., VllmFleet],
    adapters: bool,
    lora: bool,
    refuses: str,
) -> None:
    theirs[1].lora = lora
    fleet = fleet_of(adapters=adapters)
    await fleet.probe()
    assert fleet.refuses_adapters.startswith(refuses)
    assert bool(fleet.refuses_adapters) == bool(refuses)
    assert fleet.name == "base"


@pytest.mark.parametrize(("first", "second", "all_have"), [("ipc", "ipc", "ipc"), ("ipc", "", "")])
async def test_a_backend_is_used_where_all_servers_have_it(
    theirs: list[FakeVllm],
    fleet_of: Callable[..., VllmFleet],
    first: str,
    second: str,
    all_have: str,
) -> None:
    theirs[0].backend, theirs[1].backend = first, second
    fleet = fleet_of()
    await fleet.probe()
    assert (fleet.backend, fleet.gpus) == (all_have, int(all_have == "ipc"))


async def ask(fleet: VllmFleet, path: str = "/v1/chat/completions", **headers: str) -> Any:
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(fleet.url + path, json=CALL) as reply,
    ):
        return reply.status, reply.headers.get("x-policy-version"), await reply.read()


async def control(fleet: VllmFleet, path: str, server: str = "") -> tuple[int, Any]:
    """The largest status, and the bodies of all responses."""
    replies = await fleet.request("POST", path, {"method": "reload"}, server)
    return max([200, *(status for status, _ in replies)]), [json.loads(body) for _, body in replies]


@pytest.fixture
async def fleet(request: pytest.FixtureRequest, fleet_of: Callable[..., VllmFleet]) -> VllmFleet:
    """One that is up, its gate open; with the arguments that are the fixture's parameter."""
    fleet = fleet_of(**getattr(request, "param", {}))
    await fleet.probe()
    await fleet.start(SERVING)
    await control(fleet, f"{OPEN}?=0")
    return fleet


async def test_calls_are_spread_and_updates_go_everywhere(
    theirs: list[FakeVllm], fleet_of: Callable[..., VllmFleet]
) -> None:
    fleet = fleet_of(api_key="secret")
    theirs[0].key = "secret"
    await fleet.probe()
    await fleet.start(SERVING)
    early = asyncio.create_task(ask(fleet))
    assert await control(fleet, "/collective_rpc") == (
        200,
        [{"by": server.port} for server in theirs],
    )
    assert not early.done()
    await control(fleet, f"{OPEN}?policy=3")
    assert (await early)[:2] == (200, "3")

    for server in theirs:
        server.answer.clear()
        server.calls = 0
    calls = [asyncio.create_task(ask(fleet)) for _ in range(4)]
    while not all(server.calls == 2 for server in theirs):
        await asyncio.sleep(0)
        assert not any(call.done() for call in calls)
    hold = asyncio.create_task(control(fleet, HOLD))
    for server in theirs:
        server.answer.set()
    assert {(await call)[:2] for call in calls} == {(200, "3")}
    assert (await hold)[0] == 200
    late = asyncio.create_task(ask(fleet))
    assert await control(fleet, "/reset_prefix_cache") == (200, [{"success": True}] * 2)
    assert not late.done()
    await control(fleet, f"{OPEN}?policy=4")
    assert (await late)[:2] == (200, "4")


async def test_callers_may_do_no_more_than_ask_the_model(
    theirs: list[FakeVllm], fleet: VllmFleet
) -> None:
    for path in ("/collective_rpc", "/v1/load_lora_adapter", HOLD, OPEN, "/version"):
        assert (await ask(fleet, path))[0] == 404
    assert [server.updates for server in theirs] == [[], []]


async def test_when_one_is_gone_updates_do_not_wait_for_it(
    theirs: list[FakeVllm], fleet: VllmFleet
) -> None:
    gone, left = theirs
    await gone.stop()
    assert (await ask(fleet))[0] == 503  # ask again
    assert fleet.servers == (left.url,)
    assert (await ask(fleet))[0] == 200
    assert await control(fleet, "/collective_rpc") == (200, [{"by": left.port}])
    assert gone.url in fleet.failure_reason()


@pytest.mark.parametrize("fleet", [{"timeout": 2.0}], indirect=True)
@pytest.mark.parametrize("how", ["hangs", "dies of it"])
async def test_one_that_does_not_take_an_update_is_gone(
    theirs: list[FakeVllm], fleet: VllmFleet, how: str
) -> None:
    if how == "hangs":
        theirs[1].hang.clear()
    else:
        theirs[1].status, theirs[1].well = 500, False
    assert await control(fleet, "/collective_rpc") == (200, [{"by": theirs[0].port}])
    assert fleet.servers == (theirs[0].url,)
    theirs[1].hang.set()


async def test_what_all_refuse_is_told(
    theirs: list[FakeVllm], fleet: VllmFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_fleet, "CRASH_GRACE", 0.01)
    for server in theirs:
        server.status = 500
    assert (await control(fleet, "/collective_rpc"))[0] == 500
    assert len(fleet.servers) == 2


async def test_one_that_returns_is_updated_and_gets_calls_again(
    theirs: list[FakeVllm], fleet: VllmFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_fleet, "HEALTH_INTERVAL", 0.01)
    await theirs[1].stop()
    async with aclosing(fleet.returned()) as returned:
        back = asyncio.create_task(anext(returned))
        while len(fleet.servers) == 2:
            await asyncio.sleep(0)
            assert not back.done()
        await theirs[1].start()
        assert await back == theirs[1].url
        assert await control(fleet, "/collective_rpc", theirs[1].url) == (
            200,
            [{"by": theirs[1].port}],
        )
        assert (theirs[0].updates, theirs[1].updates) == ([], ["reload"])
        assert fleet.servers == (theirs[0].url,)
        await fleet.adopt(theirs[1].url)
        assert set(fleet.servers) == {server.url for server in theirs}


async def test_when_all_are_gone_calls_wait_for_one_of_them(
    theirs: list[FakeVllm], fleet: VllmFleet
) -> None:
    for server in theirs:
        await server.stop()
    ended = asyncio.create_task(fleet.ended())
    while not ended.done():
        await ask(fleet) if fleet.servers else await asyncio.sleep(0)
    assert "does not answer" in await ended
    held = asyncio.create_task(ask(fleet))
    await theirs[1].start()
    await fleet.start(SERVING)
    assert fleet.servers == (theirs[1].url,)
    assert not held.done()
    await control(fleet, f"{OPEN}?=5")
    assert (await held)[:2] == (200, "5")
