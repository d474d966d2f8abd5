"""Prompts of the agent in a training run: searched for before or between steps."""

from __future__ import annotations

from agentrl.algorithms.prompts.schedule import PromptSchedule
from agentrl.algorithms.train.hooks import Hooks, ServedRun
from agentrl.config import RunConfig


class Prompts(Hooks):
    """Sets the prompts of each step."""

    schedule: PromptSchedule

    async def start(self, run: ServedRun) -> None:
        self.schedule = PromptSchedule(run.store, run.config, run.state, run.candidate)
        await self.schedule.start()

    async def before_step(self, step: int) -> None:
        await self.schedule.before_step(step)


def join(config: RunConfig) -> Prompts | None:
    return Prompts() if config.prompts.components else None
