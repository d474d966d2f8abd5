"""What a runner needs of workspaces: a protocol of their source, and one of each."""

from __future__ import annotations

from typing import Any, Protocol

from agentrl.errors import AgentRLError
from agentrl.runners.gateway.attribution import AgentPlace
from agentrl.types import Task


class WorkspaceError(AgentRLError):
    """A workspace cannot be created, copied or written to. The message is one sentence."""


class AttemptWorkspace(Protocol):
    """The files of one attempt; verifiers get it as `workspace`."""

    @property
    def place(self) -> AgentPlace:
        """The working environment of the agent's process."""

    def diff(self) -> str:
        """Return the agent's changes as a unified diff."""

    def packed(self) -> bytes:
        """Pack the agent's changes for `WorkspaceSource.prepare`. Raises WorkspaceError."""


class WorkspaceSource(Protocol):
    """Creates the workspaces of a run."""

    async def start(self) -> None:
        """Raise ConfigError for problems that the user can correct."""

    async def prepare(self, task: Task, changed: bytes | None = None) -> AttemptWorkspace:
        """Create a workspace, with the changes of `AttemptWorkspace.packed`, if any. Raises
        WorkspaceError."""

    async def remove(self, workspace: Any, *, failed: bool = False, name: str = "") -> None:
        """Remove a workspace, even if cancelled. `failed` and `name`: of its attempt."""

    async def close(self) -> None: ...
