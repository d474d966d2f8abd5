"""The order of a training step, wherever it is cut off, and what goes on beside the update."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl.algorithms.sampling.collect import Collected
from agentrl.algorithms.train import saving
from agentrl.algorithms.train.hooks import Hooks, ServedRun
from agentrl.algorithms.train.loop import TrainingLoop
from agentrl.config import resolve
from agentrl.types import EMPTY, StepCommit

STEPS = 3


class Killed(Exception):
    pass


class Parts:
    """Stands in for all that a loop calls; after `last` calls it dies."""

    def __init__(self, last: int) -> None:
        self.left = last
        self.committed, self.served = 0, [0]
        self.loop_lives = threading.Event()

    def call(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed

    def update(self, step: int, groups: list[Any]) -> dict[str, float]:
        self.call()
        assert self.loop_lives.wait(10), "the update kept the event loop from running"
        return {"rollouts/usable": 1.0, "rollouts": 1.0, "tokens": 1.0, "tokens/action": 1.0}

    def restore(self, state: dict[str, Any]) -> None: ...
    def update_references(self, since: int, steps: int) -> None: ...

    def versions(self, steps: int) -> dict[str, int]:
        return {"policy": steps}

    def dump(self) -> dict[str, Any]:
        return {}

    def credits(self, step: int) -> list[Any]:
        return []

    step_rewards = judgements = credits

    async def collect(self, step: int) -> Collected:
        self.loop_lives.clear()
        asyncio.get_running_loop().call_soon(asyncio.create_task, self.live())
        return Collected([], [], {})

    async def live(self) -> None:
        self.loop_lives.set()

    async def commit_step(self, commit: StepCommit) -> None:
        self.call()
        assert EMPTY not in commit.metrics
        self.committed = commit.step + 1
        self.call()

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        yield

    def idle_seconds(self) -> float:
        return 0.0

    async def publish(self, versions: dict[str, int]) -> None:
        self.call()
        self.served.append(versions["policy"])

    async def announce(self, *given: Any) -> None:
        self.call()

    async def steps(self, run: str) -> list[Any]:
        return []

    async def score(self, step: int) -> bool:
        return False

    async def finish(self) -> None: ...

    def check(self) -> None:
        self.call()

    epoch, step, identity, checkpoint = 1, 0, ("r", 1), None


@pytest.mark.parametrize("last", range(3 * 8))
async def test_no_version_is_served_that_is_not_committed(
    last: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parts: Any = Parts(last)
    monkeypatch.setattr(saving, "save_checkpoint", lambda *given: parts.call())
    monkeypatch.setattr(saving, "prune", lambda *given, **more: parts.call())
    config = resolve({"name": "r", "steps": STEPS, "output": str(tmp_path)}, source="test")
    live = ServedRun(
        config=config, store=parts, state=parts, lock=parts, closing=AsyncExitStack(), models=[],
        policies=parts, serving=parts,
    )  # fmt: skip
    loop = TrainingLoop(live, parts, parts, Hooks())
    try:
        await loop.run()
    except Killed:
        assert last < 8 * STEPS + 1
    assert max(parts.served) <= parts.committed
    assert parts.committed - max(parts.served) <= 1
