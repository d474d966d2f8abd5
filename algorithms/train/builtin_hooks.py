"""The optional parts of this library, by the settings that ask for them. See `hooks`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from agentrl.algorithms.data.state import StatePart
from agentrl.algorithms.diagnostics.metrics import Metrics
from agentrl.algorithms.sampling.task_sampler import DIFFICULTY, TaskDifficulty, TaskSampler
from agentrl.algorithms.train.hooks import AllHooks, Hooks, LoadedRun
from agentrl.algorithms.train.load_policies import LoadedModel
from agentrl.algorithms.train.step import Updater
from agentrl.algorithms.train.teacher import RemoteTeacher, make_teacher
from agentrl.base.parts import installed_plugins
from agentrl.config import RunConfig
from agentrl.config.policies import trained_policies, view
from agentrl.config.schema import TasksConfig
from agentrl.types import Group


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


PARTS: tuple[tuple[Callable[[RunConfig], object], Callable[[RunConfig], Hooks]], ...] = (
    (lambda config: by_difficulty(config.tasks), Curriculum),
    (lambda config: any(own.teacher.upstream for own in views(config)), lambda _: Teachers()),
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
