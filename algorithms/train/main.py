"""The algorithm process: it opens the run, builds what trains and serves, and starts the loop.

`loop.py` is the training loop itself, `build.py` what it is put together from.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import torch
from transformers.utils.logging import disable_progress_bar

from agentrl import folder_lock
from agentrl.algorithms.sampling import evaluate
from agentrl.algorithms.sampling.collect import Collector
from agentrl.algorithms.sampling.selfplay import OpponentPool
from agentrl.algorithms.sampling.task_sampler import TaskSampler
from agentrl.algorithms.train import build
from agentrl.algorithms.train.load_policies import LoadedModel, load_policies, vocabulary_sizes
from agentrl.algorithms.train.loop import TrainingLoop
from agentrl.algorithms.train.policy_set import PolicySet
from agentrl.algorithms.train.resume import resume_run
from agentrl.algorithms.train.serving import PolicyServers
from agentrl.algorithms.train.snapshots import SnapshotStore
from agentrl.config import RunConfig
from agentrl.config.policies import has_no_own_policy
from agentrl.loading import load_tasks
from agentrl.processes import PHASE, log_to_stderr
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.types import ENDED, Json

log = logging.getLogger("agentrl.algorithm")


def main(config: RunConfig) -> None:
    """Train (or, with no steps, evaluate) until the run is complete."""
    log_to_stderr()
    asyncio.run(evaluate.evaluate_upstreams(config) if has_no_own_policy(config) else run(config))


async def run(config: RunConfig) -> None:
    """Open the run, load the policies of its last committed step, and train to the last step."""
    algos = build.load_algorithms(config)
    greedy, resample = build.group_requirements(config, algos)
    log.log(PHASE, "reading the tasks")
    train, heldout = _tasks(config, "train"), _tasks(config, "heldout")
    disable_progress_bar()  # the console shows the progress of the run
    random.seed(config.seed)
    torch.manual_seed(config.seed)
    async with AsyncExitStack() as stack:
        lock = stack.enter_context(folder_lock.shared(Path(config.output)))
        store = await stack.enter_async_context(open_store(config.store))
        # Opened before the policies are built, so that runners load their agents in the meantime.
        state = await store.open_run(config.name, msgspec.to_builtins(config))
        models = await _load_models(config, store)
        policies = build.make_policies(config, algos, models, stack)
        difficulty = build.make_difficulty(config, policies)
        pool = build.make_pool(config, policies)
        state = await resume_run(store, config, state, policies)
        tasks = TaskSampler(config, train, greedy, difficulty, pool)
        vocabulary = vocabulary_sizes(models)
        collector = Collector(config, store, state.epoch, tasks, resample, vocabulary)
        serving = PolicyServers(config, models)
        log.log(PHASE, f"starting the policy server ({config.engine.kind})")
        await serving.start()
        stack.push_async_callback(serving.close)
        await serving.publish(policies.versions(state.step))
        if stand_ins := build.first_versions(config):
            async with serving.updating():
                await serving.serve_frozen(stand_ins)
        snapshots = _snapshots(config, policies, serving, store, pool)
        if snapshots is not None:
            await snapshots.start(state.step)
        loop = TrainingLoop(
            config, store, state, policies, serving, collector, heldout, lock, snapshots
        )
        await serving.during(loop.run())
        await store.log(config.name, config.steps, {ENDED: 1.0}, epoch=state.epoch)


async def _load_models(config: RunConfig, store: Store) -> list[LoadedModel]:
    """The models of all policies; how long building them took is logged."""
    started = time.monotonic()
    models = load_policies(config)
    if any(model.built for model in models):
        await store.log(config.name, 0, {"time/build": time.monotonic() - started})
    return models


def _snapshots(
    config: RunConfig,
    policies: PolicySet,
    serving: PolicyServers,
    store: Store,
    pool: OpponentPool | None,
) -> SnapshotStore | None:
    """What keeps and serves the snapshots of a pool, if there is one."""
    if pool is None or config.selfplay.opponents == "self":
        return None
    learner = policies.updaters[pool.policy].learner
    folder = Path(config.output, "pool")
    return SnapshotStore(pool, learner, serving, store, config.name, folder)


def _tasks(config: RunConfig, split: str) -> list[dict[str, Json]]:
    path: str = getattr(config.tasks, split)
    return load_tasks(path, Path(config.root), key=f"tasks.{split}") if path else []
