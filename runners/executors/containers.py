"""The container executor: a container for each attempt, by docker or a compatible program.

Containers are started before they are needed; the agent is a program that is run in one, in place
of the image's own command. Without a network a container reaches only the gateway, by a proxy
(`keeper.py`).

Owns: the containers of this runner, including the warm ones of each `ContainerSpec`. A container is
used once; its first process is a shell that waits, and programs run next to it. Invariant: a
container is removed when it is discarded, when it could not be started, and by the keeper when the
runner has ended.
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

import msgspec

from agentrl.core import processes
from agentrl.core.access import is_loopback
from agentrl.core.config import AgentConfig
from agentrl.core.config.infrastructure import ContainerRunnerConfig
from agentrl.core.errors import ConfigError
from agentrl.core.types import ErrorKind, Json
from agentrl.runners.executors import command, input_of
from agentrl.runners.executors.command import (
    CommandExecutor,
    FailedAttemptError,
    ProcessLauncher,
    matching,
    passed_environment,
)
from agentrl.runners.executors.command import Finished as Finished
from agentrl.runners.executors.container_engine import (
    CLIENT,
    Cli,
    ContainerEnded,
    ContainerError,
    DiskWatch,
    check_variables,
    limits,
)
from agentrl.runners.executors.container_images import SHELL, Images, written
from agentrl.runners.executors.container_images import Container as Container
from agentrl.runners.executors.container_images import ContainerSpec as ContainerSpec
from agentrl.runners.executors.keeper import LABEL, command_line, started
from agentrl.runners.gateway.attribution import ActiveAttempt, AgentPlace

HOST = "host.docker.internal"  # the host's name inside a container
KILLED = 128 + 9
WARM = 8  # containers that are ready before rollouts need them
DISK_MB = 10_000  # that a rollout may write
SHARES = "containers"  # subfolder of the workspaces' folder


class ContainerExecutor(CommandExecutor):
    """Runs `agent.command`, by default the image's own command, in `runner.container.image`."""

    def __init__(
        self, agent: AgentConfig, runner: ContainerRunnerConfig, *, root: Path, gateway: str
    ) -> None:
        super().__init__(agent, runner, root=root, gateway=gateway)
        self.config = settings = runner.container
        has_proxy = settings.network != "host" and (
            settings.network == "none" or is_loopback(runner.host)
        )
        self._by_network = not has_proxy and settings.network != "host"
        if self._by_network:
            self.gateway = command.reachable_url(gateway, runner, HOST)
        elif has_proxy:
            self.gateway = f"http://127.0.0.1:{gateway.rpartition(':')[2]}"
        try:
            check_variables(self._user_variables())
        except ContainerError as error:
            raise ConfigError(f"agent.env: {error}") from None
        self._containers = Containers(
            settings.cli, gateway=gateway if has_proxy else "", warm=min(WARM, runner.concurrency)
        )
        self._launcher = self._containers.launcher

    async def start(self) -> None:
        """Raise ConfigError if containers do not work here, or there is no such image."""
        await self._containers.start()
        try:
            entrypoint, command = await self._containers.command(self.config.image)
        except ContainerError as error:
            raise ConfigError(f"runner.container.image: {error}") from None
        self.argv = [*entrypoint, *(self.argv or command)]
        if not self.argv:
            raise ConfigError("agent.command is missing, and the image has no command of its own")
        self._containers.expect(self._spec_of(None), min(WARM, self.runner.concurrency))

    async def close(self) -> None:
        await self._containers.close()

    def _user_variables(self) -> dict[str, str]:
        return matching(os.environ, self.agent.pass_env) | self.agent.env

    def _spec_of(self, place: AgentPlace | None) -> ContainerSpec:
        settings, options = self.config, tuple(self.config.options)
        if self._by_network and not self.runner.advertise:
            options = ("--add-host", f"{HOST}:host-gateway", *options)
        share = None
        if place is not None:  # a workspace has the same path in the container
            shared = place.folder.parent.parent
            share = (str(shared / SHARES), str(shared))
        return ContainerSpec(
            settings.image, settings.network, self.runner.memory_mb, disk_mb=DISK_MB, share=share,
            options=options,
        )  # fmt: skip

    async def _execute(self, active: ActiveAttempt, span: str) -> Json:
        task = msgspec.json.encode(input_of(active))
        with command.task_folder(task, active.place) as folder:
            try:
                container = await self._containers.take(self._spec_of(active.place), active.left)
            except ContainerError as error:
                raise FailedAttemptError(ErrorKind.LOST_RUNNER, str(error)) from None
            moved = None
            try:
                if active.place is not None:
                    moved = _move(active.place.folder.parent, container)
                    folder = moved / folder.name
                return await self._run_in(container, active, span, task, folder)
            finally:
                await processes.uncancelled(_leave(container, active.place, moved))

    async def _run_in(
        self, container: Container, active: ActiveAttempt, span: str, task: bytes, folder: Path
    ) -> Json:
        variables, works_in = self._user_variables(), self.agent.folder
        if (place := active.place) is not None:
            variables, works_in = {**place.env, **variables}, str(place.folder)
        variables |= command.attempt_environment(active, self.gateway, span, task, variables)
        task = b"" if self.agent.harness else task
        spec = container.command(self.argv, variables, folder=works_in, stdin=len(task))
        stdin, held = written(task)
        try:
            status, stdout, stderr = await self._run_process(active, spec, folder, stdin)
        finally:
            os.close(held)
        if status:
            await self._check(container, stderr)
        if status == KILLED and self.runner.memory_mb:
            message = f"the agent was killed, probably for using {self.runner.memory_mb} MB"
            raise FailedAttemptError(ErrorKind.AGENT, message, stderr)
        command.check_exit(status, stderr)
        return command.parse_result(stdout)

    async def _check(self, container: Container, stderr: str) -> None:
        """Raise FailedAttemptError if the container is the reason why the agent has failed."""
        try:
            await container.check()
        except ContainerEnded as error:
            raise FailedAttemptError(ErrorKind.AGENT, str(error), stderr) from None
        except ContainerError as error:
            raise FailedAttemptError(ErrorKind.LOST_RUNNER, str(error), stderr) from None


