"""The algorithm process of a run that only calls `[upstreams]`. Does not import torch."""

from __future__ import annotations

import asyncio

from agentrl import run_owner
from agentrl.algorithms.prompts.schedule import candidate_in_use
from agentrl.algorithms.sampling.evaluate import evaluate_heldout
from agentrl.base.processes import log_to_stderr
from agentrl.config import RunConfig
from agentrl.config.run_file import tasks_of
from agentrl.store import open_store
from agentrl.types import ENDED


def main(config: RunConfig) -> None:
    """Evaluate the upstreams of a run."""
    log_to_stderr()
    asyncio.run(evaluate_upstreams(config))


async def evaluate_upstreams(config: RunConfig) -> None:
    """Score the upstreams on the held-out tasks."""
    tasks = tasks_of(config, "heldout")
    tasks = tasks[: config.eval.tasks or None]
    async with open_store(config.store) as store:
        state = await run_owner.open_as_child(store, config)
        candidate = await candidate_in_use(store, config, state)
        await evaluate_heldout(store, config, state.epoch, 0, tasks, candidate)
        await store.log(config.name, 0, {ENDED: 1.0}, epoch=state.epoch)
