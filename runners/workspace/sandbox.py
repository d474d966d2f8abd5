"""Builds the command line that confines a program to its workspace, by `workspace.sandbox`."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from agentrl.config.agents import WorkspaceConfig
from agentrl.errors import ConfigError
from agentrl.runners.workspace import confine
from agentrl.runners.workspace.sources import change_owner


class Sandbox:
    """`root`: the run file's folder, readable for programs except the `hidden` paths. `gateway`:
    the only address that they can connect to."""

    def __init__(
        self, config: WorkspaceConfig, root: Path, gateway: str, hidden: Iterable[Path]
    ) -> None:
        self.kind, self._root = config.sandbox, str(root)
        self.owner = _user(config.user) if self.kind == "user" else None
        self.confines = self.kind in ("user", "unshare", "bubblewrap")
        self._port, self._hidden = urlsplit(gateway).port or 0, [str(path) for path in hidden]

    def command(self, folder: Path, works_in: Path, argv: Sequence[str]) -> list[str]:
        """Return a command line that runs `argv` with write access to `folder` only."""
        if not self.confines:
            return list(argv)
        spec = confine.Confinement(
            folder=str(works_in),
            port=self._port,
            write=str(folder),
            show=[self._root, *_interpreter()],
            hide=self._hidden,
            mounts=self.kind != "bubblewrap",
            user=self.owner,
        )
        program = [sys.executable, "-I", "-S", confine.__file__, msgspec.json.encode(spec).decode()]
        if self.kind == "bubblewrap":
            program += self._bubblewrap(str(folder), str(works_in))
        return [*program, *argv]

    def give(self, folder: Path) -> None:
        """Make the user of the programs the owner of a folder's files."""
        change_owner(folder, self.owner)

    def _bubblewrap(self, folder: str, works_in: str) -> list[str]:
        argv = ["bwrap", "--die-with-parent", "--unshare-user", "--unshare-pid"]
        argv += ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
        for path in confine.SCRATCH:
            argv += ["--tmpfs", path]
        for path in (self._root, *_interpreter()):
            argv += ["--ro-bind", path, path]
        for path in filter(os.path.exists, self._hidden):
            empty = os.path.isdir(path)  # noqa: PTH112
            argv += ["--tmpfs", path] if empty else ["--ro-bind", os.devnull, path]
        return [*argv, "--bind", folder, folder, "--chdir", works_in, "--"]


def _interpreter() -> list[str]:
    """Return this Python's folders that lie in scratch folders, hence would be hidden."""
    prefixes = {sys.prefix, sys.base_prefix}
    return [path for path in prefixes if any(Path(path).is_relative_to(s) for s in confine.SCRATCH)]


def _user(name: str) -> tuple[int, int]:
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        raise ConfigError(f"workspace.user = {name!r}: there is no such user here") from None
    if os.getuid():
        raise ConfigError("workspace.sandbox = 'user' needs a runner of root; use 'unshare'")
    return found.pw_uid, found.pw_gid
