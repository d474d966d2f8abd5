"""The algorithm process: opens the run, builds its parts (`build.py`) and starts the training loop
(`loop.py`). An evaluation plan has such a process too, with frozen policies.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import MappingProxyType

import aiohttp
import torch
from msgspec.structs import replace
from transformers.utils.logging import disable_progress_bar

from agentrl import run_owner
from agentrl.algorithms.judges.judge import make_judges
from agentrl.algorithms.prompts.main import search
from agentrl.algorithms.prompts.schedule import PromptSchedule
from agentrl.algorithms.sampling import evaluate
from agentrl.algorithms.sampling.collect import Collector
from agentrl.algorithms.sampling.rollouts import evaluation_rollouts
from agentrl.algorithms.sampling.task_sampler import TaskSampler
from agentrl.algorithms.train import build
from agentrl.algorithms.train.checkpoint import earlier_checkpoints, load_checkpoint, parse_name
from agentrl.algorithms.train.estimate import announce
from agentrl.algorithms.train.heldout import HeldoutEvaluator
from agentrl.algorithms.train.load_policies import evaluated_steps, load_policies, vocabulary_sizes
from agentrl.algorithms.train.loop import TrainingLoop
from agentrl.algorithms.train.offline import DatasetCollector
from agentrl.algorithms.train.policy_set import PolicySet
from agentrl.algorithms.train.serving import PolicyServers
from agentrl.algorithms.train.snapshots import SnapshotStore
from agentrl.base import folder_lock
from agentrl.base.loading import load_tasks
from agentrl.base.processes import PHASE, freeze_loaded, log_to_stderr
from agentrl.config import RunConfig
from agentrl.config.policies import EvaluationPlan, FrozenPolicy, trained_policies
from agentrl.errors import DamagedError
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.types import ENDED, POLICY, Json, RunState

log = logging.getLogger("agentrl.algorithm")


def main(config: RunConfig) -> None:
    """Train (or, with no steps, evaluate) until the run is complete."""
    log_to_stderr()
    asyncio.run(run(config, ready=freeze_loaded))


async def run(config: RunConfig, *, ready: Callable[[], None] = lambda: None) -> None:
    """Open the run, load the policies of its last committed step, and train to the last step.
    ready: called when everything is loaded."""
    algos = build.load_algorithms(config)
    greedy, resample = build.group_requirements(config, algos)
    log.log(PHASE, "reading the tasks")
    train, heldout = _tasks(config, "train"), _tasks(config, "heldout")
    _prepare(config.seed)
    async with AsyncExitStack() as stack:
        lock = stack.enter_context(folder_lock.shared(Path(config.output)))
        store = await stack.enter_async_context(open_store(config.store))
        # Opened before the policies are built, so runners can load their agents meanwhile.
        state = await run_owner.open_as_child(store, config)
        started = time.monotonic()
        models = load_policies(config)
        if any(model.built for model in models):
            await store.log(config.name, 0, {"time/build": time.monotonic() - started})
        announce(config, models)
        config = build.with_proven_packing(config, models)
        policies = build.make_policies(config, algos, models, stack)
        for updater in policies.updaters.values():
            if updater.teacher is not None:
                await updater.teacher.check()
        difficulty = build.make_difficulty(config.tasks, policies)
        pool = build.make_pool(config, policies)
        dataset = None
        if config.data.name:  # before the checkpoint is loaded: the initial policy is the reference
            updater, (model,) = policies.updaters[POLICY], models
            dataset = DatasetCollector(config, store, state.epoch, updater, model)
            await dataset.prepare()
        state = await resume_run(store, config, state, policies)
        prompts = PromptSchedule(store, config, state)
        await prompts.start()
        tasks = TaskSampler(config, train, greedy, difficulty, pool, prompts.in_use)
        vocabulary = vocabulary_sizes(models)
        collector = dataset or Collector(config, store, state.epoch, tasks, resample, vocabulary)
        serving = PolicyServers(config, [] if dataset else models)
        if dataset is None:
            log.log(PHASE, f"starting the policy server ({config.engine.kind})")
        await serving.start()
        stack.push_async_callback(serving.close)
        await serving.publish(policies.versions(state.step or evaluated_steps(config)))
        if stand_ins := build.first_versions(config):
            async with serving.updating():
                await serving.serve_frozen(stand_ins)
        snapshots = None
        if pool is not None and config.selfplay.opponents != "self":
            learner, folder = policies.updaters[pool.policy].learner, Path(config.output, "pool")
            snapshots = SnapshotStore(pool, learner, serving, store, config.name, folder)
            await snapshots.start(state.step)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        judges = await make_judges(config, store, session)
        evaluator = HeldoutEvaluator(
            config, store, state.epoch, state.identity, policies, serving, heldout, prompts
        )
        playing = policies, serving, collector, evaluator
        loop = TrainingLoop(config, store, state, *playing, lock, prompts, snapshots, judges)
        await evaluator.start(state.step)
        ready()
        await serving.during(loop.run())
        await store.log(config.name, config.steps, {ENDED: 1.0}, epoch=state.epoch)


async def play_plan(config: RunConfig, plan: EvaluationPlan) -> None:
    """Serve the run's policies and the players, and roll out every task with every lineup. Rollouts
    that have ended do not run again.

    Raises PolicyError for a player that cannot be served."""
    async with _served(config, plan.steps, plan.players) as (store, _):
        sampling = replace(config.sampling, temperature=plan.temperature)
        requested = {
            name: evaluation_rollouts(config, 0, name, plan.tasks, sampling, seats)
            for name, seats in plan.lineups.items()
        }
        await evaluate.play(store, requested)


async def search_prompts(config: RunConfig) -> None:
    """Search the agent's prompts with the run's policies, which do not learn."""
    async with _served(config, 0) as (store, state):
        await search(store, config, state)


@asynccontextmanager
async def _served(
    config: RunConfig, steps: int, players: Mapping[str, FrozenPolicy] = MappingProxyType({})
) -> AsyncIterator[tuple[Store, RunState]]:
    """Context in which the run's policies, trained for `steps` steps, and the players are served
    and announced."""
    _prepare(config.seed)
    async with open_store(config.store) as store:
        state = await run_owner.open_as_child(store, config)
        serving = PolicyServers(config, load_policies(config))
        await serving.start()
        try:
            async with serving.updating():
                await serving.publish(dict.fromkeys(trained_policies(config), steps))
                await serving.serve_frozen(players)
            await serving.announce(store, config.name, state.epoch)
            yield store, state
        finally:
            await serving.close()


async def resume_run(
    store: Store, config: RunConfig, state: RunState, policies: PolicySet
) -> RunState:
    """Load the newest undamaged checkpoint, then rewind later steps in the store; returns the run's
    state. Raises DamagedError if every checkpoint is damaged."""
    if state.checkpoint is None:
        return state
    last = config.checkpoint(state.checkpoint)
    folder = Path(config.output, "checkpoints")
    earlier = earlier_checkpoints(folder, last, state.identity)
    damage: DamagedError | None = None
    for path in (last, *earlier):
        try:
            policies.restore(load_checkpoint(path, policies))
        except DamagedError as error:
            log.warning("%s", error)
            damage = damage or error
            continue
        if path is last:
            return state
        steps, name = (parse_name(path) or (0, 0))[0], f"checkpoints/{path.name}"
        log.warning("Going on from %s: %d steps are trained again.", path, state.step - steps)
        await store.rewind(state.run, state.epoch, steps, name)
        rewound = {"steps/taken_back": float(state.step - steps)}
        await store.log(state.run, steps, rewound, epoch=state.epoch)
        return replace(state, step=steps, checkpoint=name)
    raise DamagedError(
        f"{damage}. No earlier one is whole: restore a copy, name one with `agentrl train --from "
        "PATH`, or train from the start with --from 0"
    )


def _prepare(seed: int) -> None:
    """Seed the random generators of the process, and hide the progress bars of loading."""
    disable_progress_bar()
    random.seed(seed)
    torch.manual_seed(seed)


def _tasks(config: RunConfig, split: str) -> list[dict[str, Json]]:
    path: str = getattr(config.tasks, split)
    return load_tasks(path, Path(config.root), key=f"tasks.{split}") if path else []
