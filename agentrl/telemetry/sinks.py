"""Metrics sinks and callbacks: the protocol, and the process that writes to the sinks.

    launcher ── starts, restarts, stops ──► sinks process ── one thread per sink ──► backend

Each thread follows the store independently, so a backend that fails or hangs delays no other sink.
The position up to which a sink has a run's steps is a small file in the run's output folder,
written after the backend has a step. Only the sink's thread writes it, and continues from it after
a failure. A sink killed between the two writes the step again; the class of each backend documents
the effect. The process works until its standard input ends, and then for a limited time.

A callback of a `Trainer` is an object of a script or a notebook with `on_step`, `on_evaluation` or
both: called with the stored `StepRow` of a step that was committed, or of a held-out evaluation,
whose metrics are `eval/...` and whose step is the number of steps before it. They are called in
order, one at a time, in a thread of this process, while training continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import inspect
import logging
import math
import os
import re
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol
from urllib.parse import quote

import msgspec
from rich.console import Console

from agentrl.core import user_code
from agentrl.core.config import RunConfig
from agentrl.core.config.validate import flatten
from agentrl.core.errors import AgentRLError, TrainingError
from agentrl.core.files import replace_file
from agentrl.core.plugins import BUILT_IN, check_call, check_protocol, load_plugin
from agentrl.core.processes import USER_ERROR, Child, Ending, backoff, keep_running, log_to_stderr
from agentrl.core.types import Json, Purpose, StepRow, one_line, step_in_words
from agentrl.core.user_code import cause_of, contained
from agentrl.store import open_store
from agentrl.store.base import Store

SETTINGS = ("seed", "steps", "policy", "sampling", "algorithm", "learner", "eval")
"""The settings that backends get; not those of the agent, whose variables may contain keys."""
KEY = "metrics.sinks"


class SinkError(AgentRLError):
    """A metrics sink cannot be reached or refuses metrics."""


class Sink(Protocol):
    """A backend that is open for one run. After any exception it is opened again later."""

    def write(self, row: StepRow) -> None:
        """Write a stored row's metrics, all finite; `split_step` gives them the step numbers that
        people see. Returns once they would survive the end of this process."""

    def close(self) -> None: ...


class SinkPosition(msgspec.Struct, frozen=True, kw_only=True):
    """All steps before `next` are written. Of step `next`, the metrics `names` are written: those
    of the evaluation after the last step. If the run is extended, the step's other metrics
    follow."""

    id: str  # id of the run in the backend
    next: int = 0
    names: tuple[str, ...] = ()

    def after(self, row: StepRow) -> SinkPosition:
        """The position once `row` is written."""
        if row.committed:
            return SinkPosition(id=self.id, next=row.step + 1)
        written = self.names if row.step == self.next else ()
        return SinkPosition(id=self.id, next=row.step, names=(*written, *sorted(row.metrics)))

    def unwritten(self, rows: Sequence[StepRow], steps: int) -> Iterator[StepRow]:
        """The parts of `rows` to write, in a run of `steps` steps. An uncommitted step may still
        change, except the one after the last step, which has only evaluations."""
        for row in rows:
            if row.step < self.next or not (row.committed or row.step == steps):
                continue
            written = self.names if row.step == self.next else ()
            finite = {name: value for name, value in row.metrics.items() if math.isfinite(value)}
            if metrics := {name: finite[name] for name in finite if name not in written}:
                yield msgspec.structs.replace(row, metrics=metrics)


def position_file(config: RunConfig, sink: str) -> Path:
    return Path(config.output, "metrics", quote(sink, safe="") + ".json")


def load_position(file: Path) -> SinkPosition:
    """The position in the file. A new one is saved at once, so that the backend's run can always
    be found by its id. Raises SinkError for a damaged file."""
    if file.exists():
        try:
            return msgspec.json.decode(file.read_bytes(), type=SinkPosition)
        except msgspec.DecodeError as error:
            raise SinkError(
                f"{file} is damaged ({error}); delete it, and the sink starts a new run with all"
                " steps"
            ) from error
    position = SinkPosition(id=secrets.token_hex(4))
    save_position(file, position)
    return position


def save_position(file: Path, position: SinkPosition) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, msgspec.json.encode(position))


def sink_factory(name: str, root: Path) -> Any:
    """The function or class that opens a sink: built-in, a package's or the user's.

    Raises ConfigError for an unknown name, or if it does not take (config, position)."""
    factory: Any = load_plugin("sinks", name, (), root, key=KEY)
    check_call(factory, "config", "position", key=KEY)
    if inspect.isclass(factory):
        check_protocol(factory, Sink, source=factory, key=KEY)
    return factory


def check_sinks(config: RunConfig) -> None:
    """Raises ConfigError for unusable sinks of users."""
    for name in config.metrics.sinks:
        if name not in BUILT_IN["sinks"]:
            sink_factory(name, Path(config.root))


def open_sink(name: str, config: RunConfig, position: SinkPosition) -> Sink:
    """Open the backend of that name to continue at `position`."""
    factory = sink_factory(name, Path(config.root))
    sink: Sink = factory(config, position)
    check_protocol(sink, Sink, source=factory, key=KEY)
    return sink


def public_settings(config: RunConfig) -> dict[str, Json]:
    """The settings for backends, with dotted keys."""
    flat = flatten(msgspec.to_builtins(config))
    return {key: value for key, value in flat.items() if key.split(".")[0] in SETTINGS}


def plain_name(name: str) -> str:
    """A metric's name for backends that allow only letters, digits and `_-. :/`."""
    return re.sub(r"[^\w.: /-]", "_", name)


