"""Runs the program of a harness, as its preset says."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.runners.executors import input_of
from agentrl.runners.gateway.attribution import ActiveAttempt
from agentrl.runners.harnesses.preset import Preset, prompt_of, version_of
from agentrl.runners.processes import contract
from agentrl.runners.processes.command import CommandExecutor
from agentrl.runners.processes.contract import FailedAttemptError
from agentrl.types import ErrorKind

log = logging.getLogger("agentrl.runner")


class HarnessExecutor(CommandExecutor):
    """Starts the program of a preset for each attempt, in a HOME of its own."""

    def __init__(self, config: RunConfig, preset: Preset, *, root: Path, gateway: str) -> None:
        super().__init__(config.agent, config.runner, root=root, gateway=gateway)
        self._preset = preset

    async def start(self) -> None:
        """Warn if the program's version is untested. Raises ConfigError if it is not installed."""
        preset = self._preset
        program = preset.find_program(*self.argv[:1])
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
            version = await version_of(program, Path(home))
        if not preset.was_tested(version):
            log.warning(
                "%s is version %s, and its preset was tested with %s: check its requests with"
                " `agentrl harness check %s`",
                *(program, version or "?", " to ".join(preset.tested or ()), self.agent.harness),
            )
        self.argv = [program]
        await super().start()

    def _command(
        self, active: ActiveAttempt, env: dict[str, str], home: Path, works_in: Path
    ) -> list[str]:
        prompt = prompt_of(input_of(active))
        if "\0" in prompt or len(prompt.encode()) > contract.LARGEST_VARIABLE:
            why = f"the task is too long for an argument of {self._preset.program}, or has a NUL"
            raise FailedAttemptError(ErrorKind.AGENT, why)
        known = {"url": self.gateway, "key": active.key, "prompt": prompt}
        preset = self._preset.filled(home=home, context=self.agent.context, **known)
        home.mkdir(parents=True, exist_ok=True)
        preset.write_files(home)
        env |= contract.private_folders(str(home), works_in) | preset.env | self.agent.env
        return [*self.argv, *preset.argv, *self.agent.args]
