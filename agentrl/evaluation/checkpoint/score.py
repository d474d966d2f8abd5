"""Score a checkpoint of a run, by a run without steps in a folder beside it."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec
from rich.console import Console

from agentrl import trainer
from agentrl.base import folder_lock
from agentrl.base.processes import PHASE
from agentrl.base.threads import run_blocking
from agentrl.checkpoints.saved import STEPS
from agentrl.config import RunConfig
from agentrl.config import policies as team
from agentrl.errors import AgentRLError, ConfigError
from agentrl.evaluation.checkpoint.runs import (
    check_any_succeeded,
    evaluation_run,
    find_checkpoint,
    named,
)
from agentrl.results import TrainingResult
from agentrl.store import open_store
from agentrl.types import Purpose

TRIES = 5  # to hold the newest checkpoint of a run that goes on


def evaluate(
    config: RunConfig,
    checkpoint: Path | None,
    tasks: str | None,
    *,
    level: int = PHASE,
) -> TrainingResult:
    """Score a checkpoint, by default the run's last one, before training the model that the run
    starts from, or `[upstreams]` if the run has no model of its own. Writes to the store that the
    run file names, if any."""
    config = trainer.hide_secrets(config)
    if team.has_no_own_policy(config) and checkpoint:
        raise ConfigError(
            f"{checkpoint}: [upstreams] answer every call, so a checkpoint has no effect; "
            "remove it, or set policy.model"
        )
    with _held(config, checkpoint) as held:
        return _evaluate(config, held, tasks, level)


@contextmanager
def _held(config: RunConfig, checkpoint: Path | None) -> Iterator[Path | None]:
    """A checkpoint, by default the run's last one, which the run does not prune meanwhile."""
    with ExitStack() as stack:
        if checkpoint:
            checkpoint = named(config, checkpoint)
            stack.enter_context(folder_lock.reading(checkpoint))
        elif not team.has_no_own_policy(config):
            for left in reversed(range(TRIES)):
                if (checkpoint := find_checkpoint(config)) is None:
                    break
                try:
                    stack.enter_context(folder_lock.reading(checkpoint))
                    break
                except ConfigError:  # pruned since the store named it, which names a newer one
                    if not left:
                        raise
        yield checkpoint


def _evaluate(
    config: RunConfig, checkpoint: Path | None, tasks: str | None, level: int
) -> TrainingResult:
    replace = msgspec.structs.replace
    name = evaluation_name(config.name)
    heldout = str(Path(tasks).resolve()) if tasks and ":" not in tasks else tasks
    own = evaluation_run(config.for_evaluation(), name, checkpoint and checkpoint.resolve())
    own = own.without_warmup()
    config = replace(
        own,
        store=own.store if trainer.has_own_store(config) else config.store,
        tasks=replace(config.tasks, heldout=heldout or config.tasks.heldout),
        eval=replace(config.eval, tasks=0) if tasks else config.eval,
    )
    trainer.check(config)
    if scored := scored_line(config, checkpoint):
        Console().print(scored, highlight=False, markup=False, soft_wrap=True)
    return run_blocking(_score(config, level))


def evaluation_name(run: str) -> str:
    """A name of its own for an evaluation of a run, also beside one that begins in this second."""
    return f"{run}-eval-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


async def _score(config: RunConfig, level: int) -> TrainingResult:
    try:
        result = await trainer.front(config, level=level)
    except BaseException:
        await _remove_unstarted(config)
        raise
    async with open_store(config.store, readonly=True) as store:
        check_any_succeeded(await store.rollouts(config.name, purpose=Purpose.EVAL), config.name)
    return result


async def _remove_unstarted(config: RunConfig) -> None:
    """Delete what an evaluation has written that failed before its first rollout began."""
    if not trainer.has_own_store(config):
        return  # a store of several runs keeps the row of its settings
    with suppress(AgentRLError):
        async with open_store(config.store, readonly=True) as store:
            if any(row.attempt for row in await store.rollouts(config.name)):
                return
        with folder_lock.exclusive(Path(config.output)):
            shutil.rmtree(config.output, ignore_errors=True)


def scored_line(config: RunConfig, checkpoint: Path | None) -> str:
    """A line for the console that names the scored weights, if they are the run's own."""
    if checkpoint:
        named = STEPS.match(checkpoint.name)
        after = f" after step {int(named[1])}" if named else ""
        return f"scoring the policy{after}: {checkpoint}"
    if team.has_no_own_policy(config):
        return ""
    begun = [team.view(config, name).policy for name in team.trained_policies(config)]
    models = sorted({policy.model or policy.build for policy in begun})
    return f"scoring the policy before training: {', '.join(models)}"
