"""Threads: what they are for."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from agentrl.runners.executors.inprocess import InProcessExecutor, as_agent
from agentrl.types import ErrorKind


async def test_async_agents_that_block_their_loops_hold_nobody_up(bench: Any) -> None:
    together = threading.Barrier(3, timeout=20)

    async def agent(text: str) -> int:
        together.wait()  # passes only if three run at the same time
        return threading.get_ident()

    executor = InProcessExecutor(as_agent(agent), threaded=True)
    rollouts = await bench.run(executor, *[{"input": "x"}] * 3)
    assert len({rollout.result for rollout in rollouts}) == 3, rollouts[0].failure


async def test_an_agent_that_cancels_itself_fails_alone(bench: Any) -> None:
    async def agent(text: str) -> str:
        if text == "cancel":
            raise asyncio.CancelledError
        return text

    executor = InProcessExecutor(as_agent(agent), threaded=True)
    cancelled, fine = await bench.run(executor, {"input": "cancel"}, {"input": "x"})
    assert cancelled.failure.kind is ErrorKind.AGENT
    assert fine.result == "x"
