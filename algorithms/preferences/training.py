"""How a data set joins a training run: as the source of its groups."""

from __future__ import annotations

from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.preferences.collector import DatasetCollector, from_dataset, on_dataset
from agentrl.algorithms.sampling.collect import GroupSource
from agentrl.algorithms.train.hooks import Hooks, LoadedRun
from agentrl.algorithms.train.load_policies import LoadedModel
from agentrl.algorithms.train.step import Updater
from agentrl.config import RunConfig
from agentrl.types import POLICY


class DataSet(Hooks):
    """Training on a data set."""

    collector: DatasetCollector

    def algorithm(self, config: RunConfig, algo: Algo) -> Algo:
        return on_dataset(config, algo)

    def updater(self, updater: Updater, model: LoadedModel) -> Updater:
        return from_dataset(updater, lambda batch: self.collector.reference_logprobs(batch))

    async def prepare(self, run: LoadedRun) -> None:
        updater, (model,) = run.policies.updaters[POLICY], run.models
        self.collector = DatasetCollector(run.config, run.store, run.state.epoch, updater, model)
        await self.collector.prepare()

    def source(self, run: LoadedRun) -> GroupSource:
        return self.collector

    async def evaluate(self, step: int, limit: int) -> None:
        await self.collector.evaluate(step, limit)


def join(config: RunConfig) -> DataSet | None:
    return DataSet() if config.data.name else None
