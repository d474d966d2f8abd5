"""What self-play adds to a training run: opponents for its rollouts, and their snapshots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

from agentrl.algorithms.data.state import StatePart
from agentrl.algorithms.diagnostics.metrics import Metrics
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.sampling.task_sampler import TaskSampler
from agentrl.algorithms.selfplay.pool import SELFPLAY, OpponentPool, check_seat_comparison
from agentrl.algorithms.selfplay.snapshots import SnapshotStore
from agentrl.algorithms.train.hooks import Hooks, ServedRun
from agentrl.config import RunConfig
from agentrl.config.policies import self_playing_policy
from agentrl.types import Group, StepReward


def join(config: RunConfig) -> Hooks | None:
    """None for a run without games, and for one without steps, which only evaluates."""
    return SelfPlay(config) if config.selfplay.seats and config.steps else None


class SelfPlay(Hooks):
    """Games against itself or a pool of snapshots (`[selfplay]`)."""

    def __init__(self, config: RunConfig) -> None:
        self.settings, self.policy = config.selfplay, self_playing_policy(config)
        ahead = ceil(config.algorithm.max_staleness)
        self.pool = OpponentPool(self.settings, self.policy, config.seed, ahead=ahead)
        self.snapshots: SnapshotStore | None = None

    def check(self, algos: Mapping[str, Algo], resample: str | None) -> None:
        check_seat_comparison(algos[self.policy])

    def state(self) -> Mapping[str, StatePart]:
        return {} if self.settings.opponents == "self" else {SELFPLAY: self.pool}

    def sampling(self, tasks: TaskSampler) -> TaskSampler:
        return replace(tasks, seats=self.pool.seats)

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
