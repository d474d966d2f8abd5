"""Runs a container for each attempt, through the docker command line or a compatible one.

Values of variables are never command-line arguments, which every user of the machine can read. The
attempt's own variables are in the docker client's environment. The user's could change the client's
behaviour (PATH, HOME, DOCKER_HOST), so they are passed in a file in the attempt's private folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from agentrl.config import AgentConfig
from agentrl.errors import ConfigError
from agentrl.runners.containers.table import CLIENT, ContainerRunnerConfig
from agentrl.runners.executors.environment import matching
from agentrl.runners.gateway.attribution import ActiveAttempt
from agentrl.runners.processes import contract
from agentrl.runners.processes.command import CommandExecutor
from agentrl.runners.processes.contract import FailedAttemptError
from agentrl.runners.processes.launcher import ProcessLauncher
from agentrl.runners.processes.supervisor import ProcessSpec
from agentrl.types import ErrorKind, Json

HOST = "host.docker.internal"  # the host's name inside a container
NOT_STARTED = 125  # exit status of `docker run` when docker itself fails
KILLED = 128 + 9
CHECK_TIMEOUT = 20.0  # seconds for the daemon to answer


class ContainerExecutor(CommandExecutor):
    """Runs `agent.command`, by default the image's own command, in `runner.container.image`."""

    def __init__(
        self, agent: AgentConfig, runner: ContainerRunnerConfig, *, root: Path, gateway: str
    ) -> None:
        super().__init__(agent, runner, root=root, gateway=gateway)
        self.config = runner.container
        self._launcher = ProcessLauncher(env=contract.passed_environment(CLIENT))
        reserved = (*contract.PASSED, *CLIENT)
        for name in matching(_with_line_breaks(self._user_variables()), reserved):
            raise ConfigError(f"agent.env: {name} has several lines; containers take one line only")
        self._on_host = self.config.network == "host"
        if not self._on_host:
            self.gateway = contract.reachable_url(gateway, runner, HOST)

    async def start(self) -> None:
        cli = self.config.cli
        if not shutil.which(cli):
            raise ConfigError(f"runner.container.cli: there is no program {cli!r}; install it")
        try:
            asked = subprocess.run(  # noqa: ASYNC221 - nothing runs yet
                [cli, "version", "--format", "{{.Server.Version}}"],
                capture_output=True,
                text=True,
                timeout=CHECK_TIMEOUT,
                check=False,
            )
            problem = asked.stderr.strip() if asked.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"no answer within {CHECK_TIMEOUT:g} s"
        if problem:
            raise ConfigError(
                f"runner.executor = 'container': {cli} does not work here; start its daemon, or"
                f" choose another executor ({problem.splitlines()[-1]})"
            )
        await self._launcher.start()

    def _user_variables(self) -> dict[str, str]:
        return matching(os.environ, self.agent.pass_env) | self.agent.env

    def _spec(self, active: ActiveAttempt, span: str, task: bytes, folder: Path) -> ProcessSpec:
        given, memory = self._user_variables(), f"{self.runner.memory_mb}m"
        if active.place is not None:
            given = {**active.place.env, **given}
        own = contract.attempt_environment(active, self.gateway, span, task)
        inside = _with_line_breaks(given) | own  # a line of the file holds one variable
        lines = [f"{name}={given[name]}\n" for name in given if name not in inside]
        file, name = folder / "env", f"agentrl-{active.id}"
        file.write_text("".join(lines), errors="surrogateescape")
        argv = [self.config.cli, "run", "--rm", "--interactive", "--init", "--name", name]
        argv += ["--env-file", str(file)] if lines else []
        for variable in inside:
            argv += ["--env", variable]
        if self.runner.memory_mb:
            argv += [f"--memory={memory}", f"--memory-swap={memory}"]
        if self.config.network:
            argv += ["--network", self.config.network]
        if not self._on_host and not self.runner.advertise:
            argv += ["--add-host", f"{HOST}:host-gateway"]
        if (place := active.place) is not None:
            mounted = str(place.folder.parent)
            argv += ["--volume", f"{mounted}:{mounted}", "--workdir", str(place.folder)]
        elif self.agent.folder:
            argv += ["--workdir", self.agent.folder]
        argv += [*self.config.options, self.config.image, *self.argv]
        env = inside | contract.passed_environment(CLIENT)
        return ProcessSpec(argv=argv, env=env, after=[self.config.cli, "rm", "--force", name])

    def _read(self, folder: Path, status: int, stdout: str, stderr: str) -> Json:
        if status == NOT_STARTED:
            message = f"{self.config.cli} could not run the container: {stderr.strip()}"
            raise FailedAttemptError(ErrorKind.LOST_RUNNER, message)
        if status == KILLED and self.runner.memory_mb:
            message = f"the agent was killed, probably for using {self.runner.memory_mb} MB"
            raise FailedAttemptError(ErrorKind.AGENT, message, stderr)
        contract.check_exit(status, stderr)
        return contract.parse_result(stdout)


def _with_line_breaks(variables: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in variables.items() if "\n" in value or "\r" in value}
