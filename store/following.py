"""Reading again what changes in a store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

from agentrl.errors import StoreError
from agentrl.store.base import Store

log = logging.getLogger("agentrl.store")
LONGEST_PAUSE = 2.0  # seconds between two tries while the store is away


async def keep_reading(
    store: Store,
    read: Callable[[], Awaitable[None]],
    missed: str,
    *,
    pause: float,
    timeout: float | None = None,
) -> NoReturn:
    """Call `read` now, whenever the store has changed, and every `timeout` seconds, with at least
    `pause` seconds between. missed: what does not happen while the store is away, for the console,
    which says it once; it is tried again after growing pauses."""
    cursor, waits = 0, pause
    while True:
        try:
            cursor = await store.wait(cursor, timeout=timeout)
            await read()
        except StoreError as error:
            if waits == pause:
                log.warning("%s: %s; tried again", missed, error)
            cursor, waits = 0, max(pause, min(2 * waits, LONGEST_PAUSE))
        else:
            waits = pause
        await asyncio.sleep(waits)
