"""Processes and threads of a run: children, blocking calls, orphans, and memory.

A child is started in its own session, logged to a file, and never orphaned. A subreaper becomes the
parent of all orphaned descendants, even of daemons in their own sessions; descendants are found on
Linux only.

A pool thread that never returns shrinks the pool, then blocks the interpreter's exit. So every call
of a user's blocking code gets its own daemon thread, which costs only memory if it hangs.

Memory is that of this machine or container: its size, what is free, and processes killed for lack
of it. On kernels other than Linux only the size is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import ctypes
import gc
import itertools
import logging
import multiprocessing.resource_tracker
import os
import resource
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

from agentrl.core.errors import AgentRLError, TrainingError

log = logging.getLogger(__name__)


PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4  # linux/prctl.h
MAX_FILES = 65_536  # the limit of open files that servers request
LOG_LEVEL = "AGENTRL_LOG_LEVEL"  # of the log files of a run's processes
PHASE = 25  # log level of the run's current phase, which the console shows unless quiet
# Of a runner, without a finished rollout between them; they end the run.
MAX_CONSECUTIVE_CRASHES = 20
STEADY_UPTIME = 300.0  # seconds of uptime that reset a runner's count of deaths
RESTART_PAUSE = 1.0  # seconds before a runner is restarted
PARENT = "AGENTRL_PARENT"  # pid of the parent, with which this process dies
# Environment variables with secrets: only the run's own, sealed processes get them, no other
# program. The same applies to variables that begin with STORE_SECRET, which backends of the store
# read.
SECRETS = {"AGENTRL_STORE_KEY", "PGPASSWORD", "AGENTRL_AGENT_ENV"}
STORE_SECRET = "AGENTRL_STORE_"


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel to send `number` to this process when its parent dies.

    A no-op on kernels other than Linux, or if `Child` did not start this process."""
    parent = os.environ.pop(PARENT, None)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != int(parent):  # the parent died before the call to prctl
        os.kill(os.getpid(), number)


def log_phase(log: logging.Logger, sentence: str) -> None:
    """Log at PHASE. The record's level is named INFO, because log handlers of some libraries accept
    only Python's standard levels."""
    if log.isEnabledFor(PHASE):
        record = log.makeRecord(log.name, PHASE, "agentrl", 0, sentence, (), None)
        record.levelname = "INFO"
        log.handle(record)


class _LogLines(logging.Formatter):
    """The lines of a run's log files, which name the level PHASE."""

    def format(self, record: logging.LogRecord) -> str:
        if record.levelno == PHASE and record.name.startswith("agentrl"):
            record = copy.copy(record)
            record.levelname = "PHASE"
        return super().format(record)


