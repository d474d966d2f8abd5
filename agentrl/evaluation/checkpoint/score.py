"""Score a checkpoint of a run, by a run without steps in a folder beside it."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
from rich.console import Console

from agentrl import trainer
from agentrl.base.processes import PHASE
from agentrl.base.threads import run_blocking
from agentrl.checkpoints.saved import STEPS
from agentrl.config import RunConfig
from agentrl.config import policies as team
from agentrl.config.base import tables, without_making
from agentrl.errors import ConfigError
from agentrl.evaluation.checkpoint.runs import (
    check_any_succeeded,
    evaluation_run,
    find_checkpoint,
    named,
)
from agentrl.results import TrainingResult
from agentrl.store import open_store
from agentrl.types import Purpose


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
    if team.has_no_own_policy(config):
        if checkpoint:
            raise ConfigError(
                f"{checkpoint}: [upstreams] answer every call, so a checkpoint has no effect; "
                "remove it, or set policy.model"
            )
    else:
        checkpoint = named(config, checkpoint) if checkpoint else find_checkpoint(config)
    replace = msgspec.structs.replace
    name = f"{config.name}-eval-{time.strftime('%Y%m%d-%H%M%S')}"
    heldout = str(Path(tasks).resolve()) if tasks and ":" not in tasks else tasks
    own = without_making(evaluation_run(config, name, checkpoint and checkpoint.resolve()))
    evaluated = {key: one.evaluated(config) for key, one in tables(own) if "." not in key}
    own = replace(own, **evaluated)
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


async def _score(config: RunConfig, level: int) -> TrainingResult:
    result = await trainer.front(config, level=level)
    async with open_store(config.store, readonly=True) as store:
        check_any_succeeded(await store.rollouts(config.name, purpose=Purpose.EVAL), config.name)
    return result


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
