"""Client of the keeper: asks docker's command line, or a compatible one, through it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from agentrl.base import threads
from agentrl.config.infrastructure import ContainerRunnerConfig
from agentrl.errors import AgentRLError, ConfigError
from agentrl.runners.containers import keeper
from agentrl.runners.executors.environment import matching
from agentrl.runners.processes.contract import PASSED, passed_environment

# Variables of docker's command line, and of podman's
CLIENT = ("DOCKER_*", "CONTAINER_*", "CONTAINERS_*", "BUILDAH_*", "REGISTRY_*", "XDG_RUNTIME_DIR")
HINTS = ("See '", "Run '", "Usage:")  # below an error
PROGRAMS = ("docker", "podman")  # the first that works, if the run file names none
CLOSE_TIMEOUT = 60.0
CHECK_TIMEOUT = 20.0  # seconds for the daemon to answer


class ContainerError(AgentRLError):
    """A container or its image cannot be made or used. The message is one sentence."""


class ContainerEnded(ContainerError):
    """What runs in a container has ended it, or used more than it may."""


class CliAnswer(NamedTuple):
    """What a call of the command line said."""

    status: int
    out: str
    err: str

    @property
    def problem(self) -> str:
        lines = [line for line in (self.err or self.out).splitlines() if line.strip()]
        lines = [line for line in lines if not line.startswith(HINTS)]
        return lines[-1].strip().removeprefix("Error: ") if lines else f"exit status {self.status}"


class Cli:
    """Owns: the keeper process and the folder `scratch`, which the keeper removes."""

    def __init__(self, program: str = "") -> None:
        """`program`: docker, podman or a compatible one; empty: the first that works here."""
        self.program, self._named = program, program
        self.scratch = Path()
        self._waiting: dict[int, asyncio.Future[CliAnswer]] = {}
        self._count, self._owner = 0, ""
        self._keeper: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._restarting = asyncio.Lock()

    async def start(self) -> None:
        """Raise ConfigError, one sentence, if there is no program, or its daemon is down."""
        if not sys.platform.startswith("linux"):
            raise ConfigError("containers need Linux: the keeper of a runner uses its namespaces")
        self.program = await threads.call(working_program, self._named)
        self.scratch = Path(tempfile.mkdtemp(prefix=keeper.PREFIX))
        keeper.note_owner(self.scratch)
        await self._start_keeper()

    async def _start_keeper(self) -> None:
        """The first one, or the next after one that was killed."""
        if self._keeper is not None and self._writer is not None:
            self._writer.close()
            await threads.call(self._keeper.wait)
        ours, theirs = socket.socketpair()
        program = [sys.executable, "-I", "-S", keeper.__file__, self.program, str(self.scratch)]
        how: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        how |= {"pass_fds": [theirs.fileno()], "start_new_session": True, "cwd": self.scratch}
        with theirs:
            self._keeper = subprocess.Popen(  # noqa: ASYNC220 - does not wait
                [*program, str(theirs.fileno())], env=passed_environment(CLIENT), **how
            )
        self._owner = keeper.owner_of(self._keeper.pid)
        limit = keeper.LARGEST_MESSAGE
        reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=limit)
        self._reading = asyncio.create_task(self._read(reader))

    @property
    def owner(self) -> str:
        """The label of the containers that are started now, by a keeper that is `awake`."""
        return self._owner

    @property
    def alive(self) -> bool:
        """Whether the keeper is alive. The doors of its containers end with it."""
        return self._reading is not None and not self._reading.done()

    async def ask(
        self,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        stdin: Path | None = None,
        stdout: Path | None = None,
        largest: int = 0,
        timeout: float = keeper.CLI_TIMEOUT,
        ends: bool = False,
    ) -> CliAnswer:
        """Call the command line. `env`: additional variables. `stdout`: file for the output, of
        at most `largest` bytes; 0: no limit.
        `ends`: it ends by itself: it starts a container or builds an image, and is not interrupted
        if the runner is killed, since only then is it known what to remove."""
        how: dict[str, Any] = {"argv": [self.program, *arguments], "env": env, "timeout": timeout}
        how |= {"stdin": str(stdin)} if stdin else {}
        how |= {"stdout": str(stdout), "largest": largest} if stdout else {}
        return await self._send({"do": "call", "how": how, "ends": ends})

    async def open_door(self, name: str, pid: int, host: str, port: int) -> CliAnswer:
        how = {"name": name, "pid": pid, "host": host, "port": port}
        return await self._send({"do": "door", "how": how})

    def remove(self, name: str, folder: Path | None = None) -> None:
        """Remove a container in the background, whatever state it is in, then a folder."""
        if self.alive:  # else the next keeper does it
            self._write({"do": "remove", "name": name, "folder": str(folder or "")})

    async def awake(self) -> None:
        """Start the next keeper if the last one was killed."""
        async with self._restarting:
            if not self.alive:
                await self._start_keeper()

    async def _send(self, asked: dict[str, Any]) -> CliAnswer:
        await self.awake()
        self._count += 1
        number = self._count
        future: asyncio.Future[CliAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._write({"id": number, **asked})
        try:
            return await future
        except asyncio.CancelledError:
            if not asked.get("ends"):
                self._write({"do": "stop", "of": number})
            raise
        finally:
            del self._waiting[number]

    def _write(self, message: dict[str, Any]) -> None:
        assert self._writer is not None
        self._writer.write(msgspec.json.encode(message) + b"\n")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                answer = msgspec.json.decode(line)
                future = self._waiting.get(answer["id"])
                if future is not None and not future.done():
                    future.set_result(CliAnswer(answer["status"], answer["out"], answer["err"]))
        lost = ContainerError("the keeper of the containers was killed")
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(lost)

    async def close(self) -> None:
        """Remove all containers, and wait for that, unless docker does not answer: then the keeper
        goes on alone."""
        if self._writer is not None and self._keeper is not None:
            self._writer.close()
            try:
                await threads.call(self._keeper.wait, CLOSE_TIMEOUT)
            except subprocess.TimeoutExpired:
                self._keeper.returncode = 0  # nobody waits for it, so Python shall not warn of it
        if self._reading is not None:
            await asyncio.wait({self._reading})
        if self.scratch.name:
            await threads.call(shutil.rmtree, self.scratch, True)


def working_program(named: str) -> str:
    """Return the program that is `named`, else the first of docker and podman that works. Raises
    ConfigError."""
    return _working_program(named, tuple(passed_environment(CLIENT).items()))


@cache
def _working_program(named: str, environment: tuple[tuple[str, str], ...]) -> str:
    found = [program for program in ([named] if named else PROGRAMS) if shutil.which(program)]
    if not found:
        what = f"no program {named!r}" if named else "neither docker nor podman"
        raise ConfigError(f"runner.container.cli: there is {what} on this machine; install it")
    problems = {program: _problem(program) for program in found}
    for program, problem in problems.items():
        if not problem:
            return program
    why = "; ".join(f"{program}: {problem}" for program, problem in problems.items())
    raise ConfigError(
        f"{' and '.join(found)} does not work here; start its daemon, or choose another executor"
        f" ({why})"
    )


def _problem(program: str) -> str:
    """Return why a program cannot be used; empty if it can."""
    try:
        asked = subprocess.run(
            [program, "version", "--format", "{{.Server.Version}}"],
            capture_output=True,
            env=passed_environment(CLIENT),
            text=True,
            timeout=CHECK_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {CHECK_TIMEOUT:g} s"
    except OSError as error:
        return error.strerror or str(error)
    lines = asked.stderr.strip().splitlines() or [f"exit status {asked.returncode}"]
    return lines[-1] if asked.returncode else ""


def check_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return those with several lines. Raises ContainerError for one that the command line itself
    would obey: in its files of variables, a line holds one."""
    several = {k: v for k, v in variables.items() if "\n" in v or "\r" in v}
    for name in matching(several, (*PASSED, *CLIENT)):
        raise ContainerError(f"{name} has several lines; containers take one line only")
    return several


