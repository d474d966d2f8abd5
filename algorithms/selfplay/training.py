"""What self-play adds to a training run: opponents for its rollouts, and their snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from pathlib import Path

from agentrl.algorithms.diagnostics.metrics import Metrics
from agentrl.algorithms.selfplay.pool import SELFPLAY, OpponentPool
from agentrl.algorithms.selfplay.snapshots import SnapshotStore
from agentrl.algorithms.train.features import Feature, LoadedRun, ServedRun
from agentrl.config import RunConfig
from agentrl.config.policies import self_playing_policy
from agentrl.types import Group, StepReward


class SelfPlay(Feature):
    """Games against itself or a pool of snapshots (`[selfplay]`)."""

    def __init__(self, config: RunConfig) -> None:
        self.settings, self.policy = config.selfplay, self_playing_policy(config)
        ahead = ceil(config.algorithm.max_staleness)
        self.pool = OpponentPool(self.settings, self.policy, config.seed, ahead=ahead)
        self.snapshots: SnapshotStore | None = None

    async def prepare(self, run: LoadedRun) -> None:
        if self.settings.opponents != "self":
            run.policies.state.parts[SELFPLAY] = self.pool

    async def start(self, run: ServedRun) -> None:
        if self.settings.opponents == "self":
            return
        learner, folder = run.policies.updaters[self.policy].learner, Path(run.config.output)
        self.snapshots = SnapshotStore(
            self.pool, learner, run.serving, run.store, run.config.name, folder / "pool"
        )
        await self.snapshots.start(run.state.step)

    def claimed(self, groups: Sequence[Group]) -> Metrics:
        return self.pool.record_games(groups)

    async def before_commit(self, steps: int) -> list[StepReward]:
        if self.snapshots is not None:
            await self.snapshots.save_due(steps)
        return []

    async def published(self) -> None:
        if self.snapshots is not None:
            await self.snapshots.serve_pool()
