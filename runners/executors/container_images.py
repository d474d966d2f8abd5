"""Images and running containers: running programs in a container, copying files to and from it, and
ending it.

An image is built from a folder once, and identified by a digest of the folder's content.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import select
import signal
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from agentrl.core import processes
from agentrl.runners.executors import container_engine
from agentrl.runners.executors.command import (
    Finished,
    OutputPipe,
    SupervisorLost,
    passed_environment,
)
from agentrl.runners.executors.container_engine import (
    CLIENT,
    MAX_PROCESSES,
    Cli,
    CliAnswer,
    ContainerEnded,
    ContainerError,
    write_variables,
)
from agentrl.runners.executors.keeper import command_line, started
from agentrl.runners.executors.supervisor import ProcessSpec

if TYPE_CHECKING:
    from agentrl.runners.executors.containers import Containers


T = TypeVar("T")
REPOSITORY = "agentrl-build"  # repository of built images; the tag is a digest
PULL_TIMEOUT = 600.0  # seconds


class ImageConfig(msgspec.Struct):
    """The configuration of an image, as `docker image inspect` shows it."""

    entrypoint: list[str] | None = msgspec.field(default=None, name="Entrypoint")
    command: list[str] | None = msgspec.field(default=None, name="Cmd")


class Images:
    """Builds and pulls images. Concurrent calls for the same image share the work; a call after a
    failure retries it."""

    def __init__(self, cli: Cli, options: Sequence[str] = ()) -> None:
        """`options`: additional arguments of `docker build`."""
        self._cli, self._options = cli, options
        self._building: dict[str, asyncio.Task[str]] = {}
        self._configs: dict[str, asyncio.Task[ImageConfig]] = {}

    async def build(
        self,
        folder: Path,
        dockerfile: str = "Dockerfile",
        args: Mapping[str, str] | None = None,
        timeout: float = PULL_TIMEOUT,
    ) -> str:
        """Return the name of an image made from `folder`; it is built only if no image of the same
        files exists. timeout: seconds. Raises ContainerError."""
        digest = await processes.call(_digest, folder, dockerfile, args or {}, self._options)
        name = f"localhost/{REPOSITORY}:{digest}"
        return await _shared(
            self._building, name, self._build(name, folder, dockerfile, args or {}, timeout)
        )

    async def _build(
        self, name: str, folder: Path, dockerfile: str, args: Mapping[str, str], timeout: float
    ) -> str:
        if not (await self._cli.ask("image", "inspect", name)).status:
            return name
        build_args = [word for pair in args.items() for word in ("--build-arg", "=".join(pair))]
        reply = await self._cli.ask(
            *("build", "--tag", name, "--file", str(folder / dockerfile)),
            *(*build_args, *self._options, str(folder)),
            timeout=timeout,
            ends=True,
        )
        if reply.status:
            raise ContainerError(f"the image of {folder} cannot be built: {reply.problem}")
        return name

    async def config(self, image: str) -> ImageConfig:
        """The configuration of an image, pulled if it is missing. Raises ContainerError."""
        return await _shared(self._configs, image, self._config(image))

    async def _config(self, image: str) -> ImageConfig:
        how = ("image", "inspect", "--format", "{{json .Config}}", image)
        reply = await self._cli.ask(*how)
        if reply.status:
            pulled = await self._cli.ask("pull", "--quiet", image, timeout=PULL_TIMEOUT)
            if pulled.status:
                why = f"is not on this machine and cannot be pulled: {pulled.problem}"
                raise ContainerError(f"the image {image!r} {why}")
            reply = await self._cli.ask(*how)
        try:
            return msgspec.json.decode(reply.out, type=ImageConfig)
        except msgspec.DecodeError:
            raise ContainerError(f"the image {image!r} cannot be read: {reply.problem}") from None


async def _shared(tasks: dict[str, asyncio.Task[T]], key: str, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a task that several callers may await; none of them cancels it."""
    if (task := tasks.get(key)) is None:
        task = tasks[key] = asyncio.create_task(work)
        task.add_done_callback(lambda task: _forget_failed(tasks, key, task))
    else:
        work.close()
    return await asyncio.shield(task)


def _forget_failed(tasks: dict[str, asyncio.Task[T]], key: str, task: asyncio.Task[T]) -> None:
    if task.cancelled() or task.exception():
        del tasks[key]


