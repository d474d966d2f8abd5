"""The change feed inside one process: who waits for what, and waking them from any thread.

Owns: one counter per topic, and the futures of the tasks that wait. Always true: a notification
between `ticket` and `changed` is not lost. Any thread may notify: the writer after its commit, and
the listener for the commits of other processes.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

QUEUE = 1  # a rollout became claimable
GROUPS = 2  # a group settled, or was released
ANY = 4  # anything was written
TOPICS = (QUEUE, GROUPS, ANY)
ALL = QUEUE | GROUPS | ANY


class Feed:
    """Wake-ups by topic. Topics are bits, so one byte says all that a commit touched."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rings = dict.fromkeys(TOPICS, 0)
        self._waiting: dict[int, set[asyncio.Future[None]]] = {topic: set() for topic in TOPICS}

    def ticket(self, topic: int) -> int:
        """Take it before looking at the store; `changed` returns at once if one came since."""
        return self._rings[topic]

    async def changed(self, topic: int, ticket: int, timeout: float | None) -> None:
        """Returns after a later notification of the topic than the ticket, or `timeout` seconds."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._rings[topic] != ticket:
                return
            self._waiting[topic].add(future)
        try:
            await asyncio.wait((future,), timeout=timeout)
        finally:
            future.cancel()
            with self._lock:
                self._waiting[topic].discard(future)

    def notify(self, topics: int) -> None:
        woken: list[asyncio.Future[None]] = []
        with self._lock:
            for topic in TOPICS:
                if topics & topic:
                    self._rings[topic] += 1
                    woken += self._waiting[topic]
                    self._waiting[topic].clear()
        by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = defaultdict(list)
        for future in woken:
            by_loop[future.get_loop()].append(future)
        for loop, futures in by_loop.items():
            call_soon(loop, _wake, futures)


def call_soon(
    loop: asyncio.AbstractEventLoop, callback: Callable[[T], object], argument: T
) -> None:
    """Thread-safe, and silent when the loop has been closed: nobody waits there any more."""
    try:
        loop.call_soon_threadsafe(callback, argument)
    except RuntimeError:
        if not loop.is_closed():
            raise


def _wake(futures: Iterable[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
