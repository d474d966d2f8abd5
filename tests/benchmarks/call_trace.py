"""What a plain model call executes: the library's files and functions, by tracing one.

From the request at the gateway to the committed row in SQLite, on all threads that take part: what
each of several calls of an attempt executes. The first one also learns what the policy server can
do, and at times the gateway reads which policies there are.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

import aiohttp
from aiohttp import web

from agentrl.core.config import RunConfig
from agentrl.core.types import NewRollout, PolicyVersion
from agentrl.runners.gateway.server import Gateway
from agentrl.runners.main import run_features
from agentrl.store import open_store
from agentrl.store.base import Store
from tests.benchmarks.size import files, in_library

RUN, CALLS = "traced", 5
APART = 0.2  # seconds between calls: what their commits wake has ended
QUESTION = {"model": "", "messages": [{"role": "user", "content": "How far is the moon?"}]}
ANSWER = {
    "object": "chat.completion",
    "model": "tiny",
    "prompt_token_ids": [5, 6, 7],
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Far."},
            "logprobs": {"content": [{"token": "Far", "logprob": -0.5}]},
            "finish_reason": "stop",
            "token_ids": [8],
        }
    ],
}


class Tracer:
    """Collects the library's named functions while `on`, of this thread and those that it starts.
    A thread is traced from its beginning only, so the tracer encloses store and gateway."""

    def __init__(self) -> None:
        self.on, self.calls = False, list[set[CodeType]]()

    def __enter__(self) -> Tracer:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self.on = False
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if self.on and event == "call" and not code.co_name.startswith("<"):
            self.calls[-1].add(code)


async def traced_call() -> set[CodeType]:
    """The library's named functions that a call executes until its row is committed."""
    with TemporaryDirectory() as folder, Tracer() as tracer:
        async with open_store(f"sqlite:///{Path(folder) / 'store.db'}") as store:
            await _trace_calls(store, tracer)
    return set(filter(in_library, set.intersection(*tracer.calls)))


async def _trace_calls(store: Store, tracer: Tracer) -> None:
    add_transitions = store.add_transitions

    async def noted(rows: Any) -> Any:
        kept = await add_transitions(rows)
        tracer.on = False
        return kept

    store.add_transitions = noted  # type: ignore[method-assign]
    server = web.AppRunner(_policy_server())
    await server.setup()
    await web.TCPSite(server, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{server.addresses[0][1]}/v1"
    await store.open_run(RUN, {})
    await store.publish(PolicyVersion(run=RUN, policy="policy", version=1, base_url=url, model=""))
    gateway = Gateway(store, RUN, features=run_features(store, RunConfig()))
    await asyncio.to_thread(gateway.start)
    rollout = NewRollout(id="r", run=RUN, group="g", index=0, task={}, timeout=60.0)
    await store.enqueue([rollout])
    (attempt,) = await store.claim(1, runner="traced", lease=60.0, run=RUN)
    headers = {"authorization": f"Bearer {gateway.register(attempt).key}"}
    try:
        async with aiohttp.ClientSession(gateway.base_url + "/", headers=headers) as agent:
            await _ask(agent)
            for _ in range(CALLS):
                await asyncio.sleep(APART)
                tracer.calls.append(set())
                tracer.on = True
                await _ask(agent)
    finally:
        await asyncio.to_thread(gateway.close)
        await server.cleanup()


async def _ask(agent: aiohttp.ClientSession) -> None:
    async with agent.post("chat/completions", json=QUESTION) as response:
        assert response.status == 200, await response.text()


def _policy_server() -> web.Application:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(ANSWER, headers={"x-policy-version": "1"})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    return app


def measure() -> dict[str, int]:
    """Files and functions of one call."""
    codes = asyncio.run(traced_call())
    return {"call_files": len(files(codes)), "call_functions": len(codes)}


if __name__ == "__main__":
    found = asyncio.run(traced_call())
    print(json.dumps([files(found), sorted(code.co_qualname for code in found)]))
