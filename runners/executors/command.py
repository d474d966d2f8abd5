"""A command for each rollout: any language, its own session, its own key, nothing left behind."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from agentrl.config import AgentConfig, RunnerConfig
from agentrl.errors import ConfigError
from agentrl.runners.executors import ExecutionResult, contract, input_of, out_of_time
from agentrl.runners.executors.launcher import (
    OutputPipe,
    ProcessLauncher,
    SupervisedProcess,
    SupervisorLost,
)
from agentrl.runners.executors.supervisor import ProcessSpec
from agentrl.runners.gateway.attribution import ActiveAttempt
from agentrl.runners.scoring.results import LONGEST_TRACEBACK
from agentrl.types import ErrorKind, Failure, Json

MB = 2**20


class CommandExecutor:
    """Starts `agent.command` for each attempt. `runner.memory_mb` limits the data of each of its
    processes (RLIMIT_DATA); a limit for all of them together needs a container."""

    sealed = True
    limit: int | None = None

    def __init__(
        self, agent: AgentConfig, runner: RunnerConfig, *, root: Path, gateway: str
    ) -> None:
        """`root` is the run file's folder, `gateway` the base URL for agents on this machine."""
        self.argv = shlex.split(agent.command) if isinstance(agent.command, str) else agent.command
        self.folder = root / agent.folder
        self.agent, self.runner, self.gateway = agent, runner, gateway
        self._launcher = ProcessLauncher(
            env=contract.passed_environment(os.environ, agent.pass_env)
        )

    async def start(self) -> None:
        check_command(self.argv, self.folder)
        await self._launcher.start()

    async def close(self) -> None:
        await self._launcher.close()

    async def run(self, active: ActiveAttempt) -> ExecutionResult:
        root = contract.RootSpan(active)
        task = msgspec.json.encode(input_of(active))
        with contract.task_folder(task) as folder:
            spec = self._spec(active, root.id, folder, task)
            result, failed = await self._ended(active, spec, folder)
        return ExecutionResult(result=result, failure=failed, spans=[root.ended(ok=failed is None)])

    def _spec(self, active: ActiveAttempt, span: str, folder: Path, task: bytes) -> ProcessSpec:
        files = {
            "AGENTRL_TASK_FILE": str(folder / contract.TASK),
            "AGENTRL_RESULT_FILE": str(folder / contract.RESULT),
        }
        env = contract.passed_environment(os.environ, self.agent.pass_env) | self.agent.env
        env |= (
            contract.attempt_environment(active, self.gateway, span)
            | contract.task_variable(task)
            | files
        )
        spec = ProcessSpec(argv=self.argv, env=env, folder=str(self.folder))
        if self.runner.memory_mb:
            spec["memory"] = self.runner.memory_mb * MB
        return spec

    async def _ended(
        self, active: ActiveAttempt, spec: ProcessSpec, folder: Path
    ) -> tuple[Json, Failure | None]:
        done = await run_process(self._launcher, active, spec, folder)
        if isinstance(done, Failure):
            return None, done
        status, stdout, stderr = done
        if failed := contract.exit_failure(status, stderr):
            return None, failed
        try:
            size = (folder / contract.RESULT).stat().st_size
            if size > contract.LARGEST_RESULT:
                return None, contract.too_large("its result file")
            if size:
                stdout = (folder / contract.RESULT).read_text(errors="replace")
        except FileNotFoundError:
            pass  # the answer is on stdout
        except OSError as error:  # it made something else of its file, or of the folder
            message = f"the agent's result file cannot be read: {error.strerror}"
            return None, Failure(kind=ErrorKind.AGENT, message=message)
        return contract.parse_result(stdout), None


async def run_process(
    launcher: ProcessLauncher, active: ActiveAttempt, spec: ProcessSpec, folder: Path
) -> tuple[int, str, str] | Failure:
    """Exit status, stdout and the end of stderr; or why it had to be ended. By then nothing of it
    is left, also when this is cancelled. `folder` holds its task; when the runner is killed it goes
    with the process."""
    spec["remove"] = str(folder)
    stdout = OutputPipe(contract.LARGEST_RESULT)
    stderr = OutputPipe(LONGEST_TRACEBACK, tail=True)
    fds = [os.open(folder / contract.TASK, os.O_RDONLY), await stdout.open(), await stderr.open()]
    try:
        process = await launcher.launch(spec, fds)
    except SupervisorLost as lost:
        return Failure(kind=ErrorKind.LOST_RUNNER, message=str(lost))
    finally:
        for fd in fds:
            os.close(fd)
    try:
        async with asyncio.timeout(active.left) as limit:
            status = await process.wait()
    except SupervisorLost as lost:
        return Failure(kind=ErrorKind.LOST_RUNNER, message=str(lost))
    except TimeoutError:
        if not limit.expired():
            raise
        failed = out_of_time(active)
        await _end(process)
        return replace(failed, traceback=await stderr.text())
    except asyncio.CancelledError:
        await asyncio.shield(_end(process))
        raise
    if stdout.cut:
        return contract.too_large("stdout")
    return status, await stdout.text(), await stderr.text()


def check_command(argv: Sequence[str], folder: Path) -> None:
    """Raises ConfigError for a command that cannot be started in `folder`."""
    if not argv:
        raise ConfigError("agent.command is missing: write it as a list, or as in a shell")
    if not folder.is_dir():
        raise ConfigError(f"agent.folder: there is no folder {folder}")
    program = argv[0]
    found = (folder / program).is_file() if "/" in program else shutil.which(program)
    if not found:
        raise ConfigError(f"agent.command: there is no program {program!r} on this machine")


async def _end(process: SupervisedProcess) -> None:
    process.kill()
    with suppress(SupervisorLost):
        await process.wait()
