"""The stages of a run, and the protocol of its optional features.

A run is built in stages. Each is a record of the objects that exist from then on: `OpenRun` has the
store, `LoadedRun` also the policies, `ServedRun` also their servers. A feature, such as self-play
or judges, takes part by the methods of `Feature`; the record that a method gets contains what
exists when it is called. Invariant: methods are called in the order of their definition here, and
each method is called for all features in the order of the run's list (`main.features_of`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentrl.algorithms.sampling.tasks import CandidateInUse

if TYPE_CHECKING:  # only for annotations: nothing is built here
    from agentrl.algorithms.sampling.collect import GroupSource
    from agentrl.algorithms.train.metrics import Metrics
    from agentrl.algorithms.train.policies import LoadedModel, PolicySet
    from agentrl.algorithms.train.serving import PolicyServers
    from agentrl.core.config import RunConfig
    from agentrl.core.files import FolderLock
    from agentrl.core.types import Group, RunState, StepReward
    from agentrl.store.base import Store


@dataclass(frozen=True, kw_only=True)
class OpenRun:
    """A run that this process owns."""

    config: RunConfig
    store: Store
    state: RunState  # after the last checkpoint
    lock: FolderLock
    closing: AsyncExitStack  # its contexts are closed at the end of the run's process
    candidate: CandidateInUse = field(default_factory=CandidateInUse)  # candidate of new rollouts


@dataclass(frozen=True, kw_only=True)
class LoadedRun(OpenRun):
    """The stage with policies in memory: at first the initial policies, from `Feature.start` on
    those of `state`."""

    models: Sequence[LoadedModel]
    policies: PolicySet


@dataclass(frozen=True, kw_only=True)
class ServedRun(LoadedRun):
    """The stage with running policy servers; none for a run without rollouts."""

    serving: PolicyServers


class Feature:
    """An optional feature of a run, which overrides the methods that it needs. source: the source
    of groups, if these are not rollouts that the run requests; set by `prepare`. At most one
    feature has a source, which also decides whether policies are served."""

    source: GroupSource | None = None

    async def prepare(self, run: LoadedRun) -> None:
        """Called while the policies are the initial ones, before the checkpoint is loaded. A
        feature adds its state in checkpoints to `run.policies.state.parts`, and its part of a
        policy's step to `run.policies.updaters`."""

    async def start(self, run: ServedRun) -> None:
        """Called once the checkpoint is loaded and the servers run, before the first step."""

    async def before_step(self, step: int) -> None:
        """Called before the groups of a step are requested."""

    def claimed(self, groups: Sequence[Group]) -> Metrics:
        """Learn from all readable groups that a step has claimed, including those that it replaces.
        Changes of the run's state are rolled back if the step turns out to be empty."""
        return {}

    async def complete(self, groups: list[Group]) -> tuple[list[Group], Metrics]:
        """The groups that a step trains, with additional rewards, such as those of judges."""
        return groups, {}

    async def before_commit(self, steps: int) -> list[StepReward]:
        """Called before the checkpoint after `steps` steps is written; returns rewards to commit
        with the step."""
        return []

    async def published(self) -> None:
        """Called after a commit, once the new versions are served and while no call is in flight:
        other policies may be served or dropped."""

    async def evaluate(self, step: int, limit: int) -> None:
        """Additional measurements of an evaluation after `step` steps. limit: maximum tasks; 0:
        all."""
