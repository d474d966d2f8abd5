"""Runs each attempt in a container of its own, through the docker command line or a compatible one.

The container was started before the attempt, if one was ready; the agent is a program that is run
in it, in place of the image's own command. Without a network the container reaches the gateway
alone, by a door (`keeper.py`).
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from agentrl.base import threads
from agentrl.base.access import is_loopback
from agentrl.config import AgentConfig
from agentrl.config.infrastructure import ContainerRunnerConfig
from agentrl.errors import ConfigError
from agentrl.runners.containers.cli import ContainerEnded, ContainerError, check_variables
from agentrl.runners.containers.pool import Container, Containers, ContainerSpec
from agentrl.runners.containers.running import written
from agentrl.runners.executors import input_of
from agentrl.runners.executors.environment import matching
from agentrl.runners.gateway.attribution import ActiveAttempt, AgentPlace
from agentrl.runners.processes import contract
from agentrl.runners.processes.command import CommandExecutor
from agentrl.runners.processes.contract import FailedAttemptError
from agentrl.types import ErrorKind, Json

HOST = "host.docker.internal"  # the host's name inside a container
KILLED = 128 + 9
SHARES = "containers"  # in the folder of workspaces


class ContainerExecutor(CommandExecutor):
    """Runs `agent.command`, by default the image's own command, in `runner.container.image`."""

    def __init__(
        self, agent: AgentConfig, runner: ContainerRunnerConfig, *, root: Path, gateway: str
    ) -> None:
        super().__init__(agent, runner, root=root, gateway=gateway)
        self.config = own = runner.container
        has_door = own.network != "host" and (own.network == "none" or is_loopback(runner.host))
        self._by_network = not has_door and own.network != "host"
        if self._by_network:
            self.gateway = contract.reachable_url(gateway, runner, HOST)
        elif has_door:
            self.gateway = f"http://127.0.0.1:{gateway.rpartition(':')[2]}"
        try:
            check_variables(self._user_variables())
        except ContainerError as error:
            raise ConfigError(f"agent.env: {error}") from None
        self._containers = Containers(
            own.cli, gateway=gateway if has_door else "", warm=min(own.warm, runner.concurrency)
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
        self._containers.expect(self._spec_of(None), min(self.config.warm, self.runner.concurrency))

    async def close(self) -> None:
        await self._containers.close()

    def _user_variables(self) -> dict[str, str]:
        return matching(os.environ, self.agent.pass_env) | self.agent.env

    def _spec_of(self, place: AgentPlace | None) -> ContainerSpec:
        own, options = self.config, tuple(self.config.options)
        if self._by_network and not self.runner.advertise:
            options = ("--add-host", f"{HOST}:host-gateway", *options)
        share = None
        if place is not None:  # the path of a workspace is the same in the container
            shared = place.folder.parent.parent
            share = (str(shared / SHARES), str(shared))
        limits = (self.runner.memory_mb, own.cpus, own.pids, own.disk_mb)
        return ContainerSpec(own.image, own.network, *limits, share=share, options=options)

    async def _execute(self, active: ActiveAttempt, span: str) -> Json:
        task = msgspec.json.encode(input_of(active))
        with contract.task_folder(task, active.place) as folder:
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
                await threads.uncancelled(_leave(container, active.place, moved))

    async def _run_in(
        self, container: Container, active: ActiveAttempt, span: str, task: bytes, folder: Path
    ) -> Json:
        given, works_in = self._user_variables(), self.agent.folder
        if (place := active.place) is not None:
            given, works_in = {**place.env, **given}, str(place.folder)
        given |= contract.attempt_environment(active, self.gateway, span, task)
        task = b"" if self.agent.harness else task
        spec = container.command(self.argv, given, folder=works_in, stdin=len(task))
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
        contract.check_exit(status, stderr)
        return contract.parse_result(stdout)

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
    """End the container, and then take the workspace out of the reach of what ran in it."""
    try:
        if place is not None and moved is not None:
            await container.end()
            await threads.call(moved.rename, place.folder.parent)
    finally:
        await container.discard()
