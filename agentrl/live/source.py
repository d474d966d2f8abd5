"""The source of a live run's groups: each labelled session is a group. Invariant: a step claims
sessions that are ready, in order of their ends, and exactly one commit trains or discards a
session. Calls count as calls of the trained policy; their age is the number of updates from the
answering version to the learner's weights. Sessions that will never be trained do not accumulate:
if no step trains, an empty step discards them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import inf
from pathlib import Path

from msgspec.structs import replace

from agentrl.algorithms.sampling.collect import Collected, Vocabulary, split_unreadable
from agentrl.algorithms.train.features import Feature, LoadedRun, ServedRun
from agentrl.algorithms.train.policies import vocabulary_sizes
from agentrl.core.processes import log_phase
from agentrl.core.types import POLICY, Group, Rollout, Transition
from agentrl.live.bisection import StepBisection
from agentrl.live.records import (
    believed,
    ended,
    is_lost,
    is_ready,
    mark_of,
    oldest_first,
    policy_of,
)
from agentrl.live.versions import Lineage, Versions

log = logging.getLogger("agentrl.algorithm")
ROOM = 16 * 2**20  # bytes of a step besides its weights
CHECK_PAUSE = 1.0  # seconds between two checks of the sessions
MAX_LEFT_OUT = 1000  # sessions that wait for a step to discard them
MAX_UNLABELLED_SECONDS = 86_400.0  # seconds for which this process waits for a session's label
EARLY_PART = 4  # a step begins by `live.every` with at least this part of `live.sessions`
CLAIMED_AT_ONCE = 64  # sessions to discard; a claim reads their calls


@dataclass(slots=True)
class SessionSource:
    """Claims the sessions of a step when it is worth it. versions: set before the first step."""

    run: LoadedRun
    lineage: Lineage
    vocabulary: Vocabulary
    serves: bool  # whether its policy is an adapter, which is served by the base's server
    versions: Versions | None = None
    since: float = dataclasses.field(default_factory=time.monotonic)  # time of the last step
    discarded: float = dataclasses.field(default_factory=time.monotonic)  # time of the last discard
    held: str = ""  # why learning is paused
    no_room: str = ""  # why a step cannot be written
    unlabelled: dict[str, float] = dataclasses.field(
        default_factory=dict
    )  # group -> when it was seen first
    bisection: StepBisection = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.bisection = StepBisection(Path(self.run.config.output))

    async def collect(self, step: int) -> Collected:
        """Wait for the sessions of a step; meanwhile decisions take effect."""
        assert self.versions is not None
        live, store, name = self.run.config.live, self.run.store, self.run.config.name
        cursor = 0
        while True:
            await self.versions.tend(step)
            sessions = await ended(store, name)
            ready, left_out, again = self._sorted(sessions, step)
            due = bool(again) or self._is_due(len(ready))
            if not self._held(step, sessions) and due and self._has_room():
                break
            if self._is_late(len(left_out)):
                ready = again = []
                break
            cursor = await store.wait(cursor, timeout=10 * CHECK_PAUSE)
            await asyncio.sleep(CHECK_PAUSE)
        self.discarded = time.monotonic()
        self.since = self.discarded if ready and not again else self.since
        chosen = again[:1] or oldest_first(ready)[: live.sessions]
        chosen = self.bisection.bisect(step, chosen)
        return await self._claim(step, chosen, left_out)

    def _held(self, step: int, sessions: Sequence[Rollout]) -> str:
        """Why learning is paused, which is printed once; empty if it is not."""
        assert self.versions is not None
        why = self.versions.blocked or self.versions.too_far_ahead(step)
        why = why or self.bisection.hold_reason({row.group for row in sessions})
        if why and why != self.held and not self.versions.blocked:  # not reported yet
            log_phase(log, f"learning is paused, serving continues: {why}")
        self.held = why
        return why

    def _is_due(self, ready: int) -> bool:
        live = self.run.config.live
        late = time.monotonic() - self.since >= live.every
        return ready >= live.sessions or (late and ready >= max(1, live.sessions // EARLY_PART))

    def _is_late(self, left_out: int) -> bool:
        """Whether sessions must be discarded even if nothing can be trained."""
        late = time.monotonic() - self.discarded >= self.run.config.live.every
        return left_out >= MAX_LEFT_OUT or (late and left_out > 0)

    def _has_room(self) -> bool:
        """Whether the step's checkpoint and version can be written; otherwise learning is paused,
        and serving continues."""
        assert self.versions is not None
        why = no_room(Path(self.run.config.output), self.versions.size())
        if why and why != self.no_room:
            log.warning("learning is paused, serving continues: %s", why)
        self.no_room = why
        return not why

    def _sorted(
        self, sessions: Sequence[Rollout], step: int
    ) -> tuple[list[Rollout], list[Rollout], list[Rollout]]:
        """The sessions that may be trained, those that never will be, and those that raised alone
        and are retried because others were trained since."""
        wait, now, seen = self.run.config.live.wait, time.time(), time.monotonic()
        waiting = [row.group for row in sessions if mark_of(row) is None]
        self.unlabelled = {group: self.unlabelled.get(group, seen) for group in waiting}
        limit, failed = self.run.config.algorithm.max_staleness, self.bisection.failed()
        trained = self.lineage.updates(failed.step, step) > 0
        ready: list[Rollout] = []
        left_out: list[Rollout] = []
        again: list[Rollout] = []
        for row in sessions:
            if row.group in failed.twice:
                left_out.append(row)
            elif is_ready(row, now, wait):
                if self._age(row, step) > limit:
                    left_out.append(row)
                elif row.group not in failed.once:
                    ready.append(row)
                elif trained:
                    again.append(row)
            elif is_lost(row, now, wait) or self._is_overdue(row, seen):
                left_out.append(row)
        return ready, left_out, again

    def _is_overdue(self, session: Rollout, now: float) -> bool:
        """Whether a session has waited too long for its label: a watch that starts late labels
        all."""
        return now - self.unlabelled.get(session.group, now) >= MAX_UNLABELLED_SECONDS

    def _age(self, session: Rollout, step: int) -> float:
        """Updates since the version that began the session; later versions may have continued
        it."""
        version, now = session.task.get("version"), self.run.policies.versions(step)[POLICY]
        return self.lineage.lag(version, now) if isinstance(version, int) else inf

    async def _claim(
        self, step: int, chosen: Sequence[Rollout], left_out: Sequence[Rollout]
    ) -> Collected:
        """Claim the sessions to train and those to discard."""
        claimed = await self._claimed(chosen)
        groups = [self.as_own(group, step) for group in claimed]
        groups, unreadable = split_unreadable(groups, self.vocabulary)
        void: list[Group] = []
        for first in range(0, len(left_out), CLAIMED_AT_ONCE):  # there may be thousands
            discarded = await self._claimed(left_out[first : first + CLAIMED_AT_ONCE])
            void += [replace(group, rollouts=[]) for group in discarded]
        metrics = {"live/sessions": len(groups), "live/discarded": len(void) + len(unreadable)}
        return Collected(
            groups, [*void, *unreadable], {name: float(x) for name, x in metrics.items()},
            ready=len(chosen),
        )  # fmt: skip

    async def _claimed(self, sessions: Sequence[Rollout]) -> list[Group]:
        if not sessions:
            return []
        ids, run = [row.group for row in sessions], self.run
        return await run.store.claim_groups(
            run.config.name, run.state.epoch, len(ids), groups=ids, timeout=0
        )

    def as_own(self, group: Group, step: int) -> Group:
        """A group with the calls of its versions as older calls of the trained policy."""
        now = self.run.policies.versions(step)[POLICY]
        names = self.run.config.live.signals.weight.keys()
        rows = [believed(row, names) for row in group.rollouts]
        rollouts = [
            replace(row, transitions=[self._relabelled(call, now) for call in row.transitions])
            for row in rows
        ]
        return replace(group, rollouts=rollouts, step=step)

    def _relabelled(self, call: Transition, now: int) -> Transition:
        if call.version is None or call.policy != policy_of(call.version):
            return call
        lag = self.lineage.lag(call.version, now)
        return replace(call, policy=POLICY, version=now - int(min(lag, now + 1)), spans=[])


def no_room(folder: Path, size: int) -> str:
    """Why a step that writes `size` bytes of weights cannot be written; empty if it can."""
    probe = folder / ".room"
    try:
        with probe.open("wb") as file:
            if hasattr(os, "posix_fallocate"):  # not on every kernel
                os.posix_fallocate(file.fileno(), 0, 2 * size + ROOM)
    except OSError as error:
        return f"{folder} has no room for {2 * size + ROOM:,} bytes ({error.strerror})"
    finally:
        probe.unlink(missing_ok=True)
    return ""


NICENESS = 10  # `nice` increment with which the learner yields to the engine on shared cores


class Live(Feature):
    """Training on the sessions of a served policy."""

    def __init__(self) -> None:
        self.lineage, self.steps = Lineage(), 0
        self.sessions: SessionSource | None = None

    async def prepare(self, run: LoadedRun) -> None:
        run.policies.state.parts["live"] = self.lineage
        adapted = any(model.adapters is not None for model in run.models)
        self.source = self.sessions = SessionSource(
            run, self.lineage, vocabulary_sizes(run.models), serves=adapted
        )

    async def start(self, run: ServedRun) -> None:
        assert self.sessions is not None
        self.sessions.versions = versions = Versions(run, self.lineage)
        learning = ThreadPoolExecutor(thread_name_prefix="learning", initializer=yield_to_answers)
        asyncio.get_running_loop().set_default_executor(learning)
        await versions.start()

    async def before_step(self, step: int) -> None:
        self.steps = step + 1  # once the step is committed

    async def published(self) -> None:
        assert self.sessions is not None
        assert self.sessions.versions is not None
        await self.sessions.versions.tend(self.steps)


def yield_to_answers() -> None:
    """Lower the priority of this thread, and of those that it starts, below that of the threads
    that answer calls. A no-op outside of Linux, where threads have no priority of their own."""
    if sys.platform.startswith("linux"):
        thread = threading.get_native_id()
        now = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(now + NICENESS, 19))
