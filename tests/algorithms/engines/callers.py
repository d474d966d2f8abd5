"""Callers that call all the time, for what happens to calls while weights change."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

from agentrl.algorithms.engines.base import VERSION_HEADER

LENGTHS = (200, 240, 270, 300)  # tokens of an answer: where one call ends, the others run
UPDATES = 20  # one of which a call crosses, as fast as calls may be


class Callers:
    """`answers` gets each answer with its `version`, or how the call failed."""

    def __init__(self, url: str, body: Mapping[str, Any]) -> None:
        self.answers: list[dict[str, Any] | str] = []
        self.running = True
        self._url, self._body, self._more = url, body, threading.Semaphore(0)

    def call(self, length: int) -> None:
        """One call after the other. In a thread, so that nothing that the test's event loop does
        keeps it from asking."""
        with httpx.Client(timeout=None, trust_env=False) as http:
            while self.running:
                seed = 500 * length + len(self.answers)
                more = {"max_tokens": length, "ignore_eos": True, "seed": seed}
                try:
                    reply = http.post(self._url, json={**self._body, **more}).raise_for_status()
                    version = {"version": int(reply.headers[VERSION_HEADER])}
                    self.answers.append(reply.json() | version)
                except httpx.HTTPError as error:
                    self.answers.append(repr(error))
                    time.sleep(0.05)
                self._more.release()

    @property
    def crossed(self) -> bool:
        """Whether an answer has tokens of several versions."""
        choices = (a["choices"][0] for a in self.answers if not isinstance(a, str))
        return any(len(choice.get("agentrl_spans", ())) > 1 for choice in choices)

    async def more(self, n: int) -> None:
        """Returns after as many more answers."""
        for _ in range(n):
            await asyncio.to_thread(self._more.acquire)


@asynccontextmanager
async def always_called(url: str, **body: Any) -> AsyncIterator[Callers]:
    """Within, as many callers as LENGTHS call as soon as they are answered."""
    callers = Callers(url, body)
    threads = [asyncio.create_task(asyncio.to_thread(callers.call, n)) for n in LENGTHS]
    try:
        yield callers
    finally:
        callers.running = False
        await asyncio.gather(*threads)
