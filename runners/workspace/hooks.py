"""Gives each attempt of a runner a workspace."""

from __future__ import annotations

from pathlib import Path

from agentrl.config import RunConfig
from agentrl.runners.hooks import RunnerHooks, WorkspaceSource


class WorkspaceHooks(RunnerHooks):
    def __init__(self, config: RunConfig, root: Path) -> None:
        self._config, self._root = config, root

    def workspaces(self, gateway: str) -> WorkspaceSource:
        from agentrl.runners.workspace.folders import Workspaces  # only if a run has workspaces

        return Workspaces(self._config, root=self._root, gateway=gateway)


def join(config: RunConfig, root: Path) -> WorkspaceHooks | None:
    return WorkspaceHooks(config, root) if config.workspace.source else None
