"""Labels ended sessions: their signals, and the outcome that follows from them."""

from __future__ import annotations

import asyncio

from agentrl.config import RunConfig
from agentrl.store.base import Store


async def run(store: Store, config: RunConfig) -> None:
    """Label sessions of the run as they end, until cancelled."""
    await asyncio.Event().wait()
