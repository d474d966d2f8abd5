"""The algorithm process: opens the run, loads its policies, starts their servers, and begins the
training loop (`loop.py`).

Each of these stages is a function from one record of the run to the next (`stages.py`), so nothing
can be used before it exists. An evaluation plan has such a process too, with frozen policies.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial

from agentrl.algorithms.hack_signs import HackSigns
from agentrl.algorithms.judges import JudgeRewards
from agentrl.algorithms.learners.memory import is_out_of_memory
from agentrl.algorithms.preferences.collector import DataSet
from agentrl.algorithms.prompts import PromptSearch
from agentrl.algorithms.sampling.collect import Collector, Requested, nothing_more
from agentrl.algorithms.sampling.curriculum import Curriculum
from agentrl.algorithms.sampling.evaluate import EvalFunctions
from agentrl.algorithms.sampling.replays import Replays, request_branches
from agentrl.algorithms.sampling.tasks import TaskSampler
from agentrl.algorithms.selfplay import SelfPlay
from agentrl.algorithms.train import stages
from agentrl.algorithms.train.features import Feature, LoadedRun
from agentrl.algorithms.train.formats import TemplateChecks
from agentrl.algorithms.train.loop import TrainingLoop
from agentrl.algorithms.train.policies import vocabulary_sizes
from agentrl.algorithms.train.saving import HeldoutEvaluator
from agentrl.algorithms.train.stages import load_run, open_run, prepare_process, serve_run
from agentrl.core import processes
from agentrl.core.config import RunConfig
from agentrl.core.config.run_file import tasks_of
from agentrl.core.errors import TrainingError
from agentrl.core.processes import freeze_loaded, log_phase, log_to_stderr, share_freed_memory
from agentrl.core.types import ENDED, Json, one_line

log = logging.getLogger("agentrl.algorithm")


def main(config: RunConfig, added: Sequence[Feature] = ()) -> None:
    """Train (or, with no steps, evaluate) until the run is complete. added: see `features_of`.
    Raises TrainingError if memory runs out."""
    log_to_stderr()
    share_freed_memory()
    try:
        asyncio.run(run(config, added, ready=freeze_loaded))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        why = one_line(str(error)) or type(error).__name__
        raise TrainingError(f"memory ran out ({why}); {processes.LEARNER_MEMORY_HINT}") from error


async def run(
    config: RunConfig,
    added: Sequence[Feature] = (),
    *,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Open the run, load the policies of its last checkpoint, and train to the last step. added:
    see `features_of`. ready: called when everything is loaded."""
    algos = stages.load_algorithms(config)
    greedy, resample = stages.group_requirements(config, algos)
    features = features_of(config, added)
    log_phase(log, "reading the tasks")
    train, heldout = tasks_of(config, "train"), tasks_of(config, "heldout")
    prepare_process(config.seed)
    async with AsyncExitStack() as closing:
        loaded = await load_run(await open_run(config, closing), algos, features)
        config, state, models = loaded.config, loaded.state, loaded.models
        source = next((feature.source for feature in features if feature.source is not None), None)
        serves = source is None or source.serves
        live = await serve_run(loaded, models if serves else [])
        for feature in features:
            await feature.start(live)
        if source is None:
            source = Collector(
                config, live.store, state.epoch, task_sampler(loaded, train, features, greedy),
                resample, vocabulary_sizes(models),
                observers=[feature.claimed for feature in features],
                requested=joining_rollouts(loaded),
            )  # fmt: skip
        evaluator = HeldoutEvaluator(
            config, live.store, state.epoch, state.identity, heldout, live.candidate
        )
        ready()
        await live.serving.during(TrainingLoop(live, source, evaluator, features).run())
        await live.store.log(config.name, config.steps, {ENDED: 1.0}, epoch=state.epoch)


def features_of(config: RunConfig, added: Sequence[Feature] = ()) -> list[Feature]:
    """The features of a run, in the order in which their methods are called. added: features of
    packages that import this one, such as `agentrl.live`."""
    features: list[Feature] = []
    if config.tasks.order != "shuffle":
        features.append(Curriculum(config))
    if config.eval.functions:
        features.append(EvalFunctions())
    if config.plays_rollouts:
        features.append(TemplateChecks())
    if config.judges:
        features.append(JudgeRewards())
    if config.plays_rollouts:
        features.append(HackSigns(config))
    features += added
    if config.prompts.components:
        features.append(PromptSearch())
    if config.algorithm.joins:
        features.append(Replays())
    if config.selfplay.seats and config.steps:
        features.append(SelfPlay(config))
    # Last, because it reads items with the updater's additions of other features.
    if config.data.name:
        features.append(DataSet())
    return features


def task_sampler(
    run: LoadedRun, tasks: list[dict[str, Json]], features: Sequence[Feature], greedy: bool
) -> TaskSampler:
    """The tasks of training rollouts, in the order of a curriculum and with the seats of games."""
    curriculum = next((feature for feature in features if isinstance(feature, Curriculum)), None)
    games = next((feature for feature in features if isinstance(feature, SelfPlay)), None)
    return TaskSampler(
        run.config,
        tasks,
        greedy,
        order=curriculum.difficulty.choose if curriculum else None,
        seats=games.pool.seats if games else None,
        prompts=run.candidate,
    )


def joining_rollouts(run: LoadedRun) -> Requested:
    """The function that requests branches and counterfactual rollouts to join a step's groups."""
    if not run.config.algorithm.joins:
        return nothing_more
    return partial(request_branches, run.store, run.config)