def _move(workspace: Path, container: Container) -> Path:
    """Move the files of an attempt to where its container sees them."""
    assert container.share is not None
    try:
        return workspace.rename(container.share / workspace.name)
    except OSError as error:
        message = f"cannot move the workspace: {error.strerror}"
        raise FailedAttemptError(ErrorKind.WORKSPACE, message) from None


async def _leave(container: Container, place: AgentPlace | None, moved: Path | None) -> None:
    """End the container, then make the workspace inaccessible for its remaining processes."""
    try:
        if place is not None and moved is not None:
            await container.end()
            await processes.call(moved.rename, place.folder.parent)
    finally:
        await container.discard()


log = logging.getLogger("agentrl.runner")
# The first process: ends for no signal from inside, and reaps all orphans.
WAIT = "while :; do sleep 2147483 & wait; done"
START_TIMEOUT = 120.0  # seconds
MAX_IDLE = 64  # warm containers of all kinds; those of the longest unused kind are removed first


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
        """`cli`: program; empty: docker or podman, whichever works. `gateway`: the gateway's base
        URL on this machine; in containers it has the same port on 127.0.0.1. Empty: containers
        cannot reach it. `warm`: number of containers to keep ready of each kind that was used."""
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
        """Set the number of containers of a kind to keep ready."""
        self._wanted[spec] = count
        self._fill(spec)

    async def ready(self, spec: ContainerSpec) -> None:
        """Wait until the warm containers of a kind have started, or failed to."""
        await asyncio.gather(*self._ready.get(spec, ()), return_exceptions=True)

    async def take(self, spec: ContainerSpec, timeout: float = START_TIMEOUT) -> Container:
        """Return an unused container. Raises ContainerError, one sentence."""
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
            self.forget(container)  # it was ended from outside meanwhile

    def forget(self, container: Container) -> None:
        self._taken.pop(container.name, None)
        self.cli.remove(container.name, container.share)
        for file in self.cli.scratch.glob(f"{container.name}-*.env"):
            file.unlink(missing_ok=True)

    def _next(self, spec: ContainerSpec) -> asyncio.Task[Container]:
        """Return a ready container, else the one that is starting for the longest time, else a new
        one. An earlier failure may not recur."""
        tasks = self._ready.get(spec, [])
        tasks[:] = [task for task in tasks if not (task.done() and task.exception())]
        if not tasks:
            return asyncio.create_task(self._start(spec))
        ready = [task for task in tasks if task.done()]
        chosen = ready[0] if ready else tasks[0]
        tasks.remove(chosen)
        return chosen

    def _fill(self, spec: ContainerSpec) -> None:
        """Start missing containers of a kind; remove surplus ones of all kinds."""
        tasks = self._ready.setdefault(spec, [])
        self._ready.move_to_end(spec)
        for _ in range(self._wanted[spec] - len(tasks)):
            task = asyncio.create_task(self._start(spec))
            task.add_done_callback(_note)
            tasks.append(task)
        for _ in range(len(tasks) - self._wanted[spec]):
            tasks.pop().add_done_callback(self._abandon)
        while len(self._ready) > 1 and sum(map(len, self._ready.values())) > MAX_IDLE:
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
                    container.share = await processes.call(
                        _make_share, spec.share[0] or self.cli.scratch, container.name
                    )
                await self.cli.awake()  # otherwise the label would name a dead keeper
                reply = await self.cli.ask(
                    *self._arguments(container), timeout=START_TIMEOUT, ends=True
                )
                if reply.status:
                    # Gives a better message for a missing image.
                    await self.images.config(spec.image)
                    raise ContainerError(
                        f"a container of {spec.image!r} cannot start: {reply.problem}"
                    )
                await self._open_proxy(container)
        except BaseException:
            self.forget(container)
            raise
        return container

    def _arguments(self, container: Container) -> list[str]:
        spec, name = container.spec, container.name
        argv = ["run", "--detach", "--name", name, "--label", f"{LABEL}={self.cli.owner}"]
        # The output of its first process, which everybody inside can write to, is not kept.
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

    async def _open_proxy(self, container: Container) -> None:
        """Note its first process, and let it reach the gateway."""
        reply = await self.cli.ask("inspect", "--format", "{{.State.Pid}}", container.name)
        pid = int(reply.out.strip() or 0) if not reply.status else 0
        if not pid:
            raise ContainerError(
                f"a container of {container.spec.image!r} ended at once: its image"
                " needs a shell, `sh`, and `sleep`"
            )
        with contextlib.suppress(OSError):  # it is a process of another machine
            container.pid = pid if container.name in command_line(pid) else 0
        if self._gateway and container.spec.network != "host":
            opened = await self.cli.open_proxy(container.name, pid, *self._gateway)
            if opened.status:
                raise ContainerError(
                    f"a container cannot reach the gateway ({opened.problem}); run the runner as"
                    " root or with rootless podman, or give the container a network that has it"
                )


def _note(task: asyncio.Task[Container]) -> None:
    """Log why no container was ready; the attempt that takes one gets the reason, too."""
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
