"""Runs a command for each attempt, in any language, and ends all its processes with the attempt."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shlex
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec

from agentrl.config import AgentConfig, RunnerConfig
from agentrl.errors import ConfigError
from agentrl.runners.executors import contract, input_of, out_of_time
from agentrl.runners.executors.contract import FailedAttemptError, SandboxExecutor
from agentrl.runners.executors.launcher import OutputPipe, ProcessLauncher, SupervisorLost
from agentrl.runners.executors.supervisor import ProcessSpec
from agentrl.runners.gateway.attribution import ActiveAttempt
from agentrl.runners.harnesses import preset as presets
from agentrl.runners.scoring.results import LONGEST_TRACEBACK
from agentrl.types import ErrorKind, Json

log = logging.getLogger("agentrl.runner")
MB = 2**20


class CommandExecutor(SandboxExecutor):
    """Starts `agent.command`, or the program of a harness preset, for each attempt.

    `runner.memory_mb` limits the data segment of each process (RLIMIT_DATA); a limit on their sum
    needs a container."""

    def __init__(
        self, agent: AgentConfig, runner: RunnerConfig, *, root: Path, gateway: str
    ) -> None:
        """`root`: the run file's folder. `gateway`: base URL for agents on this machine."""
        self.argv = shlex.split(agent.command) if isinstance(agent.command, str) else agent.command
        self.preset = presets.load_preset(agent.harness, root) if agent.harness else None
        self.folder = root / agent.folder
        self.agent, self.runner, self.gateway = agent, runner, gateway
        self._launcher = ProcessLauncher(env=contract.passed_environment(agent.pass_env))

    async def start(self) -> None:
        """Raise ConfigError if the command cannot be started in its folder."""
        if self.preset is not None:
            self.argv = [await self._harness(self.preset)]
        if not self.argv:
            raise ConfigError("agent.command is missing: write it as a list or a shell-like string")
        if not self.folder.is_dir():
            raise ConfigError(f"agent.folder: there is no folder {self.folder}")
        program = self.argv[0]
        if not ((self.folder / program).is_file() if "/" in program else shutil.which(program)):
            raise ConfigError(f"agent.command: there is no program {program!r} on this machine")
        await self._launcher.start()

    async def _harness(self, preset: presets.Preset) -> str:
        """Return the path of the preset's program; warn if its version is untested."""
        program = preset.find_program(*self.argv[:1])
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
            version = await presets.version_of(program, Path(home))
        if not preset.was_tested(version):
            log.warning(
                "%s is version %s, and its preset was tested with %s: check its requests with"
                " `agentrl harness check %s`",
                *(program, version or "?", " to ".join(preset.tested or ()), self.agent.harness),
            )
        return program

    async def close(self) -> None:
        await self._launcher.close()

    async def _execute(self, active: ActiveAttempt, span: str) -> Json:
        task = msgspec.json.encode(input_of(active))
        with contract.task_folder(task, active.place) as folder:
            spec = self._spec(active, span, task, folder)
            return self._read(folder, *await self._run_process(active, spec, folder))

    def _spec(self, active: ActiveAttempt, span: str, task: bytes, folder: Path) -> ProcessSpec:
        env = contract.passed_environment(self.agent.pass_env) | self.agent.env
        env |= contract.attempt_environment(active, self.gateway, span, task)
        env["AGENTRL_TASK_FILE"] = str(folder / contract.TASK)
        env["AGENTRL_RESULT_FILE"] = str(folder / contract.RESULT)
        argv, works_in, home = self.argv, self.folder, folder / "home"
        if (place := active.place) is not None:
            works_in, home = place.folder, Path(place.env["HOME"])
            env |= {**place.env, "AGENTRL_ROOT": str(self.folder)} | self.agent.env
        if self.preset is not None:
            asked = presets.prompt_of(input_of(active))
            known = {"url": self.gateway, "key": active.key, "prompt": asked}
            if "\0" in asked or len(asked.encode()) > contract.LARGEST_VARIABLE:
                why = f"the task is too long for an argument of {self.preset.program}, or has a NUL"
                raise FailedAttemptError(ErrorKind.AGENT, why)
            preset = self.preset.filled(home=home, context=self.agent.context, **known)
            home.mkdir(parents=True, exist_ok=True)
            preset.write_files(home)
            argv = [*argv, *preset.argv, *self.agent.args]
            env |= presets.private_folders(str(home), works_in) | preset.env | self.agent.env
        if place is not None:
            place.give(home)
            argv = [*place.prefix, *argv]
        spec = ProcessSpec(argv=argv, env=env, folder=str(works_in))
        if self.runner.memory_mb:
            spec["memory"] = self.runner.memory_mb * MB
        return spec

    async def _run_process(
        self, active: ActiveAttempt, spec: ProcessSpec, folder: Path
    ) -> tuple[int, str, str]:
        """Return exit status, stdout and the end of stderr. All descendants of the process are
        killed, on cancellation too. If the runner is killed, `folder`, which holds the task, is
        deleted along with the process.

        Raises FailedAttemptError if the process had to be killed."""
        spec["remove"] = str(folder)
        stdout = OutputPipe(contract.LARGEST_RESULT)
        stderr = OutputPipe(LONGEST_TRACEBACK, tail=True)
        # A harness has its prompt as an argument, and would append its stdin to it.
        stdin = os.devnull if self.preset is not None else folder / contract.TASK
        task = os.open(stdin, os.O_RDONLY)
        fds = [task, await stdout.open(), await stderr.open()]
        try:
            process = await self._launcher.launch(spec, fds)
            try:
                async with asyncio.timeout(active.left):
                    status = await process.wait()
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
        words = (line for line in stdout.splitlines() if self.preset and "error" in line.lower())
        contract.check_exit(status, "\n".join([stderr, *words]))
        try:
            if folder.is_symlink():
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            with open(folder / contract.RESULT, errors="replace", opener=_open_no_link) as file:
                size = os.fstat(file.fileno()).st_size
                if size > contract.LARGEST_RESULT:
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
