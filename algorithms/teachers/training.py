"""Teachers behind a server (`teacher.upstream`) in the place of one in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from agentrl.algorithms.learners.base import Teacher
from agentrl.algorithms.teachers.remote import RemoteTeacher, make_teacher
from agentrl.algorithms.train.load_policies import LoadedModel
from agentrl.algorithms.train.step import Updater


def with_teacher_server(updater: Updater, model: LoadedModel) -> Updater:
    """The updater of a policy with its teacher, if that is behind a server."""
    teacher = make_teacher(updater.config, updater.algo, model.model, model.tokenizer)
    return replace(updater, teacher=teacher) if teacher else updater


async def check_teachers(teachers: Iterable[Teacher | None]) -> None:
    """Raise PolicyError for a server that does not answer, or has another vocabulary."""
    for teacher in teachers:
        if isinstance(teacher, RemoteTeacher):
            await teacher.check()
