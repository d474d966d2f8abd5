"""The algorithm process: model, learner and policy server around the training loop."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from agentrl.algorithms import beside, presets
from agentrl.algorithms.adapters import Adapters
from agentrl.algorithms.checkpoint import atomic_directory, load_checkpoint
from agentrl.algorithms.collect import Collector, rule
from agentrl.algorithms.controller import Anchor, Following
from agentrl.algorithms.difficulty import PART, Difficulty
from agentrl.algorithms.dump import BadSteps
from agentrl.algorithms.engines.choice import policy_server
from agentrl.algorithms.hindsight import Hindsight
from agentrl.algorithms.implicit import ImplicitTrainer
from agentrl.algorithms.intake import Completer, Intake
from agentrl.algorithms.learners.base import Learner
from agentrl.algorithms.learners.choice import make_learner
from agentrl.algorithms.learners.verl import VerlLearner
from agentrl.algorithms.ledger import Ledger
from agentrl.algorithms.loop import Loop
from agentrl.algorithms.model import Tokenizer, context_of, load_model
from agentrl.algorithms.objective import Algo
from agentrl.algorithms.requests import TaskStream
from agentrl.algorithms.retokenize import Retokenizer
from agentrl.algorithms.state import State
from agentrl.algorithms.steps import HINDSIGHT
from agentrl.algorithms.update import Updater
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.loading import load_attribute, load_tasks
from agentrl.store import open_store
from agentrl.types import POLICY, Json


def main(config: RunConfig) -> None:
    """Train (or, with no steps, evaluate) until the run is complete."""
    asyncio.run(run(config))


async def run(config: RunConfig) -> None:
    """Open the run, load the policy of its last committed step, build what trains it, and loop."""
    algo = algorithm(config)
    resample = rule(config.algorithm, algo)
    train, heldout = _tasks(config, "train"), _tasks(config, "heldout")
    disable_progress_bar()  # the view is the only one
    random.seed(config.seed)
    torch.manual_seed(config.seed)
    async with open_store(config.store) as store, AsyncExitStack() as stack:
        # Opened before the policy is built, so that runners load their agents in the meantime.
        state = await store.open_run(config.name, msgspec.to_builtins(config))
        started = time.monotonic()
        policy = load_policy(config)
        if policy.built:
            await store.log(config.name, 0, {"time/build": time.monotonic() - started})
        model, tokenizer, source = policy.model, policy.tokenizer, policy.source
        scorers, trainers = beside.make_reward_models(config, model, tokenizer, source)
        learner = make_learner(config, algo, model, tokenizer, source, policy.adapters, trainers)
        if isinstance(learner, VerlLearner):
            stack.callback(learner.close)
        memory, difficulty, anchor = remembered(config, algo, learner.frozen.get("q"))
        if state.checkpoint:
            memory.restore(load_checkpoint(Path(state.checkpoint), learner))
        updater = Updater(
            config,
            algo,
            learner,
            state=memory,
            intake=make_intake(config, algo, policy, learner, scorers, trainers),
            anchor=anchor,
            ledger=Ledger() if config.algorithm.store_credit else None,
            bad_steps=BadSteps(Path(config.output, "dumps"), config.algorithm.max_bad_steps),
        )
        tasks = TaskStream(config, train, algo.greedy, difficulty)
        collector = Collector(config, store, state.epoch, tasks, resample)
        server = policy_server(config, policy.model, policy.tokenizer, policy.adapters)
        await server.start()
        try:
            await server.publish(state.step)
            await Loop(config, store, state, updater, server, collector, heldout).run()
        finally:
            await server.close()


def algorithm(config: RunConfig) -> Algo:
    """The record that the run file asks for. Raises ConfigError for what it could not use."""
    streams = beside.supplied(config)
    algo = presets.make(config.algorithm.preset, config.algorithm.options, streams=streams)
    beside.check_used(config, algo)
    return algo


@dataclass(frozen=True, slots=True)
class Policy:
    """What is trained, as the run began with it."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    adapters: Adapters | None  # none: all weights are trained
    source: str  # directory or hub name
    built: bool  # just now, as the run file says


def load_policy(config: RunConfig) -> Policy:
    source, built = policy_directory(config)
    model, tokenizer = load_model(source, config.policy.dtype, config.policy.device)
    return Policy(model, tokenizer, lora_adapters(model, config), source, built)


def remembered(
    config: RunConfig, algo: Algo, reference: Following | None
) -> tuple[State, Difficulty | None, Anchor]:
    """All that is remembered from step to step, and those parts of it that others ask."""
    memory = State(algo.memories)
    anchor = Anchor(reference, beside.make_controller(config, algo))
    if anchor.kl is not None:
        memory.parts["kl"] = anchor.kl
    difficulty = Difficulty() if config.tasks.order == "difficulty" else None
    if difficulty is not None:
        memory.parts[PART] = difficulty.means
    return memory, difficulty, anchor


def make_intake(
    config: RunConfig,
    algo: Algo,
    policy: Policy,
    learner: Learner,
    scorers: Sequence[Completer],
    trainers: Sequence[ImplicitTrainer],
) -> Intake:
    """What completes the groups before they are learned from: ids first, then rewards."""
    tokenizer, context = policy.tokenizer, context_of(policy.model)
    completers: list[Completer] = []
    if config.algorithm.inexact == "retokenize":
        completers.append(Retokenizer(tokenizer, learner, context, algo.rewards))
    completers += scorers
    if HINDSIGHT in algo.rewards:
        completers.append(Hindsight(tokenizer, learner, context))
    return Intake(tuple(completers), tuple(trainers), context)


def lora_adapters(model: PreTrainedModel, config: RunConfig) -> Adapters | None:
    """The adapter that the run file asks for, on a model; none: all weights are trained."""
    settings = config.policy.lora
    if not settings.rank:
        return None
    adapters = Adapters(model)
    adapters.add(
        POLICY,
        rank=settings.rank,
        alpha=settings.alpha,
        targets=settings.targets,
        seed=config.seed,
    )
    if settings.adapter:
        adapters.restore(POLICY, adapters.read(POLICY, config.path(settings.adapter)))
    return adapters


def policy_directory(config: RunConfig) -> tuple[str, bool]:
    """The model to start from, a local directory or a hub name, and whether it was built just now,
    as the run file says it is to be where there is none."""
    settings = config.policy
    directory = config.path(settings.model) if settings.model else Path(config.output, "policy")
    if not settings.build or directory.is_dir():
        return (str(directory) if directory.is_dir() else settings.model), False
    build = load_attribute(settings.build, Path(config.root), key="policy.build")
    if not callable(build):
        raise ConfigError(f"policy.build = {settings.build!r}: it is not a function")
    with atomic_directory(directory) as partial:
        try:
            build(partial, config.seed)
        except Exception as error:
            raise ConfigError(
                f"policy.build = {settings.build!r} raised {type(error).__name__}: {error}"
            ) from error
    return str(directory), True


def _tasks(config: RunConfig, split: str) -> list[dict[str, Json]]:
    path: str = getattr(config.tasks, split)
    return load_tasks(path, Path(config.root), key=f"tasks.{split}") if path else []
