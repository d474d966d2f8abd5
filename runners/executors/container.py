"""A container for each rollout, through the docker command line (or one that understands the same).

Values of variables are never arguments of the command line, which everybody on the machine can
read. Those of the attempt are in its environment; the user's, which could change what it does
itself (PATH, HOME, DOCKER_HOST), in a file of the task's folder, which nobody else may enter.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec

from agentrl.config import AgentConfig, RunnerConfig
from agentrl.errors import ConfigError
from agentrl.runners.executors import ExecutionResult, contract, input_of
from agentrl.runners.executors.command import run_process
from agentrl.runners.executors.launcher import ProcessLauncher
from agentrl.runners.executors.supervisor import ProcessSpec
from agentrl.runners.gateway.attribution import ActiveAttempt
from agentrl.types import ErrorKind, Failure, Json

HOST = "host.docker.internal"  # what a container calls the machine it is on
NOT_STARTED = 125  # exit status of `docker run` when docker itself fails
KILLED = 128 + 9
CLI_VARIABLES = ("DOCKER_*", "CONTAINER_*", "XDG_RUNTIME_DIR")
CHECK_TIMEOUT = 20.0  # seconds for the daemon to answer


class ContainerExecutor:
    """Runs `agent.command`, or else the image's own, in `runner.container.image`."""

    sealed = True
    limit: int | None = None

    def __init__(self, agent: AgentConfig, runner: RunnerConfig, *, gateway: str) -> None:
        """`gateway` is the base URL for agents on this machine."""
        self.argv = shlex.split(agent.command) if isinstance(agent.command, str) else agent.command
        self.agent, self.runner, self.config = agent, runner, runner.container
        if not self.config.image:
            raise ConfigError("runner.container.image is missing: which image holds the agent?")
        for name in contract.passed_environment(_of_many_lines(self._given()), CLI_VARIABLES):
            raise ConfigError(f"agent.env: {name} has several lines, which no container is given")
        self._on_host = self.config.network == "host"
        self.gateway = gateway if self._on_host else contract.reachable_url(gateway, runner, HOST)
        self._launcher = ProcessLauncher(env=contract.passed_environment(os.environ, CLI_VARIABLES))

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

    async def close(self) -> None:
        await self._launcher.close()

    async def run(self, active: ActiveAttempt) -> ExecutionResult:
        root = contract.RootSpan(active)
        task = msgspec.json.encode(input_of(active))
        with contract.task_folder(task) as folder:
            spec = self._spec(active, root.id, task, folder)
            done = await run_process(self._launcher, active, spec, folder)
        result, failed = (None, done) if isinstance(done, Failure) else self._ended(*done)
        return ExecutionResult(result=result, failure=failed, spans=[root.ended(ok=failed is None)])

    def _given(self) -> dict[str, str]:
        return contract.matching(os.environ, self.agent.pass_env) | self.agent.env

    def _spec(self, active: ActiveAttempt, span: str, task: bytes, folder: Path) -> ProcessSpec:
        given = self._given()
        own = contract.attempt_environment(active, self.gateway, span) | contract.task_variable(
            task
        )
        inside = _of_many_lines(given) | own  # a line of the file holds one
        lines = [f"{name}={given[name]}\n" for name in given if name not in inside]
        file = folder / "env"
        file.write_text("".join(lines), errors="surrogateescape")
        outside = contract.passed_environment(os.environ, CLI_VARIABLES)
        name = f"agentrl-{active.id}"
        argv = [self.config.cli, "run", "--rm", "--interactive", "--init", "--name", name]
        argv += ["--env-file", str(file)] if lines else []
        for variable in inside:
            argv += ["--env", variable]
        if self.runner.memory_mb:
            argv += [
                f"--memory={self.runner.memory_mb}m",
                f"--memory-swap={self.runner.memory_mb}m",
            ]
        if self.config.network:
            argv += ["--network", self.config.network]
        if not self._on_host and not self.runner.advertise:
            argv += ["--add-host", f"{HOST}:host-gateway"]
        if self.agent.folder:
            argv += ["--workdir", self.agent.folder]
        argv += [*self.config.options, self.config.image, *self.argv]
        return ProcessSpec(
            argv=argv, env=inside | outside, after=[self.config.cli, "rm", "--force", name]
        )

    def _ended(self, status: int, stdout: str, stderr: str) -> tuple[Json, Failure | None]:
        failed = contract.exit_failure(status, stderr)
        if failed is None:
            return contract.parse_result(stdout), None
        if status == NOT_STARTED:
            message = f"{self.config.cli} could not run the container: {stderr.strip()}"
            return None, Failure(kind=ErrorKind.LOST_RUNNER, message=message)
        if status == KILLED and self.runner.memory_mb:
            message = f"the agent was killed, probably for using {self.runner.memory_mb} MB"
            return None, msgspec.structs.replace(failed, message=message)
        return None, failed


def _of_many_lines(variables: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in variables.items() if "\n" in value or "\r" in value}
