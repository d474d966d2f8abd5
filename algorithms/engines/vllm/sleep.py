"""vLLM asleep: while the learner updates, a child on the same GPU gives up its memory there.

Level 1 keeps the weights in host memory, level 2 drops them, so they are sent again. Keys and
values are forgotten at both. Always true: a child sleeps only while no call is in flight and new
ones wait; it gets its weights before it gets room for keys and values, so that both and what a
transfer takes are never there at once.
"""

from __future__ import annotations

import asyncio

from agentrl.algorithms.engines.vllm.client import VllmClient

WEIGHTS, KEYS = "weights", "kv_cache"  # as vLLM names what it wakes


class SleepCycle:
    """What of vLLM is asleep. level: 0: it never sleeps."""

    def __init__(self, level: int) -> None:
        self.level = level
        self._asleep: set[str] = set()
        # Set while vLLM may take GPU memory: one that died asleep is not started again before.
        self.may_start = asyncio.Event()
        self.may_start.set()

    async def sleep(self, servers: VllmClient) -> None:
        """Calls must be held."""
        if self.level:
            # What somebody else may have left in the engine ends, as its keys are gone.
            await servers.post(f"/sleep?level={self.level}&mode=abort")
            self._asleep = {WEIGHTS, KEYS}
            self.may_start.clear()

    async def wake(self, tag: str, servers: VllmClient) -> None:
        """Give WEIGHTS, and then KEYS, their memory again, where they lack it."""
        if tag in self._asleep:
            await servers.post(f"/wake_up?tags={tag}")
            self._asleep.remove(tag)

    @property
    def dropped(self) -> bool:
        """Whether the weights are asleep and nowhere else: they must be sent again."""
        return self.level == 2 and WEIGHTS in self._asleep

    def restarted(self) -> None:
        """A new process is awake."""
        self._asleep = set()
