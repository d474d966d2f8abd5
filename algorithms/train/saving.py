"""Checkpoints and held-out evaluations of a run: when they happen, and what training waits for.

Owns the checkpoint that is being written, if there is one. Invariant: the store names only complete
checkpoints; after the commit of a step, the checkpoint of an earlier step is complete. So a killed
run loses at most `checkpoint.every` committed steps, whose groups it trains again
(`stages.resume_run`). The files of a large checkpoint are written while no call is in flight,
because the weights must not change meanwhile. Their digests, and the wait for the disk, run during
the rollouts of the next step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.algorithms.sampling.evaluate import evaluate_heldout
from agentrl.algorithms.sampling.tasks import CandidateInUse
from agentrl.algorithms.train.checkpoint import (
    begin_checkpoint,
    checkpoint_name,
    mark_best,
    parse_name,
    prune,
    save_checkpoint,
)
from agentrl.algorithms.train.features import ServedRun
from agentrl.algorithms.train.policies import PolicySet
from agentrl.core.config import RunConfig
from agentrl.core.types import Json
from agentrl.store.base import Store

# Checkpoints above this size in bytes are not written at every step, and are completed in the #
# background.
LARGE = 32 * 2**20
MAX_SHARE = 0.05  # of the time, for large checkpoints if `checkpoint.every` is not set


@dataclass(slots=True)
class Checkpoints:
    """Writes the checkpoints of a run."""

    live: ServedRun
    saved: int = 0  # steps at the last checkpoint
    trained: int = 0  # steps up to the last one that was not empty
    size: int = 0  # bytes of the last checkpoint; 0: none is written yet
    seconds: float = 0.0  # duration of the last checkpoint, including the part during training
    ended: float = 0.0  # time at which it was complete
    waited: float = 0.0  # seconds in which training waited since the last commit
    writing: tuple[Path, asyncio.Task[float]] | None = None  # its result is the time of completion
    named: Path | None = None  # the checkpoint that the commit in progress names
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        last = self.live.state.checkpoint
        self.saved = self.trained = (parse_name(Path(last)) or (0, 0))[0] if last else 0

    async def before_commit(self, steps: int, *, trained: bool = True) -> tuple[str | None, float]:
        """Called before the commit of a step, after which the run has `steps` steps. Returns the
        name of a checkpoint that is new, or None, and the seconds that training waited since the
        last call. trained: whether the step changed the state of the run."""
        if self.writing is not None:
            await self._wait()
        self.trained = steps if trained else self.trained
        if self._is_due(steps) and not (trained and self._may_wait(steps)):
            self.started, path = time.monotonic(), self._path()
            # In a thread, because calls may be in flight.
            await asyncio.to_thread(save_checkpoint, path, *self._content())
            self._is_whole(path, time.monotonic())
            self.waited += self.seconds
        waited, self.waited = self.waited, 0.0
        return (f"checkpoints/{self.named.name}" if self.named else None), waited

    async def after_commit(self, steps: int) -> None:
        """Called after the commit. Deletes old checkpoints, and begins a large one that is due."""
        config, identity = self.live.config, self.live.state.identity
        if self.named is not None:
            folder, keep = self.named.parent, config.keep_checkpoints
            prune(folder, keep=keep, last=self.named, run=identity)
            self.named = None
        if self._is_due(steps):
            self.live.lock.check()
            self.started, path = time.monotonic(), self._path()
            finish = await asyncio.to_thread(begin_checkpoint, path, *self._content())
            self.waited += time.monotonic() - self.started
            self.writing = path, asyncio.create_task(asyncio.to_thread(_ended, finish))
            self.saved = self.trained

    def _is_due(self, steps: int) -> bool:
        if self.saved == self.trained:
            return False
        if interval := self.live.config.checkpoint.every:
            return steps - self.saved >= interval or self._is_needed(steps)
        pause = self.seconds * (1 / MAX_SHARE - 1) if self.size > LARGE else 0.0
        return self._is_needed(steps) or time.monotonic() - self.ended >= pause

    def _may_wait(self, steps: int) -> bool:
        """Whether the checkpoint may be completed after the commit."""
        return self.size > LARGE and not self._is_needed(steps)

    def _is_needed(self, steps: int) -> bool:
        """Whether an evaluation, or the end of the run, takes the weights from a checkpoint."""
        interval = self.live.config.eval.every
        return steps == self.live.config.steps or bool(interval and steps % interval == 0)

    async def _wait(self) -> None:
        """Wait until the checkpoint that is being written is complete. Raises TrainingError."""
        assert self.writing is not None
        (path, task), started = self.writing, time.monotonic()
        self.writing = None
        ended = await task
        self.waited += time.monotonic() - started
        self._is_whole(path, ended)

    def _is_whole(self, path: Path, ended: float) -> None:
        self.ended, self.seconds = ended, ended - self.started
        self.size = sum(file.stat().st_size for file in path.rglob("*"))
        self.named, self.saved = path, self.trained

    def _path(self) -> Path:
        name = checkpoint_name(self.trained, self.live.state.epoch)
        return Path(self.live.config.output, "checkpoints", name)

    def _content(self) -> tuple[PolicySet, dict[str, Json], str]:
        policies = self.live.policies
        return policies, policies.dump(), self.live.state.identity


def _ended(finish: Callable[[], None]) -> float:
    """The time.monotonic() right after `finish`; the task that awaits it may resume much later."""
    finish()
    return time.monotonic()


@dataclass(slots=True)
class HeldoutEvaluator:
    """Scores the policies of a run on its held-out tasks."""

    config: RunConfig
    store: Store
    epoch: int
    identity: str
    tasks: list[dict[str, Json]]
    candidate: CandidateInUse  # whose prompts the agent uses

    async def score(self, step: int) -> None:
        """Score the policies after `step` steps."""
        if not self.tasks:
            return
        settings, outer = self.config.eval, step in (0, self.config.steps)
        limit = settings.tasks if outer else settings.curve_tasks
        tasks, candidate = self.tasks[: limit or None], self.candidate.id
        await evaluate_heldout(self.store, self.config, self.epoch, step, tasks, candidate)
        await mark_best(self.store, self.config, self.identity)
