"""The process that writes a run's metrics to its sinks, and the front's handle on it.

    front ── starts, restarts, stops ──► sinks process ── one thread per sink ──► backend

Each thread follows the store independently, so a backend that fails or hangs delays no other sink.
Only this thread writes its sink's position, from which it continues after a failure. The process
works until its standard input ends, and then for a limited time.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rich.console import Console

from agentrl.base.processes import USER_ERROR, Child, log_to_stderr
from agentrl.base.user_code import cause_of, contained
from agentrl.config import RunConfig
from agentrl.errors import AgentRLError
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.telemetry.sinks import base
from agentrl.telemetry.sinks.base import (
    Sink,
    SinkError,
    load_position,
    position_file,
    save_position,
)

log = logging.getLogger(__name__)
STORE_POLL = 1.0  # seconds between reads of the store
# Seconds before a retry after a failure; doubles.
FIRST_RETRY_PAUSE, LONGEST_RETRY_PAUSE = 10.0, 600.0
DRAIN_TIMEOUT = 30.0  # seconds that sinks have for the remaining steps when a run ends
EXIT_GRACE = 5.0  # further seconds until the process ends itself


def main(config: RunConfig) -> None:
    """Write the run's metrics to its sinks until standard input ends, then the remaining steps.

    Raises SinkError, which names the sinks that miss steps."""
    log_to_stderr()
    threads = [SinkThread(config, name) for name in config.metrics.sinks]
    for thread in threads:
        thread.start()
    while os.read(0, 4096):  # sys.stdin would hold a lock for which the exit waits
        pass
    timer = threading.Timer(
        DRAIN_TIMEOUT + EXIT_GRACE, os._exit, [1]
    )  # a backend may block the exit too
    timer.daemon = True
    timer.start()
    deadline = time.monotonic() + DRAIN_TIMEOUT
    for thread in threads:
        thread.run_ended.set()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.error:
            thread.report(thread.error)
    if errors := [thread.error for thread in threads if thread.error]:
        raise SinkError("\n".join(errors))


class SinkThread(threading.Thread):
    """Writes the steps of a run to one sink, and retries after failures."""

    def __init__(self, config: RunConfig, sink: str) -> None:
        super().__init__(name=f"sink-{sink}", daemon=True)
        self.config, self.sink = config, sink
        self.run_ended = threading.Event()
        self.error = _sentence(sink, f"it did not end within {DRAIN_TIMEOUT:.0f} s of the run")
        self.reported = False

    def run(self) -> None:
        """Run until everything is written, or the last try after the run's end has failed."""
        pause = FIRST_RETRY_PAUSE
        while self.error:
            last = self.run_ended.is_set()
            try:
                with _locked(position_file(self.config, self.sink).with_suffix(".lock")):
                    asyncio.run(self._write())
                self.error = ""
            except (AgentRLError, OSError) as error:
                self.report(str(error))
                if last:
                    return
                self.run_ended.wait(pause)
                pause = min(2 * pause, LONGEST_RETRY_PAUSE)

    def report(self, error: str) -> None:
        """Log a failure once; the front prints the log on the console."""
        self.error = error
        if not self.reported:
            self.reported = True
            log.warning("%s", error)

    async def _write(self) -> None:
        async with open_store(self.config.store, readonly=True) as store:
            await write_steps(store, self.config, self.sink, self.run_ended)


async def write_steps(
    store: Store, config: RunConfig, name: str, run_ended: threading.Event
) -> None:
    """Write steps to the sink as they are committed, and the rest after the run's end.

    Raises SinkError if the backend fails."""
    file = position_file(config, name)
    with _backend(name):
        position = load_position(file)
    sink: Sink | None = None
    try:
        while True:
            last = run_ended.is_set()
            rows = await store.steps(config.name, after=position.next - 1)
            for row in position.unwritten(rows, config.steps):
                with _backend(name):
                    sink = sink or base.open_sink(name, config, position)
                    sink.write(row)
                    position = position.after(row)
                    save_position(file, position)
            if last:
                return
            await asyncio.to_thread(run_ended.wait, STORE_POLL)
    finally:
        if sink is not None:
            with _backend(name):
                sink.close()


@contextlib.contextmanager
def _backend(name: str) -> Iterator[None]:
    try:
        with contained():
            yield
    except Exception as error:  # a backend may raise anything
        cause = cause_of(error)
        raise SinkError(_sentence(name, str(cause) or type(cause).__name__)) from error


def _sentence(sink: str, problem: str) -> str:
    first_line, _, _ = problem.strip().partition("\n")
    return (
        f"metrics sink {sink}: {first_line}. Training goes on and the store keeps every step; the"
        " sink is retried, also by the same command, and then gets the steps that it missed"
    )


def _locked(file: Path) -> IO[str]:
    """The file, locked until it is closed, because an earlier front's process may still write."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = file.open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


@dataclass(slots=True)
class SinksProcess:
    """The front's handle on the process, which it restarts if a backend ends it."""

    child: Child
    console: Console
    reported: bool = False

    async def keep(self) -> None:
        pause = FIRST_RETRY_PAUSE
        while True:
            await self.child.start()
            if not await self.child.wait():
                return
            self._report()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_RETRY_PAUSE)

    async def stop(self) -> None:
        """Let the sinks write the remaining steps, for a limited time."""
        if self.child.process is not None and self.child.process.returncode:
            await self.child.start()  # the last try after a failure
        await self.child.stop(DRAIN_TIMEOUT + EXIT_GRACE)
        self._report()

    def _report(self) -> None:
        """Print that the process itself failed. Errors of sinks are in its log already."""
        code = self.child.process.returncode if self.child.process else 0
        if code and code != USER_ERROR and not self.reported:
            self.reported = True
            sentence = (
                f"metrics sinks: their process ended with code {code} before they had all steps;"
                f" the same command writes the rest (its output: {self.child.log})"
            )
            self.console.print(sentence, style="bold", highlight=False, markup=False)


def sinks_process(config: RunConfig, run_file: Path, console: Console) -> SinksProcess | None:
    """The sinks process, not started yet; None for a run without sinks."""
    if not config.metrics.sinks:
        return None
    file = Path(config.output, "logs", "sinks.log")
    child = Child("sinks", ["sink", "start", str(run_file)], file, piped=True)
    return SinksProcess(child, console)
