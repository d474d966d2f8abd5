"""How parts join a runner, which knows none of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from agentrl.base.parts import installed_plugins
from agentrl.config import RoleRule, RunConfig
from agentrl.errors import AgentRLError, ConfigError
from agentrl.runners.executors import Executor
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


class RunnerHooks:
    """Base class of what a part does in a runner; does nothing."""

    role_rules: Sequence[RoleRule] = ()
    environment: str = ""
    """The name of what plays the rollouts in place of an agent; its faults are not the policy's."""

    def executor(self, gateway: str) -> Executor | None:
        """Return what runs the run file's agent, instead of the executor that it names. `gateway`:
        base URL for agents."""
        return None

    def workspaces(self, gateway: str) -> WorkspaceSource | None:
        """Return what makes the workspaces of attempts. `gateway`: base URL for agents."""
        return None


def role_rules(config: RunConfig, hooks: Iterable[RunnerHooks]) -> list[RoleRule]:
    """Return the rules of the run file, then those of parts."""
    return [*config.role_rules, *(rule for part in hooks for rule in part.role_rules)]


def runner_hooks(config: RunConfig, root: Path) -> list[RunnerHooks]:
    """Return those of the installed parts. Raises ConfigError for a part that the run needs and
    that is missing here, and the errors of the parts."""
    for problem in config.agent.problems(config):
        raise ConfigError(problem)
    made = (point.load()(config, root) for point in installed_plugins("runner"))
    return [hooks for hooks in made if hooks is not None]
