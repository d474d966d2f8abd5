"""An event loop in a thread of its own, so that what is served goes on while the learner computes.

Owns the thread. `run` may be awaited from any other loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs from `start` until `stop`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread is not None

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns, or raises, on the thread's loop."""
        assert self._loop is not None, "start() comes first"
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """What a plain function returns, or raises, on the thread's loop."""

        async def work() -> T:
            return function(*arguments)

        return await self.run(work())

    async def stop(self) -> None:
        """End the loop, with whatever it still runs. A second time does nothing."""
        if self._loop is None or self._thread is None:
            return
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        loop.call_soon_threadsafe(loop.stop)
        await asyncio.to_thread(thread.join)
        loop.close()
