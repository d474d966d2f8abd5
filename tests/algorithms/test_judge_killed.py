"""A judged step that is killed and repeated asks nothing twice."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from pathlib import Path

from aiohttp import web

from agentrl.store import open_store
from tests import warm

CHILD = """
import asyncio, sys
import aiohttp
from agentrl.algorithms import judges
from agentrl.algorithms.judges import make_judges
from agentrl.core.config import resolve
from agentrl.store import open_store
from tests.algorithms.test_judges import group

async def main(url, base_url):
    judge = {"upstream": "gpt", "kind": "pairwise"}
    upstreams = {"gpt": {"base_url": base_url, "model": "m"}}
    config = resolve({"judges": {"quality": judge}, "upstreams": upstreams}, source="test")
    judges.CONCURRENCY = 1  # the kill leaves no other question behind
    async with open_store(url) as store, aiohttp.ClientSession() as session:
        rewards = await make_judges(config, store, session)
        made, metrics = await rewards.complete([group("it is 4", "it is 3", "no")])
        print([row.reward("quality") for row in made[0].rollouts], metrics)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_no_answer_is_paid_twice_over_kills(tmp_path: Path) -> None:
    paid, child, kills = Counter[str](), None, {3, 5}

    async def answer(request: web.Request) -> web.Response:
        (message,) = (await request.json())["messages"]
        if sum(paid.values()) in kills:  # before it answers: this question costs nothing
            kills.remove(sum(paid.values()))
            assert child is not None
            child.kill()
            await asyncio.sleep(60)
        paid[message["content"]] += 1
        verdict = '{"reason": "", "better": "tie"}'
        return web.json_response({"choices": [{"message": {"content": verdict}}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    store, ends = f"sqlite:///{tmp_path / 'store.db'}", []
    async with open_store(store):
        pass
    for _ in range(3):
        with (tmp_path / "said").open("wb") as said:
            child = await asyncio.to_thread(warm.start, "-c", CHILD, store, url, output=said)
            ends.append(await asyncio.to_thread(child.wait))
    await runner.cleanup()
    assert ends == [-signal.SIGKILL, -signal.SIGKILL, 0]
    assert "[0.5, 0.5, 0.5]" in (tmp_path / "said").read_text()
    assert set(paid.values()) == {1}
    assert len(paid) == 6  # three pairs in both orders
