"""The server that keeps vLLM up to date, on stand-ins for vLLM: what dies, and what comes back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentrl.algorithms.engines.base import run_unless_failed
from agentrl.algorithms.engines.vllm import fleet as vllm_fleet
from agentrl.algorithms.engines.vllm import server as vllm
from agentrl.algorithms.engines.vllm import weights
from agentrl.algorithms.engines.vllm.delivery import SleepCycle
from agentrl.algorithms.engines.vllm.fleet import VllmFleet
from agentrl.algorithms.engines.vllm.protocol import TrainedModel
from agentrl.algorithms.engines.vllm.server import VllmServer
from agentrl.core.errors import PolicyError
from tests.algorithms.engines.fake_vllm import FakeVllm


@pytest.fixture
async def theirs(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[FakeVllm]]:
    monkeypatch.setattr(vllm_fleet, "HEALTH_INTERVAL", 0.01)
    monkeypatch.setattr(vllm_fleet, "CRASH_GRACE", 0.01)
    monkeypatch.setattr(vllm, "CRASH_GRACE", 0.05)
    servers = [FakeVllm(), FakeVllm()]
    for server in servers:
        await server.start()
    yield servers
    for server in servers:
        server.hang.set()
        await server.stop()


LEARNED = TrainedModel(
    Path.mkdir, dict, Path.mkdir, lambda policy, tokens: [-1.0 for _ in tokens[1:]], [5, 6, 7]
)


@pytest.fixture
async def server(
    request: pytest.FixtureRequest, theirs: list[FakeVllm], tmp_path: Path
) -> AsyncIterator[VllmServer]:
    """A test may have a time-out of updates as the fixture's parameter."""
    timeout = getattr(request, "param", 50.0)
    fleet = VllmFleet([each.url for each in theirs], start_timeout=60.0, timeout=timeout)
    server = VllmServer(LEARNED, fleet, folder=tmp_path / "served")
    await server.start()
    yield server
    await server.close()
    await server.close()
    assert not (tmp_path / "served").exists()


async def version(server: VllmServer, model: str = "base") -> str:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{server.base_url}/chat/completions", json={"model": model}) as reply,
    ):
        return reply.headers["x-policy-version"] if reply.status == 200 else str(reply.status)


async def until(condition: Any) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came true")


async def changing_the_first(theirs: list[FakeVllm], server: VllmServer) -> asyncio.Task[None]:
    """A publish in flight that hangs in the first server."""
    server.delivery.in_flight = True
    theirs[0].hang.clear()
    publish = asyncio.create_task(server.publish(1))
    await until(lambda: theirs[0].hanging)
    return publish


async def test_the_way_of_weights_is_said_once(
    theirs: list[FakeVllm], server: VllmServer, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO, logger=weights.__name__)
    fleet = VllmFleet([theirs[0].url])
    other = VllmServer(LEARNED, fleet, folder=tmp_path / "other")
    await other.start()
    await other.publish(1)
    await other.publish(2)
    await other.close()
    (line,) = [line for line in caplog.messages if "gets new weights" in line]
    assert line.startswith("vLLM gets new weights by reload (not adapter: all weights are trained;")
    assert set(other.delivery.seconds) == {"hold", "take", "send", "reset", "check"}


class Broken(weights.CheckpointSync):
    """A method that moves nothing."""

    async def send(self, policy: str, servers: Any) -> None:
        raise PolicyError("weights could not be sent: no such device")


