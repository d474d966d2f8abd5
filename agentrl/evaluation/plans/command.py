"""The process that serves the players of a plan; `trainer.supervise` starts it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click
import msgspec

from agentrl.base.processes import die_with_parent
from agentrl.cli import config_file
from agentrl.config import RunConfig
from agentrl.evaluation.plans.plan import EvaluationPlan


@click.command("play")
@config_file
@click.argument("plan_file", type=click.Path(path_type=Path))
def play_lineups(config: RunConfig, plan_file: Path) -> None:
    die_with_parent()
    from agentrl.evaluation.plans.process import play_plan

    plan = msgspec.json.decode(plan_file.read_bytes(), type=EvaluationPlan)
    asyncio.run(play_plan(config, plan))
