"""The container engine: docker's command line, or a compatible one, which the keeper runs.

Also: archives of `docker cp`, for files to and from a container, and a watch of disk use, which
ends containers that exceed their limit before the disk is full for others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from agentrl.core import processes
from agentrl.core.config.infrastructure import ContainerRunnerConfig
from agentrl.core.errors import AgentRLError, ConfigError
from agentrl.runners.executors import keeper
from agentrl.runners.executors.command import PASSED, matching, passed_environment
from agentrl.runners.executors.keeper import LABEL

if TYPE_CHECKING:
    from agentrl.runners.executors.container_images import Container


log = logging.getLogger("agentrl.runner")


# Variables of docker's command line, and of podman's
CLIENT = ("DOCKER_*", "CONTAINER_*", "CONTAINERS_*", "BUILDAH_*", "REGISTRY_*", "XDG_RUNTIME_DIR")
HINTS = ("See '", "Run '", "Usage:")  # appended to errors
PROGRAMS = ("docker", "podman")  # the first that works, if the run file names none
MAX_PROCESSES = 512  # and threads in a container: more than agents need, too few for a fork bomb
CLOSE_TIMEOUT = 60.0
CHECK_TIMEOUT = 20.0  # seconds for the daemon to answer


class ContainerError(AgentRLError):
    """A container or its image cannot be made or used. The message is one sentence."""


class ContainerEnded(ContainerError):
    """A program in a container has ended it, or exceeded a limit."""


class CliAnswer(NamedTuple):
    """The result of a call of the command line."""

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
        self.program = await processes.call(working_program, self._named)
        self.scratch = Path(tempfile.mkdtemp(prefix=keeper.PREFIX))
        keeper.note_owner(self.scratch)
        await self._start_keeper()

    async def _start_keeper(self) -> None:
        """Start the first keeper, or a new one after the last was killed."""
        if self._keeper is not None and self._writer is not None:
            self._writer.close()
            await processes.call(self._keeper.wait)
        ours, theirs = socket.socketpair()
        program = [sys.executable, "-I", "-S", keeper.__file__, self.program, str(self.scratch)]
        how: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        how |= {"pass_fds": [theirs.fileno()], "start_new_session": True, "cwd": self.scratch}
        with theirs:
            self._keeper = subprocess.Popen(  # noqa: ASYNC220 - does not wait
                [*program, str(theirs.fileno())], env=passed_environment(CLIENT), **how
            )
        self._owner = keeper.owner_of(self._keeper.pid)
        limit = keeper.MAX_MESSAGE_BYTES
        reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=limit)
        self._reading = asyncio.create_task(self._read(reader))

    @property
    def owner(self) -> str:
        """The label of the containers that are started now, by a keeper that is `awake`."""
        return self._owner

    @property
    def alive(self) -> bool:
        """Whether the keeper is alive. The proxies of its containers end with it."""
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
        `ends`: the call ends by itself (it starts a container or builds an image) and is not
        interrupted if the runner is killed, so that the keeper knows what to remove."""
        how: dict[str, Any] = {"argv": [self.program, *arguments], "env": env, "timeout": timeout}
        how |= {"stdin": str(stdin)} if stdin else {}
        how |= {"stdout": str(stdout), "largest": largest} if stdout else {}
        return await self._send({"do": "call", "how": how, "ends": ends})

    async def open_proxy(self, name: str, pid: int, host: str, port: int) -> CliAnswer:
        how = {"name": name, "pid": pid, "host": host, "port": port}
        return await self._send({"do": "proxy", "how": how})

    def remove(self, name: str, folder: Path | None = None) -> None:
        """Remove a container in any state in the background, then a folder."""
        if self.alive:  # else the next keeper does it
            self._write({"do": "remove", "name": name, "folder": str(folder or "")})

    async def awake(self) -> None:
        """Start the next keeper if the last one was killed."""
        async with self._restarting:
            if not self.alive:
                await self._start_keeper()

    async def _send(self, request: dict[str, Any]) -> CliAnswer:
        await self.awake()
        self._count += 1
        number = self._count
        future: asyncio.Future[CliAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._write({"id": number, **request})
        try:
            return await future
        except asyncio.CancelledError:
            if not request.get("ends"):
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
        continues alone."""
        if self._writer is not None and self._keeper is not None:
            self._writer.close()
            try:
                await processes.call(self._keeper.wait, CLOSE_TIMEOUT)
            except subprocess.TimeoutExpired:
                # Nothing waits for the process; prevents Python's warning.
                self._keeper.returncode = 0
        if self._reading is not None:
            await asyncio.wait({self._reading})
        if self.scratch.name:
            await processes.call(shutil.rmtree, self.scratch, True)


def working_program(named: str) -> str:
    """Return the program that is `named`, else the first of docker and podman that works. Raises
    ConfigError."""
    return _working_program(named, tuple(passed_environment(CLIENT).items()))


@cache
def _working_program(named: str, environment: tuple[tuple[str, str], ...]) -> str:
    present = [program for program in ([named] if named else PROGRAMS) if shutil.which(program)]
    if not present:
        missing = f"no program {named!r}" if named else "neither docker nor podman"
        raise ConfigError(f"runner.container.cli: there is {missing} on this machine; install it")
    problems = {program: _problem(program) for program in present}
    for program, problem in problems.items():
        if not problem:
            return program
    why = "; ".join(f"{program}: {problem}" for program, problem in problems.items())
    raise ConfigError(
        f"{' and '.join(present)} does not work here; start its daemon, or choose another executor"
        f" ({why})"
    )


def _problem(program: str) -> str:
    """Return why a program cannot be used; empty if it can."""
    try:
        probe = subprocess.run(
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
    lines = probe.stderr.strip().splitlines() or [f"exit status {probe.returncode}"]
    return lines[-1] if probe.returncode else ""


def check_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with several lines, which a file of variables cannot contain. Raises
    ContainerError for a variable that would change the behaviour of the command line itself."""
    several = {k: v for k, v in variables.items() if "\n" in v or "\r" in v}
    for name in matching(several, (*PASSED, *CLIENT)):
        raise ContainerError(f"{name} has several lines; containers take one line only")
    return several


def write_variables(variables: Mapping[str, str], file: Path) -> tuple[list[str], dict[str, str]]:
    """Return options that set variables of a program in a container, and variables of the command
    line's environment for them. Values are never arguments, which every user of the machine can
    read. Most are written to `file`, because in the command line's environment they could change
    its behaviour (PATH, HOME, DOCKER_HOST). Raises ContainerError."""
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
    """How to run a program in the environment of agents, outside of this machine's own."""

    prefix: list[str]  # start of the command line
    pass_env: tuple[str, ...]  # patterns of the runner's variables that the prefix needs
    after: list[str]  # command that ends the program if it did not end by itself


def enclosure(
    runner: ContainerRunnerConfig, name: str, folder: str, env: Mapping[str, str]
) -> Enclosure:
    """A container of the agent's image without network, with access to `folder`. If this process is
    killed before it removes the container, the next keeper does. env: its variables; PWD is its
    working directory."""
    settings = runner.container
    cli = settings.cli or working_program("")
    argv = [cli, "run", "--rm", "--init", "--name", name, "--network", "none"]
    argv += ["--label", f"{keeper.LABEL}={keeper.owner_of(os.getpid())}"]
    argv += limits(runner.memory_mb, 0.0, MAX_PROCESSES)
    argv += ["--volume", f"{folder}:{folder}", "--workdir", env["PWD"]]
    for key, value in env.items():
        argv += ["--env", f"{key}={value}"]
    prefix = [*argv, *settings.options, settings.image]
    return Enclosure(prefix, CLIENT, [cli, "rm", "--force", name])


def limits(memory_mb: int, cpus: float, pids: int) -> list[str]:
    """Return the options of `docker run` for these limits; 0: no limit."""
    memory = [f"--memory={memory_mb}m", f"--memory-swap={memory_mb}m"] if memory_mb else []
    more = [f"--cpus={cpus:g}"] if cpus else []
    return [*memory, *more, *([f"--pids-limit={pids}"] if pids else [])]


INTERVAL = 0.5  # seconds between measurements of the free space
# Bytes written by all programs of the machine, after which containers are measured.
GROWTH = 64 * 2**20
MB = 2**20
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
LIMITS = {  # controller of cgroups, and its name in docker's `info`
    "memory": ("memory", "MemoryLimit"),
    "cores": ("cpu", "CpuCfsQuota"),
    "processes": ("pids", "PidsLimit"),
}
VOLUMES = '{{.Name}}{{range .Mounts}}{{if eq .Type "volume"}} {{.Source}}{{end}}{{end}}'
SIZE = re.compile(r"([0-9.]+) ?([kKMGT]?B)")


class DiskWatch:
    """Measures containers whenever the disk with their files has become fuller; docker itself can
    limit them on few file systems only."""

    def __init__(self, cli: Cli, containers: Mapping[str, Container]) -> None:
        """`containers`: the containers in use, by name."""
        self._cli, self._containers = cli, containers
        self._free: dict[Path, int] = {}  # free bytes at the last measurement
        self._folder: Path | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        reply = await self._cli.ask("info", "--format", "{{json .}}")
        with suppress(msgspec.DecodeError, KeyError, TypeError):
            info = msgspec.json.decode(reply.out)
            self._folder = Path(info.get("DockerRootDir") or info["store"]["graphRoot"])
            if ignored := ignored_limits(info):
                log.warning(
                    "%s here ignores limits of %s, as its user may not set them; run it as root, or"
                    " delegate these controllers of cgroups v2 to the user",
                    *(self._cli.program, " and ".join(ignored)),
                )
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL)
            limited = [c for c in self._containers.values() if c.spec.disk_mb and not c.why]
            if limited and self._fuller(limited):
                with suppress(ContainerError):  # retried with the next keeper
                    await self._measure(limited)

    def _fuller(self, limited: list[Container]) -> bool:
        """Whether so much was written since the last measurement that another is due."""
        folders = {c.share.parent for c in limited if c.share is not None}
        folders |= {self._folder} if self._folder else set()
        now = {folder: free for folder in folders if (free := _free(folder)) is not None}
        before = {folder: self._free.setdefault(folder, free) for folder, free in now.items()}
        if any(before[folder] - free > GROWTH for folder, free in now.items()):
            self._free = now
            return True
        self._free |= {folder: max(before[folder], free) for folder, free in now.items()}
        return not now

    async def _measure(self, limited: list[Container]) -> None:
        labels = ("--filter", f"label={LABEL}={self._cli.owner}")
        how = ("ps", "--all", "--size", *labels, "--format", "{{.Names}} {{.Size}}")
        listed = await self._cli.ask(*how)
        written = {}
        for line in listed.out.splitlines():
            name, _, text = line.partition(" ")
            if (size_match := SIZE.match(text)) is not None:
                written[name] = float(size_match[1]) * UNITS[size_match[2].upper()]
        volumes = await self._volumes(limited)
        for container in limited:
            size = written.get(container.name, 0.0)
            for volume in volumes.get(container.name, ()):
                size += await processes.call(_size, Path(volume))
            if container.share is not None:
                size += await processes.call(_size, container.share)
            if size > container.spec.disk_mb * MB:
                container.why = (
                    f"the agent wrote more than {container.spec.disk_mb} MB to its container's disk"
                )
                self._cli.remove(container.name)  # the container's programs end with this cause

    async def _volumes(self, limited: list[Container]) -> dict[str, list[str]]:
        """The volumes of each container that its image declares: folders on this machine."""
        names = [container.name for container in limited]
        listed = await self._cli.ask("inspect", "--format", VOLUMES, *names)
        lines = [line.removeprefix("/").split() for line in listed.out.splitlines()]
        return {line[0]: line[1:] for line in lines if line}


