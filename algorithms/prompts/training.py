"""Prompts of the agent in a training run: searched for before or between steps."""

from __future__ import annotations

from agentrl.algorithms.prompts.schedule import PromptSchedule
from agentrl.algorithms.train.features import Feature, ServedRun


class PromptSearch(Feature):
    """Sets the prompts of each step."""

    schedule: PromptSchedule

    async def start(self, run: ServedRun) -> None:
        self.schedule = PromptSchedule(run.store, run.config, run.state, run.candidate)
        await self.schedule.start()

    async def before_step(self, step: int) -> None:
        await self.schedule.before_step(step)
