"""What an agent that ends its own process costs the others: nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from agentrl.core.config import resolve
from agentrl.core.processes import Child
from agentrl.core.types import ErrorKind, NewRollout, PolicyVersion, Rollout, RolloutState
from agentrl.store import open_store
from agentrl.store.base import Store
from tests.runners.conftest import FakeModel

HEALTHY = 40
CODE = 3
AGENT = f"""
import asyncio, os, time
import httpx

def ask(text):
    body = {{"model": "policy", "messages": [{{"role": "user", "content": text}}]}}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    answer = httpx.post(url, json=body, timeout=30).raise_for_status().json()
    if text == "crash":
        os._exit({CODE})
    return answer["choices"][0]["message"]["content"]

def threads(text):
    time.sleep(0.2)
    said = ask(text)
    time.sleep(0.5)
    return said

def asynchronous(text):
    async def work():
        await asyncio.sleep(0.2)
        said = await asyncio.to_thread(ask, text)
        await asyncio.sleep(0.5)
        return said
    return work()
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("executor", ["threads", "async"])
async def test_an_agent_that_ends_the_process_fails_alone(tmp_path: Path, executor: str) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "verifier.py").write_text("def verify(task, result):\n    return 1.0\n")
    url, model = f"sqlite:///{tmp_path / 'store.db'}", FakeModel()
    name = "threads" if executor == "threads" else "asynchronous"
    config = resolve(
        {
            "name": "r",
            "root": str(tmp_path),
            "agent": {"path": f"agent.py:{name}"},
            "verifier": {"path": "verifier.py:verify"},
            "runner": {"executor": executor, "concurrency": 64, "lease": 2.0},
        },
        source="test",
    )
    inputs = [str(i) for i in range(HEALTHY)]
    inputs.insert(HEALTHY // 2, "crash")
    await model.start()
    try:
        async with open_store(url) as store:
            await store.open_run("r", msgspec.to_builtins(config))
            served = PolicyVersion(
                run="r", policy="policy", version=0, base_url=model.base_url, model="policy"
            )
            await store.publish(served)
            await store.enqueue(
                [
                    NewRollout(id=f"g{i}", run="r", group=f"g{i}", index=0, task={"input": text})
                    for i, text in enumerate(inputs)
                ]
            )
            arguments = ["runner", "start", "--store", url, "--run", "r"]
            rows = await ended(store, Child("runner", arguments, tmp_path / "runner.log"))
    finally:
        await model.stop()
    (culprit,) = (row for row in rows if row.task["input"] == "crash")
    healthy = [row for row in rows if row is not culprit]
    assert [row.failure for row in healthy] == [None] * HEALTHY
    assert culprit.state is RolloutState.FAILED
    assert culprit.failure is not None
    assert culprit.failure.kind is ErrorKind.LOST_RUNNER
    assert f"while running rollout {culprit.id} alone" in culprit.failure.message


async def ended(store: Store, runner: Child) -> list[Rollout]:
    """All rollouts, once they have ended in a runner that is started again when it dies."""
    alive = asyncio.create_task(keep_alive(runner))
    try:
        for rollout in await store.rollouts("r"):
            settled = asyncio.create_task(store.settled(rollout.group))
            await asyncio.wait([alive, settled], return_when=asyncio.FIRST_COMPLETED)
            if not settled.done():
                settled.cancel()
                alive.result()
    finally:
        alive.cancel()
        await runner.stop()
    return await store.rollouts("r")


async def keep_alive(runner: Child) -> None:
    while True:
        await runner.start()
        code = await runner.wait()
        assert code == CODE, runner.log.read_text()
