"""Which session the learner fails for: a step that raised is repeated with half of its sessions,
until one raises alone. It waits until others were trained, is tried alone once more, and is
discarded if it raises again.

Owns the file `failed.json` of the run's folder. Always true: a session is discarded only if it
raised twice with a trained step in between; kills, memory that ran out, and services that cannot be
reached blame none. If several sessions in a row raise alone, it is not because of them: learning
waits until the file is deleted, and serving goes on.
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

from agentrl.algorithms.learners.memory import is_out_of_memory
from agentrl.base.files import replace_file
from agentrl.errors import AgentError, AgentRLError, ConfigError, Invalid, StoreError
from agentrl.types import Record, Rollout

log = logging.getLogger("agentrl.algorithm")
MOST = 3  # sessions that raised alone and wait for others to be trained
SERVICES = (StoreError, OSError, aiohttp.ClientError, httpx.HTTPError)
SETTINGS = (AgentRLError, AgentError, ConfigError)  # not the subclasses, which are about data


class Tried(Record, frozen=True):
    """The sessions of a step."""

    step: int
    groups: list[str]
    once: list[str] = field(default_factory=list)  # groups that raised alone
    twice: list[str] = field(default_factory=list)  # and again after others were trained

    def judged(self) -> Tried:
        """What follows if the step raised."""
        if len(self.groups) != 1:
            return self
        only = self.groups[0]
        if only in self.once:
            once = [group for group in self.once if group != only]
            return replace(self, once=once, twice=[*self.twice, only])
        return replace(self, once=[*self.once, only])


@dataclass(slots=True)
class Blame:
    """What the last process failed with. folder: of the run."""

    folder: Path
    trying: Tried | None = None  # by this process; None: no session

    @property
    def file(self) -> Path:
        return self.folder / "failed.json"

    def failed(self) -> Tried:
        """The last step that raised."""
        try:
            return msgspec.json.decode(self.file.read_bytes(), type=Tried)
        except (OSError, msgspec.DecodeError):
            return Tried(step=-1, groups=[])

    def why_held(self, waiting: Collection[str]) -> str:
        """Why nothing may be learned, a sentence; empty if something may be. waiting: groups that
        are neither trained nor discarded."""
        found = sum(group in waiting for group in self.failed().once)
        if found <= MOST:
            return ""
        return (
            f"{found} sessions were tried one by one, and none could be trained: it is not because "
            f"of them; see the errors above, fix their cause, and delete {self.file}"
        )

    def narrowed(self, step: int, chosen: Sequence[Rollout]) -> list[Rollout]:
        """The sessions that a step tries, of those whose turn it is. Call it in the task that
        trains them."""
        last, kept = self.failed(), [*chosen]
        again = [row for row in kept if row.group in last.groups] if last.step == step else []
        if last.step == step and last.once and last.groups == last.once[-1:]:
            kept = kept[len(kept) // 2 :]  # those beside it may raise as well
        elif again:
            kept = again[: max(1, len(again) // 2)]
        if len(kept) < len(chosen):
            log.warning("a step failed: it is tried again with %d of its sessions", len(kept))
        if self.trying is None and (task := asyncio.current_task()):
            task.add_done_callback(self._ended)
        self.trying = Tried(step, [row.group for row in kept], last.once, last.twice)
        return kept

    def _ended(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if self.trying is not None and error is not None and _may_be_theirs(error):
            replace_file(self.file, msgspec.json.encode(self.trying.judged()))


def _may_be_theirs(error: BaseException) -> bool:
    """Whether a session can be the cause of an error."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_may_be_theirs, error.exceptions))
    away = isinstance(error, SERVICES) and not isinstance(error, Invalid)
    return not (away or type(error) in SETTINGS or any(map(is_out_of_memory, _chain(error))))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and what was being handled when it was raised."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
