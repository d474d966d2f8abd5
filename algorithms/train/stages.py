"""The stages of a run: opened, with policies in memory, with policy servers (see `features.py`);
and algorithm, updater and state of every trained policy.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from msgspec.structs import replace
from transformers.utils.logging import disable_progress_bar

from agentrl.algorithms.credit.dump import CreditRecorder, keep_in
from agentrl.algorithms.data.state import AlgorithmState
from agentrl.algorithms.judges import check_judges
from agentrl.algorithms.learners import factory
from agentrl.algorithms.model.attention import context_length
from agentrl.algorithms.model.load import vocabulary_gap, vocabulary_size
from agentrl.algorithms.objective.core import Algo, ReferenceControl
from agentrl.algorithms.preferences.collector import from_dataset, on_dataset
from agentrl.algorithms.presets import registry
from agentrl.algorithms.presets.registry import check_group, check_staleness
from agentrl.algorithms.proof import announce, with_proven_packing
from agentrl.algorithms.reward_models import check_reward_models, with_reward_models
from agentrl.algorithms.sampling.collect import resampling_reward
from agentrl.algorithms.sampling.replays import (
    check_counterfactuals,
    with_optional_reward,
    with_role_rewards,
)
from agentrl.algorithms.selfplay import check_seat_comparison
from agentrl.algorithms.teachers import check_teachers, with_teacher_server
from agentrl.algorithms.train.checkpoint import earlier_checkpoints, load_checkpoint, parse_name
from agentrl.algorithms.train.features import Feature, LoadedRun, OpenRun, ServedRun
from agentrl.algorithms.train.kl_target import with_kl_target
from agentrl.algorithms.train.load_policies import evaluated_steps, load_policies
from agentrl.algorithms.train.metrics import MAX_BAD_STEPS, BadSteps
from agentrl.algorithms.train.optimize import STEP_SIZE, KlLimit, largest_kl
from agentrl.algorithms.train.policies import LoadedModel, PolicySet
from agentrl.algorithms.train.prepare import Completer, Preprocessor, ProcessedScorer
from agentrl.algorithms.train.serving import PolicyServers
from agentrl.algorithms.train.step import Updater
from agentrl.core import files
from agentrl.core.config import RunConfig
from agentrl.core.config.derived import FrozenPolicy, self_playing_policy, trained_policies, view
from agentrl.core.config.infrastructure import EngineConfig
from agentrl.core.errors import ConfigError, DamagedError, PolicyError
from agentrl.core.processes import log_phase
from agentrl.core.types import EMPTY, POLICY, RunState
from agentrl.store import open_store, run_folder
from agentrl.store.base import Store


def load_algorithms(config: RunConfig) -> dict[str, Algo]:
    """Build the algorithm of each trained policy. Raises ConfigError for invalid settings."""
    algos = {}
    for name in trained_policies(config):
        try:
            algos[name] = load_algorithm(view(config, name))
        except ConfigError as error:
            where = f"policies.{name}: " if config.policies else ""
            raise ConfigError(f"{where}{error}") from None
    return algos


def group_requirements(config: RunConfig, algos: Mapping[str, Algo]) -> tuple[bool, str | None]:
    """The algorithms' requirements on groups, which all policies share: whether the first rollout
    is greedy, and the reward that must differ within a group, or None.

    Raises ConfigError if they disagree, or do not fit counterfactuals or self-play."""
    required = {
        name: (algo.needs_greedy, resampling_reward(view(config, name).algorithm, algo))
        for name, algo in algos.items()
    }
    (first, wanted), *others = required.items()
    for name, requirements in others:
        if requirements != wanted:
            raise ConfigError(
                f"policies.{first} and policies.{name} learn from the same groups, and their "
                f"presets {algos[first].name!r} and {algos[name].name!r} need different ones (a "
                "greedy rollout, or dynamic sampling); choose presets that agree, or set "
                "algorithm.dynamic_sampling = false"
            )
    if config.algorithm.counterfactual.substitutes:
        check_counterfactuals(config, algos, wanted[1])
    if config.selfplay.seats and config.steps:
        check_seat_comparison(algos[self_playing_policy(config)])
    return wanted


def load_algorithm(config: RunConfig) -> Algo:
    """Build the algorithm of the run file. Raises ConfigError for settings that do not fit it."""
    supplies = factory.available_outputs(config)
    settings = config.algorithm
    algo = registry.make(
        settings.preset, settings.options, supplies=supplies, root=Path(config.root)
    )
    if config.judges:
        check_judges(config, algo)
    if config.data.name:
        algo = on_dataset(config, algo)
    algo = with_optional_reward(config.algorithm.counterfactual, algo)
    if config.reward_models:
        check_reward_models(config, algo)
    check_group(settings, algo)
    check_staleness(settings, algo)
    factory.refuse_unused_settings(config, algo)
    return algo


def make_policies(
    config: RunConfig,
    algos: Mapping[str, Algo],
    models: Sequence[LoadedModel],
    stack: AsyncExitStack,
) -> PolicySet:
    """Build the trained policies, with the state of the run. `stack` closes their learners."""
    updaters = {}
    for name, algo in algos.items():
        model = next(model for model in models if name in model.policies)
        basic = make_updater(view(config, name), name, algo, model)
        stack.callback(basic.learner.close)
        dumps = Path(config.output, "dumps", name if config.policies else "")
        updaters[name] = updater = extend_updater(basic, model, dumps)
        if updater.limit is not None:
            updater.state.parts[STEP_SIZE] = updater.limit
    state = AlgorithmState() if config.policies else updaters[POLICY].state
    return PolicySet(config, updaters, state)


def make_updater(config: RunConfig, name: str, algo: Algo, model: LoadedModel) -> Updater:
    """Build the updater of one policy. config: the policy's view of the run."""
    tokenizer = model.tokenizer
    learner = factory.make_learner(config, algo, model.model, tokenizer, model.adapters, name)
    context = context_length(model.model)
    completers: list[Completer] = [ProcessedScorer(learner, context, name, algo.rewards)]
    return Updater(
        config,
        algo,
        learner,
        state=AlgorithmState(algo.remembered, seed=config.seed),
        preprocessor=Preprocessor(
            tuple(completers), context=context, policy=name, tokenizer=tokenizer
        ),
        reference_control=ReferenceControl(learner.frozen.get("reference")),
        bad_steps=BadSteps(MAX_BAD_STEPS),
        policy=name,
        limit=KlLimit(learner, largest_kl(config.algorithm), config.seed, name),
    )


