"""The change feed inside one process: tasks wait for a topic, any thread wakes them.

Owns: one counter per topic, and the futures of waiting tasks. Invariant: a notification between
`ticket` and `changed` is not lost. The writer notifies after its commit, the listener after commits
of other processes.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

QUEUE = 1  # a rollout became claimable
GROUPS = 2  # a group settled, or was released
ANY = 4  # anything was written
TOPICS = (QUEUE, GROUPS, ANY)
ALL = QUEUE | GROUPS | ANY
Answers = Iterable[tuple[asyncio.Future[Any], Any]]


class Feed:
    """Wake-ups by topic. Topics are bits, so one byte holds all topics of a commit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rings = dict.fromkeys(TOPICS, 0)
        self._waiting: dict[int, set[asyncio.Future[None]]] = {topic: set() for topic in TOPICS}

    def ticket(self, topic: int) -> int:
        """Return a ticket; take it before a query: `changed` returns at once if a notification has
        arrived since."""
        return self._rings[topic]

    async def changed(self, topic: int, ticket: int, timeout: float | None) -> None:
        """Wait up to `timeout` seconds for a notification of the topic later than the ticket."""
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
        resolve((future, None) for future in woken)


def resolve(answers: Answers) -> None:
    """Resolve futures from any thread, each with a result or an exception. Wakes each event loop
    only once, however many of its futures are resolved."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Any]] = defaultdict(list)
    for future, answer in answers:
        by_loop[future.get_loop()].append((future, answer))
    for loop, mine in by_loop.items():
        try:
            loop.call_soon_threadsafe(_settle, mine)
        except RuntimeError:  # a closed loop has no waiters
            if not loop.is_closed():
                raise


def _settle(answers: Answers) -> None:
    """Resolve futures of the running event loop."""
    for future, answer in answers:
        if future.done():  # its waiter was cancelled
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
