"""Processes of a live run that are killed with SIGKILL under the load of four agents.

`kills`: how many times each process was killed; the next is killed when agents were answered
again. Agents are OpenAI's client as it comes, with its two retries, in sessions of three calls.
`failed_requests`: calls that the client gave up. `lost`: answers that an agent has read and the
store does not have. `trained_twice`: questions with more than one trained answer, and groups of
more than one step. `slowest_s`: the slowest answer, `answers`: all of them; `steps`: trained.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.agentrl.live.load import Load, keep_labelling, lost, survive, trained_twice
from tests.agentrl.live.shop import RUN, running
from tests.tiny_models import qwen2

PROCESSES = ("gateway", "algorithm", "watch", "supervisor")
KILLS = int(os.environ.get("LIVE_KILLS", "30"))  # of each process


def measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        model = qwen2(Path(folder, "model"), seed=0)
        return asyncio.run(kill(Path(folder), model))


async def kill(folder: Path, model: Path) -> dict[str, Any]:
    async with running(folder, model, "live.promotion.rule=always") as (shop, store, client):
        load = Load(client)
        working = asyncio.create_task(load.run())
        labelling = asyncio.create_task(keep_labelling(store))
        for number in range(KILLS):
            for name in PROCESSES:
                await survive(shop, store, load, name)
            print(f"{number + 1} of {KILLS} rounds, {len(load.answers)} answers, "
                  f"{len(load.failed)} failed", flush=True)  # fmt: skip
        load.stopped = True
        await working
        labelling.cancel()
        steps = [row for row in await store.steps(RUN) if row.committed]
        return {
            "kills": KILLS,
            "answers": len(load.answers),
            "failed_requests": len(load.failed),
            "lost": len(await lost(load, store)),
            "trained_twice": len(await trained_twice(store)),
            "slowest_s": max(load.seconds),
            "steps": len(steps),
            "failures": load.failed[:3],
        }
