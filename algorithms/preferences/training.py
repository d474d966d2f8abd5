"""How a data set joins a training run: as the source of its groups."""

from __future__ import annotations

from agentrl.algorithms.preferences.collector import DatasetCollector
from agentrl.algorithms.train.features import Feature, LoadedRun
from agentrl.types import POLICY


class DataSet(Feature):
    """Training on a data set."""

    collector: DatasetCollector

    async def prepare(self, run: LoadedRun) -> None:
        updater, (model,) = run.policies.updaters[POLICY], run.models
        self.collector = DatasetCollector(run.config, run.store, run.state.epoch, updater, model)
        await self.collector.prepare()
        self.source = self.collector

    async def evaluate(self, step: int, limit: int) -> None:
        await self.collector.evaluate(step, limit)
