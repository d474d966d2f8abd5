"""The optional parts of this library, by the settings that ask for them. See `parts`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

from agentrl.algorithms.data.state import StatePart
from agentrl.algorithms.diagnostics.metrics import Metrics
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.prompts.schedule import PromptSchedule
from agentrl.algorithms.sampling import counterfactuals
from agentrl.algorithms.sampling.selfplay import SELFPLAY, OpponentPool, check_seat_comparison
from agentrl.algorithms.sampling.task_sampler import DIFFICULTY, TaskDifficulty, TaskSampler
from agentrl.algorithms.train.hooks import AllHooks, Hooks, LoadedRun, ServedRun
from agentrl.algorithms.train.load_policies import LoadedModel
from agentrl.algorithms.train.snapshots import SnapshotStore
from agentrl.algorithms.train.step import Updater
from agentrl.algorithms.train.teacher import RemoteTeacher, make_teacher
from agentrl.base.parts import installed_plugins
from agentrl.config import RunConfig
from agentrl.config.policies import (
    INITIAL,
    initial_version,
    policy_of_role,
    trained_policies,
    view,
)
from agentrl.config.schema import TasksConfig
from agentrl.config.selfplay import learning_policy
from agentrl.types import Group, StepReward


class Curriculum(Hooks):
    """Tasks by difficulty (`tasks.order`, `tasks.solved`)."""

    def __init__(self, config: RunConfig) -> None:
        self.difficulty = TaskDifficulty(solved=config.tasks.solved)

    def state(self) -> Mapping[str, StatePart]:
        return {DIFFICULTY: self.difficulty.means}

    def sampling(self, tasks: TaskSampler) -> TaskSampler:
        return replace(tasks, order=self.difficulty)

    def claimed(self, groups: Sequence[Group]) -> Metrics:
        return self.difficulty.observe(groups)


class SelfPlay(Hooks):
    """Games against itself or a pool of snapshots (`[selfplay]`)."""

    def __init__(self, config: RunConfig) -> None:
        self.settings, self.policy = config.selfplay, learning_policy(config)
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


class Counterfactuals(Hooks):
    """Repetitions of rollouts with stand-ins (`algorithm.counterfactual`)."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def algorithm(self, config: RunConfig, algo: Algo) -> Algo:
        return counterfactuals.with_optional_reward(config.algorithm.counterfactual, algo)

    def check(self, algos: Mapping[str, Algo], resample: str | None) -> None:
        counterfactuals.check_counterfactuals(self.config, algos, resample)

    def updater(self, updater: Updater, model: LoadedModel) -> Updater:
        config, name = updater.config, updater.policy
        if not counterfactuals.uses_counterfactuals(config.algorithm.counterfactual, updater.algo):
            return updater
        rewards = counterfactuals.RoleRewards(counterfactuals.coalition_formula(config), name)
        before = updater.preprocessor
        return replace(
            updater, preprocessor=replace(before, completers=(rewards, *before.completers))
        )

    async def start(self, run: ServedRun) -> None:
        """Serve the untrained versions of policies that stand in, if the run trains anything."""
        named = self.config.algorithm.counterfactual.stand_ins if self.config.steps else {}
        roles = [role for role, player in named.items() if player == INITIAL]
        policies = (policy_of_role(self.config, role) for role in roles)
        if players := dict(initial_version(self.config, policy) for policy in policies):
            async with run.serving.updating():
                await run.serving.serve_frozen(players)


class Teachers(Hooks):
    """Teachers at a server (`teacher.upstream`)."""

    def __init__(self) -> None:
        self.remote: list[RemoteTeacher] = []

    def updater(self, updater: Updater, model: LoadedModel) -> Updater:
        teacher = make_teacher(updater.config, updater.algo, model.model, model.tokenizer)
        if teacher is None:
            return updater
        self.remote.append(teacher)
        return replace(updater, teacher=teacher)

    async def prepare(self, run: LoadedRun) -> None:
        for teacher in self.remote:
            await teacher.check()


class Prompts(Hooks):
    """Prompts of the agent, searched for before or between steps (`[prompts]`)."""

    schedule: PromptSchedule

    async def start(self, run: ServedRun) -> None:
        self.schedule = PromptSchedule(run.store, run.config, run.state, run.candidate)
        await self.schedule.start()

    async def before_step(self, step: int) -> None:
        await self.schedule.before_step(step)


PARTS: tuple[tuple[Callable[[RunConfig], object], Callable[[RunConfig], Hooks]], ...] = (
    (lambda config: by_difficulty(config.tasks), Curriculum),
    (lambda config: config.selfplay.seats, SelfPlay),
    (lambda config: any(map(has_stand_ins, views(config))), Counterfactuals),
    (lambda config: any(own.teacher.upstream for own in views(config)), lambda _: Teachers()),
    (lambda config: config.prompts.components, lambda _: Prompts()),
)
"""Whether the settings ask for a part, and the part."""


def hooks_of(config: RunConfig) -> AllHooks:
    """What joins a run, new."""
    own = [make(config) for is_asked_for, make in PARTS if is_asked_for(config)]
    made = [point.load()(config) for point in installed_plugins("training")]
    return AllHooks(*own, *(hooks for hooks in made if hooks is not None))


def views(config: RunConfig) -> Iterator[RunConfig]:
    """The run, and the view of each trained policy."""
    yield config
    yield from (view(config, name) for name in trained_policies(config))


def by_difficulty(tasks: TasksConfig) -> bool:
    return tasks.order == "difficulty" or tasks.solved is not None


def has_stand_ins(config: RunConfig) -> bool:
    return bool(config.algorithm.counterfactual.stand_ins)
