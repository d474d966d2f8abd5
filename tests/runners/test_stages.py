"""Prepare, run, score: at most as many rollouts as slots at once, and none twice."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from typing import Any

from tests.runners.test_partial import ask


class Pace:
    """Counts who is in which stage; each takes so many seconds."""

    def __init__(self, **seconds: float) -> None:
        self.seconds, self.now, self.most = seconds, Counter[str](), Counter[str]()
        self.total = 0  # the most that were in any stage

    async def stage(self, name: str) -> None:
        self.now[name] += 1
        self.most[name] = max(self.most[name], self.now[name])
        self.total = max(self.total, self.now.total())
        await asyncio.sleep(self.seconds[name])
        self.now[name] -= 1


class FakeSpaces:
    def __init__(self, pace: Pace) -> None:
        self.pace, self.open = pace, 0

    async def prepare(self, task: Any, ran: Any = None) -> Any:
        await self.pace.stage("prepare")
        self.open += 1
        return self

    async def remove(self, workspace: Any, **how: Any) -> None:
        self.open -= 1

    def diff(self) -> str:
        return ""

    def packed(self) -> bytes:
        return b""

    place = None


async def run_at(bench: Any, pace: Pace, rollouts: int, **runner: int) -> float:
    """Seconds that the rollouts took."""

    async def agent(text: str) -> None:
        await ask(text)
        await pace.stage("run")

    async def verify(result: Any) -> float:
        await pace.stage("score")
        return 1.0

    spaces = FakeSpaces(pace)
    began = time.monotonic()
    found = await bench.run(
        agent, *({"input": "x"} for _ in range(rollouts)), verifier=verify, workspaces=spaces,
        **runner,
    )  # fmt: skip
    assert [rollout.reward() for rollout in found] == [1.0] * rollouts
    assert spaces.open == 0
    return time.monotonic() - began


async def test_a_rollout_keeps_its_slot_to_its_end(bench: Any) -> None:
    pace = Pace(prepare=0.02, run=0.02, score=0.02)
    await run_at(bench, pace, 6, concurrency=2)
    assert max(pace.most.values()) == 2
    assert pace.total == 2


async def test_an_agents_run_is_stored_before_it_is_scored(bench: Any) -> None:
    """A verifier may end the process with `os._exit`: whoever claims the rollout next only scores
    it, so that the policy answers each task once."""
    ran = list[Any]()

    async def agent(text: str) -> str:
        return str(await ask(text))

    async def verify(result: Any) -> float:
        (run,) = await bench.store.runs()
        (row,) = await bench.store.rollouts(run)
        (attempt,) = await bench.store.attempts(row.id)
        ran.append((attempt.calls, await kept(bench.store, row.id)))
        return 1.0

    (rollout,) = await bench.run(agent, {"input": "x"}, verifier=verify)
    ((calls, stored),) = ran
    assert (calls, stored["result"]) == (1, rollout.result)


async def kept(store: Any, rollout: str) -> Any:
    def read(conn: Any) -> Any:
        return conn.execute("select ran from rollouts where id = ?", (rollout,)).fetchone()["ran"]

    return json.loads(await store._readers.read(read))
