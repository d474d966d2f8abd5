"""Serve the players of a plan, and roll out its games."""

from __future__ import annotations

from msgspec.structs import replace

from agentrl.algorithms.sampling import evaluate
from agentrl.algorithms.sampling.rollouts import evaluation_rollouts
from agentrl.algorithms.train.stages import served
from agentrl.config import RunConfig
from agentrl.evaluation.plans.plan import EvaluationPlan


async def play_plan(config: RunConfig, plan: EvaluationPlan) -> None:
    """Serve the run's policies and the players, and roll out every task with every lineup. Rollouts
    that have ended do not run again.

    Raises PolicyError for a player that cannot be served."""
    async with served(config, plan.steps, plan.players) as (store, _):
        sampling = replace(config.sampling, temperature=plan.temperature)
        requested = {
            name: evaluation_rollouts(config, 0, name, plan.tasks, sampling, seats)
            for name, seats in plan.lineups.items()
        }
        await evaluate.play(store, requested)
