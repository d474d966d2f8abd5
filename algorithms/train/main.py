"""The algorithm process: policies, learners and policy servers around the training loop."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import torch
from transformers.utils.logging import disable_progress_bar

from agentrl import folder_lock
from agentrl.algorithms.data.state import AlgorithmState
from agentrl.algorithms.diagnostics.credit_records import Ledger
from agentrl.algorithms.learners import auxiliary
from agentrl.algorithms.learners.base import Learner
from agentrl.algorithms.learners.factory import make_learner
from agentrl.algorithms.learners.implicit_reward import ImplicitTrainer
from agentrl.algorithms.model.load import context_length
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.objective.kl_control import ReferenceControl, UpdatableReference
from agentrl.algorithms.presets import catalogue
from agentrl.algorithms.presets.registry import check_group
from agentrl.algorithms.presets.zoo.hcapo import HINDSIGHT
from agentrl.algorithms.sampling import counterfactuals, evaluate
from agentrl.algorithms.sampling.collect import Collector, rule
from agentrl.algorithms.sampling.counterfactuals import RoleRewards, shares
from agentrl.algorithms.sampling.curriculum import PART, Difficulty
from agentrl.algorithms.sampling.selfplay import PART as GAMES
from agentrl.algorithms.sampling.selfplay import Pool, check_fair
from agentrl.algorithms.sampling.task_sampler import TaskStream
from agentrl.algorithms.train import resume
from agentrl.algorithms.train.dump import BadSteps
from agentrl.algorithms.train.frozen_policies import serve
from agentrl.algorithms.train.hindsight import Hindsight
from agentrl.algorithms.train.load_policies import Base, load_bases, vocabulary
from agentrl.algorithms.train.loop import Loop
from agentrl.algorithms.train.policies import Team
from agentrl.algorithms.train.preprocess import Completer, Intake
from agentrl.algorithms.train.retokenize import Retokenizer
from agentrl.algorithms.train.serving import Serving
from agentrl.algorithms.train.snapshots import Opponents
from agentrl.algorithms.train.update import Updater
from agentrl.config import RunConfig
from agentrl.config.players import Player, first_version
from agentrl.config.policies import FIRST, player_of, remote, trained, view
from agentrl.config.selfplay import player
from agentrl.errors import ConfigError
from agentrl.loading import load_tasks
from agentrl.processes import PHASE, log_to_stderr
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.types import ENDED, POLICY, Json

log = logging.getLogger("agentrl.algorithm")


def main(config: RunConfig) -> None:
    """Train (or, with no steps, evaluate) until the run is complete."""
    log_to_stderr()
    asyncio.run(evaluate.remote(config) if remote(config) else run(config))


async def run(config: RunConfig) -> None:
    """Open the run, load the policies of its last committed step and what trains them, and loop."""
    algos = algorithms(config)
    greedy, resample = sampled_for(config, algos)
    log.log(PHASE, "reading the tasks")
    train, heldout = _tasks(config, "train"), _tasks(config, "heldout")
    disable_progress_bar()  # the view is the only one
    random.seed(config.seed)
    torch.manual_seed(config.seed)
    async with AsyncExitStack() as stack:
        lock = stack.enter_context(folder_lock.shared(Path(config.output)))
        store = await stack.enter_async_context(open_store(config.store))
        # Opened before the policies are built, so that runners load their agents in the meantime.
        state = await store.open_run(config.name, msgspec.to_builtins(config))
        started = time.monotonic()
        bases = load_bases(config)
        if any(base.built for base in bases):
            await store.log(config.name, 0, {"time/build": time.monotonic() - started})
        team, difficulty = make_team(config, algos, bases, stack)
        pool = make_pool(config, team)
        state = await resume.resumed(store, config, state, team)
        tasks = TaskStream(config, train, greedy, difficulty, pool)
        collector = Collector(config, store, state.epoch, tasks, resample, vocabulary(bases))
        serving = Serving(config, bases)
        log.log(PHASE, f"starting the policy server ({config.engine.kind})")
        await serving.start()
        try:
            await serving.publish(team.versions(state.step))
            if firsts := first_versions(config):
                async with serving.updating():
                    await serve(config, bases, serving, firsts)
            opponents = make_opponents(config, team, serving, store, pool)
            if opponents is not None:
                await opponents.start(state.step)
            loop = Loop(config, store, state, team, serving, collector, heldout, lock, opponents)
            await serving.during(loop.run())
            await store.log(config.name, config.steps, {ENDED: 1.0}, epoch=state.epoch)
        finally:
            await serving.close()


def algorithms(config: RunConfig) -> dict[str, Algo]:
    """The record of each policy that learns. Raises ConfigError for what one could not use."""
    algos = {}
    for name in trained(config):
        try:
            algos[name] = algorithm(view(config, name))
        except ConfigError as error:
            where = f"policies.{name}: " if config.policies else ""
            raise ConfigError(f"{where}{error}") from None
    if config.selfplay.seats:
        check_fair(algos[player(config)])
    return algos


def sampled_for(config: RunConfig, algos: Mapping[str, Algo]) -> tuple[bool, str | None]:
    """What the algorithms ask of the groups, from which all policies learn: whether the first
    rollout is a greedy one, and the reward that must differ within a group; none: any will do.

    Raises ConfigError where they do not agree, and for replays that none of them learns from."""
    asked = {
        name: (algo.greedy, rule(view(config, name).algorithm, algo))
        for name, algo in algos.items()
    }
    (first, wanted), *others = asked.items()
    for name, other in others:
        if other != wanted:
            raise ConfigError(
                f"policies.{first} and policies.{name} learn from the same groups, and their "
                f"presets {algos[first].name!r} and {algos[name].name!r} ask for different ones (a "
                "greedy rollout, or groups sampled again); choose presets that agree, or set "
                "algorithm.dynamic_sampling = false"
            )
    counterfactuals.check_read(config, algos, wanted[1])
    return wanted


def algorithm(config: RunConfig) -> Algo:
    """The record that the run file asks for. Raises ConfigError for what it could not use."""
    streams = auxiliary.available_streams(config)
    settings = config.algorithm
    algo = catalogue.make(
        settings.preset, settings.options, streams=streams, root=Path(config.root)
    )
    check_group(config.algorithm, algo)
    auxiliary.refuse_unused_settings(config, algo)
    return counterfactuals.lenient(config, algo)


def make_team(
    config: RunConfig, algos: Mapping[str, Algo], bases: Sequence[Base], stack: AsyncExitStack
) -> tuple[Team, Difficulty | None]:
    """What trains the policies, and how often tasks were solved, if these are drawn by that.
    Processes that learners start end with `stack`."""
    updaters = {}
    for name, algo in algos.items():
        base = next(base for base in bases if name in base.policies)
        dumps = Path(config.output, "dumps", name if config.policies else "")
        updaters[name] = make_updater(view(config, name), name, algo, base, dumps)
        if close := getattr(updaters[name].learner, "close", None):
            stack.callback(close)
    memory = AlgorithmState() if config.policies else updaters[POLICY].state
    difficulty = Difficulty() if config.tasks.order == "difficulty" else None
    if difficulty is not None:
        memory.parts[PART] = difficulty.means
    return Team(config, updaters, memory), difficulty


def first_versions(config: RunConfig) -> dict[str, Player]:
    """The policies as training began with them that stand in for what they have become. None where
    nothing is trained."""
    given = config.algorithm.counterfactual.stand_ins if config.steps else {}
    roles = [role for role, player in given.items() if player == FIRST]
    return dict(first_version(config, player_of(config, role)) for role in roles)


def make_pool(config: RunConfig, team: Team) -> Pool | None:
    """Who plays whom, where there are seats; a pool of snapshots is remembered with the run."""
    settings = config.selfplay
    if not settings.seats:
        return None
    pool = Pool(settings, player(config), config.seed, ahead=config.algorithm.max_staleness)
    if settings.opponents != "self":
        team.memory.parts[GAMES] = pool
    return pool


def make_opponents(
    config: RunConfig, team: Team, serving: Serving, store: Store, pool: Pool | None
) -> Opponents | None:
    """What keeps and serves the snapshots of a pool, if there is one."""
    if pool is None or config.selfplay.opponents == "self":
        return None
    learner = team.updaters[pool.policy].learner
    return Opponents(pool, learner, serving, store, config.name, Path(config.output, "pool"))


def make_updater(config: RunConfig, name: str, algo: Algo, base: Base, dumps: Path) -> Updater:
    """What trains one policy, by its own view of the run. dumps: where steps go that cannot be
    made."""
    model, tokenizer, source = base.model, base.tokenizer, base.source
    scorers, trainers = auxiliary.make_reward_models(config, model, tokenizer, source)
    learner = make_learner(config, algo, model, tokenizer, source, base.adapters, trainers, name)
    memory, anchor = remembered(config, algo, getattr(learner, "frozen", {}).get("q"))
    return Updater(
        config,
        algo,
        learner,
        state=memory,
        intake=make_intake(config, algo, name, base, learner, scorers, trainers),
        anchor=anchor,
        ledger=Ledger(name) if config.algorithm.store_credit else None,
        bad_steps=BadSteps(dumps, config.algorithm.max_bad_steps),
        policy=name,
    )


def remembered(
    config: RunConfig, algo: Algo, reference: UpdatableReference | None
) -> tuple[AlgorithmState, ReferenceControl]:
    """All that a policy remembers from step to step, and what holds it."""
    memory = AlgorithmState(algo.memories, seed=config.seed)
    anchor = ReferenceControl(reference, auxiliary.make_controller(config, algo))
    if anchor.kl is not None:
        memory.parts["kl"] = anchor.kl
    return memory, anchor


def make_intake(
    config: RunConfig,
    algo: Algo,
    name: str,
    base: Base,
    learner: Learner,
    scorers: Sequence[Completer],
    trainers: Sequence[ImplicitTrainer],
) -> Intake:
    """What completes the groups before a policy learns from them: what replays say of its roles,
    ids, and then the rewards that models give, which read these."""
    tokenizer, context = base.tokenizer, context_length(base.model)
    completers: list[Completer] = []
    if counterfactuals.read(config, algo):
        completers.append(RoleRewards(shares(config), name))
    if config.algorithm.inexact == "retokenize":
        completers.append(Retokenizer(tokenizer, learner, context, algo.rewards, name))
    completers += scorers
    if HINDSIGHT in algo.rewards:
        completers.append(Hindsight(tokenizer, learner, context, name))
    decode = tokenizer.decode
    return Intake(tuple(completers), tuple(trainers), context, name, decode=decode)


def _tasks(config: RunConfig, split: str) -> list[dict[str, Json]]:
    path: str = getattr(config.tasks, split)
    return load_tasks(path, Path(config.root), key=f"tasks.{split}") if path else []
