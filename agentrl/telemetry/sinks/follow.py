"""The process of one sink: it follows the store until its standard input ends, and then to the end.

Owns the sink's mark, alone: the process of a front that was killed may still be at work when the
next one starts, and ends soon after its input. Whatever the backend does, training does not notice:
the process ends with a sentence, and the next one continues where it stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO

from agentrl.config import RunConfig
from agentrl.errors import SinkError
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.telemetry.sinks.base import Sink, load_mark, mark_file, open_sink, save_mark

PAUSE = 1.0  # seconds between two looks at a busy store
DRAIN = 30.0  # seconds that a sink has for what is left when a run ends
SLACK = 5.0  # seconds after which it ends by itself, where no front ends it


def main(config: RunConfig, name: str) -> None:
    """Write the run's metrics to the sink. Raises SinkError when the backend fails."""
    with _boundary(name):
        lock = _locked(mark_file(config, name).with_suffix(".lock"))
    with lock:
        asyncio.run(_main(config, name))


async def _main(config: RunConfig, name: str) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    ends = partial(loop.call_soon_threadsafe, stop.set)
    threading.Thread(target=_at_end_of_input, args=[ends], daemon=True).start()
    async with open_store(config.store) as store:
        await follow(store, config, name, stop)


async def follow(store: Store, config: RunConfig, name: str, stop: asyncio.Event) -> None:
    """Write what is due, as it comes; once `stop` is set, what there is, and return."""
    file = mark_file(config, name)
    with _boundary(name):
        mark = load_mark(file)
    sink: Sink | None = None
    try:
        while True:
            last, cursor = stop.is_set(), await store.cursor()
            rows = await store.steps(config.name, after=mark.next - 1)
            for row in mark.due(rows, config.steps):
                with _boundary(name):
                    sink = sink or open_sink(name, config, mark)
                    sink.write(row)
                    mark = mark.after(row)
                    save_mark(file, mark)
            if last:
                return
            await _news(store, cursor, stop)
    finally:
        if sink is not None:
            with _boundary(name):
                sink.close()


@contextlib.contextmanager
def _boundary(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a backend may raise anything
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        raise SinkError(
            f"metrics sink {name}: {said}. Training goes on and the store keeps every step; the"
            " sink is tried again and then given what it missed"
        ) from error


async def _news(store: Store, cursor: int, stop: asyncio.Event) -> None:
    """Returns when the store has changed, at most once in a while, or when it is to stop."""
    tasks = [asyncio.create_task(store.wait(cursor)), asyncio.create_task(stop.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PAUSE):
            await stop.wait()


def _locked(file: Path) -> IO[str]:
    """Waits until no other process has the file open from here, and keeps it until it is closed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = file.open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def _at_end_of_input(stop: Callable[[], object]) -> None:
    """Call `stop`, from a thread, once nothing can be read any more, and end a process that a
    backend still holds up long after. `os.read` holds no lock that the end of the process would
    wait for."""
    while os.read(0, 4096):
        pass
    stop()
    time.sleep(DRAIN + SLACK)
    os._exit(1)
