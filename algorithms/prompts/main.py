"""The algorithm process of a run that only calls `[upstreams]`. Does not import torch."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agentrl import run_owner
from agentrl.algorithms.prompts.schedule import PromptSchedule
from agentrl.algorithms.prompts.stored import play_heldout, search_prompts
from agentrl.algorithms.sampling.evaluate import evaluate_heldout
from agentrl.base.loading import load_tasks
from agentrl.base.processes import log_to_stderr
from agentrl.config import RunConfig
from agentrl.config.prompts import prompt_texts
from agentrl.prompts import candidate_id
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.types import ENDED, RunState


def main(config: RunConfig) -> None:
    """Evaluate the upstreams of a run."""
    log_to_stderr()
    asyncio.run(evaluate_upstreams(config))


async def evaluate_upstreams(config: RunConfig) -> None:
    """Score the upstreams on the held-out tasks."""
    tasks = load_tasks(config.tasks.heldout, Path(config.root), key="tasks.heldout")
    tasks = tasks[: config.eval.tasks or None]
    async with open_store(config.store) as store:
        state = await run_owner.open_as_child(store, config)
        prompts = PromptSchedule(store, config, state)
        await prompts.start()
        epoch, candidate = state.epoch, prompts.in_use.id
        await evaluate_heldout(store, config, epoch, 0, tasks, candidate)
        await store.log(config.name, 0, {ENDED: 1.0}, epoch=epoch)


async def search_upstreams(config: RunConfig) -> None:
    async with open_store(config.store) as store:
        state = await run_owner.open_as_child(store, config)
        await search(store, config, state)


async def search(store: Store, config: RunConfig, state: RunState) -> None:
    """Search prompts, then score the result and the agent's own texts on the held-out tasks."""
    texts = prompt_texts(config)
    best = await search_prompts(store, config, state, texts, None)
    step = len([row for row in await store.steps(config.name) if row.committed])
    scored = {"prompts/heldout_before": candidate_id(texts), "prompts/heldout": best.id}
    await play_heldout(store, config, state, scored, step)
    await store.log(config.name, 0, {ENDED: 1.0}, epoch=state.epoch)
