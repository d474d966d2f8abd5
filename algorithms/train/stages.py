"""A run in stages: opened, with its policies in memory, with their servers. See `features.py`."""

from __future__ import annotations

import dataclasses
import logging
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import MappingProxyType

import torch
from msgspec.structs import replace
from transformers.utils.logging import disable_progress_bar

from agentrl import run_owner
from agentrl.algorithms.model.attention import context_length
from agentrl.algorithms.model.load import vocabulary_gap, vocabulary_size
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.preflight.training import announce, with_proven_packing
from agentrl.algorithms.teachers.training import check_teachers
from agentrl.algorithms.train import build
from agentrl.algorithms.train.checkpoint import earlier_checkpoints, load_checkpoint, parse_name
from agentrl.algorithms.train.features import Feature, LoadedRun, OpenRun, ServedRun
from agentrl.algorithms.train.load_policies import LoadedModel, evaluated_steps, load_policies
from agentrl.algorithms.train.policy_set import PolicySet
from agentrl.algorithms.train.serving import PolicyServers
from agentrl.base import folder_lock
from agentrl.base.processes import log_phase
from agentrl.config import RunConfig
from agentrl.config.infrastructure import EngineConfig
from agentrl.config.policies import FrozenPolicy, trained_policies
from agentrl.errors import DamagedError, PolicyError
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.types import EMPTY, RunState

log = logging.getLogger("agentrl.algorithm")


async def open_run(config: RunConfig, closing: AsyncExitStack) -> OpenRun:
    lock = closing.enter_context(folder_lock.shared(Path(config.output)))
    store = await closing.enter_async_context(open_store(config.store))
    # Opened before the policies are built, so runners can load their agents meanwhile.
    state = await run_owner.open_as_child(store, config)
    return OpenRun(config=config, store=store, state=state, lock=lock, closing=closing)


async def load_run(
    opened: OpenRun, algos: Mapping[str, Algo], features: Sequence[Feature]
) -> LoadedRun:
    """With the policies of the last checkpoint in memory."""
    config, started = opened.config, time.monotonic()
    models = load_policies(config)
    if any(model.built for model in models):
        took = {"time/build": time.monotonic() - started}
        await opened.store.log(config.name, 0, took)
    for model in models:
        check_vocabulary(model)
        check_context(model, config)
    announce(config, models)
    config = with_proven_packing(config, models)
    policies = build.make_policies(config, algos, models, opened.closing)
    now = {**vars(opened), "config": config}
    loaded = LoadedRun(**now, models=models, policies=policies)
    for feature in features:
        await feature.prepare(loaded)
    await check_teachers(updater.teacher for updater in policies.updaters.values())
    state = await resume_run(loaded.store, config, loaded.state, policies)
    return dataclasses.replace(loaded, state=state)


def check_context(loaded: LoadedModel, config: RunConfig) -> None:
    """Log that a model's context is shorter than the run file says."""
    asked, longest = config.engine.max_context, context_length(loaded.model)
    if longest and asked > longest and asked != EngineConfig().max_context:
        log.warning(
            "engine.max_context = %d is more than the model's context: calls have at most %d "
            "tokens, of prompt and answer", asked, longest,
        )  # fmt: skip


def check_vocabulary(loaded: LoadedModel) -> None:
    """Raise PolicyError for a tokenizer with tokens that its model cannot read, and log that it has
    far fewer than the model."""
    if gap := vocabulary_gap(loaded.model, loaded.tokenizer):
        if len(loaded.tokenizer) > vocabulary_size(loaded.model):
            raise PolicyError(f"model {loaded.source!r}: {gap}")
        log.warning("model %r: %s", loaded.source, gap)


async def serve_run(loaded: LoadedRun, models: Sequence[LoadedModel]) -> ServedRun:
    """With servers of these models, which serve the current versions."""
    config, serving = loaded.config, PolicyServers(loaded.config, models)
    if models:
        log_phase(log, f"starting the policy server ({config.engine.kind})")
    await serving.start()
    loaded.closing.push_async_callback(serving.close)
    versions = loaded.policies.versions(loaded.state.step or evaluated_steps(config))
    await serving.publish(versions)
    return ServedRun(**vars(loaded), serving=serving)


async def resume_run(
    store: Store, config: RunConfig, state: RunState, policies: PolicySet
) -> RunState:
    """Load the newest undamaged checkpoint, then rewind later steps that learned; returns the run's
    state. Raises DamagedError if every checkpoint is damaged."""
    if state.checkpoint is None:
        return await _train_again(store, state, None) if await _lost(store, state, 0) else state
    last = config.checkpoint_path(state.checkpoint)
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
        if path is last and not await _lost(store, state, _steps(path)):
            return state
        return await _train_again(store, state, path)
    raise DamagedError(
        f"{damage}. No earlier one is whole: restore a copy, name one with `agentrl train --from "
        "PATH`, or train from the start with --from 0"
    )


def _steps(path: Path | None) -> int:
    """The steps of a checkpoint."""
    return ((path and parse_name(path)) or (0, 0))[0]


async def _lost(store: Store, state: RunState, steps: int) -> bool:
    """Whether the run has learned in a step after the first `steps` ones; an empty step is whole
    without a checkpoint."""
    rows = await store.steps(state.run, after=steps - 1)
    return any(row.committed and EMPTY not in row.metrics for row in rows)


async def _train_again(store: Store, state: RunState, path: Path | None) -> RunState:
    """Roll back the steps after a checkpoint (None: all), whose groups are then trained again."""
    steps, name = _steps(path), f"checkpoints/{path.name}" if path else None
    lost, where = state.step - steps, path or "the untrained policy"
    log.warning("Going on from %s: %d steps are trained again.", where, lost)
    await store.rewind(state.run, state.epoch, steps, name)
    await store.log(state.run, steps, {"steps/taken_back": float(lost)}, epoch=state.epoch)
    return replace(state, step=steps, checkpoint=name)


@asynccontextmanager
async def served(
    config: RunConfig, steps: int, players: Mapping[str, FrozenPolicy] = MappingProxyType({})
) -> AsyncIterator[tuple[Store, RunState]]:
    """Context in which the run's policies, trained for `steps` steps, and the players are served
    and announced."""
    prepare_process(config.seed)
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


def prepare_process(seed: int) -> None:
    """Seed the random generators of the process, and hide the progress bars of loading."""
    disable_progress_bar()
    random.seed(seed)
    torch.manual_seed(seed)
