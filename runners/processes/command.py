"""Runs a command for each attempt, in any language, and ends all its processes with the attempt."""

from __future__ import annotations

import asyncio
import errno
import os
import shlex
import shutil
from contextlib import suppress
from pathlib import Path

import msgspec

from agentrl.config import AgentConfig, RunnerConfig
from agentrl.errors import ConfigError
from agentrl.runners import executors
from agentrl.runners.executors import input_of, out_of_time
from agentrl.runners.executors.environment import explained
from agentrl.runners.gateway.attribution import ActiveAttempt
from agentrl.runners.processes import contract
from agentrl.runners.processes.contract import FailedAttemptError, SandboxExecutor
from agentrl.runners.processes.launcher import OutputPipe, ProcessLauncher, SupervisorLost
from agentrl.runners.processes.supervisor import ProcessSpec
from agentrl.runners.scoring.results import LONGEST_TRACEBACK
from agentrl.types import ErrorKind, Json

MB = 2**20


class CommandExecutor(SandboxExecutor):
    """Starts `agent.command` for each attempt.

    `runner.memory_mb` limits the data segment of each process (RLIMIT_DATA); a limit on their sum
    needs a container."""

    def __init__(
        self, agent: AgentConfig, runner: RunnerConfig, *, root: Path, gateway: str
    ) -> None:
        """`root`: the run file's folder. `gateway`: base URL for agents on this machine."""
        self.argv = shlex.split(agent.command) if isinstance(agent.command, str) else agent.command
        self.folder = root / agent.folder
        self.agent, self.runner, self.gateway = agent, runner, gateway
        self._launcher = ProcessLauncher(env=contract.passed_environment(agent.pass_env))

    async def start(self) -> None:
        """Raise ConfigError if the command cannot be started in its folder."""
        if not self.argv:
            raise ConfigError("agent.command is missing: write it as a list or a shell-like string")
        if not self.folder.is_dir():
            raise ConfigError(f"agent.folder: there is no folder {self.folder}")
        program = self.argv[0]
        if not ((self.folder / program).is_file() if "/" in program else shutil.which(program)):
            raise ConfigError(f"agent.command: there is no program {program!r} on this machine")
        await self._launcher.start()

    async def close(self) -> None:
        await self._launcher.close()

    async def _execute(self, active: ActiveAttempt, span: str) -> Json:
        task = msgspec.json.encode(input_of(active))
        with contract.task_folder(task, active.place) as folder:
            spec = self._spec(active, span, task, folder)
            ended = await self._run_process(active, spec, folder)
            try:
                return self._read(folder, *ended)
            except FailedAttemptError as error:
                error.failure = explained(error.failure, spec["env"])
                raise

    def _spec(self, active: ActiveAttempt, span: str, task: bytes, folder: Path) -> ProcessSpec:
        env = contract.passed_environment(self.agent.pass_env) | self.agent.env
        env |= contract.attempt_environment(active, self.gateway, span, task)
        env["AGENTRL_TASK_FILE"] = str(folder / contract.TASK)
        env["AGENTRL_RESULT_FILE"] = str(folder / contract.RESULT)
        works_in, home = self.folder, folder / "home"
        if (place := active.place) is not None:
            works_in, home = place.folder, Path(place.env["HOME"])
            env |= {**place.env, "AGENTRL_ROOT": str(self.folder)} | self.agent.env
        argv = self._command(active, env, home, works_in)
        if place is not None:
            place.give(home)
            argv = [*place.prefix, *argv]
        spec = ProcessSpec(argv=argv, env=env, folder=str(works_in))
        if self.runner.memory_mb:
            spec["memory"] = self.runner.memory_mb * MB
        return spec

    def _command(
        self, active: ActiveAttempt, env: dict[str, str], home: Path, works_in: Path
    ) -> list[str]:
        """Return the command line of an attempt, and add to its variables. `home`: its own HOME, if
        it has one. `works_in`: its working directory."""
        return self.argv

    async def _run_process(
        self, active: ActiveAttempt, spec: ProcessSpec, folder: Path, stdin: int | None = None
    ) -> tuple[int, str, str]:
        """Return exit status, stdout and the end of stderr. All descendants of the process are
        killed, on cancellation too. If the runner is killed, `folder`, which holds the task, is
        deleted along with the process. `stdin`: a file descriptor, if not the task.

        Raises FailedAttemptError if the process had to be killed."""
        spec["remove"] = str(folder)
        stdout = OutputPipe(executors.LARGEST_RESULT)
        stderr = OutputPipe(LONGEST_TRACEBACK, tail=True)
        if stdin is None:
            # A harness has its prompt as an argument, and would append its stdin to it.
            given = os.devnull if self.agent.harness else folder / contract.TASK
            stdin = os.open(given, os.O_RDONLY)
        fds = [stdin, await stdout.open(), await stderr.open()]
        try:
            process = await self._launcher.launch(spec, fds)
            try:
                async with asyncio.timeout(active.left):
                    status = await process.wait()
                    if active.left <= 0:  # the event loop was blocked
                        raise TimeoutError
            except (TimeoutError, asyncio.CancelledError):
                late = out_of_time(active)
                process.kill()
                with suppress(SupervisorLost):
                    await process.wait()
                raise
        except SupervisorLost as lost:
            raise FailedAttemptError(ErrorKind.LOST_RUNNER, str(lost)) from None
        except TimeoutError:
            raise FailedAttemptError(late.kind, late.message, await stderr.text()) from None
        if stdout.cut:
            raise contract.too_large("stdout")
        return status, await stdout.text(), await stderr.text()

    def _read(self, folder: Path, status: int, stdout: str, stderr: str) -> Json:
        """Return the result of a process that exited. Raises FailedAttemptError."""
        # Harnesses print errors to stdout, among much else.
        printed = stdout.splitlines() if self.agent.harness else ()
        words = (line for line in printed if "error" in line.lower())
        contract.check_exit(status, "\n".join([stderr, *words]))
        try:
            if folder.is_symlink():
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            with open(folder / contract.RESULT, errors="replace", opener=_open_no_link) as file:
                size = os.fstat(file.fileno()).st_size
                if size > executors.LARGEST_RESULT:
                    raise contract.too_large("its result file")
                if size:
                    stdout = file.read()
        except FileNotFoundError:
            pass  # the result is on stdout
        except OSError as error:  # the agent replaced its file or folder by something else
            message = f"the agent's result file cannot be read: {error.strerror}"
            raise FailedAttemptError(ErrorKind.AGENT, message) from None
        return contract.parse_result(stdout)


def _open_no_link(path: str, flags: int) -> int:
    """Open without following links, which may lead to files that only the runner can read, such as
    the expected answers, and without blocking on a named pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
