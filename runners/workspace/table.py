"""The table [workspace] of the run file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from agentrl.config.base import Seconds, Section


class WorkspaceConfig(Section, frozen=True):
    """A folder for each attempt of a command: a git repository with one commit in which it works,
    and a HOME of its own. It is removed after scoring."""

    # Source of workspaces: "git:PATH@REVISION", a folder, or "task.KEY": a key of the task with one
    # of these or a mapping of file names to texts. Paths are relative to the run file. Empty: no
    # workspace.
    source: str = ""
    # Sandbox of the agent. user: run as another user (needs root); unshare: in Linux namespaces;
    # bubblewrap: with bwrap; container: with runner.executor = "container". With user, unshare and
    # bubblewrap the agent can write only to its workspace and connect only to the gateway.
    sandbox: Literal["none", "user", "unshare", "bubblewrap", "container"] = "none"
    user: str = "nobody"  # User as whom agents run, with sandbox = "user".
    hide: list[str] = []  # additional files and folders that appear empty in the sandbox
    # Workspaces that are kept, in <output>/workspaces.
    keep: Literal["never", "failed", "always"] = "never"
    folder: str = ""  # parent folder of workspaces; default: the system's temporary folder
    timeout: Seconds = 60.0  # Seconds in which a workspace is created, at most.

    def problems(self, config: Any) -> Iterator[str]:
        if not self.source:
            if self != WorkspaceConfig():
                yield "[workspace] has no effect without `source`, the files that it copies"
            return
        kind, sandbox = config.runner.executor, self.sandbox
        if config.agent.path or kind not in ("auto", "command", "container"):
            yield (
                "[workspace] is for an agent that is a command, run by runner.executor = 'command' "
                "or 'container'"
            )
        if (sandbox == "container") != (kind == "container"):
            yield (
                f"workspace.sandbox = {sandbox!r} with runner.executor = {kind!r}: the sandbox and "
                "the executor 'container' need each other; set both or neither"
            )


def workspace_of(config: Any) -> WorkspaceConfig:
    settings: WorkspaceConfig = config.workspace
    return settings
