"""The process that labels sessions and decides about versions. All of its state is in the store."""

from __future__ import annotations

import asyncio

from agentrl.base.processes import log_to_stderr
from agentrl.config import RunConfig
from agentrl.live.labels import label
from agentrl.live.lanes import decide
from agentrl.live.records import people
from agentrl.store import open_store


def main(config: RunConfig) -> None:
    log_to_stderr()
    asyncio.run(watch(config))


async def watch(config: RunConfig) -> None:
    """Run until cancelled. Raises the error of the first part that fails."""
    async with open_store(config.store) as store, asyncio.TaskGroup() as parts:
        parts.create_task(label.run(store, config))
        parts.create_task(decide.run(store, config))
        parts.create_task(people.keep(store, config))
