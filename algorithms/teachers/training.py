"""How teachers behind a server join a training run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from agentrl.algorithms.train.hooks import Hooks, LoadedRun
from agentrl.algorithms.train.load_policies import LoadedModel
from agentrl.algorithms.train.step import Updater
from agentrl.base.parts import has
from agentrl.config import RunConfig
from agentrl.config.policies import trained_policies, view
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.algorithms.teachers.remote import RemoteTeacher


def join(config: RunConfig) -> Teachers | None:
    views = [config, *(view(config, name) for name in trained_policies(config))]
    if not any(own.teacher.upstream for own in views):
        return None
    if not has("chat-completions"):
        raise ConfigError(
            "teacher.upstream needs the part 'chat-completions', which is not installed here"
        )
    return Teachers()


class Teachers(Hooks):
    """Teachers at a server (`teacher.upstream`)."""

    def __init__(self) -> None:
        self.remote: list[RemoteTeacher] = []

    def updater(self, updater: Updater, model: LoadedModel) -> Updater:
        from agentrl.algorithms.teachers.remote import make_teacher

        teacher = make_teacher(updater.config, updater.algo, model.model, model.tokenizer)
        if teacher is None:
            return updater
        self.remote.append(teacher)
        return replace(updater, teacher=teacher)

    async def prepare(self, run: LoadedRun) -> None:
        for teacher in self.remote:
            await teacher.check()