SCORE = "eval/score"
METHODS = ("on_step", "on_evaluation")


@asynccontextmanager
async def followed(
    store: Store, run: str, callbacks: Sequence[Any]
) -> AsyncIterator[Callable[[], Coroutine[Any, Any, None]]]:
    """Yield a coroutine function that calls the callbacks until it is cancelled; at the end they
    are called for the remaining steps."""
    new = Followers(store, run, check_callbacks(callbacks))
    await new.call()  # skips the steps that exist already
    yield new.follow
    await new.call()


def check_callbacks(callbacks: Sequence[Any]) -> Sequence[Any]:
    """Return the callbacks. Raises AgentRLError for an object without a method of METHODS."""
    for callback in callbacks:
        if not any(callable(getattr(callback, name, None)) for name in METHODS):
            raise AgentRLError(f"callback {callback!r}: it has neither {' nor '.join(METHODS)}")
    return callbacks


class Followers:
    """Calls callbacks once for each new step and evaluation of a run."""

    def __init__(self, store: Store, run: str, callbacks: Sequence[Any]) -> None:
        self._store, self._run, self._callbacks = store, run, callbacks
        self._seen: dict[str, int] | None = None  # method -> the last step for which it was called

    async def follow(self) -> None:
        """Call the callbacks until cancelled. Raises TrainingError for an error of a callback."""
        cursor = await self._store.cursor()
        while True:
            await self.call()
            cursor = await self._store.wait(cursor)

    async def call(self) -> None:
        rows = await self._store.steps(self._run) if self._callbacks else []
        rows_by_method = {
            "on_step": [row for row in rows if row.committed],
            "on_evaluation": [row for row in rows if SCORE in row.metrics],
        }
        if self._seen is None:  # earlier steps of a resumed run were reported before
            self._seen = {
                name: max((r.step for r in rows_of), default=-1)
                for name, rows_of in rows_by_method.items()
            }
        pending = [
            (row.step, name, row) for name, rows_of in rows_by_method.items() for row in rows_of
        ]
        # The evaluation with a step's number takes place before the step.
        for step, name, row in sorted(pending, key=lambda item: (item[0], item[1] == "on_step")):
            if step > self._seen[name]:
                self._seen[name] = step
                for callback in self._callbacks:
                    if method := getattr(callback, name, None):
                        await self._invoke(method, name, callback, row)

    async def _invoke(self, method: Any, name: str, callback: Any, row: StepRow) -> None:
        try:
            await user_code.in_thread(method, row)
        except Exception as error:
            method_name, cause = f"{type(callback).__name__}.{name}", user_code.cause_of(error)
            where = step_in_words(row.step, Purpose.TRAIN if name == "on_step" else Purpose.EVAL)
            raise TrainingError(
                f"the callback {method_name} raised {type(cause).__name__} at {where}: "
                f"{one_line(str(cause))}; training has stopped: start it again to continue from "
                "the last checkpoint"
            ) from error


log = logging.getLogger(__name__)
STORE_POLL = 1.0  # seconds between reads of the store
# Seconds before a retry after a failure; doubles.
FIRST_RETRY_PAUSE, MAX_RETRY_PAUSE = 10.0, 600.0
DRAIN_TIMEOUT = 30.0  # seconds that sinks have for the remaining steps when a run ends
EXIT_GRACE = 5.0  # further seconds until the process ends itself


def main(config: RunConfig) -> None:
    """Write the run's metrics to its sinks until standard input ends, then the remaining steps.

    Raises SinkError, which names the sinks that miss steps."""
    log_to_stderr()
    threads = [SinkThread(config, name) for name in config.metrics.sinks]
    for thread in threads:
        thread.start()
    while os.read(0, 4096):  # sys.stdin would hold a lock that blocks the exit
        pass
    # A backend may block the exit, too.
    timer = threading.Timer(DRAIN_TIMEOUT + EXIT_GRACE, os._exit, [1])
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
                pause = min(2 * pause, MAX_RETRY_PAUSE)

    def report(self, error: str) -> None:
        """Log a failure once; the launcher prints the log on the console."""
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
    """Write steps to the sink as they are committed, and the remaining ones after the run's end.

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
                    sink = sink or open_sink(name, config, position)
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
        f"metrics sink {sink}: {first_line}. Training continues and the store keeps every step; the"
        " sink is retried, also when the command is run again, and then gets the steps that it "
        "missed"
    )


def _locked(file: Path) -> IO[str]:
    """The file, locked until it is closed: the process of an earlier launcher may still write."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = file.open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


@dataclass(slots=True)
class SinksProcess:
    """The launcher's handle on the process, which it restarts if a backend ends it."""

    child: Child
    console: Console
    reported: bool = False

    async def keep(self) -> None:
        async def after(ending: Ending) -> float | None:
            if not ending.code:
                return None
            self._report()
            return backoff(FIRST_RETRY_PAUSE, MAX_RETRY_PAUSE, ending.number)

        await keep_running(self.child, after)

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
    child = Child("sinks", ["process", "sinks", str(run_file)], file, piped=True)
    return SinksProcess(child, console)
