"""The process of the gateway half: it serves with the socket of its supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.base.processes import die_with_parent, log_phase, log_to_stderr
from agentrl.config import RunConfig
from agentrl.live import handover
from agentrl.live.gateway import LiveSessions
from agentrl.store import open_store

log = logging.getLogger("agentrl.runner")
ORPHANED = 120.0  # seconds for which a gateway goes on without a supervisor


def main(config: RunConfig) -> None:
    """Serve with the socket that this process has inherited, until SIGTERM."""
    log_to_stderr()
    asyncio.run(_until_signal(config, handover.inherited()))


async def _until_signal(config: RunConfig, listener: socket.socket) -> None:
    stop, orphaned, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)

    def lose_supervisor() -> None:
        orphaned.set()
        loop.call_later(ORPHANED, stop.set)

    loop.add_signal_handler(signal.SIGHUP, lose_supervisor)
    die_with_parent(signal.SIGHUP)
    await serve(config, listener, stop=stop, orphaned=orphaned)


async def serve(
    config: RunConfig, listener: socket.socket, *, stop: asyncio.Event, orphaned: threading.Event
) -> None:
    """Serve until `stop` is set. Sessions stay open for the next process."""
    loop = asyncio.get_running_loop()
    async with open_store(config.store) as store:
        sessions = LiveSessions(store, config, listener)
        await sessions.take_over()
        gateway = sessions.gateway
        await asyncio.to_thread(gateway.start)
        given = partial(loop.call_soon_threadsafe, stop.set)
        handover.offer(Path(config.output), listener, orphaned, given)
        log_phase(log, f"serving at {gateway.base_url}")
        working = [gateway.spawn(work()) for work in (sessions.keep, sessions.follow)]
        waiting: list[asyncio.Future[Any]] = [asyncio.wrap_future(work) for work in working]
        waiting.append(asyncio.ensure_future(stop.wait()))
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in waiting:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*waiting, return_exceptions=True)
            await asyncio.to_thread(gateway.close)
