"""Which session the learner fails for: a step that raised is repeated with half of its sessions,
until the one is found that cannot be trained.

Owns the file `failed.json` of the run's folder. Always true: only errors count, not kills or a
store that cannot be reached; nothing is discarded before another session could be trained, so an
error that has nothing to do with sessions loses none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import field

from agentrl.algorithms.learners.memory import is_out_of_memory
from agentrl.errors import StoreError, TrainingError
from agentrl.types import Record, Rollout

log = logging.getLogger("agentrl.algorithm")
MOST = 3  # sessions that cannot be trained; if there are more, it is not because of them
NOT_BLAMED = (StoreError, OSError)


class Tried(Record, frozen=True):
    """The sessions of a step."""

    step: int
    groups: list[str]
    # groups that raised alone before, and are not trained
    suspects: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Blame:
    """What the last process failed with. folder: of the run."""

    folder: Path
    trying: Tried | None = None  # by this process

    @property
    def file(self) -> Path:
        return self.folder / "failed.json"

    def failed(self) -> Tried:
        """The last step that raised."""
        try:
            return msgspec.json.decode(self.file.read_bytes(), type=Tried)
        except (OSError, msgspec.DecodeError):
            return Tried(step=-1, groups=[])

    def suspects(self, sessions: Sequence[Rollout]) -> list[Rollout]:
        """Those that raised alone, and are not to be trained again. Raises TrainingError if they
        are many."""
        last = self.failed()
        groups = {*last.suspects, *(last.groups if len(last.groups) == 1 else [])}
        found = [row for row in sessions if row.group in groups]
        if len(found) > MOST:
            raise TrainingError(
                f"{len(found)} sessions were tried one by one, and none can be trained: it is not "
                f"because of them, see the errors above, and delete {self.file} to try again"
            )
        return found

    def narrowed(
        self, step: int, chosen: Sequence[Rollout], suspects: Sequence[Rollout]
    ) -> list[Rollout]:
        """The sessions that a step tries, of those whose turn it is. Call it in the task that
        trains them."""
        last, kept = self.failed(), [*chosen]
        if last.step == step and (again := [row for row in kept if row.group in last.groups]):
            kept = again[: max(1, len(again) // 2)]
            log.warning("a step failed: it is tried again with %d of its sessions", len(kept))
        if self.trying is None and (task := asyncio.current_task()):
            task.add_done_callback(self._ended)
        groups = [row.group for row in kept]
        self.trying = Tried(step, groups, [row.group for row in suspects])
        return kept

    def _ended(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None or isinstance(error, NOT_BLAMED) or is_out_of_memory(error):
            return
        self.file.write_bytes(msgspec.json.encode(self.trying))