def _digest(folder: Path, dockerfile: str, args: Mapping[str, str], options: Sequence[str]) -> str:
    """Hash names, modes and contents of a folder's files, and how the image is built from them."""
    if not (folder / dockerfile).is_file():
        raise ContainerError(f"there is no {dockerfile} in {folder}, so no image can be built")
    hasher = hashlib.sha256(msgspec.json.encode([dockerfile, sorted(args.items()), *options]))
    try:
        for parent, folders, files in os.walk(folder):
            folders.sort()
            for name in sorted([*files, *folders]):
                path = Path(parent, name)
                head = [str(path.relative_to(folder)), path.lstat().st_mode]
                if path.is_symlink():
                    content = os.fsencode(path.readlink())
                else:
                    content = path.read_bytes() if path.is_file() else b""
                hasher.update(msgspec.json.encode([*head, len(content)]) + content)
    except OSError as error:
        raise ContainerError(f"{folder} cannot be read: {error.strerror or error}") from None
    return hasher.hexdigest()[:32]


SHELL, ROOT = "/bin/sh", "0"
KILL_ALL = "kill -9 -1"  # all processes of a container but the first
# Podman loses output if its stdin ends early, or is not read to the end. So stdin stays open until
# the program has ended, and the container always reads the announced number of bytes: into a pipe,
# or into a file if a pipe is too small.
READ_STDIN = 'size=$0; PATH="$PATH:/bin:/usr/bin" head -c "$size" | "$@"'
READ_LARGE_STDIN = """size=$0 file=/tmp/.agentrl-$$
(PATH="$PATH:/bin:/usr/bin"; umask 077; head -c "$size" >"$file")
exec 3<"$file"; (PATH="$PATH:/bin:/usr/bin"; rm "$file"); exec "$@" <&3 3<&-"""
MAX_PIPE_BYTES = 2**16 - 2**12  # bytes
STATE = "{{.State.Status}} {{.State.ExitCode}} {{.State.OOMKilled}}"
END_NOTICE_TIMEOUT = 5.0  # seconds that an engine may need to notice that a container has ended
COPY_TIMEOUT = 120.0  # seconds
KILL_TIMEOUT = 10
MAX_OUTPUT_BYTES = 2**20  # bytes kept of each output of a program


class ContainerSpec(NamedTuple):
    """A kind of container. Numbers: 0 is no limit."""

    image: str
    network: str = "none"  # network of `docker run`; none: only the container's loopback address
    memory_mb: int = 0
    cpus: float = 0.0
    pids: int = MAX_PROCESSES
    disk_mb: int = 0  # that a container may write
    mounts: tuple[tuple[str, str, str], ...] = ()  # (path on the host, path inside, "ro" or "rw")
    # A folder on the host in which each container gets a subfolder, mounted at the second path.
    share: tuple[str, str] | None = None
    env: tuple[tuple[str, str], ...] = ()  # no secrets: others can read them
    folder: str = ""  # working directory; empty: the image's
    user: str = ""  # empty: the image's
    # Whether to run the image's entrypoint, which must then run its arguments.
    entrypoint: bool = False
    options: tuple[str, ...] = ()  # additional arguments of `docker run`


