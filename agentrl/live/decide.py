"""Decides which version answers sessions."""

from __future__ import annotations

import asyncio

from agentrl.config import RunConfig
from agentrl.store.base import Store


async def run(store: Store, config: RunConfig) -> None:
    """Write the run's lanes, and what was decided and why, until cancelled."""
    await asyncio.Event().wait()
