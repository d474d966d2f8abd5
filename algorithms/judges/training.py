"""How judges join a training run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp

from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.train.features import Feature, ServedRun
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.types import Group, StepReward

if TYPE_CHECKING:
    from agentrl.algorithms.judges.judge import Judges


class JudgeRewards(Feature):
    """Rewards of judges."""

    judges: Judges

    async def start(self, run: ServedRun) -> None:
        from agentrl.algorithms.judges.judge import make_judges

        session = await run.closing.enter_async_context(aiohttp.ClientSession())
        self.judges = await make_judges(run.config, run.store, session)

    async def complete(self, groups: list[Group]) -> tuple[list[Group], dict[str, float]]:
        return await self.judges.complete(groups)

    async def before_commit(self, steps: int) -> list[StepReward]:
        return self.judges.rewards


def check_judges(config: RunConfig, algo: Algo) -> None:
    """Raise ConfigError for a judge whose reward the algorithm does not read."""
    for name in config.judges:
        if name not in algo.rewards:
            raise ConfigError(
                f"judges.{name} is set, and algorithm.preset = {algo.name!r} reads no reward "
                f"{name!r}; name it in algorithm.options, or leave it out"
            )
