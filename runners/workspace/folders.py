"""Creates and removes workspaces: a folder with the agent's repository and a separate HOME.

Owns: a folder of this runner below `workspace.folder`, locked while the runner lives, with the
templates and every workspace in it.
Invariant: a workspace is removed when its attempt is over. If the runner is killed, its cleaner, a
separate process, removes them, or else the next runner that starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.base import threads
from agentrl.config import RunConfig
from agentrl.config.infrastructure import ContainerRunnerConfig
from agentrl.errors import ConfigError
from agentrl.runners.gateway.attribution import AgentPlace
from agentrl.runners.processes.contract import passed_environment, private_folders
from agentrl.runners.processes.launcher import Finished, OutputPipe, ProcessLauncher
from agentrl.runners.processes.supervisor import ProcessSpec
from agentrl.runners.workspace import cleaner, sources
from agentrl.runners.workspace.base import WorkspaceError
from agentrl.runners.workspace.changes import carry_over, diff, pack, unpack
from agentrl.runners.workspace.sandbox import Sandbox
from agentrl.runners.workspace.sources import Template, Templates, no_space_or
from agentrl.types import Json, Task

FOLDERS = ("home", "tmp", "io")
Change = Callable[[Path], None]  # modifies the files of a repository
LARGEST_OUTPUT = 2**20  # bytes kept of each output of a test
log = logging.getLogger("agentrl.runner")


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """The verifier's view of a workspace. `path`: the repository as the agent left it; `home`: its
    HOME."""

    folder: Path
    template: Template
    _of: Workspaces
    _copies: list[Path] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.folder / "repo"

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def place(self) -> AgentPlace:
        """The working environment of the agent's process."""
        env = private_folders(str(self.home), self.path) | {"TMPDIR": str(self.folder / "tmp")}
        prefix = self._of.sandbox.command(self.folder, self.path, [])
        return AgentPlace(self.path, self.folder / "io", env, prefix, self._of.sandbox.give)

    def diff(self) -> str:
        """Return the agent's changes as a unified diff; binary and large files only by name."""
        return diff(self.template.folder, self.path)

    def packed(self) -> bytes:
        """Pack the agent's changes for `Workspaces.prepare`. Raises WorkspaceError if they are too
        large."""
        return pack(self.template.folder, self.path)

    async def fresh(self, files: Mapping[str, Json] | None = None) -> Workspace:
        """Create a copy of the template with the agent's changes, then write `files` to it, such as
        hidden tests. It is removed with this workspace. Raises WorkspaceError."""

        def change(repository: Path) -> None:
            carry_over(self.template.folder, self.path, repository)
            sources.write_files(repository, files or {})

        copy = await self._of.copy(self.template, change)
        self._copies.append(copy.folder)
        return copy

    async def run(
        self, argv: Sequence[str], *, timeout: float = 60.0, env: Mapping[str, str] | None = None
    ) -> Finished:
        """Run a program in the repository, confined like the agent and with its HOME; kill all its
        descendants at the end. Raises TimeoutError after `timeout` seconds."""
        return await self._of.run(self, argv, timeout=timeout, env=env or {})