def ignored_limits(info: Any) -> list[str]:
    """The limits that an engine ignores, according to its `info`."""
    if (host := info.get("host")) is None:  # docker
        return [name for name, (_, key) in LIMITS.items() if info.get(key) is False]
    has = host.get("cgroupControllers") or ()
    rootless = host["security"]["rootless"]
    return [name for name, (controller, _) in LIMITS.items() if rootless and controller not in has]


def _free(folder: Path) -> int | None:
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def _size(folder: Path) -> int:
    """Return the bytes of the files below a folder."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512  # noqa: PTH118
    return total


def pack(source: Path, inside: str, archive: Path) -> None:
    """Archive a file, or the contents of a folder, for the path `inside` of a container. Root owns
    the files there."""
    place = PurePosixPath(inside.lstrip("/"))

    def as_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        return member

    with tarfile.open(archive, "w") as tar:
        if source.is_dir():
            for path in sorted(source.iterdir()):
                tar.add(path, str(place / path.name), filter=as_root)
            if not any(source.iterdir()):
                tar.add(source, str(place), recursive=False, filter=as_root)
        else:
            tar.add(source.resolve(), str(place), filter=as_root)


def unpack(archive: Path, target: Path) -> None:
    """Extract the one file or folder of an archive as `target`. Extracts only files and folders,
    because an agent may have created links that lead elsewhere."""
    with tarfile.open(archive) as tar:
        for member in tar:
            _, *below = PurePosixPath(member.name.removeprefix("/")).parts or ("",)
            if ".." in below:
                continue
            path = target.joinpath(*below)
            if member.isdir():
                path.mkdir(parents=True, exist_ok=True)
            elif member.isfile() or member.islnk():  # a file with two names
                if (data := tar.extractfile(member)) is None:
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    shutil.copyfileobj(data, file)
                path.chmod(member.mode & 0o777 | 0o600)
