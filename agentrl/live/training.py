"""How sessions join the algorithm process: as the source of its groups."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from agentrl.algorithms.train.features import Feature, LoadedRun, ServedRun
from agentrl.algorithms.train.load_policies import vocabulary_sizes
from agentrl.live.source import SessionSource
from agentrl.live.versions import Lineage, Versions

NICENESS = 10  # by which the learner yields to the engine on shared cores


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
        self.steps = step + 1  # once it is committed

    async def published(self) -> None:
        assert self.sessions is not None
        assert self.sessions.versions is not None
        await self.sessions.versions.tend(self.steps)


def yield_to_answers() -> None:
    """Lower the priority of this thread, and of those that it starts, below that of the threads
    that answer calls. A no-op on other kernels than Linux, where a thread has none of its own."""
    if sys.platform.startswith("linux"):
        thread = threading.get_native_id()
        now = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(now + NICENESS, 19))
