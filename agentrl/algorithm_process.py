"""The algorithm process of a run, with the features that `agentrl.algorithms` must not import.

It serves and trains the policies of the run, or only evaluates the models of `[upstreams]` of a run
without any, for which it needs no torch.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from agentrl.algorithms.prompts import candidate_in_use
from agentrl.algorithms.sampling.evaluate import evaluate_heldout
from agentrl.core.config import RunConfig
from agentrl.core.config.derived import has_no_own_policy
from agentrl.core.config.run_file import tasks_of
from agentrl.core.processes import log_to_stderr
from agentrl.core.types import ENDED
from agentrl.store import open_store, run_folder

if TYPE_CHECKING:
    from agentrl.algorithms.train.features import Feature


def run_algorithm(config: RunConfig) -> None:
    """Train, or evaluate, until the run is complete."""
    if has_no_own_policy(config):
        log_to_stderr()
        asyncio.run(evaluate_upstreams(config))
    else:
        from agentrl.algorithms.train.main import main as train

        train(config, added_features(config))


async def evaluate_upstreams(config: RunConfig) -> None:
    """Score the upstreams on the held-out tasks."""
    tasks = tasks_of(config, "heldout")
    tasks = tasks[: config.eval.tasks or None]
    async with open_store(config.store) as store:
        state = await run_folder.open_as_child(store, config)
        candidate = await candidate_in_use(store, config, state)
        await evaluate_heldout(store, config, state.epoch, 0, tasks, candidate)
        await store.log(config.name, 0, {ENDED: 1.0}, epoch=state.epoch)


def added_features(config: RunConfig) -> list[Feature]:
    """The features of training that `agentrl.algorithms` does not import, in their order."""
    from agentrl.algorithms.vision.training import ImageTextPolicies
    from agentrl.live.source import Live
    from agentrl.view.records import RunOrigin

    live = [Live()] if config.live.running else []
    return [*live, RunOrigin(), ImageTextPolicies()]
