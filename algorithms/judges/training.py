"""How judges join a training run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp

from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.train.hooks import Hooks, ServedRun
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.types import Group, StepReward

if TYPE_CHECKING:
    from agentrl.algorithms.judges.judge import Judges


class Judged(Hooks):
    """Rewards of judges."""

    judges: Judges

    def algorithm(self, config: RunConfig, algo: Algo) -> Algo:
        for name in config.judges:
            if name not in algo.rewards:
                raise ConfigError(
                    f"judges.{name} is set, and algorithm.preset = {algo.name!r} reads no reward "
                    f"{name!r}; name it in algorithm.options, or leave it out"
                )
        return algo

    async def start(self, run: ServedRun) -> None:
        from agentrl.algorithms.judges.judge import make_judges

        session = await run.closing.enter_async_context(aiohttp.ClientSession())
        self.judges = await make_judges(run.config, run.store, session)

    async def complete(self, groups: list[Group]) -> tuple[list[Group], dict[str, float]]:
        return await self.judges.complete(groups)

    async def before_commit(self, steps: int) -> list[StepReward]:
        return self.judges.rewards


def join(config: RunConfig) -> Judged | None:
    return Judged() if config.judges else None
