"""A running container: programs in it, files to and from it, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import select
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from agentrl.base import threads
from agentrl.runners.containers import files
from agentrl.runners.containers.cli import (
    CLIENT,
    CliAnswer,
    ContainerEnded,
    ContainerError,
    write_variables,
)
from agentrl.runners.containers.keeper import command_line, started
from agentrl.runners.processes.contract import passed_environment
from agentrl.runners.processes.launcher import Finished, OutputPipe, SupervisorLost
from agentrl.runners.processes.supervisor import ProcessSpec

if TYPE_CHECKING:
    from agentrl.runners.containers.pool import Containers

SHELL, ROOT = "/bin/sh", "0"
KILL_ALL = "kill -9 -1"  # all processes of a container but the first
# Podman loses outputs when its own input ends early, or is not read to the end. So it is open until
# the program has ended, and the container reads as many bytes as it is told, whatever the program
# does: into a pipe, or a file if a pipe cannot hold them.
READ_STDIN = 'size=$0; PATH="$PATH:/bin:/usr/bin" head -c "$size" | "$@"'
READ_LARGE_STDIN = """size=$0 file=/tmp/.agentrl-$$
(PATH="$PATH:/bin:/usr/bin"; umask 077; head -c "$size" >"$file")
exec 3<"$file"; (PATH="$PATH:/bin:/usr/bin"; rm "$file"); exec "$@" <&3 3<&-"""
LARGEST_IN_PIPE = 2**16 - 2**12  # bytes
STATE = "{{.State.Status}} {{.State.ExitCode}} {{.State.OOMKilled}}"
SETTLING = 5.0  # seconds until an engine knows at last that a container has ended
COPY_TIMEOUT = 120.0  # seconds
KILL_TIMEOUT = 10
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


@dataclass(slots=True, eq=False)
class Container:
    """A running container, for one rollout."""

    name: str
    spec: ContainerSpec
    pool: Containers
    share: Path | None = None  # its own folder on the host, if the spec has one
    pid: int = 0  # of its first process; 0: the engine is on another machine
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
        spec = self.command(argv, env or {}, folder=folder, user=user, stdin=len(stdin))
        given, held = written(stdin)
        fds = [given, await stdout.open(), await stderr.open()]
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
        options, own = write_variables(env, file)
        options += ["--interactive"] if stdin else []
        options += ["--workdir", folder] if folder else []
        options += ["--user", user] if user else []
        read = READ_STDIN if stdin <= LARGEST_IN_PIPE else READ_LARGE_STDIN
        program = [SHELL, "-c", read, str(stdin), *argv] if stdin else argv
        command = [self.pool.cli.program, "exec", *options, self.name, *program]
        env = own | passed_environment(CLIENT)
        return ProcessSpec(argv=command, env=env, folder=str(self.pool.cli.scratch))

    async def check(self) -> None:
        """Raise ContainerError if the container has ended, or is not reachable; its kind
        ContainerEnded if what ran in it is to blame."""
        until = time.monotonic() + SETTLING
        while True:
            said = await self._ask("inspect", "--format", STATE, self.name)
            if self.why:
                raise ContainerEnded(self.why)
            if said.status:
                raise ContainerError(f"the container is gone: {said.problem}")
            state, status, oom = said.out.split()
            if state == "running" and (not self.pid or started(self.pid)):
                return
            # The engine hears of the first process's end after those of all others.
            if state not in ("running", "stopped") or time.monotonic() > until:
                break
            await asyncio.sleep(SETTLING / 50)
        if oom == "true":
            memory = f"for using {self.spec.memory_mb} MB of memory"
            raise ContainerEnded(f"the container was ended by what runs in it, {memory}")
        # The first process gets SIGKILL from outside only.
        if state in ("exited", "stopped") and int(status) != 128 + signal.SIGKILL:
            raise ContainerEnded("the container was ended by what runs in it")
        raise ContainerError(f"the container is gone: somebody has ended it, it is {state}")

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
        exists. Raises ContainerError if it cannot be copied, and its kind ContainerEnded if it is
        larger than the container may be."""
        with self._archive() as archive:
            most = self.spec.disk_mb * 2**20
            said = await self._ask("cp", f"{self.name}:{inside}", "-", stdout=archive, largest=most)
            if said.status:
                await self.check()
                if most and archive.stat().st_size >= most:
                    raise ContainerEnded(f"{inside} has more than {self.spec.disk_mb} MB")
                look = ("exec", "--user", ROOT, self.name, SHELL, "-c", '[ -e "$0" ]', inside)
                if (await self._ask(*look)).status == 1:
                    return False
                why = f"cannot be copied from the container: {said.problem}"
                raise ContainerError(f"{inside} {why}")
            await threads.call(files.unpack, archive, target)
        return True

    async def _kill_all(self) -> None:
        """Raise ContainerError if that cannot be done, as when there are too many processes for one
        more. The container has been ended then."""
        said = await self._ask("exec", "--user", ROOT, self.name, SHELL, "-c", KILL_ALL)
        if said.status:
            await self.check()
            self.why = f"what runs in the container cannot be ended: {said.problem}"
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
        if not await threads.call(_kill, self.pid, self.name):
            await self._ask("kill", self.name)

    async def discard(self) -> None:
        """Kill all that runs in the container, and remove it in the background."""
        try:
            await threads.uncancelled(self.end())
        finally:
            self.pool.forget(self)


def written(data: bytes) -> tuple[int, int]:
    """Return a pipe with `data` in it: the end to read, and that to write, which the caller closes
    when the reader has ended."""
    reading, writing = os.pipe()

    def write() -> None:
        with contextlib.suppress(OSError), os.fdopen(own, "wb") as pipe:  # nobody reads any more
            pipe.write(data)

    own = os.dup(writing)
    threading.Thread(target=write, name="agentrl-stdin", daemon=True).start()
    return reading, writing


def _kill(pid: int, name: str) -> bool:
    """Kill a container's first process, and by that all others of it; return whether they have
    ended. The engine may run on another machine, or as a user whose processes this one must not
    kill."""
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
