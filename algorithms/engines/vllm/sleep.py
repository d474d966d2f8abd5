"""vLLM's sleep mode: a child on the learner's GPU frees its memory during updates.

Level 1 keeps the weights in host memory; level 2 drops them, and they are sent again. Both drop the
KV cache. Always true: a child sleeps only while calls are held; it wakes the weights before the KV
cache, because the GPU may not hold both plus the buffers of a weight transfer.
"""

from __future__ import annotations

import asyncio

from agentrl.algorithms.engines.vllm.client import VllmClient

WEIGHTS, KEYS = "weights", "kv_cache"  # vLLM's tags of wake_up


class SleepCycle:
    """Tracks which parts of vLLM are asleep. level: vLLM's sleep level; 0: it never sleeps."""

    def __init__(self, level: int) -> None:
        self.level = level
        self._asleep: set[str] = set()
        # Set while vLLM may take GPU memory: a restart of one that died asleep waits for it.
        self.may_start = asyncio.Event()
        self.may_start.set()

    async def sleep(self, servers: VllmClient) -> None:
        """Put vLLM to sleep. Calls must be held."""
        if self.level:
            # mode=abort ends requests of other clients, whose keys are lost.
            await servers.post(f"/sleep?level={self.level}&mode=abort")
            self._asleep = {WEIGHTS, KEYS}
            self.may_start.clear()

    async def wake(self, tag: str, servers: VllmClient) -> None:
        """Wake a part, if it is asleep: WEIGHTS, and then KEYS."""
        if tag in self._asleep:
            await servers.post(f"/wake_up?tags={tag}")
            self._asleep.discard(tag)  # a restart meanwhile has woken it

    @property
    def dropped(self) -> bool:
        """Whether vLLM has dropped the weights, which must be sent again."""
        return self.level == 2 and WEIGHTS in self._asleep

    def restarted(self) -> None:
        """Called after a restart: a new process is awake."""
        self._asleep = set()
