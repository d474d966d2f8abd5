"""The process that labels sessions and decides about versions. All of its state is in the store."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from agentrl.base.failures import one_line
from agentrl.base.processes import log_to_stderr
from agentrl.config import RunConfig
from agentrl.errors import AgentRLError, ConfigError
from agentrl.live.labels import label
from agentrl.live.lanes import decide, heldout
from agentrl.live.records import people
from agentrl.store import open_store

log = logging.getLogger("agentrl.live")
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 60.0  # seconds before work is begun again; doubles every time
STEADY = 120.0  # seconds of work after which its next error is a first one
WORK = {
    "sessions are not labelled": label.run,
    "nothing is decided about versions": decide.run,
    "versions have no held-out scores": heldout.run,
    "old sessions are not deleted": people.keep,
}


def main(config: RunConfig) -> None:
    log_to_stderr()
    asyncio.run(watch(config))


async def watch(config: RunConfig) -> None:
    """Run until cancelled. Raises ConfigError for what a user must fix."""
    try:
        async with open_store(config.store) as store, asyncio.TaskGroup() as parts:
            for missed, work in WORK.items():
                parts.create_task(keep_working(missed, partial(work, store, config)))
    except* ConfigError as group:
        raise group.exceptions[0] from None


async def keep_working(missed: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Begin work again after each error, until it returns. missed: what does not happen until then,
    for the console."""
    pause = FIRST_PAUSE
    while True:
        began = time.monotonic()
        try:
            await work()
            return
        except ConfigError:
            raise
        except Exception as error:  # the others go on
            why = f"{type(error).__name__}: {one_line(str(error))}"
            trace = None if isinstance(error, AgentRLError) else error
            log.warning("%s now (%s); tried again", missed, why, exc_info=trace)
        pause = FIRST_PAUSE if time.monotonic() - began > STEADY else pause
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
