"""Containers that are ready before they are needed.

Owns: the containers of this runner, the warm ones of each `ContainerSpec` among them. A container
is taken once and never returns; its first process is a shell that waits, and programs run in it
beside.
Invariant: a container is removed when it is discarded, when it could not be started, and by the
keeper when the runner has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import select
import signal
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from agentrl.base import threads
from agentrl.runners.containers import files
from agentrl.runners.containers.cli import (
    Answer,
    Cli,
    ContainerEnded,
    ContainerError,
    write_variables,
)
from agentrl.runners.containers.disk import DiskWatch
from agentrl.runners.containers.images import Images
from agentrl.runners.containers.keeper import LABEL, command_line
from agentrl.runners.containers.table import CLIENT, limits
from agentrl.runners.processes.contract import passed_environment
from agentrl.runners.processes.launcher import OutputPipe, ProcessLauncher, SupervisorLost
from agentrl.runners.processes.supervisor import ProcessSpec

log = logging.getLogger("agentrl.runner")
SHELL = "/bin/sh"
# The first process: ends for no signal from inside, and reaps all orphans.
WAIT = "while :; do sleep 2147483 & wait; done"
KILL_ALL = "kill -9 -1"  # all processes of a container but the first
# Podman loses the output of a program that ends without having read its input.
PASS_STDIN = (SHELL, "-c", 'PATH="$PATH:/bin:/usr/bin" cat | "$@"', "sh")
START_TIMEOUT = 120.0  # seconds
COPY_TIMEOUT = 120.0
KILL_TIMEOUT = 10
MOST_IDLE = 64  # warm containers of all kinds; those of the longest unused kind are removed first
LARGEST_OUTPUT = 2**20  # bytes kept of each output of a program


class ContainerSpec(NamedTuple):
    """A kind of container. Numbers: 0 is no limit."""

    image: str
    network: str = "none"  # of `docker run`; none: only its own loopback address
    memory_mb: int = 0
    cpus: float = 0.0
    pids: int = 512
    disk_mb: int = 0  # that it writes
    mounts: tuple[tuple[str, str, str], ...] = ()  # (path on the host, path inside, "ro" or "rw")
    # A folder on the host in which each container gets one of its own, mounted at the second path.
    share: tuple[str, str] | None = None
    env: tuple[tuple[str, str], ...] = ()  # no secrets: others can read them
    folder: str = ""  # working directory; empty: the image's
    user: str = ""  # empty: the image's
    entrypoint: bool = False  # run that of the image, which then has to run its arguments
    options: tuple[str, ...] = ()  # additional arguments of `docker run`


class Finished(NamedTuple):
    """A finished program: exit status, and the end of both outputs."""

    status: int
    stdout: str
    stderr: str


@dataclass(slots=True, eq=False)
class Container:
    """A running container, for one rollout."""

    name: str
    spec: ContainerSpec
    pool: Containers
    share: Path | None = None  # its own folder on the host, if the spec has one
    pid: int = 0  # of its first process
    why: str = ""  # it was ended by this runner, because

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        folder: str = "",
        user: str = "",
        stdin: bytes = b"",
        timeout: float = 60.0,
    ) -> Finished:
        """Run a program. Raises TimeoutError after `timeout` seconds, when all processes of the
        container but the first are killed, and ContainerError if the container has ended."""
        stdout = OutputPipe(LARGEST_OUTPUT, tail=True)
        stderr = OutputPipe(LARGEST_OUTPUT, tail=True)
        given = os.memfd_create("stdin", os.MFD_CLOEXEC)
        os.write(given, stdin)
        os.lseek(given, 0, os.SEEK_SET)
        spec = self.command(argv, env or {}, folder=folder, user=user, stdin=bool(stdin))
        fds = [given, await stdout.open(), await stderr.open()]
        try:
            process = await self.pool.launcher.launch(spec, fds)
            try:
                async with asyncio.timeout(timeout):
                    status = await process.wait()
            except BaseException:
                process.kill()
                with contextlib.suppress(SupervisorLost):
                    await process.wait()
                raise
        except SupervisorLost as lost:
            raise ContainerError(f"{lost}, and its program with it") from None
        except TimeoutError:
            await self._ask("exec", "--user", "0", self.name, SHELL, "-c", KILL_ALL)
            raise
        if status:
            await self.check()
        return Finished(status, await stdout.text(), await stderr.text())

    def command(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        folder: str = "",
        user: str = "",
        stdin: bool = True,
    ) -> ProcessSpec:
        """Return the process of this machine that runs a program in the container. `stdin`: whether
        the program reads that of the process."""
        file = self.pool.cli.scratch / f"{self.name}.env"
        options, own = write_variables(env, file)
        options += ["--interactive"] if stdin else []
        options += ["--workdir", folder] if folder else []
        options += ["--user", user] if user else []
        program = [*PASS_STDIN, *argv] if stdin else argv
        command = [self.pool.cli.program, "exec", *options, self.name, *program]
        env = own | passed_environment(CLIENT)
        return ProcessSpec(argv=command, env=env, folder=str(self.pool.cli.scratch))

    async def check(self) -> None:
        """Raise ContainerError if the container has ended, or is not reachable."""
        state = "{{.State.Running}} {{.State.OOMKilled}}"
        said = await self.pool.cli.ask("inspect", "--format", state, self.name)
        running, _, oom = said.out.strip().partition(" ")
        if self.why:
            raise ContainerEnded(self.why)
        if said.status:
            raise ContainerError(f"the container is gone: {said.problem}")
        if running != "true":
            memory = f", for using {self.spec.memory_mb} MB of memory" if oom == "true" else ""
            raise ContainerEnded(f"the container was ended by what runs in it{memory}")

    async def copy_in(self, source: Path, inside: str) -> None:
        """Copy a file, or what is in a folder, to a path in the container; root owns it there.
        Raises ContainerError."""
        with self._archive() as archive:
            await threads.call(files.pack, source, inside, archive)
            said = await self._ask("cp", "-", f"{self.name}:/", stdin=archive)
        if said.status:
            await self.check()
            raise ContainerError(f"{inside} cannot be copied into the container: {said.problem}")

    async def copy_out(self, inside: str, target: Path) -> bool:
        """Copy a file or folder of the container to `target`, without links; return whether it
        exists. Raises ContainerError if the container has ended."""
        with self._archive() as archive:
            said = await self._ask("cp", f"{self.name}:{inside}", "-", stdout=archive)
            if said.status:
                await self.check()
                return False
            await threads.call(files.unpack, archive, target)
        return True

    async def _ask(
        self, *arguments: str, stdin: Path | None = None, stdout: Path | None = None
    ) -> Answer:
        ask = self.pool.cli.ask
        return await ask(*arguments, stdin=stdin, stdout=stdout, timeout=COPY_TIMEOUT)

    @contextlib.contextmanager
    def _archive(self) -> Iterator[Path]:
        path = self.pool.cli.scratch / f"{secrets.token_hex(8)}.tar"
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    async def end(self) -> None:
        """Kill all that runs in the container, which ends with it."""
        if not await threads.call(_kill, self.pid, self.name):
            await self._ask("kill", self.name)

    async def discard(self) -> None:
        """Kill all that runs in the container, and remove it in the background."""
        try:
            await threads.uncancelled(self.end())
        finally:
            self.pool.forget(self)


class Containers:
    """Starts containers, and keeps some ready."""

    def __init__(
        self,
        cli: str = "",
        *,
        gateway: str = "",
        warm: int = 1,
        build_options: Sequence[str] = (),
    ) -> None:
        """`cli`: program; empty: docker or podman, whichever works. `gateway`: its base URL on this
        machine; in containers it is the same port of 127.0.0.1. Empty: they cannot reach it.
        `warm`: how many are kept ready of each kind that was taken once."""
        self.cli = Cli(cli)
        self.images = Images(self.cli, build_options)
        self.build = self.images.build
        self.launcher = ProcessLauncher(env=passed_environment(CLIENT))
        url = urlsplit(gateway)
        self._gateway = (url.hostname, url.port) if url.hostname and url.port else None
        self._warm = warm
        self._wanted: dict[ContainerSpec, int] = {}
        self._ready: OrderedDict[ContainerSpec, list[asyncio.Task[Container]]] = OrderedDict()
        self._starting = asyncio.Semaphore(max(2, os.cpu_count() or 1))
        self._taken = dict[str, Container]()
        self._watch = DiskWatch(self.cli, self._taken)

    async def start(self) -> None:
        """Raise ConfigError, one sentence, if containers do not work on this machine."""
        await self.cli.start()
        await self.launcher.start()
        await self._watch.start()

    async def close(self) -> None:
        """Remove all containers."""
        for tasks in self._ready.values():
            for task in tasks:
                task.cancel()
        await self._watch.close()
        await self.launcher.close()
        await self.cli.close()

    async def command(self, image: str) -> tuple[list[str], list[str]]:
        """Return entrypoint and command of an image. Raises ContainerError if there is no such
        image here, and it cannot be pulled."""
        config = await self.images.config(image)
        return config.entrypoint or [], config.command or []

    def expect(self, spec: ContainerSpec, count: int) -> None:
        """Keep so many containers of a kind ready, from now on."""
        self._wanted[spec] = count
        self._fill(spec)

    async def take(self, spec: ContainerSpec, timeout: float = START_TIMEOUT) -> Container:
        """Return a container that nobody had before. Raises ContainerError, one sentence."""
        self._wanted.setdefault(spec, self._warm)
        until = asyncio.get_running_loop().time() + timeout
        while True:
            starting = self._next(spec)
            self._fill(spec)
            try:
                async with asyncio.timeout_at(until):
                    container = await asyncio.shield(starting)
            except TimeoutError:
                starting.add_done_callback(self._abandon)
                raise ContainerError(f"no container was ready after {timeout:g} s") from None
            except asyncio.CancelledError:
                starting.add_done_callback(self._abandon)
                raise
            if _exists(container.pid):
                self._taken[container.name] = container
                return container
            self.forget(container)  # somebody has ended it meanwhile

    def forget(self, container: Container) -> None:
        self._taken.pop(container.name, None)
        self.cli.remove(container.name, container.share)
        (self.cli.scratch / f"{container.name}.env").unlink(missing_ok=True)

    def _next(self, spec: ContainerSpec) -> asyncio.Task[Container]:
        """Return one that is ready, else the one that is started first, else a new one."""
        if not (tasks := self._ready.get(spec, [])):
            return asyncio.create_task(self._start(spec))
        ready = [task for task in tasks if task.done() and not task.exception()]
        chosen = ready[0] if ready else tasks[0]
        tasks.remove(chosen)
        return chosen

    def _fill(self, spec: ContainerSpec) -> None:
        """Start what is missing of a kind; remove what is too much of all."""
        tasks = self._ready.setdefault(spec, [])
        self._ready.move_to_end(spec)
        for _ in range(self._wanted[spec] - len(tasks)):
            task = asyncio.create_task(self._start(spec))
            task.add_done_callback(_note)
            tasks.append(task)
        for _ in range(len(tasks) - self._wanted[spec]):
            tasks.pop().add_done_callback(self._abandon)
        while len(self._ready) > 1 and sum(map(len, self._ready.values())) > MOST_IDLE:
            unused, started = self._ready.popitem(last=False)
            del self._wanted[unused]
            for task in started:
                task.add_done_callback(self._abandon)

    def _abandon(self, starting: asyncio.Task[Container]) -> None:
        if not starting.cancelled() and not starting.exception():
            self.forget(starting.result())

    async def _start(self, spec: ContainerSpec) -> Container:
        """Start a container. Raises ContainerError; nothing is left of it then."""
        container = Container(f"agentrl-{secrets.token_hex(8)}", spec, self)
        try:
            async with self._starting:
                if spec.share is not None:
                    container.share = await threads.call(
                        _make_share, spec.share[0] or self.cli.scratch, container.name
                    )
                said = await self.cli.ask(
                    *self._arguments(container), timeout=START_TIMEOUT, starts=True
                )
                if said.status:
                    await self.images.config(spec.image)  # says it better if there is none
                    raise ContainerError(
                        f"a container of {spec.image!r} cannot start: {said.problem}"
                    )
                await self._open_door(container)
        except BaseException:
            self.forget(container)
            raise
        return container

    def _arguments(self, container: Container) -> list[str]:
        spec, name = container.spec, container.name
        argv = ["run", "--detach", "--name", name, "--label", f"{LABEL}={self.cli.owner}"]
        argv += ["--stop-timeout", "0", *([] if spec.entrypoint else ["--entrypoint", SHELL])]
        argv += ["--network", spec.network] if spec.network else []
        argv += limits(spec.memory_mb, spec.cpus, spec.pids)
        mounts = list(spec.mounts)
        if spec.share is not None:
            mounts.append((str(container.share), spec.share[1], "rw"))
        for host, inside, mode in mounts:
            argv += ["--volume", f"{host}:{inside}:{mode}"]
        for key, value in spec.env:
            argv += ["--env", f"{key}={value}"]
        argv += ["--workdir", spec.folder] if spec.folder else []
        argv += ["--user", spec.user] if spec.user else []
        program = [SHELL] if spec.entrypoint else []
        return [*argv, *spec.options, spec.image, *program, "-c", WAIT, name]

    async def _open_door(self, container: Container) -> None:
        """Note its first process, and let it reach the gateway."""
        said = await self.cli.ask("inspect", "--format", "{{.State.Pid}}", container.name)
        container.pid = int(said.out.strip() or 0) if not said.status else 0
        if not container.pid:
            raise ContainerError(
                f"a container of {container.spec.image!r} ended at once: its image"
                " needs a shell, `sh`, and `sleep`"
            )
        if self._gateway and container.spec.network != "host":
            opened = await self.cli.open_door(container.name, container.pid, *self._gateway)
            if opened.status:
                raise ContainerError(
                    f"the gateway cannot be reached in a container: {opened.problem}"
                )


def _note(task: asyncio.Task[Container]) -> None:
    """Say why no container was ready; who takes one is told again."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("no container is kept ready: %s", error)


def _exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _kill(pid: int, name: str) -> bool:
    """Kill a container's first process, and by that all others of it; return whether they have
    ended. The engine may run on another machine, or as a user whose processes this one must not
    kill."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    try:
        if name not in command_line(pid):
            return True
        signal.pidfd_send_signal(process, signal.SIGKILL)
        poll = select.poll()
        poll.register(process, select.POLLIN)
        return bool(poll.poll(1000 * KILL_TIMEOUT))
    except ProcessLookupError:
        return True
    except OSError:
        return False
    finally:
        os.close(process)


def _make_share(folder: str | Path, name: str) -> Path:
    share = Path(folder, name)
    try:
        share.mkdir(parents=True)
        share.chmod(0o777)
    except OSError as error:
        raise ContainerError(f"{share} cannot be made: {error.strerror or error}") from None
    return share
