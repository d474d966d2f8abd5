"""Environments: figures of each plug-in, of containers, and of calls through a shared server.

python -m tests.benchmarks.environments --json [--only gym misattributed] [--rollouts 1000]

`misattributed`: stored calls that are another rollout's, of `rollouts` that ask through one server
which the first of them starts: one that forwards each request's trace, one that calls the address
of `agentrl.endpoint()`, and one that does neither, whose calls must be refused. `queued`: the same,
through one task that the first rollout starts, and a queue. `containers` is of
`tests.benchmarks.containers`. A section of each plug-in is what
`tests/environments/PLUGIN/figures.py` prints in `.environments/PLUGIN`, as one line of JSON:
`tasks`, `ground_truth` and `rollouts_per_s`; `plugin_lines` and `glue_lines` (of a run file beyond
two) are counted here.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import logging
import os
import subprocess
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
from aiohttp import web

import agentrl
from agentrl.core.config import RunConfig
from agentrl.core.plugins import plugin_points
from agentrl.runners.executors.command import environment
from agentrl.runners.gateway.server import Gateway
from agentrl.runners.main import run_features
from agentrl.store import open_store
from tests.runners.conftest import RUN, Bench, FakeModel

ROOT = Path(__file__).parents[2]
PLUGINS = ROOT / "tests/environments"
PATH = "/chat/completions"
AT_ONCE = 64
Headers = dict[str, str]
WAYS = ("forwarded", "own", "unknown")


async def ask(url: str, text: str, headers: Headers | None = None) -> str:
    """The answer, or "" if the call was refused."""
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    async with httpx.AsyncClient(timeout=60, verify=False) as client:
        answer = await client.post(url + PATH, json=body, headers=headers)
        found = answer.json()
        return found["choices"][0]["message"]["content"] if answer.status_code == 200 else ""


def shared_server(stack: AsyncExitStack, way: str) -> Callable[[str], Awaitable[str]]:
    """An agent that asks through a server, which its first rollout starts."""
    started: asyncio.Task[str] | None = None

    async def serve(request: web.Request) -> web.Response:
        text = (await request.json())["messages"][-1]["content"]
        url, headers = os.environ["OPENAI_BASE_URL"], dict[str, str]()
        if way == "own":
            url = request.headers["x-own"]
        elif way == "forwarded":
            headers = {"traceparent": request.headers["traceparent"]}
        said = await ask(url, text, headers)
        return web.json_response({"choices": [{"message": {"content": said}}]})

    async def start() -> str:
        app = web.Application()
        app.router.add_post(PATH, serve)
        runner = web.AppRunner(app)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def agent(text: str) -> str:
        nonlocal started
        started = started or asyncio.ensure_future(start())
        return await ask(await started, text, {"x-own": agentrl.endpoint().url})

    return agent


def shared_queue(stack: AsyncExitStack, way: str) -> Callable[[str], Awaitable[str]]:
    """An agent that asks through a task, which its first rollout starts."""
    queue: asyncio.Queue[Any] = asyncio.Queue()
    working: list[asyncio.Task[None]] = []

    async def work() -> None:
        while True:
            text, url, answer = await queue.get()
            url = url if way == "own" else os.environ["OPENAI_BASE_URL"]
            answer.set_result(await ask(url, text))

    async def asked(text: str) -> str:
        answer = asyncio.get_running_loop().create_future()
        queue.put_nowait((text, agentrl.endpoint().url, answer))
        return str(await answer)

    async def agent(text: str) -> str:
        if not working:
            working.append(asyncio.create_task(work()))
            stack.callback(working[0].cancel)
            await asked(text)
            await asyncio.sleep(1)  # so that it runs while the others ask
        return await asked(text)

    return agent


async def shared(make: Any, way: str, rollouts: int) -> dict[str, int]:
    model = FakeModel()
    await model.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(model.stop)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        store = await stack.enter_async_context(open_store(f"sqlite:///{folder}/store.db"))
        await store.open_run(RUN, {})
        gateway = Gateway(store, RUN, features=run_features(store, RunConfig()))
        bench = Bench(store, model, gateway)
        await bench.move(model)
        gateway.start()
        stack.push_async_callback(asyncio.to_thread, gateway.close)
        stack.enter_context(environment(gateway.base_url))
        tasks = [{"input": f"the question {number}"} for number in range(rollouts)]
        played = await bench.run(
            make(stack, way), *tasks, concurrency=AT_ONCE, timeout=120.0, calls_optional=False
        )
        wrong = answered = 0
        for rollout in played:
            calls = (await store.trace(rollout.id)).transitions
            answered += bool(calls)
            wrong += sum(
                call.messages is None or call.messages[-1]["content"] != rollout.task["input"]
                for call in calls
            )
        return {"misattributed": wrong, "rollouts": len(played), "answered": answered}


async def misattributed(rollouts: int) -> dict[str, Any]:
    return {way: await shared(shared_server, way, rollouts) for way in WAYS}


async def queued(rollouts: int) -> dict[str, Any]:
    return {way: await shared(shared_queue, way, rollouts) for way in WAYS[1:]}


async def containers(rollouts: int) -> dict[str, Any]:
    if find_spec("tests.benchmarks.containers") is None:
        return {"skipped": "there is no tests/benchmarks/containers.py"}
    from importlib import import_module

    figures = import_module("tests.benchmarks.containers").figures
    found: dict[str, Any] = await figures() if inspect.iscoroutinefunction(figures) else figures()
    return found


def plugin(name: str, module: str) -> dict[str, Any]:
    """The figures of a plug-in, by its own interpreter."""
    file = ROOT / f"{module.replace('.', '/')}.py"
    lines = sum(bool(line.strip()) for line in file.read_text(encoding="utf-8").splitlines())
    known = {"plugin_lines": lines, "glue_lines": 0}
    script, python = PLUGINS / name / "figures.py", ROOT / f".environments/{name}/bin/python"
    if not (script.is_file() and python.is_file()):
        lacks = script if not script.is_file() else f"{python}: make test-environments"
        return known | {"skipped": f"there is no {lacks}"}
    module_ = f"tests.environments.{name}.figures"
    done = subprocess.run(
        [python, "-m", module_], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        return known | {"failed": done.stderr.strip().rpartition("\n")[2]}
    found: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return known | found


SECTIONS: dict[str, Any] = {
    "misattributed": misattributed, "queued": queued, "containers": containers
}  # fmt: skip


def main() -> None:
    plugins = {point.name: point.module for point in plugin_points("environments")}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--only", nargs="+", choices=[*SECTIONS, *plugins], metavar="SECTION")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    found = {
        name: asyncio.run(section(given.rollouts))
        for name, section in SECTIONS.items()
        if not given.only or name in given.only
    }
    found |= {
        name: plugin(name, module)
        for name, module in plugins.items()
        if not given.only or name in given.only
    }
    print(json.dumps(found) if given.json else json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