def write_variables(variables: Mapping[str, str], file: Path) -> tuple[list[str], dict[str, str]]:
    """Return options that give a program in a container variables, and the variables that the
    command line itself needs for that. Values are never arguments, which every user of the machine
    can read; most are in `file`, since in its own environment they could change the command line's
    behaviour (PATH, HOME, DOCKER_HOST). Raises ContainerError."""
    several = check_variables(variables)
    lines = [f"{name}={value}\n" for name, value in variables.items() if name not in several]
    options: list[str] = []
    if lines:
        private = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(private, "w", errors="surrogateescape") as out:
            out.writelines(lines)
        options += ["--env-file", str(file)]
    for name in several:
        options += ["--env", name]
    return options, several


class Enclosure(NamedTuple):
    """How a program runs in an environment like that of agents, which is not this machine's own."""

    prefix: list[str]  # of its command line
    pass_env: tuple[str, ...]  # patterns of the runner's variables that the prefix needs
    after: list[str]  # command that ends the program if it did not end by itself


def enclosure(
    runner: ContainerRunnerConfig, name: str, folder: str, env: Mapping[str, str]
) -> Enclosure:
    """A container of the agent's image without network, with access to `folder`. If this process is
    killed, and nobody removes it, the next keeper does. env: its variables; PWD is its working
    directory."""
    own = runner.container
    cli = own.cli or working_program("")
    argv = [cli, "run", "--rm", "--init", "--name", name, "--network", "none"]
    argv += ["--label", f"{keeper.LABEL}={keeper.owner_of(os.getpid())}"]
    argv += limits(runner.memory_mb, own.cpus, own.pids)
    argv += ["--volume", f"{folder}:{folder}", "--workdir", env["PWD"]]
    for key, value in env.items():
        argv += ["--env", f"{key}={value}"]
    prefix = [*argv, *own.options, own.image]
    return Enclosure(prefix, CLIENT, [cli, "rm", "--force", name])


def limits(memory_mb: int, cpus: float, pids: int) -> list[str]:
    """Return the options of `docker run` for these; 0 is no limit."""
    memory = [f"--memory={memory_mb}m", f"--memory-swap={memory_mb}m"] if memory_mb else []
    more = [f"--cpus={cpus:g}"] if cpus else []
    return [*memory, *more, *([f"--pids-limit={pids}"] if pids else [])]