def extend_updater(updater: Updater, model: LoadedModel, dumps: Path) -> Updater:
    """The updater with the additions of its policy's settings. dumps: the folder for the batches of
    failed optimizer steps."""
    config = updater.config
    if updater.bad_steps is not None:
        updater.bad_steps.keep = partial(keep_in, dumps)
    updater = dataclasses.replace(updater, recorder=CreditRecorder(updater.policy))
    updater = with_kl_target(updater)
    if config.data.name:
        updater = from_dataset(updater)
    updater = with_role_rewards(updater)
    updater = with_reward_models(updater, model)
    return with_teacher_server(updater, model)


log = logging.getLogger("agentrl.algorithm")


async def open_run(config: RunConfig, closing: AsyncExitStack) -> OpenRun:
    lock = closing.enter_context(files.shared(Path(config.output)))
    store = await closing.enter_async_context(open_store(config.store))
    # The run is opened before the policies are built, so that runners can load their agents
    # meanwhile.
    state = await run_folder.open_as_child(store, config)
    return OpenRun(config=config, store=store, state=state, lock=lock, closing=closing)


async def load_run(
    opened: OpenRun, algos: Mapping[str, Algo], features: Sequence[Feature]
) -> LoadedRun:
    """The run with the policies of its last checkpoint in memory."""
    config, started = opened.config, time.monotonic()
    models = load_policies(config)
    if any(model.built for model in models):
        took = {"time/build": time.monotonic() - started}
        await opened.store.log(config.name, 0, took)
    for model in models:
        check_vocabulary(model)
        check_context(model, config)
    announce(config, models, opened.state.step)
    config = with_proven_packing(config, models)
    policies = make_policies(config, algos, models, opened.closing)
    now = {**vars(opened), "config": config}
    loaded = LoadedRun(**now, models=models, policies=policies)
    for feature in features:
        await feature.prepare(loaded)
    await check_teachers(updater.teacher for updater in policies.updaters.values())
    state = await resume_run(loaded.store, config, loaded.state, policies)
    return dataclasses.replace(loaded, state=state)


def check_context(loaded: LoadedModel, config: RunConfig) -> None:
    """Log that a model's context is shorter than the run file's."""
    requested, longest = config.engine.max_context, context_length(loaded.model)
    if longest and requested > longest and requested != EngineConfig().max_context:
        log.warning(
            "engine.max_context = %d is more than the model's context: calls have at most %d "
            "tokens, of prompt and answer", requested, longest,
        )  # fmt: skip


def check_vocabulary(loaded: LoadedModel) -> None:
    """Raise PolicyError for a tokenizer with tokens that its model cannot read, and log that it has
    far fewer than the model."""
    if gap := vocabulary_gap(loaded.model, loaded.tokenizer):
        if len(loaded.tokenizer) > vocabulary_size(loaded.model):
            raise PolicyError(f"model {loaded.source!r}: {gap}")
        log.warning("model %r: %s", loaded.source, gap)


async def serve_run(loaded: LoadedRun, models: Sequence[LoadedModel]) -> ServedRun:
    """Start servers of these models, with the current versions."""
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
    """Whether a step after the first `steps` steps has learned something; an empty step needs no
    checkpoint."""
    rows = await store.steps(state.run, after=steps - 1)
    return any(row.committed and EMPTY not in row.metrics for row in rows)


async def _train_again(store: Store, state: RunState, path: Path | None) -> RunState:
    """Roll back the steps after a checkpoint (None: all); their groups are then trained again."""
    steps, name = _steps(path), f"checkpoints/{path.name}" if path else None
    lost, where = state.step - steps, path or "the untrained policy"
    log.warning("Going on from %s: %d steps are trained again.", where, lost)
    await store.rewind(state.run, state.epoch, steps, name)
    await store.log(state.run, steps, {"steps/rolled_back": float(lost)}, epoch=state.epoch)
    return replace(state, step=steps, checkpoint=name)


@asynccontextmanager
async def served(
    config: RunConfig, steps: int, players: Mapping[str, FrozenPolicy] = MappingProxyType({})
) -> AsyncIterator[tuple[Store, RunState]]:
    """Context in which the run's policies, trained for `steps` steps, and the players are served
    and announced."""
    prepare_process(config.seed)
    async with open_store(config.store) as store:
        state = await run_folder.open_as_child(store, config)
        serving = PolicyServers(config, load_policies(config))
        await serving.start(frozen=len(players))
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