@dataclass(slots=True, eq=False)
class Container:
    """A running container, for one rollout."""

    name: str
    spec: ContainerSpec
    pool: Containers
    share: Path | None = None  # its folder on the host, if the spec has one
    pid: int = 0  # pid of the container's first process; 0: the engine is on another machine
    why: str = ""  # why this runner ended it

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
        stdout = OutputPipe(MAX_OUTPUT_BYTES, tail=True)
        stderr = OutputPipe(MAX_OUTPUT_BYTES, tail=True)
        spec = self.command(argv, env or {}, folder=folder, user=user, stdin=len(stdin))
        stdin_fd, held = written(stdin)
        fds = [stdin_fd, await stdout.open(), await stderr.open()]
        try:
            process = await self.pool.launcher.launch(spec, fds)
            status = await process.wait_at_most(timeout)
        except SupervisorLost as lost:
            raise ContainerError(f"{lost}, and its program with it") from None
        except TimeoutError:
            await self._kill_all()
            raise
        finally:
            os.close(held)
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
        stdin: int = 0,
    ) -> ProcessSpec:
        """Return the process of this machine that runs a program in the container. `stdin`: bytes
        of its input (`written`)."""
        file = self.pool.cli.scratch / f"{self.name}-{secrets.token_hex(4)}.env"
        options, client_env = write_variables(env, file)
        options += ["--interactive"] if stdin else []
        options += ["--workdir", folder] if folder else []
        options += ["--user", user] if user else []
        read = READ_STDIN if stdin <= MAX_PIPE_BYTES else READ_LARGE_STDIN
        program = [SHELL, "-c", read, str(stdin), *argv] if stdin else argv
        command = [self.pool.cli.program, "exec", *options, self.name, *program]
        env = client_env | passed_environment(CLIENT)
        return ProcessSpec(argv=command, env=env, folder=str(self.pool.cli.scratch))

    async def check(self) -> None:
        """Raise ContainerError if the container has ended, or is not reachable; the subclass
        ContainerEnded if a program in it is the cause."""
        until = time.monotonic() + END_NOTICE_TIMEOUT
        while True:
            reply = await self._ask("inspect", "--format", STATE, self.name)
            if self.why:
                raise ContainerEnded(self.why)
            if reply.status:
                raise ContainerError(f"the container is gone: {reply.problem}")
            state, status, oom = reply.out.split()
            if state == "running" and (not self.pid or started(self.pid)):
                return
            # The engine notices the end of the first process after those of all others.
            if state not in ("running", "stopped") or time.monotonic() > until:
                break
            await asyncio.sleep(END_NOTICE_TIMEOUT / 50)
        if oom == "true":
            memory = f"for using {self.spec.memory_mb} MB of memory"
            raise ContainerEnded(f"the container was ended by what runs in it, {memory}")
        # The first process gets SIGKILL from outside only.
        if state in ("exited", "stopped") and int(status) != 128 + signal.SIGKILL:
            raise ContainerEnded("the container was ended by what runs in it")
        raise ContainerError(f"the container is gone: it was ended from outside and is {state}")

    async def copy_in(self, source: Path, inside: str) -> None:
        """Copy a file, or the contents of a folder, to a path in the container, owned by root.
        Raises ContainerError."""
        with self._archive() as archive:
            await processes.call(container_engine.pack, source, inside, archive)
            reply = await self._ask("cp", "-", f"{self.name}:/", stdin=archive)
        if reply.status:
            await self.check()
            raise ContainerError(f"{inside} cannot be copied into the container: {reply.problem}")

    async def copy_out(self, inside: str, target: Path) -> bool:
        """Copy a file or folder of the container to `target`, without links; return whether it
        exists. Raises ContainerError if it cannot be copied, and the subclass ContainerEnded if it
        is larger than the container's limit."""
        with self._archive() as archive:
            most = self.spec.disk_mb * 2**20
            reply = await self._ask(
                "cp", f"{self.name}:{inside}", "-", stdout=archive, largest=most
            )
            if reply.status:
                await self.check()
                if most and archive.stat().st_size >= most:
                    raise ContainerEnded(f"{inside} has more than {self.spec.disk_mb} MB")
                probe = ("exec", "--user", ROOT, self.name, SHELL, "-c", '[ -e "$0" ]', inside)
                if (await self._ask(*probe)).status == 1:
                    return False
                why = f"cannot be copied from the container: {reply.problem}"
                raise ContainerError(f"{inside} {why}")
            await processes.call(container_engine.unpack, archive, target)
        return True

    async def _kill_all(self) -> None:
        """Kill all processes of the container except the first. If that fails, for example because
        no further process can be started, end the container and raise ContainerEnded."""
        reply = await self._ask("exec", "--user", ROOT, self.name, SHELL, "-c", KILL_ALL)
        if reply.status:
            await self.check()
            self.why = f"what runs in the container cannot be ended: {reply.problem}"
            await self.end()
            raise ContainerEnded(self.why)

    async def _ask(self, *arguments: str, **files: Any) -> CliAnswer:
        return await self.pool.cli.ask(*arguments, **files, timeout=COPY_TIMEOUT)

    @contextlib.contextmanager
    def _archive(self) -> Iterator[Path]:
        path = self.pool.cli.scratch / f"{secrets.token_hex(8)}.tar"
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    async def end(self) -> None:
        """Kill all that runs in the container, which ends with it."""
        if not await processes.call(_kill, self.pid, self.name):
            await self._ask("kill", self.name)

    async def discard(self) -> None:
        """Kill all that runs in the container, and remove it in the background."""
        try:
            await processes.uncancelled(self.end())
        finally:
            self.pool.forget(self)


def written(data: bytes) -> tuple[int, int]:
    """Return a pipe with `data`: its read end, and its write end, which the caller closes when the
    reader has ended."""
    reading, writing = os.pipe()

    def write() -> None:
        with (
            contextlib.suppress(OSError),
            os.fdopen(duplicate, "wb") as pipe,
        ):  # the reader has ended
            pipe.write(data)

    duplicate = os.dup(writing)
    threading.Thread(target=write, name="agentrl-stdin", daemon=True).start()
    return reading, writing


def _kill(pid: int, name: str) -> bool:
    """Kill a container's first process and with it all others; return whether they have ended. The
    engine may run on another machine, or as a user whose processes this one must not kill."""
    if not pid:
        return False
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
