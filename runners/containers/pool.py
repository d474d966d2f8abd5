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
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from agentrl.base import threads
from agentrl.runners.containers.cli import CLIENT, Cli, ContainerError, limits
from agentrl.runners.containers.cli import ContainerEnded as ContainerEnded
from agentrl.runners.containers.disk import DiskWatch
from agentrl.runners.containers.images import Images
from agentrl.runners.containers.keeper import LABEL, command_line, started
from agentrl.runners.containers.running import SHELL
from agentrl.runners.containers.running import Container as Container
from agentrl.runners.containers.running import ContainerSpec as ContainerSpec
from agentrl.runners.processes.contract import passed_environment
from agentrl.runners.processes.launcher import Finished as Finished
from agentrl.runners.processes.launcher import ProcessLauncher

log = logging.getLogger("agentrl.runner")
# The first process: ends for no signal from inside, and reaps all orphans.
WAIT = "while :; do sleep 2147483 & wait; done"
START_TIMEOUT = 120.0  # seconds
MOST_IDLE = 64  # warm containers of all kinds; those of the longest unused kind are removed first


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

    async def ready(self, spec: ContainerSpec) -> None:
        """Wait until the containers of a kind that are kept ready have started, or failed to."""
        await asyncio.gather(*self._ready.get(spec, ()), return_exceptions=True)

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
            if not container.pid or started(container.pid):
                self._taken[container.name] = container
                return container
            self.forget(container)  # somebody has ended it meanwhile

    def forget(self, container: Container) -> None:
        self._taken.pop(container.name, None)
        self.cli.remove(container.name, container.share)
        for file in self.cli.scratch.glob(f"{container.name}-*.env"):
            file.unlink(missing_ok=True)

    def _next(self, spec: ContainerSpec) -> asyncio.Task[Container]:
        """Return one that is ready, else the one that is started first, else a new one. What failed
        once may work now."""
        tasks = self._ready.get(spec, [])
        tasks[:] = [task for task in tasks if not (task.done() and task.exception())]
        if not tasks:
            return asyncio.create_task(self._start(spec))
        ready = [task for task in tasks if task.done()]
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
                await self.cli.awake()  # else the label would be that of a dead one
                said = await self.cli.ask(
                    *self._arguments(container), timeout=START_TIMEOUT, ends=True
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
        # What its first process, whose output everybody inside can write to, says is not kept.
        argv += ["--log-driver", "none"]
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
        pid = int(said.out.strip() or 0) if not said.status else 0
        if not pid:
            raise ContainerError(
                f"a container of {container.spec.image!r} ended at once: its image"
                " needs a shell, `sh`, and `sleep`"
            )
        with contextlib.suppress(OSError):  # it is a process of another machine
            container.pid = pid if container.name in command_line(pid) else 0
        if self._gateway and container.spec.network != "host":
            opened = await self.cli.open_door(container.name, pid, *self._gateway)
            if opened.status:
                raise ContainerError(
                    f"a container cannot reach the gateway ({opened.problem}); run the runner as"
                    " root or with rootless podman, or give the container a network that has it"
                )


def _note(task: asyncio.Task[Container]) -> None:
    """Say why no container was ready; who takes one is told again."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("no container is kept ready: %s", error)


def _make_share(folder: str | Path, name: str) -> Path:
    share = Path(folder, name)
    try:
        share.mkdir(parents=True)
        share.chmod(0o777)
    except OSError as error:
        raise ContainerError(f"{share} cannot be made: {error.strerror or error}") from None
    return share
