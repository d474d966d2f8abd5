"""Child processes of a run: started in their own session, logged to a file, never orphaned."""

from __future__ import annotations

import asyncio
import copy
import ctypes
import gc
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.base import memory
from agentrl.errors import AgentRLError, TrainingError

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4  # linux/prctl.h
FILES = 65_536  # the limit of open files that servers ask the system for
LOG_LEVEL = "AGENTRL_LOG_LEVEL"  # of the log files of a run's processes
PHASE = 25  # log level of the run's current phase, which the console shows unless quiet
MOST_DEATHS = 20  # deaths of a runner in a row, without a finished rollout, that end the run
STEADY_UPTIME = 300.0  # seconds of uptime that reset a runner's count of deaths
RESTART_PAUSE = 1.0  # seconds before a runner is restarted
PARENT = "AGENTRL_PARENT"  # pid of the parent, with which this process dies
# Environment variables of the run's own processes, all of them sealed, but not of other programs;
# neither are those that begin with STORE_SECRET, in which backends of the store find theirs.
SECRETS = {"AGENTRL_STORE_KEY", "PGPASSWORD", "AGENTRL_AGENT_ENV"}
STORE_SECRET = "AGENTRL_STORE_"


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel to send `number` to this process when its parent dies.

    A no-op on other kernels than Linux, or if `Child` did not start this process."""
    parent = os.environ.pop(PARENT, None)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != int(parent):  # it died before the call to prctl
        os.kill(os.getpid(), number)


def log_phase(log: logging.Logger, sentence: str) -> None:
    """Log at PHASE. The record's level is named INFO: other libraries have handlers in the same
    process, and those of some accept only the names that Python has."""
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

    A no-op on other kernels than Linux; root can still read."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def allow_files() -> int:
    """Raise this process's limit of open files and connections to FILES or the system's maximum,
    and return the limit. Many systems start at 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return FILES if soft == resource.RLIM_INFINITY else soft


def environment() -> dict[str, str]:
    """The environment of a child. Two defaults unless this process sets them: waiting OpenMP
    threads of torch soon sleep instead of spinning, which takes a tenth of the CPU time with small
    tensors on shared cores; and MKL's products are bitwise equal for any number of threads."""
    threads = {"GOMP_SPINCOUNT": "20000", "MKL_CBWR": "AUTO,STRICT"}
    return threads | os.environ | {PARENT: str(os.getpid()), "PYTHONUNBUFFERED": "1"}


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
        memory.watch()
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
                start_new_session=True,  # Ctrl-C reaches only the front, which stops its children
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
        """The line that ends the last traceback in its log: the kind of the error and what it
        says."""
        lines = self._lines()
        starts = [at for at, line in enumerate(lines) if line.startswith(TRACEBACK)]
        after = lines[starts[-1] + 1 :] if starts else []
        ends = (line for line in after if line.strip() and not line.startswith((" ", "\t")))
        return next(ends, None)

    def last_said(self, mark: str) -> str | None:
        """What follows `mark` in the last line of its log that has it."""
        marked = [line for line in self._lines() if mark in line]
        return marked[-1].partition(mark)[2] if marked else None

    def _lines(self) -> list[str]:
        return self.log.read_text(encoding="utf-8", errors="replace").splitlines()


TRACEBACK = "Traceback (most recent call last):"
ERROR_MARK = "agentrl: error: "
USER_ERROR = 2  # exit code of a process that ended with an error message for the user


async def keep_alive(child: Child, count_ended: Callable[[], Awaitable[int]]) -> None:
    """Run a runner and restart it whenever it dies; its rollouts are requeued when their leases
    expire. Raises TrainingError after MOST_DEATHS deaths in a row.

    count_ended: the number of rollouts of the run that have ended. While it grows, deaths are not
    counted: an agent may kill its runner on some tasks."""
    deaths, ended, last = 0, await count_ended(), ""
    while deaths < MOST_DEATHS:
        await child.start()
        started = time.monotonic()
        code = await child.wait()
        if code == USER_ERROR:
            raise AgentRLError(child.last_error() or f"see {child.log}")
        if cause := memory.cause_of(code):
            log.warning("%s ended with signal 9, %s; %s", child.name, cause, memory.FEWER)
            last = f", the last time {cause}: {memory.FEWER}"
        before, ended = ended, await count_ended()
        working = ended > before or time.monotonic() - started > STEADY_UPTIME
        deaths = 1 if working else deaths + 1
        await asyncio.sleep(RESTART_PAUSE)
    raise TrainingError(
        f"{child.name} died {MOST_DEATHS} times in a row{last}; read {child.log}, fix the cause "
        "and rerun"
    )
