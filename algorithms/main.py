"""The algorithm process: model, learner and policy server around the training loop."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import torch
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from agentrl.algorithms import beside, presets
from agentrl.algorithms.adapters import Adapters
from agentrl.algorithms.checkpoint import atomic_directory, load_checkpoint
from agentrl.algorithms.collect import Collector, rule
from agentrl.algorithms.difficulty import PART, Difficulty
from agentrl.algorithms.dump import BadSteps
from agentrl.algorithms.engines.choice import policy_server
from agentrl.algorithms.hindsight import Hindsight
from agentrl.algorithms.learners.choice import make_learner
from agentrl.algorithms.learners.verl import VerlLearner
from agentrl.algorithms.ledger import Ledger
from agentrl.algorithms.loop import Loop
from agentrl.algorithms.model import context_of, load_model
from agentrl.algorithms.requests import TaskStream
from agentrl.algorithms.retokenize import Retokenizer
from agentrl.algorithms.state import State
from agentrl.algorithms.steps import HINDSIGHT
from agentrl.algorithms.update import Completer, Updater
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.loading import load_attribute, load_tasks
from agentrl.store import open_store
from agentrl.types import POLICY, Json


def main(config: RunConfig) -> None:
    """Train (or, with no steps, evaluate) until the run is complete."""
    asyncio.run(run(config))


async def run(config: RunConfig) -> None:
    """Open the run, load the policy of its last committed step, and loop."""
    streams = beside.supplied(config)
    algo = presets.make(config.algorithm.preset, config.algorithm.options, streams=streams)
    beside.check_used(config, algo)
    resample = rule(config.algorithm, algo)
    train, heldout = _tasks(config, "train"), _tasks(config, "heldout")
    disable_progress_bar()  # the view is the only one
    random.seed(config.seed)
    torch.manual_seed(config.seed)
    async with open_store(config.store) as store, AsyncExitStack() as stack:
        # Opened before the policy is built, so that runners load their agents in the meantime.
        state = await store.open_run(config.name, msgspec.to_builtins(config))
        started = time.monotonic()
        source = policy_directory(config)
        if config.policy.build and state.step == 0:
            await store.log(config.name, 0, {"time/build": time.monotonic() - started})
        model, tokenizer = load_model(source, config.policy.dtype, config.policy.device)
        adapters = lora_adapters(model, config)
        scorers, trainers = beside.make_reward_models(config, model, tokenizer, source)
        learner = make_learner(config, algo, model, tokenizer, source, adapters, trainers)
        reference = None
        if isinstance(learner, VerlLearner):
            stack.callback(learner.close)
        else:
            reference = learner.frozen.get("q")
        memory = State(algo.memories)
        if kl := beside.make_controller(config, algo):
            memory.parts["kl"] = kl
        if difficulty := Difficulty() if config.tasks.order == "difficulty" else None:
            memory.parts[PART] = difficulty.means
        if state.checkpoint:
            memory.restore(load_checkpoint(Path(state.checkpoint), learner))
        server = policy_server(config, model, tokenizer, adapters)
        await server.start()
        try:
            await server.publish(state.step)
            tasks = TaskStream(config, train, algo.greedy, difficulty)
            again = config.algorithm.inexact == "retokenize"
            context = context_of(model)
            completers: list[Completer] = (
                [Retokenizer(tokenizer, learner, context, algo.rewards)] if again else []
            )
            completers += scorers
            completers += (
                [Hindsight(tokenizer, learner, context)] if HINDSIGHT in algo.rewards else []
            )
            ledger = Ledger() if config.algorithm.store_credit else None
            updater = Updater(
                config.algorithm,
                algo,
                learner,
                config.steps,
                memory,
                ledger,
                seed=config.seed,
                context=context,
                bad_steps=BadSteps(Path(config.output, "dumps"), config.algorithm.max_bad_steps),
                reference=reference,
                kl=kl,
                completers=tuple(completers),
                trainers=trainers,
                value_clip=config.critic.clip,
            )
            collector = Collector(config, store, state.epoch, tasks, resample)
            await Loop(config, store, state, updater, server, collector, heldout).run()
        finally:
            await server.close()


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


def policy_directory(config: RunConfig) -> str:
    """The model to start from: a local directory, built first if the run file says how, or a hub
    name."""
    settings = config.policy
    directory = config.path(settings.model) if settings.model else Path(config.output, "policy")
    if not settings.build or directory.is_dir():
        return str(directory) if directory.is_dir() else settings.model
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
    return str(directory)


def _tasks(config: RunConfig, split: str) -> list[dict[str, Json]]:
    path: str = getattr(config.tasks, split)
    return load_tasks(path, Path(config.root), key=f"tasks.{split}") if path else []
