"""The algorithm process: opens the run, loads its policies, starts their servers, and begins the
training loop (`loop.py`). An evaluation plan has such a process too, with frozen policies.

Each of these stages is a function from one record of the run to the next (`stages.py`), so nothing
can be used before it exists.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack

from agentrl.algorithms.learners.memory import is_out_of_memory
from agentrl.algorithms.sampling.collect import Collector
from agentrl.algorithms.sampling.task_sampler import TaskSampler
from agentrl.algorithms.train import build
from agentrl.algorithms.train.heldout import HeldoutEvaluator
from agentrl.algorithms.train.hooks import hooks_of
from agentrl.algorithms.train.load_policies import (
    vocabulary_sizes,
)
from agentrl.algorithms.train.loop import TrainingLoop
from agentrl.algorithms.train.stages import load_run, open_run, prepare_process, serve_run
from agentrl.base import memory
from agentrl.base.failures import one_line
from agentrl.base.processes import freeze_loaded, log_phase, log_to_stderr
from agentrl.config import RunConfig
from agentrl.config.run_file import tasks_of
from agentrl.errors import TrainingError
from agentrl.types import ENDED

log = logging.getLogger("agentrl.algorithm")


def main(config: RunConfig) -> None:
    """Train (or, with no steps, evaluate) until the run is complete. Raises TrainingError if memory
    runs out."""
    log_to_stderr()
    try:
        asyncio.run(run(config, ready=freeze_loaded))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        why = one_line(str(error)) or type(error).__name__
        raise TrainingError(f"memory ran out ({why}); {memory.CURE}") from error


async def run(config: RunConfig, *, ready: Callable[[], None] = lambda: None) -> None:
    """Open the run, load the policies of its last checkpoint, and train to the last step.
    ready: called when everything is loaded."""
    hooks = hooks_of(config)
    algos = build.load_algorithms(config, hooks)
    greedy, resample = build.group_requirements(config, algos, hooks)
    log_phase(log, "reading the tasks")
    train, heldout = tasks_of(config, "train"), tasks_of(config, "heldout")
    prepare_process(config.seed)
    async with AsyncExitStack() as closing:
        loaded = await load_run(await open_run(config, closing), algos, hooks)
        config, state = loaded.config, loaded.state
        tasks = hooks.sampling(TaskSampler(config, train, greedy, prompts=loaded.candidate))
        source, models = hooks.source(loaded), loaded.models
        serves = source is None or source.serves
        live = await serve_run(loaded, models if serves else [])
        await hooks.start(live)
        if source is None:
            source = Collector(
                config, live.store, state.epoch, tasks, resample, vocabulary_sizes(models),
                observer=hooks.claimed, requested=hooks.requested,
            )  # fmt: skip
        evaluator = HeldoutEvaluator(
            config, live.store, state.epoch, state.identity, live.policies, live.serving, heldout,
            live.candidate,
        )  # fmt: skip
        await evaluator.start(state.step)
        ready()
        await live.serving.during(TrainingLoop(live, source, evaluator, hooks).run())
        await live.store.log(config.name, config.steps, {ENDED: 1.0}, epoch=state.epoch)
