"""The processes of a simulated live run: the gateway that records sessions, users, and a learner.

The gateway's code is the library's but for its socket. Users hold conversations with it, some as
streams, repeat what got no answer, and end their sessions, now and then in the middle of an answer.
The learner claims and commits the sessions that have ended, as `agentrl.live.source` does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from agentrl.core.config import RunConfig
from agentrl.core.types import ENDED, POLICY, PolicyVersion, StepCommit
from agentrl.live import records
from agentrl.live.gateway import LiveSessions
from agentrl.live.records import Event, Lanes, Version, policy_of
from agentrl.runners.gateway.server import Gateway
from agentrl.runners.main import run_features
from agentrl.store import open_store, run_folder
from tests.simulation.actors import SimulatedGateway, SimulatedServer, opened

if TYPE_CHECKING:
    from tests.simulation.world import World

SESSIONS, CALLS = 3, 3  # sessions of a run, one for each user, and calls of a session
PAUSE = 0.5  # seconds until a user repeats a request


class SimulatedSessions(LiveSessions):
    def __init__(self, world: World, store: Any, config: RunConfig) -> None:
        self.world = world
        super().__init__(store, config)

    def _make_gateway(self, config: RunConfig) -> Gateway:
        features = [*run_features(self._store, config, config.role_rules), self]
        return SimulatedGateway(self.world, self._store, config, features)


async def gateway(world: World, config: RunConfig) -> None:
    """What `live.gateway.serve` does."""
    async with open_store(config.store) as store:
        await opened(store, config.name)
        sessions = SimulatedSessions(world, store, config)
        await sessions.take_over()
        served: Any = sessions.gateway
        await served.serve()
        world.network.gateway = world.system.here(), served
        working = [served.spawn(work()) for work in (sessions.keep, sessions.follow)]
        await asyncio.gather(*map(asyncio.wrap_future, working))


async def learner(world: World, config: RunConfig) -> None:
    """Serve a version, and train every ended session once."""
    async with open_store(config.store) as store:
        state = await run_folder.open_as_child(store, config)
        world.began(state)
        server = SimulatedServer(world)
        await server.start()
        live_state = await records.live_state(store, config.name)
        if not live_state.versions:
            row = Version(version=0, step=0, path="v", offered=0.0, kind="first")
            await records.put_version(store, config.name, row)
        if live_state.lanes is None:
            event = Event(time=0.0, kind="first", version=0, lanes=Lanes(serving=0), why="first")
            await records.decide(store, config.name, live_state, event)
        name, url = policy_of(0), server.base_url
        policy = PolicyVersion(run=config.name, policy=name, version=0, base_url=url, model=POLICY)
        await store.publish(policy, epoch=state.epoch)
        step, cursor = state.step, 0
        while True:
            over = world.users_left == 0 and not await _in_progress(store, config.name)
            rows = await records.ended(store, config.name)
            if rows:
                ids = [row.group for row in records.oldest_first(rows)][:2]
                groups = await store.claim_groups(
                    config.name, state.epoch, len(ids), groups=ids, timeout=0
                )
                commit = StepCommit(
                    run=config.name, epoch=state.epoch, step=step,
                    groups=[group.id for group in groups], versions={}, checkpoint=None, metrics={},
                )  # fmt: skip
                await store.commit_step(commit)
                step += 1
            elif over:
                break
            cursor = await store.wait(cursor, timeout=1.0)
        await store.log(config.name, step, {ENDED: 1.0}, epoch=state.epoch)


async def _in_progress(store: Any, run: str) -> bool:
    rows = await store.rollouts(run)
    return any(not row.state.terminal for row in rows)


async def users(world: World) -> None:
    """All users of the run; no fault affects them."""
    await asyncio.gather(*(user(world, n) for n in range(SESSIONS)))


async def user(world: World, n: int) -> None:
    name, messages = f"session-{n}", [{"role": "user", "content": f"hello {n}"}]
    draw = world.loop.random
    heard = world.heard[name] = []
    for turn in range(CALLS):
        await asyncio.sleep(draw.random() * 3)
        stream = draw.random() < 0.5
        cut = stream and turn == CALLS - 1 and draw.random() < 0.7
        answer = await _ask(world, name, messages, stream=stream, cut=cut)
        if answer is None:
            break
        heard.append(answer)
        messages = [*messages, {"role": "assistant", "content": answer}, _user(f"more {turn}")]
    await _end(world, name)
    world.users_left -= 1


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def _ask(world: World, name: str, messages: Any, *, stream: bool, cut: bool) -> str | None:
    """One call, repeated until it is answered; None if the user ends the session during it."""
    body = {"model": "model", "messages": messages, "stream": stream}
    while True:
        reader = Reader(world)
        answer = await _post(world, "/v1/chat/completions", body, name, reader)
        if answer is not None and cut:
            while not (reader.text or answer.done()) and world.gateway_lives(answer):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            if reader.text and not answer.done():
                world.say(f"{name}: its user ends it in the middle of an answer")
                world.cut[name] = reader.text
                return None
        if await _answered(world, answer):
            response: Any = answer.result()
            if response.status == 200 and (text := reader.whole(response)) is not None:
                return text
            if response.status not in (200, 502, 503, 504):
                world.say(f"{name}: {response.status} {getattr(response, 'body', '')!r}"[:200])
        await asyncio.sleep(PAUSE)


async def _end(world: World, name: str) -> None:
    while True:
        answer = await _post(world, "/v1/sessions/end", {"session": name}, name, Reader(world))
        if await _answered(world, answer) and answer.result().status in (200, 404):
            return
        await asyncio.sleep(PAUSE)


async def _answered(world: World, answer: Any) -> bool:
    """Wait for the answer to a request; False if its gateway has died."""
    if answer is None:
        return False
    if world.gateway_lives(answer):
        died = world.loop.create_future()
        died_at = lambda: None if died.done() else died.set_result(None)  # noqa: E731
        answer.process.owned.append(died_at)
        await asyncio.wait((answer, died), return_when=asyncio.FIRST_COMPLETED)
    return answer.done() and not answer.cancelled()


async def _post(world: World, path: str, body: Any, name: str, reader: Reader) -> Any:
    """The task of a request; None if nobody listens."""
    await asyncio.sleep(world.network.delay())
    if not world.gateway_lives():
        return None
    _, served = world.network.gateway
    return served.post("", path, body, {"x-session-id": name}, reader)


class Reader:
    """What the client of a request reads, in place of aiohttp's writer to its connection."""

    output_size = 0
    buffer_size = 0
    length = None

    def __init__(self, world: World) -> None:
        self.world, self.data, self.ended = world, b"", False

    async def write_headers(self, *arguments: Any) -> None: ...
    def send_headers(self) -> None: ...
    def enable_chunking(self) -> None: ...
    def enable_compression(self, *arguments: Any) -> None: ...
    async def drain(self) -> None: ...

    async def write(self, chunk: bytes, **more: Any) -> None:
        self.data += bytes(chunk)

    async def write_eof(self, chunk: bytes = b"") -> None:
        self.data += bytes(chunk)
        self.ended = True

    def set_eof(self) -> None:
        self.ended = True

    @property
    def text(self) -> str:
        """The text that was streamed so far."""
        content = ""
        for line in self.data.split(b"\n\n"):
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:]).get("choices", []):
                    content += choice["delta"].get("content") or ""
        return content

    def whole(self, response: Any) -> str | None:
        """The answer, if it is complete."""
        if getattr(response, "body", None):
            return str(json.loads(response.body)["choices"][0]["message"]["content"])
        return self.text if b"[DONE]" in self.data else None


async def events(world: World, answer: dict[str, Any]) -> AsyncIterator[bytes]:
    """An answer as a stream, a word at a time."""
    (choice,) = answer["choices"]
    common = {key: answer[key] for key in ("id", "model")} | {"object": "chat.completion.chunk"}
    text, tokens = choice["message"]["content"], choice["token_ids"]
    size = -(-len(text) // len(tokens))
    for n, token in enumerate(tokens):
        part: dict[str, Any] = {"index": 0, "finish_reason": None, "token_ids": [token]}
        part["delta"] = {"role": "assistant", "content": text[n * size : (n + 1) * size]}
        part["logprobs"] = {"content": [choice["logprobs"]["content"][n]]}
        first = {"prompt_token_ids": answer["prompt_token_ids"]} if n == 0 else {}
        yield b"data: " + json.dumps({**common, **first, "choices": [part]}).encode() + b"\n\n"
        await asyncio.sleep(0.2 * world.loop.random.random())
    last = {"index": 0, "finish_reason": "stop", "delta": {}, "logprobs": None}
    yield b"data: " + json.dumps({**common, "choices": [last]}).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"