class Workspaces:
    """Creates the workspaces of a run."""

    def __init__(self, config: RunConfig, *, root: Path, gateway: str) -> None:
        """`gateway`: its base URL, the only address that a confined agent can connect to."""
        self.config = settings = config.workspace
        self._kept = Path(config.output or root, "workspaces")
        self._everybody = Path(settings.folder or tempfile.gettempdir()).resolve()
        self._everybody /= f"agentrl-workspaces-{os.getuid()}"
        self.folder = self._everybody / f"{os.getpid()}-{os.urandom(4).hex()}"
        self._runner, self._count = config.runner, 0
        hidden = [self._everybody, *_answers(config, root)]
        self.sandbox = Sandbox(settings, root.resolve(), gateway, hidden)
        self._templates = Templates(self.folder / "templates", root, self.sandbox.owner)
        self._launcher = ProcessLauncher(env=passed_environment(()))
        self._open: list[int] = []
        self._cleaner: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Prepare the folder. Raises ConfigError if the source does not exist or the sandbox does
        not work on this machine."""
        try:
            await threads.call(self._make_folder)
        except OSError as error:
            raise ConfigError(f"workspace.folder: {no_space_or(error, 'make')}") from None
        await self._launcher.start()
        if not (source := self.config.source).startswith("task."):
            try:
                await self._templates.take(source)  # never evicted
            except WorkspaceError as error:
                raise ConfigError(f"workspace.source = {source!r}: {error}") from None
        if self.sandbox.confines:
            workspace = await self._copy_of({})
            try:
                tried = await self.run(workspace, ["true"], timeout=20.0, env={})
            finally:
                await self.remove(workspace)
            if tried.status:
                raise ConfigError(
                    f"workspace.sandbox = {self.config.sandbox!r} does not work on this machine:"
                    f" {tried.stderr.strip() or tried.status}; choose another"
                )

    async def prepare(self, task: Task, changed: bytes | None = None) -> Workspace:
        """Create a workspace from the source, with the changes of `Workspace.packed`, if any.
        Raises WorkspaceError."""
        source: Json = self.config.source
        if source.startswith("task."):
            key = source.removeprefix("task.")
            if key not in task:
                raise WorkspaceError(f"the task has no {key!r}, the source of its workspace")
            source = task[key]
        try:
            async with asyncio.timeout(self.config.timeout):
                change = None if changed is None else partial(unpack, packed=changed)
                return await self._copy_of(source, change)
        except TimeoutError:
            message = f"a workspace was not ready after {self.config.timeout:g} s"
            raise WorkspaceError(message) from None

    async def copy(self, template: Template, change: Change | None) -> Workspace:
        """Copy a template and apply `change` to the repository. Raises WorkspaceError; on errors
        and cancellation the copy is removed."""
        self._count += 1
        folder = self.folder / str(self._count)
        copying = asyncio.ensure_future(threads.call(self._copy, template.folder, folder, change))
        try:
            await asyncio.shield(copying)
        except BaseException:
            await threads.uncancelled(_undo(copying, folder))
            raise
        return Workspace(folder, template, self)

    async def _copy_of(self, source: Json, change: Change | None = None) -> Workspace:
        template = await self._templates.take(source)
        try:
            return await self.copy(template, change)
        except BaseException:
            await self._templates.release(template)
            raise

    async def remove(self, workspace: Workspace, *, failed: bool = False, name: str = "") -> None:
        """Remove a workspace, or keep it if `workspace.keep` says so, even if cancelled."""
        await threads.uncancelled(self._remove(workspace, failed, name))

    async def _remove(self, workspace: Workspace, failed: bool, name: str) -> None:
        keep = self.config.keep
        if name and (keep == "always" or (keep == "failed" and failed)):
            kept = self._kept / name.replace("/", "_")
            try:
                await threads.call(_move, workspace.folder, kept)
                log.info("kept the workspace of %s in %s", name, kept)
            except OSError as error:
                log.warning("the workspace of %s is not kept: %s", name, error)
        for folder in (workspace.folder, *workspace._copies):
            await threads.call(cleaner.remove, folder)
        await self._templates.release(workspace.template)

    async def close(self) -> None:
        await self._launcher.close()
        await threads.call(cleaner.remove, self.folder)
        for fd in self._open:
            os.close(fd)
        if self._cleaner is not None:
            await threads.call(self._cleaner.wait)

    async def run(
        self, workspace: Workspace, argv: Sequence[str], *, timeout: float, env: Mapping[str, str]
    ) -> Finished:
        stdout = OutputPipe(LARGEST_OUTPUT, tail=True)
        stderr = OutputPipe(LARGEST_OUTPUT, tail=True)
        spec = ProcessSpec(
            argv=self.sandbox.command(workspace.folder, workspace.path, argv),
            env=passed_environment(()) | dict(workspace.place.env) | dict(env),
            folder=str(workspace.path),
        )
        name, own = f"agentrl-{os.urandom(8).hex()}", {**workspace.place.env, **env}
        if isinstance(self._runner, ContainerRunnerConfig):
            from agentrl.runners.containers.cli import enclosure  # the client of containers

            inside = enclosure(self._runner, name, str(workspace.folder), own)
            spec["argv"], spec["env"] = [*inside.prefix, *argv], passed_environment(inside.pass_env)
            spec["after"] = inside.after
        elif self._runner.memory_mb:
            spec["memory"] = self._runner.memory_mb * 2**20
        fds = [os.open(os.devnull, os.O_RDONLY), await stdout.open(), await stderr.open()]
        process = await self._launcher.launch(spec, fds)
        status = await process.wait_at_most(timeout)
        return Finished(status, await stdout.text(), await stderr.text())

    def _copy(self, template: Path, folder: Path, change: Change | None) -> None:
        try:
            folder.mkdir(mode=0o700)
            for name in FOLDERS:
                (folder / name).mkdir()
            sources.copy_files(template, folder / "repo")
            if change is not None:
                change(folder / "repo")
            self.sandbox.give(folder)
        except OSError as error:
            raise no_space_or(error, "make") from None

    def _make_folder(self) -> None:
        self._everybody.mkdir(mode=0o711, parents=True, exist_ok=True)
        if self._everybody.stat().st_uid != os.getuid():
            raise ConfigError(f"workspace.folder: {self._everybody} belongs to another user")
        for lock in self._everybody.glob("*.lock"):
            _clear_if_dead(lock)
        lock = self.folder.with_suffix(".lock")
        new = self.folder.with_suffix(".new")
        self._open.append(os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        fcntl.flock(self._open[0], fcntl.LOCK_EX)
        new.rename(lock)  # atomic: no other runner sees it unlocked
        (self.folder / "templates").mkdir(parents=True)
        theirs, ours = os.pipe()
        self._open.append(ours)
        program = [sys.executable, "-I", "-S", cleaner.__file__]
        program += [str(self.folder), str(lock), str(theirs)]
        how: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        how |= {"pass_fds": [theirs], "start_new_session": True}
        self._cleaner = subprocess.Popen(program, **how)
        os.close(theirs)


def _clear_if_dead(lock: Path) -> None:
    with contextlib.suppress(FileNotFoundError, BlockingIOError):
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            cleaner.remove(lock.with_suffix(""))
            lock.unlink(missing_ok=True)
        finally:
            os.close(fd)


async def _undo(copying: asyncio.Future[None], folder: Path) -> None:
    await asyncio.wait([copying])
    await threads.call(cleaner.remove, folder)


def _move(folder: Path, kept: Path) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True)
    cleaner.remove(kept)
    shutil.move(folder, kept)


def _answers(config: RunConfig, root: Path) -> list[Path]:
    """Return paths that may contain answers: the run's output with its store, tasks, verifiers and
    `workspace.hide`."""
    named = [config.tasks.train, config.tasks.heldout, config.verifier.path]
    named += [*config.verifier.rewards.values(), *config.workspace.hide]
    files = [root / name.partition(":")[0] for name in named if name]
    return [*files, Path(config.output)] if config.output else files
