"""The calls in flight of a policy server, and the hold that keeps new calls waiting.

Weights change only while requests are held. Always true: while they are held and `hold` has
returned, no call is in flight, so every call is answered by one version of its policy. Used on one
event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import parse_qsl


class RequestHold:
    """Counts calls in flight. Requests are held at first, until `release`."""

    def __init__(self) -> None:
        self.versions: dict[str, int] = {}  # by policy; the empty name: of every other name
        self._in_flight = 0
        self._released, self._drained = asyncio.Event(), asyncio.Event()
        self._drained.set()

    def close(self) -> None:
        """Admit no more calls."""
        self._released.clear()

    async def hold(self) -> None:
        """Admit no more calls; returns once none is in flight."""
        self.close()
        await self._drained.wait()

    def release(self) -> None:
        """Admit calls again."""
        self._released.set()

    async def wait_released(self) -> None:
        """Returns while calls are admitted. `begin` must follow before anything else is awaited."""
        while not self._released.is_set():  # held again before this task woke up
            await self._released.wait()

    def begin(self, calls: int = 1) -> None:
        self._in_flight += calls
        self._drained.clear()

    def finish(self) -> None:
        """One call has ended."""
        self._in_flight -= 1
        if not self._in_flight:
            self._drained.set()

    @contextmanager
    def call(self) -> Iterator[None]:
        """One call is in flight while inside. Comes after `wait_released`."""
        self.begin()
        try:
            yield
        finally:
            self.finish()

    def version_of(self, model: str) -> int | None:
        """The version that answers calls to a model of this name, if one of ours does."""
        return self.versions.get(model, self.versions.get(""))


def parse_versions(query: str) -> dict[str, int]:
    """Versions by policy of a query such as `policy=3&other=0`."""
    return {policy: int(version) for policy, version in parse_qsl(query, keep_blank_values=True)}
