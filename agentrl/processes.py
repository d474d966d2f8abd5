"""Child processes of a run: started in their own session, logged to a file, never orphaned."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import AgentRLError, TrainingError

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4  # linux/prctl.h
FILES = 65_536  # open files of a server, where the system allows them
LOG_LEVEL = "AGENTRL_LOG_LEVEL"  # of the log files of a run's processes
PHASE = 25  # log level of what a run is doing now, which the console shows unless quiet
logging.addLevelName(PHASE, "PHASE")
RESTARTS = 20  # deaths of a runner in a row, with no rollout ended between, until it is given up
STEADY = 300.0  # seconds alive after which a runner's earlier deaths do not count
PAUSE = 1.0  # seconds before a runner is started again
PARENT = "AGENTRL_PARENT"  # pid of the process that must outlive this one
# What processes of a run, all of them sealed, find in their environment and other programs do not.
SECRETS = {"AGENTRL_STORE_KEY", "PGPASSWORD", "AGENTRL_AGENT_ENV"}


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel to send `number` to this process when its parent dies.

    A no-op unless this process was started by `Child`, and where the kernel is not Linux."""
    parent = os.environ.pop(PARENT, None)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != int(parent):  # it died before the request was made
        os.kill(os.getpid(), number)


def log_to_stderr() -> None:
    """Log this package from the level in `LOG_LEVEL` on, and libraries from WARNING on."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("agentrl").setLevel(os.environ.get(LOG_LEVEL, "INFO"))


def freeze_loaded() -> None:
    """Have the garbage collector pass over what is loaded by now, which stays: with PyTorch a full
    collection takes a fifth of a second, in which no thread runs."""
    gc.collect()
    gc.freeze()


def seal() -> None:
    """Keep other processes of this user, such as agents, from reading this process's memory and
    the environment it was started with. Its children are not sealed.

    A no-op where the kernel is not Linux; root can still read."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def allow_files() -> int:
    """Raise the number of files that this process may open, connections included, to FILES or to
    the system's limit, and return it. Many systems begin at 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return FILES if soft == resource.RLIM_INFINITY else soft


def environment() -> dict[str, str]:
    """The environment of a child. Unless this process has other values, threads of torch that wait
    for each other soon sleep: the default is to spin for long, which costs ten times the CPU time
    in steps of small tensors on shared cores. And MKL multiplies to the same bits with any number
    of threads."""
    threads = {"GOMP_SPINCOUNT": "20000", "MKL_CBWR": "AUTO,STRICT"}
    return threads | os.environ | {PARENT: str(os.getpid()), "PYTHONUNBUFFERED": "1"}


def environment_without_secrets() -> dict[str, str]:
    """This process's environment for a program whose own can be read by other processes."""
    return {name: value for name, value in os.environ.items() if name not in SECRETS}


@dataclass(slots=True)
class Child:
    """One `agentrl …` subprocess with its output in `log`."""

    name: str
    arguments: list[str]
    log: Path
    piped: bool = False  # it works until its standard input ends, not until SIGTERM
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "agentrl",
                *self.arguments,
                stdin=asyncio.subprocess.PIPE if self.piped else asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(),
                start_new_session=True,  # Ctrl-C reaches the front only, which ends its children
            )

    async def wait(self) -> int:
        """Exit code; negative: the signal that ended it."""
        assert self.process is not None
        return await self.process.wait()

    async def stop(self, grace: float = 10.0) -> None:
        """SIGTERM or the end of its input, and after `grace` seconds SIGKILL."""
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
        """The sentence of the last user error in its log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        marked = [line for line in lines if line.startswith(ERROR_MARK)]
        return marked[-1].removeprefix(ERROR_MARK) if marked else None


ERROR_MARK = "agentrl: error: "
USER_ERROR = 2  # exit code of a process that ended with a sentence for the user


async def keep_alive(child: Child, count_ended: Callable[[], Awaitable[int]]) -> None:
    """Start a runner again whenever it dies: its rollouts come back when their leases expire.
    count_ended: the number of rollouts of the run that have ended. While it grows, the run goes on,
    whatever kills runners, as an agent may with some tasks."""
    deaths, ended = 0, await count_ended()
    while deaths < RESTARTS:
        await child.start()
        started = time.monotonic()
        code = await child.wait()
        if code == USER_ERROR:
            raise AgentRLError(child.last_error() or f"see {child.log}")
        before, ended = ended, await count_ended()
        working = ended > before or time.monotonic() - started > STEADY
        deaths = 1 if working else deaths + 1
        await asyncio.sleep(PAUSE)
    raise TrainingError(
        f"{child.name} died {RESTARTS} times in a row; read {child.log}, mend the cause, repeat"
    )
