"""The seam between a training run and what is optional in it.

A run is built in stages. Each is a record of what lives from then on: `OpenRun` has the store,
`LoadedRun` also the policies, `ServedRun` also their servers. A part, such as self-play or judges,
joins through the hooks of `Hooks`; the record that a hook gets says what exists when it is called.
Always true: hooks are called in the order of their definition here, and of several parts in the
order of the run's list; the loop and its builders know no part by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from agentrl.algorithms.data.state import StatePart
from agentrl.algorithms.diagnostics.metrics import Metrics
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.sampling.collect import GroupSource
from agentrl.algorithms.sampling.rollouts import CandidateInUse
from agentrl.algorithms.sampling.task_sampler import TaskSampler
from agentrl.algorithms.train.load_policies import LoadedModel
from agentrl.algorithms.train.policy_set import PolicySet
from agentrl.algorithms.train.serving import PolicyServers
from agentrl.algorithms.train.step import Updater
from agentrl.base.folder_lock import FolderLock
from agentrl.base.parts import installed_plugins
from agentrl.config import RunConfig
from agentrl.store.base import Store
from agentrl.types import Group, NewRollout, RunState, StepReward


@dataclass(frozen=True, kw_only=True)
class OpenRun:
    """A run that this process owns."""

    config: RunConfig
    store: Store
    state: RunState  # after the last checkpoint
    lock: FolderLock
    closing: AsyncExitStack  # what it closes lives as long as the run's process
    candidate: CandidateInUse = field(default_factory=CandidateInUse)  # of new rollouts


@dataclass(frozen=True, kw_only=True)
class LoadedRun(OpenRun):
    """With the policies in memory: the initial ones, or from `Hooks.start` on those of `state`."""

    models: Sequence[LoadedModel]
    policies: PolicySet


@dataclass(frozen=True, kw_only=True)
class ServedRun(LoadedRun):
    """With policy servers, which run. A run without rollouts of its own has none."""

    serving: PolicyServers


class Hooks:
    """What is optional in a run. A part overrides the hooks that it needs.

    The first three, `loaded` and `sampling` return what they are given, or a changed copy."""

    def algorithm(self, config: RunConfig, algo: Algo) -> Algo:
        """The algorithm of one policy, before it is checked. config: the policy's view of the run.
        For rewards that a part adds or takes away."""
        return algo

    def check(self, algos: Mapping[str, Algo], resample: str | None) -> None:
        """Raise ConfigError for algorithms that do not fit the part, before a model is loaded.
        resample: the reward of dynamic sampling."""

    def updater(self, updater: Updater, model: LoadedModel) -> Updater:
        """The updater of one policy. For what a part adds to a step: completions of the groups,
        log-probs from elsewhere."""
        return updater

    def state(self) -> Mapping[str, StatePart]:
        """What the part keeps in checkpoints, by name."""
        return {}

    def loaded(self, config: RunConfig, models: Sequence[LoadedModel]) -> RunConfig:
        """The settings of a run whose models are in memory, before its learners are built."""
        return config

    async def prepare(self, run: LoadedRun) -> None:
        """Called while the policies are the initial ones, before the checkpoint is loaded."""

    def source(self, run: LoadedRun) -> GroupSource | None:
        """Where groups come from, if not from rollouts that the run requests. At most one part has
        such a source, which says whether policies are served."""
        return None

    def sampling(self, tasks: TaskSampler) -> TaskSampler:
        """What rollouts a step requests: their tasks and who plays which role."""
        return tasks

    async def start(self, run: ServedRun) -> None:
        """Called once the checkpoint is loaded and the servers run, before the first step."""

    async def before_step(self, step: int) -> None:
        """Called before the groups of a step are requested."""

    async def requested(self, rollouts: Sequence[NewRollout]) -> None:
        """Called when rollouts of the step have been requested, before their groups are claimed: a
        part may wait for them to end, and request more that join their groups."""

    def claimed(self, groups: Sequence[Group]) -> Metrics:
        """Learn from all readable groups that a step has claimed, also those that it replaces.
        What changes in `state` is taken back if the step turns out to be empty."""
        return {}

    async def complete(self, groups: list[Group]) -> tuple[list[Group], Metrics]:
        """The groups that a step trains, with rewards that it takes to wait for."""
        return groups, {}

    async def before_commit(self, steps: int) -> list[StepReward]:
        """Called before the checkpoint after `steps` steps is written; returns rewards to commit
        with the step."""
        return []

    async def published(self) -> None:
        """Called after a commit, once the new versions are served and while no call is in flight:
        other policies may be served or dropped."""

    async def evaluate(self, step: int, limit: int) -> None:
        """Measure more at an evaluation after `step` steps. limit: most tasks; 0: all."""


class AllHooks(Hooks):
    """Several parts as one."""

    def __init__(self, *parts: Hooks) -> None:
        self.each = parts

    def algorithm(self, config: RunConfig, algo: Algo) -> Algo:
        for part in self.each:
            algo = part.algorithm(config, algo)
        return algo

    def check(self, algos: Mapping[str, Algo], resample: str | None) -> None:
        for part in self.each:
            part.check(algos, resample)

    def updater(self, updater: Updater, model: LoadedModel) -> Updater:
        for part in self.each:
            updater = part.updater(updater, model)
        return updater

    def state(self) -> Mapping[str, StatePart]:
        return {name: kept for part in self.each for name, kept in part.state().items()}

    def loaded(self, config: RunConfig, models: Sequence[LoadedModel]) -> RunConfig:
        for part in self.each:
            config = part.loaded(config, models)
        return config

    async def prepare(self, run: LoadedRun) -> None:
        for part in self.each:
            await part.prepare(run)

    def source(self, run: LoadedRun) -> GroupSource | None:
        found = [source for part in self.each if (source := part.source(run)) is not None]
        assert len(found) <= 1, "settings that need two sources of groups are refused"
        return found[0] if found else None

    def sampling(self, tasks: TaskSampler) -> TaskSampler:
        for part in self.each:
            tasks = part.sampling(tasks)
        return tasks

    async def start(self, run: ServedRun) -> None:
        for part in self.each:
            await part.start(run)

    async def before_step(self, step: int) -> None:
        for part in self.each:
            await part.before_step(step)

    async def requested(self, rollouts: Sequence[NewRollout]) -> None:
        for part in self.each:
            await part.requested(rollouts)

    def claimed(self, groups: Sequence[Group]) -> Metrics:
        return {name: x for part in self.each for name, x in part.claimed(groups).items()}

    async def complete(self, groups: list[Group]) -> tuple[list[Group], Metrics]:
        metrics: Metrics = {}
        for part in self.each:
            groups, added = await part.complete(groups)
            metrics |= added
        return groups, metrics

    async def before_commit(self, steps: int) -> list[StepReward]:
        return [row for part in self.each for row in await part.before_commit(steps)]

    async def published(self) -> None:
        for part in self.each:
            await part.published()

    async def evaluate(self, step: int, limit: int) -> None:
        for part in self.each:
            await part.evaluate(step, limit)


def hooks_of(config: RunConfig) -> AllHooks:
    """What joins a run, new."""
    made = (point.load()(config) for point in installed_plugins("training"))
    return AllHooks(*(hooks for hooks in made if hooks is not None))