def log_to_stderr() -> None:
    """Log this package at the level in the variable `LOG_LEVEL`, and libraries at WARNING."""
    handler = logging.StreamHandler()
    handler.setFormatter(_LogLines("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("agentrl").setLevel(os.environ.get(LOG_LEVEL, "INFO"))


def freeze_loaded() -> None:
    """Exclude all loaded objects from garbage collection: with PyTorch a full collection takes a
    fifth of a second, in which no thread runs."""
    gc.collect()
    gc.freeze()


def seal() -> None:
    """Keep other processes of this user, such as agents, from reading this process's memory and
    initial environment. Children are not sealed.

    A no-op on kernels other than Linux; root can still read."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def allow_files() -> int:
    """Raise this process's limit of open files and connections to MAX_FILES or the system's
    maximum, and return the limit. Many systems start at 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        return target
    return MAX_FILES if soft == resource.RLIM_INFINITY else soft


def environment() -> dict[str, str]:
    """The environment of a child. Two defaults, unless this process sets the variables: idle OpenMP
    threads of torch sleep instead of spinning, which takes a tenth of the CPU time with small
    tensors on shared cores; and MKL's products are bitwise equal for any number of threads."""
    threads = {"GOMP_SPINCOUNT": "20000", "MKL_CBWR": "AUTO,STRICT"}
    return threads | os.environ | {PARENT: str(os.getpid()), "PYTHONUNBUFFERED": "1"}


def share_freed_memory() -> None:
    """Let glibc allocate for all threads of this process from one arena, unless MALLOC_ARENA_MAX is
    set. By default each thread of a pool has its own arena, and memory that an update has freed in
    one thread is not available to the next update in another."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(-8, 1)  # M_ARENA_MAX of malloc.h


def environment_without_secrets() -> dict[str, str]:
    """This process's environment without secrets, for programs that are not sealed."""
    kept = os.environ.keys() - SECRETS
    return {name: os.environ[name] for name in kept if not name.startswith(STORE_SECRET)}


@dataclass(slots=True)
class Child:
    """One `agentrl …` subprocess with its output in `log`."""

    name: str
    arguments: list[str]
    log: Path
    piped: bool = False  # it stops at the end of its standard input, not on SIGTERM
    variables: dict[str, str] = field(default_factory=dict)  # added to its environment
    files: tuple[int, ...] = ()  # file descriptors that it inherits
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        kill_watch()
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "agentrl",
                *self.arguments,
                stdin=asyncio.subprocess.PIPE if self.piped else asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment() | self.variables,
                pass_fds=self.files,
                start_new_session=True,  # Ctrl-C reaches only the parent, which stops its children
            )

    async def wait(self) -> int:
        """Wait for the exit code; negative: the number of the signal that ended the process."""
        assert self.process is not None
        return await self.process.wait()

    async def stop(self, grace: float = 10.0) -> None:
        """Send SIGTERM or close its input, and send SIGKILL after `grace` seconds."""
        if self.process is None or self.process.returncode is not None:
            return
        if self.process.stdin is not None:
            self.process.stdin.close()
        else:
            self.process.terminate()
        try:
            async with asyncio.timeout(grace):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()

    def last_error(self) -> str | None:
        """The last error message for the user in its log."""
        marked = [line for line in self._lines() if line.startswith(ERROR_MARK)]
        return marked[-1].removeprefix(ERROR_MARK) if marked else None

    def last_exception(self) -> str | None:
        """The last line of the last traceback in the log: type and message of the error."""
        lines = self._lines()
        starts = [at for at, line in enumerate(lines) if line.startswith(TRACEBACK)]
        after = lines[starts[-1] + 1 :] if starts else []
        ends = (line for line in after if line.strip() and not line.startswith((" ", "\t")))
        return next(ends, None)

    def text_after(self, mark: str) -> str | None:
        """The text after `mark` in the last line of the log that contains it."""
        marked = [line for line in self._lines() if mark in line]
        return marked[-1].partition(mark)[2] if marked else None

    def _lines(self) -> list[str]:
        return self.log.read_text(encoding="utf-8", errors="replace").splitlines()


TRACEBACK = "Traceback (most recent call last):"
ERROR_MARK = "agentrl: error: "
USER_ERROR = 2  # exit code of a process that ended with an error message for the user


class Ending(NamedTuple):
    """How a process ended."""

    number: int  # starts so far
    code: int  # negative: the number of the signal that ended it
    uptime: float  # seconds
    error: str  # its error message for the user; empty: it has none

    @property
    def reason(self) -> str:
        return self.error or cause_of(self.code) or exit_text(self.code)


def exit_text(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


async def keep_running(child: Child, on_end: Callable[[Ending], Awaitable[float | None]]) -> None:
    """Run a process, and restart it whenever it ends. after: returns the seconds until the restart,
    or None to stop, and may raise."""
    for number in itertools.count(1):
        await child.start()
        started = time.monotonic()
        code = await child.wait()
        error = (child.last_error() or "") if code == USER_ERROR else ""
        pause = await on_end(Ending(number, code, time.monotonic() - started, error))
        if pause is None:
            return
        await asyncio.sleep(pause)


def backoff(first: float, longest: float, failures: int) -> float:
    """Seconds until the next try after this many failures in a row, doubling with each."""
    return min(first * 2.0 ** min(failures - 1, 30), longest)


async def keep_alive(child: Child, count_ended: Callable[[], Awaitable[int]]) -> None:
    """Keep a runner running; the rollouts of one that dies are requeued when their leases expire.
    Raises TrainingError after MAX_CONSECUTIVE_CRASHES deaths in a row.

    count_ended: the number of rollouts of the run that have ended. While it grows, deaths are not
    counted: an agent may kill its runner on some tasks."""
    deaths, ended, last = 0, await count_ended(), ""

    async def after(ending: Ending) -> float:
        nonlocal deaths, ended, last
        if ending.code == USER_ERROR:
            raise AgentRLError(ending.error or f"see {child.log}")
        if cause := cause_of(ending.code):
            log.warning("%s ended with signal 9, %s; %s", child.name, cause, RUNNER_MEMORY_HINT)
            last = f", the last time {cause}: {RUNNER_MEMORY_HINT}"
        previous, ended = ended, await count_ended()
        deaths = 1 if ended > previous or ending.uptime > STEADY_UPTIME else deaths + 1
        if deaths < MAX_CONSECUTIVE_CRASHES:
            return RESTART_PAUSE
        raise TrainingError(
            f"{child.name} died {MAX_CONSECUTIVE_CRASHES} times in a row{last}; read {child.log}, "
            "fix the cause and rerun"
        )

    await keep_running(child, after)


P = ParamSpec("P")
T = TypeVar("T")


async def call(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `function(...)` in a thread with the caller's context variables.

    If the caller is cancelled, the thread is abandoned and its result dropped."""
    context = contextvars.copy_context()
    return await asyncio.wrap_future(_start(partial(context.run, function, *args, **kwargs)))


async def uncancelled(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is finished even if the caller is cancelled.
    CancelledError is then raised afterwards, unless `work` raises."""
    task, cancelled = asyncio.create_task(work), False
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            cancelled = True
    result = task.result()
    if cancelled:
        raise asyncio.CancelledError
    return result


class DaemonThreads(ThreadPoolExecutor):
    """An executor for `loop.set_default_executor`, in which frameworks run sync tools of async
    agents. The number of threads is unlimited: no tool waits for a hanging tool of another
    rollout."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return _start(partial(fn, *args, **kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing: daemon threads need no shutdown."""


def _start(work: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    threading.Thread(target=_run, args=(work, future), name="agentrl-call", daemon=True).start()
    return future


def _run(work: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(work())
    except StopIteration as stop:  # asyncio futures do not accept it
        future.set_exception(RuntimeError(f"the function raised StopIteration({stop.value!r})"))
    except BaseException as error:  # noqa: BLE001 - raised again by the caller's await
        future.set_exception(error)


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine and return its result, even in a notebook, whose event loop is running."""
    if not _in_event_loop():  # outside of an `except`, which would be the context of its errors
        return asyncio.run(work)
    with ThreadPoolExecutor(1, thread_name_prefix="agentrl-launcher") as executor:
        loop = asyncio.new_event_loop()
        task = loop.create_task(work)
        running = executor.submit(loop.run_until_complete, task)
        running.add_done_callback(lambda _: loop.close())
        try:
            return running.result()
        except KeyboardInterrupt:  # "interrupt" in a notebook: stop the children, then the cell
            loop.call_soon_threadsafe(task.cancel)
            raise


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
END_TIMEOUT, END_POLL = 5.0, 0.02  # seconds for processes to end, and between two checks


@contextlib.contextmanager
def ending_descendants() -> Iterator[list[int]]:
    """On exit, kill processes that were started inside the context and still run; yields a list
    that then has their ids. Only for a process that ends afterwards."""
    before, ended = set(_children()), list[int]()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield ended
    finally:
        tracker = getattr(multiprocessing.resource_tracker._resource_tracker, "_pid", None)
        ended += _kill_all(before | {tracker})


def _kill_all(kept: Collection[int | None]) -> list[int]:
    """Kill until no child is left: the children of a killed process become children of this one."""
    killed, deadline = dict[int, None](), time.monotonic() + END_TIMEOUT
    while time.monotonic() < deadline:
        left = [pid for pid in _children() if pid not in kept]
        if not left:
            break
        for pid in left:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                done, _ = os.waitpid(pid, os.WNOHANG)
                if done == 0:
                    os.kill(pid, signal.SIGKILL)
                    killed[pid] = None
        time.sleep(END_POLL)
    return list(killed)


def _children() -> list[int]:
    me, pids = str(os.getpid()), list[int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            if stat.read_text().rpartition(")")[2].split()[1] == me:
                pids.append(int(stat.parent.name))
    return pids


ROOT = Path("/sys/fs/cgroup")
PROC = Path("/proc")
# Files of a control group, in version 2 and 1 of the kernel's interface.
LIMITS = ("memory.max", "memory.limit_in_bytes")
EVENTS = ("memory.events", "memory.oom_control")
# Keys of memory.stat: memory that cannot be reclaimed, unlike file cache.
OCCUPIED = ("anon", "total_rss")


LEARNER_MEMORY_HINT = (
    "set what is smaller of learner.token_budget, engine.max_batch and engine.max_context, or "
    "learner.gradient_checkpointing=true, policy.dtype=bfloat16 or policy.lora.rank=16"
)
RUNNER_MEMORY_HINT = (
    "lower runner.processes or runner.concurrency, so that fewer agents run at once"
)
KILL_DELAY = 10  # seconds from a kill by the kernel to the end of a large process, at most


def total_memory() -> int:
    """Bytes of memory that this process and its children may have."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(limit for _, limit in _limits())])


def free_memory() -> int:
    """Bytes that are available without reclaiming memory of other processes."""
    limits = [total_memory()]
    if (available := _numbers(PROC / "meminfo").get("MemAvailable:")) is not None:
        limits.append(1024 * available)
    for group, limit in _limits():
        stat = _numbers(group / "memory.stat")
        limits.append(limit - next((stat[key] for key in OCCUPIED if key in stat), 0))
    return max(0, min(limits))


def private_bytes() -> int:
    """Bytes of this process that `RLIMIT_DATA` limits, and of its stack; 0: not known."""
    return _statm(5)


def resident_bytes() -> int:
    """Bytes of this process that are in memory, files it has mapped included; 0: not known."""
    return _statm(1)


def _statm(column: int) -> int:
    try:
        pages = int((PROC / "self/statm").read_bytes().split()[column])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def count_kills() -> int | None:
    """A number that grows when the kernel kills a process of this container or machine because
    memory ran out; it counts before it kills. None: not known."""
    files = [group / name for group in _groups() for name in EVENTS]
    readings = [_numbers(file).get("oom_kill") for file in (*files, PROC / "vmstat")]
    counts = [count for count in readings if count is not None]
    return sum(counts) if counts else None


class KillWatch:
    """Reads `count_kills` every second. Its thread is the only one that writes."""

    def __init__(self) -> None:
        self.counts = deque([count_kills()], maxlen=KILL_DELAY)
        threading.Thread(target=self._read, name="memory", daemon=True).start()

    def _read(self) -> None:
        while True:
            time.sleep(1.0)
            self.counts.append(count_kills())

    def recently_killed(self) -> bool | None:
        """Whether the kernel has killed a process for memory in the last seconds. None: unknown."""
        before, now = self.counts[0], count_kills()
        return None if before is None or now is None else now > before


@cache
def kill_watch() -> KillWatch:
    """The watch of this process, which starts at the first call: before a child can be killed."""
    return KillWatch()


def cause_of(status: int) -> str:
    """Why a child with this exit status may have ended; "" unless memory was the cause or may have
    been. status: minus the number of the signal that ended it."""
    killed = kill_watch().recently_killed() if status == -signal.SIGKILL else False
    if killed is None:
        return "perhaps because memory ran out"
    return "because memory ran out" if killed else ""


def _limits() -> Iterator[tuple[Path, int]]:
    """The groups with a limit of memory, and the limit."""
    for group in _groups():
        for name in LIMITS:
            with suppress(OSError, ValueError):  # no such file, or "max"
                yield group, int((group / name).read_text())


def _groups() -> Iterator[Path]:
    """The control groups of this process that may limit its memory, from the innermost one."""
    with suppress(OSError):
        for line in (PROC / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root = ROOT / "memory" if controllers else ROOT
            innermost = root / path.lstrip("/")
            yield from (
                group for group in (innermost, *innermost.parents) if group.is_relative_to(root)
            )


def _numbers(file: Path) -> dict[str, int]:
    """The numbers in a file of lines such as "name 12"; none if it cannot be read."""
    numbers = {}
    with suppress(OSError):
        for words in map(str.split, file.read_text().splitlines()):
            if len(words) > 1 and words[1].isdecimal():
                numbers[words[0]] = int(words[1])
    return numbers
