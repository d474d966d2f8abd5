"""Threads: what they are for."""

from __future__ import annotations

import threading
from typing import Any

from agentrl.runners.executors.inprocess import InProcessExecutor, as_agent


async def test_async_agents_that_block_their_loops_hold_nobody_up(bench: Any) -> None:
    together = threading.Barrier(3, timeout=20)

    async def agent(text: str) -> int:
        together.wait()  # passes only if three run at the same time
        return threading.get_ident()

    executor = InProcessExecutor(as_agent(agent), threaded=True)
    rollouts = await bench.run(executor, *[{"input": "x"}] * 3)
    assert len({rollout.result for rollout in rollouts}) == 3, rollouts[0].failure
