"""Bisection: finds the session that makes a step of a live run raise. A step that raised is
repeated with half of its sessions, until a single session raises. That session waits until others
were trained, is tried once more, and is discarded if it raises again. Owns: the file `failed.json`
of the run's folder. Invariant: a session is discarded only if it raised twice with a trained step
in between; kills, lack of memory, and unreachable services do not count. If several sessions in a
row raise, they are not the cause: learning is paused until the file is deleted, and serving
continues.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import msgspec
from msgspec import field
from msgspec.structs import replace

from agentrl.core.errors import AgentError, AgentRLError, ConfigError, Invalid, StoreError
from agentrl.core.files import replace_file
from agentrl.core.types import Record, Rollout

log = logging.getLogger("agentrl.algorithm")
MAX_LONE_FAILURES = 3  # sessions that raised alone and wait for others to be trained
SERVICES = (StoreError, OSError, aiohttp.ClientError, httpx.HTTPError)
# Not the subclasses, which report errors in the data.
SETTINGS = (AgentRLError, AgentError, ConfigError)


class Attempted(Record, frozen=True):
    """The sessions of a step."""

    step: int
    groups: list[str]
    once: list[str] = field(default_factory=list)  # groups that raised alone
    # Groups that raised alone again after others were trained.
    twice: list[str] = field(default_factory=list)

    def judged(self) -> Attempted:
        """The next action after the step raised."""
        if len(self.groups) != 1:
            return self
        only = self.groups[0]
        if only in self.once:
            once = [group for group in self.once if group != only]
            return replace(self, once=once, twice=[*self.twice, only])
        return replace(self, once=[*self.once, only])


@dataclass(slots=True)
class StepBisection:
    """The state of the search in the run's folder."""

    folder: Path
    trying: Attempted | None = None  # the sessions that this process trains; None: none

    @property
    def file(self) -> Path:
        return self.folder / "failed.json"

    def failed(self) -> Attempted:
        """The last step that raised."""
        try:
            return msgspec.json.decode(self.file.read_bytes(), type=Attempted)
        except (OSError, msgspec.DecodeError):
            return Attempted(step=-1, groups=[])

    def hold_reason(self, waiting: Collection[str]) -> str:
        """A sentence: why learning is paused; empty if it is not. waiting: groups that are neither
        trained nor discarded."""
        lone = sum(group in waiting for group in self.failed().once)
        if lone <= MAX_LONE_FAILURES:
            return ""
        return (
            f"{lone} sessions were tried one by one, and none could be trained: it is not because "
            f"of them; see the errors above, fix their cause, and delete {self.file}"
        )

    def bisect(self, step: int, chosen: Sequence[Rollout]) -> list[Rollout]:
        """Select the sessions that a step tries. Call it in the task that trains them."""
        last, selected = self.failed(), [*chosen]
        again = [row for row in selected if row.group in last.groups] if last.step == step else []
        if last.step == step and last.once and last.groups == last.once[-1:]:
            selected = selected[len(selected) // 2 :]  # the others may raise as well
        elif again:
            selected = again[: max(1, len(again) // 2)]
        if len(selected) < len(chosen):
            log.warning("a step failed: it is tried again with %d of its sessions", len(selected))
        if self.trying is None and (task := asyncio.current_task()):
            task.add_done_callback(self._ended)
        self.trying = Attempted(step, [row.group for row in selected], last.once, last.twice)
        return selected

    def _ended(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if self.trying is not None and error is not None and _may_be_theirs(error):
            replace_file(self.file, msgspec.json.encode(self.trying.judged()))


def _may_be_theirs(error: BaseException) -> bool:
    """Whether a session can be the cause of an error."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_may_be_theirs, error.exceptions))
    from agentrl.algorithms.learners.memory import is_out_of_memory  # imports torch

    away = isinstance(error, SERVICES) and not isinstance(error, Invalid)
    return not (away or type(error) in SETTINGS or any(map(is_out_of_memory, _chain(error))))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and the errors that were being handled when it was raised."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
