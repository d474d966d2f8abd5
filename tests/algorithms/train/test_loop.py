"""The order of a training step, wherever it is cut off, and what goes on beside the update."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from agentrl.algorithms.sampling.collect import Collected
from agentrl.algorithms.train import saving
from agentrl.algorithms.train.features import ServedRun
from agentrl.algorithms.train.loop import TrainingLoop
from agentrl.core.types import EMPTY, StepCommit
from tests import factories

STEPS = 3


class Killed(Exception):
    pass


class StandIn:
    """For all that a loop calls, which does nothing."""

    epoch, step, identity, checkpoint = 1, 0, ("r", 1), ""

    def update(self, step: int, groups: list[Any]) -> dict[str, float]:
        return {"rollouts/usable": 1.0, "rollouts": 1.0, "tokens": 1.0, "tokens/action": 1.0}

    def restore(self, state: dict[str, Any]) -> None: ...
    def update_references(self, since: int, steps: int) -> None: ...

    def versions(self, steps: int) -> dict[str, int]:
        return {"policy": steps}

    def dump(self) -> dict[str, Any]:
        return {}

    def credits(self, step: int, groups: object = None) -> list[Any]:
        return []

    step_rewards = judgements = credits

    async def collect(self, step: int) -> Collected:
        return Collected([], [], {})

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        yield

    def idle_seconds(self) -> float:
        return 0.0

    async def nothing(self, *given: Any) -> Any:
        return []

    publish = announce = steps = finish = nothing

    async def score(self, step: int) -> bool:
        return False

    def check(self) -> None: ...

    def served_run(self, folder: Path, **tables: Any) -> ServedRun:
        config, it = factories.config(output=str(folder), **tables), cast("Any", self)
        return ServedRun(
            config=config, store=it, state=it, lock=it, closing=AsyncExitStack(), models=[],
            policies=it, serving=it,
        )  # fmt: skip


class Parts(StandIn):
    """After `last` calls it dies."""

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
        return super().update(step, groups)

    async def collect(self, step: int) -> Collected:
        self.loop_lives.clear()
        asyncio.get_running_loop().call_soon(asyncio.create_task, self.live())
        return await super().collect(step)

    async def live(self) -> None:
        self.loop_lives.set()

    async def commit_step(self, commit: StepCommit) -> None:
        self.call()
        assert EMPTY not in commit.metrics
        self.committed = commit.step + 1
        self.call()

    async def publish(self, versions: dict[str, int]) -> None:
        self.call()
        self.served.append(versions["policy"])

    async def announce(self, *given: Any) -> None:
        self.call()

    def check(self) -> None:
        self.call()


@pytest.mark.parametrize("last", range(3 * 8))
async def test_no_version_is_served_that_is_not_committed(
    last: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parts: Any = Parts(last)
    monkeypatch.setattr(saving, "save_checkpoint", lambda *given: parts.call())
    monkeypatch.setattr(saving, "prune", lambda *given, **more: parts.call())
    loop = TrainingLoop(parts.served_run(tmp_path, steps=STEPS), parts, parts, [])
    try:
        await loop.run()
    except Killed:
        assert last < 8 * STEPS + 1
    assert max(parts.served) <= parts.committed
    assert parts.committed - max(parts.served) <= 1