async def test_a_method_that_fails_gives_way_to_the_next(
    theirs: list[FakeVllm],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make = weights.make_sync

    def unproven(method: str, *given: Any) -> weights.WeightSync:
        return make(method, *given) if method == "reload" else Broken(*given[:2])

    monkeypatch.setattr(weights, "make_sync", unproven)
    theirs[0].backend = "ipc"
    on_gpu = replace(LEARNED, gpu=0)
    server = VllmServer(on_gpu, VllmFleet([theirs[0].url]), folder=tmp_path / "auto")
    await server.start()
    await server.publish(1)
    assert theirs[0].updates == ["reload_weights"] * 2
    assert await version(server) == "1"
    await server.close()
    (line,) = [line for line in caplog.messages if "by reload" in line]
    assert "not ipc: it failed here (weights could not be sent: no such device)" in line
    asked = VllmServer(on_gpu, VllmFleet([theirs[0].url]), folder=tmp_path / "asked", method="ipc")
    with pytest.raises(PolicyError, match="no such device"):
        await asked.start()


async def test_one_of_several_that_dies_returns_with_the_newest(
    theirs: list[FakeVllm], server: VllmServer
) -> None:
    await server.publish(1)
    await theirs[1].stop()
    await server.publish(2)
    assert await version(server) == "2"
    before = len(theirs[1].updates)
    await theirs[1].start()
    await until(lambda: len(server.host.servers) == 2)
    assert len(theirs[1].updates) == before + 1
    for each in theirs:
        each.calls = 0
        each.answer.clear()
    calls = [asyncio.create_task(version(server)) for _ in range(2)]
    await until(lambda: all(each.calls for each in theirs))
    for each in theirs:
        each.answer.set()
    assert await asyncio.gather(*calls) == ["2", "2"]


@pytest.mark.parametrize("server", [2.0], indirect=True)
async def test_one_that_hangs_in_an_update_does_not_hold_the_others(
    theirs: list[FakeVllm], server: VllmServer
) -> None:
    theirs[0].hang.clear()
    await server.publish(1)
    assert await version(server) == "1"
    assert server.host.servers == (theirs[1].url,)


async def test_one_that_returns_and_takes_no_weights_gets_no_calls(
    theirs: list[FakeVllm], server: VllmServer, caplog: pytest.LogCaptureFixture
) -> None:
    await theirs[1].stop()
    await server.publish(1)
    theirs[1].status = 500
    await theirs[1].start()
    await until(lambda: any("cannot be used" in line for line in caplog.messages))
    assert server.host.servers == (theirs[0].url,)
    assert await version(server) == "1"


async def test_all_may_die_and_return_with_the_newest_weights(
    theirs: list[FakeVllm], server: VllmServer
) -> None:
    await server.publish(3)
    for each in theirs:
        await each.stop()
    await until(lambda: not server.restarts.up.is_set())
    held = asyncio.create_task(version(server))
    await theirs[1].start()
    assert await held == "3"


async def test_waiting_ends_with_a_sentence_once_a_policy_is_given_up(
    theirs: list[FakeVllm], server: VllmServer
) -> None:
    """Nobody else would end it: agents ask until their time is over, and are asked again."""
    host = server.host
    assert isinstance(host, VllmFleet)
    host._start_timeout = 0.3
    for each in theirs:
        await each.stop()
    waiting = asyncio.create_task(run_unless_failed(asyncio.Event().wait(), [server]))
    with pytest.raises(PolicyError, match=r"vLLM ended 4 times in one step; .* for 0\.3 s"):
        async with asyncio.timeout(30):
            await waiting
    with pytest.raises(PolicyError, match="vLLM ended 4 times"):
        await server.publish(1)


async def test_a_server_that_cannot_be_started_again_is_given_up(
    theirs: list[FakeVllm], server: VllmServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(serving: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")  # as fork says

    monkeypatch.setattr(server.host, "start", start)
    for each in theirs:
        await each.stop()
    async with asyncio.timeout(60):
        assert "Resource temporarily unavailable" in str(await server.wait_for_failure())


async def test_what_is_done_in_time_is_not_ended(server: VllmServer) -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 3

    assert await run_unless_failed(work(), [server, server]) == 3


async def test_a_whole_model_has_no_policies_beside_it(server: VllmServer) -> None:
    with pytest.raises(PolicyError, match="cannot serve 'other' beside 'base'"):
        await server.add("other", 1)
    with pytest.raises(PolicyError, match="policy 'other' is not served; vLLM serves 'base'"):
        await server.publish(1, "other")


def name_versions(theirs: list[FakeVllm], server: VllmServer) -> None:
    """As where the servers have been started with the middleware."""
    server.host.spans = True
    for each in theirs:
        each.spans = True


async def test_calls_stand_still_while_weights_change_in_flight(
    theirs: list[FakeVllm], server: VllmServer
) -> None:
    server.delivery.in_flight = True
    name_versions(theirs, server)
    for each in theirs:
        each.answer.clear()
        each.updates.clear()
    calls = [asyncio.create_task(version(server)) for _ in range(2)]
    await until(lambda: all(each.calls for each in theirs))
    await server.publish(1)  # though they have not ended
    took = ["reload_weights", "/agentrl/spans?base=1&=1", "/resume"]
    assert theirs[0].updates == theirs[1].updates == ["/pause?mode=keep&clear_cache=true", *took]
    assert not any(call.done() for call in calls)
    later = asyncio.create_task(version(server))
    for each in theirs:
        each.answer.set()
    assert await asyncio.gather(*calls, later) == ["0", "0", "1"]


@pytest.mark.parametrize("server", [1.0], indirect=True)
async def test_one_that_dies_before_it_resumes_gets_the_weights(
    theirs: list[FakeVllm], server: VllmServer
) -> None:
    server.delivery.in_flight = True
    name_versions(theirs, server)
    theirs[0].updates.clear()
    theirs[1].hang.clear()  # it has paused, and takes nothing more
    await server.publish(1)
    assert await version(server) == "1"
    assert server.host.servers == (theirs[0].url,)
    theirs[1].updates.clear()
    theirs[1].hang.set()
    await until(lambda: len(server.host.servers) == 2)
    took = [update for update in theirs[1].updates if not update.startswith("/pause")]  # comes late
    assert took[-3:] == ["reload_weights", "/agentrl/spans?base=1&=1", "/resume"]


async def test_in_flight_servers_change_one_after_another(
    theirs: list[FakeVllm], server: VllmServer
) -> None:
    publish = await changing_the_first(theirs, server)
    theirs[0].calls = 0
    assert [await version(server) for _ in range(3)] == ["0", "0", "0"]
    theirs[1].hang.clear()
    theirs[0].hang.set()
    await until(lambda: theirs[1].hanging)
    assert theirs[0].calls == 0
    assert [await version(server) for _ in range(3)] == ["1", "1", "1"]
    assert theirs[0].calls == 3
    assert not publish.done()
    theirs[1].hang.set()
    await publish


async def test_calls_wait_if_a_server_dies_while_the_other_changes(
    theirs: list[FakeVllm], server: VllmServer
) -> None:
    publish = await changing_the_first(theirs, server)
    await theirs[1].stop()
    await until(lambda: server.host.servers == (theirs[0].url,))
    call = asyncio.create_task(version(server))
    await asyncio.sleep(0.05)
    assert not call.done()  # it would be of weights that are half sent
    theirs[0].hang.set()
    await publish
    assert await call == "1"


async def test_room_is_made_for_the_adapters_that_will_be_added(
    theirs: list[FakeVllm], tmp_path: Path
) -> None:
    learned = replace(
        LEARNED,
        adapters=["a", "b"],
        save_base=Path.mkdir,
        save_adapter=lambda policy, path: path.mkdir(),
        rank=1,
    )
    fleet = VllmFleet([theirs[0].url], adapters=True)
    fleet.max_adapters = 2
    server = VllmServer(learned, fleet, folder=tmp_path / "adapters")
    server.make_room(1)
    await server.start()
    try:
        async with server.updating():
            await server.add("c", 7)
            with pytest.raises(PolicyError, match="room for 3 adapters and serves a, b, c"):
                await server.add("d", 7)
        assert await version(server, "c") == "7"
    finally:
        await server.close()


async def test_a_new_version_is_served_beside_the_old_one(
    theirs: list[FakeVllm], tmp_path: Path
) -> None:
    learned = replace(
        LEARNED,
        adapters=["a", "b"],
        save_base=Path.mkdir,
        save_adapter=lambda policy, path: path.mkdir(),
        rank=1,
    )
    (theirs,) = theirs[:1]
    fleet = VllmFleet([theirs.url], adapters=True)
    server = VllmServer(learned, fleet, folder=tmp_path / "adapters", in_flight=True)
    await server.start()
    theirs.answer.clear()
    old = asyncio.create_task(version(server, "a"))
    await until(lambda: theirs.calls)
    await server.publish(1, "a")
    await server.publish(1, "b")
    new = asyncio.create_task(version(server, "a"))
    await until(lambda: theirs.calls == 2)
    assert theirs.adapters.keys() == {"a#0", "a#1", "b#0", "b#1"}
    assert not any(update.startswith("/pause") for update in theirs.updates)
    theirs.answer.set()
    assert await asyncio.gather(old, new) == ["0", "1"]
    assert theirs.asked == [("a#0", "0"), ("a#1", "1")]
    await server.publish(2, "b")  # no call runs under the old ones any more
    assert theirs.adapters.keys() == {"a#1", "b#1", "b#2"}
    assert len(list((tmp_path / "adapters").glob("adapter-*"))) == 3
    await server.close()


async def test_servers_without_versions_of_tokens_are_a_line(
    theirs: list[FakeVllm], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    for theirs[0].spans in (False, True):
        fleet = VllmFleet([theirs[0].url])
        server = VllmServer(LEARNED, fleet, folder=tmp_path / "other", in_flight=True)
        await server.start()
        await server.close()
    warnings = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert [line for line in warnings if "--middleware" in line] == warnings
    assert len(warnings) == 1


SLEEPS, WEIGHTS, KEYS = (
    "/sleep?level={}&mode=abort",
    "/wake_up?tags=weights",
    "/wake_up?tags=kv_cache",
)


@pytest.fixture
async def sleeper(
    theirs: list[FakeVllm], tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[VllmServer]:
    """A server of one vLLM that sleeps during updates."""
    fleet = VllmFleet([theirs[0].url], start_timeout=60.0, timeout=50.0)
    server = VllmServer(LEARNED, fleet, folder=tmp_path / "served", sleep=request.param)
    await server.start()
    theirs[0].updates.clear()
    yield server
    await server.close()


@pytest.mark.parametrize("sleeper", [1, 2], indirect=True)
async def test_vllm_sleeps_during_an_update_and_wakes_for_its_weights(
    theirs: list[FakeVllm], sleeper: VllmServer
) -> None:
    level, vllm_ = sleeper._sleep.level, theirs[0]
    async with sleeper.updating():
        call = asyncio.create_task(version(sleeper))
        assert vllm_.updates == [SLEEPS.format(level)]
        await sleeper.publish(1)
        assert vllm_.updates[1:] == [WEIGHTS, "reload_weights", KEYS]
    assert await call == "1"
    vllm_.updates.clear()
    async with sleeper.updating():
        pass
    kept = [WEIGHTS, KEYS] if level == 1 else [WEIGHTS, "reload_weights", KEYS]
    assert vllm_.updates == [SLEEPS.format(level), *kept]
    assert await version(sleeper) == "1"


@pytest.mark.parametrize("sleeper", [1, 2], indirect=True)
@pytest.mark.parametrize("publishes", [True, False])
async def test_one_that_dies_asleep_restarts_after_the_learner(
    theirs: list[FakeVllm], sleeper: VllmServer, publishes: bool
) -> None:
    vllm_ = theirs[0]
    async with sleeper.updating():
        await vllm_.stop()
        await until(lambda: not sleeper.restarts.up.is_set())
        vllm_.asleep, vllm_.updates = set(), []
        await vllm_.start()
        await asyncio.sleep(0.1)  # in which one that is awake would be started again
        assert vllm_.updates == []
        if publishes:
            await sleeper.publish(1)
    assert vllm_.updates == ["reload_weights"] * (1 + publishes)
    assert await version(sleeper) == str(int(publishes))


@pytest.mark.parametrize("sleeper", [2], indirect=True)
@pytest.mark.parametrize("dies_at", ["/wake_up", "/collective_rpc"])
async def test_one_that_dies_as_it_wakes_is_started_awake(
    theirs: list[FakeVllm], sleeper: VllmServer, monkeypatch: pytest.MonkeyPatch, dies_at: str
) -> None:
    vllm_, handle, died = theirs[0], theirs[0].handle, []

    async def dying(request: Any) -> Any:
        if request.path == dies_at and not died:
            died.append(request.path_qs)
            vllm_.asleep, vllm_.well = set(), False
            request.transport.abort()
        elif request.path == "/health" and died and not vllm_.well:
            vllm_.well = len(died) > 1  # it is back at the second look
            died.append(request.path)
            return await handle(request)
        return await handle(request)

    async with sleeper.updating():
        monkeypatch.setattr(vllm_, "handle", dying)
        await vllm_.stop()
        await vllm_.start()
        await sleeper.publish(1)
    assert died
    assert vllm_.asleep == set()
    assert vllm_.updates[-1] == "reload_weights"
    assert await version(sleeper) == "1"


async def test_a_restart_while_it_wakes_leaves_it_awake() -> None:
    cycle, paths = SleepCycle(2), []

    class Servers:
        async def post(self, path: str) -> None:
            paths.append(path)
            if path.startswith("/wake_up"):
                cycle.restarted()

    servers: Any = Servers()
    await cycle.sleep(servers)
    await cycle.wake("weights", servers)
    await cycle.wake("kv_cache", servers)
    assert not cycle.dropped
    assert paths == [SLEEPS.format(2), WEIGHTS]
