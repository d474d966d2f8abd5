"""Seconds of an answer while the served policy is trained, against those while it is not.

Four agents call a model of 4.6 M parameters, served by the embedded engine on this machine's first
two cores, in sessions of three calls of at most 16 tokens. Phases of `PHASE` seconds alternate:
in one no session is labelled, in the next all are, so that the learner takes a step whenever four
sessions have ended. `p50_ms`, `p99_ms`: of the phases without training, `training_p50_ms`,
`training_p99_ms`: with; `p99_ratio`: of the two; `cut`: answers that failed; `steps`: trained.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from tests.agentrl.live.load import Load, keep_labelling
from tests.agentrl.live.shop import RUN, running
from tests.tiny_models import qwen2

PHASE = float(os.environ.get("LIVE_PHASE", "40"))  # seconds
ROUNDS = 3
SHAPE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 5}


def measure() -> dict[str, Any]:
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:2]))
    with tempfile.TemporaryDirectory() as folder:
        model = qwen2(Path(folder, "model"), seed=0, **SHAPE)
        return asyncio.run(compare(Path(folder), model))


async def compare(folder: Path, model: Path) -> dict[str, Any]:
    settings = ("sampling.max_tokens=16", "live.promotion.rule=always")
    async with running(folder, model, *settings) as (_, store, client):
        load = Load(client, pause=0.5)
        working = asyncio.create_task(load.run())
        await asyncio.sleep(PHASE / 4)  # everything is warm
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for phase in range(2 * ROUNDS):
            training = phase % 2 == 1
            labelling = asyncio.create_task(keep_labelling(store)) if training else None
            load.seconds.clear()
            await asyncio.sleep(PHASE)
            seconds[training] += load.seconds
            if labelling:
                labelling.cancel()
        load.stopped = True
        await working
        quiet, busy = (statistics.quantiles(seconds[one], n=100) for one in (False, True))
        steps = [row for row in await store.steps(RUN) if row.committed]
        return {
            "p50_ms": 1000 * quiet[49],
            "p99_ms": 1000 * quiet[98],
            "training_p50_ms": 1000 * busy[49],
            "training_p99_ms": 1000 * busy[98],
            "p99_ratio": busy[98] / quiet[98],
            "cut": len(load.failed),
            "steps": len(steps),
            "update_s": statistics.fmean(row.metrics.get("time/update", 0.0) for row in steps),
        }
