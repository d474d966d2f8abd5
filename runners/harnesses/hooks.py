"""Joins a run whose agent is a harness."""

from __future__ import annotations

from pathlib import Path

from agentrl.config import RunConfig
from agentrl.runners.executors import Executor
from agentrl.runners.harnesses.preset import load_preset
from agentrl.runners.hooks import RunnerHooks


class HarnessHooks(RunnerHooks):
    """Runs `agent.harness`, and gives roles to the calls that are not the agent's own."""

    def __init__(self, config: RunConfig, root: Path) -> None:
        self._config, self._root = config, root
        self._preset = load_preset(config.agent.harness, root)
        self.role_rules = self._preset.match

    def executor(self, gateway: str) -> Executor | None:
        if self._config.runner.executor not in ("auto", "command"):
            return None  # the program is in the image
        from agentrl.runners.harnesses.executor import HarnessExecutor

        return HarnessExecutor(self._config, self._preset, root=self._root, gateway=gateway)


def join(config: RunConfig, root: Path) -> HarnessHooks | None:
    """Raises ConfigError for an unknown harness."""
    return HarnessHooks(config, root) if config.agent.harness else None
