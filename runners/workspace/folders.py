"""Workspaces as folders: the agent's repository and a separate HOME, its sandbox and its changes.

Owns: a folder of this runner below the temporary one, locked while the runner lives, with the
templates and every workspace in it.
Invariant: a workspace is removed when its attempt is over. If the runner is killed, its cleaner, a
separate process, removes them, or else the next runner that starts.

`Sandbox` builds the command line that confines a program to its workspace, by `workspace.sandbox`.
An agent's changes are found without git, because the agent may control git's hooks.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import fcntl
import filecmp
import io
import logging
import os
import pwd
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from agentrl.core import processes
from agentrl.core.config import RunConfig
from agentrl.core.config.agents import WorkspaceConfig
from agentrl.core.config.infrastructure import ContainerRunnerConfig
from agentrl.core.errors import ConfigError
from agentrl.core.types import Json, Task
from agentrl.runners.executors.command import (
    Finished,
    OutputPipe,
    ProcessLauncher,
    passed_environment,
    private_folders,
)
from agentrl.runners.executors.supervisor import ProcessSpec
from agentrl.runners.gateway.attribution import AgentPlace
from agentrl.runners.workspace import cleaner, confine, sources
from agentrl.runners.workspace.sources import (
    Template,
    Templates,
    WorkspaceError,
    change_owner,
    no_space_or,
)

USER = "nobody"  # as whom agents run in the sandbox "user"
FOLDERS = ("home", "tmp", "io")
Change = Callable[[Path], None]  # modifies the files of a repository
MAKING = 60.0  # maximum seconds to create a workspace
MAX_OUTPUT_BYTES = 2**20  # bytes kept of each output of a test
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
        self._kept_folder = Path(config.output or root, "workspaces")
        self._everybody = Path(tempfile.gettempdir()).resolve()
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
            await processes.call(self._make_folder)
        except OSError as error:
            raise ConfigError(f"[workspace]: {no_space_or(error, 'make')}") from None
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
            async with asyncio.timeout(MAKING):
                change = None if changed is None else partial(unpack, packed=changed)
                return await self._copy_of(source, change)
        except TimeoutError:
            message = f"a workspace was not ready after {MAKING:g} s"
            raise WorkspaceError(message) from None

    async def copy(self, template: Template, change: Change | None) -> Workspace:
        """Copy a template and apply `change` to the repository. Raises WorkspaceError; on errors
        and cancellation the copy is removed."""
        self._count += 1
        folder = self.folder / str(self._count)
        copying = asyncio.ensure_future(processes.call(self._copy, template.folder, folder, change))
        try:
            await asyncio.shield(copying)
        except BaseException:
            await processes.uncancelled(_undo(copying, folder))
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
        """Remove a workspace, or keep it by `workspace.keep`, even if cancelled."""
        await processes.uncancelled(self._remove(workspace, failed, name))

    async def _remove(self, workspace: Workspace, failed: bool, name: str) -> None:
        keep = self.config.keep
        if name and (keep == "always" or (keep == "failed" and failed)):
            target = self._kept_folder / name.replace("/", "_")
            try:
                await processes.call(_move, workspace.folder, target)
                log.info("kept the workspace of %s in %s", name, target)
            except OSError as error:
                log.warning("the workspace of %s is not kept: %s", name, error)
        for folder in (workspace.folder, *workspace._copies):
            await processes.call(cleaner.remove, folder)
        await self._templates.release(workspace.template)

    async def close(self) -> None:
        await self._launcher.close()
        await processes.call(cleaner.remove, self.folder)
        for fd in self._open:
            os.close(fd)
        if self._cleaner is not None:
            await processes.call(self._cleaner.wait)

    async def run(
        self, workspace: Workspace, argv: Sequence[str], *, timeout: float, env: Mapping[str, str]
    ) -> Finished:
        stdout = OutputPipe(MAX_OUTPUT_BYTES, tail=True)
        stderr = OutputPipe(MAX_OUTPUT_BYTES, tail=True)
        spec = ProcessSpec(
            argv=self.sandbox.command(workspace.folder, workspace.path, argv),
            env=passed_environment(()) | dict(workspace.place.env) | dict(env),
            folder=str(workspace.path),
        )
        name, variables = f"agentrl-{os.urandom(8).hex()}", {**workspace.place.env, **env}
        if isinstance(self._runner, ContainerRunnerConfig):
            from agentrl.runners.executors.container_engine import (
                enclosure,  # the client of containers
            )

            inside = enclosure(self._runner, name, str(workspace.folder), variables)
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
            raise ConfigError(f"[workspace]: {self._everybody} belongs to another user")
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
    await processes.call(cleaner.remove, folder)


def _move(folder: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    cleaner.remove(target)
    shutil.move(folder, target)


def _answers(config: RunConfig, root: Path) -> list[Path]:
    """Return paths that may contain answers: the run's output with its store, tasks, verifiers and
    `workspace.hide`."""
    named = [config.tasks.train, config.tasks.heldout, config.verifier.path]
    named += [*config.verifier.rewards.values(), *config.workspace.hide]
    files = [root / name.partition(":")[0] for name in named if name]
    return [*files, Path(config.output)] if config.output else files


class Sandbox:
    """`root`: the run file's folder, readable for programs except the `hidden` paths. `gateway`:
    the only address that they can connect to."""

    def __init__(
        self, config: WorkspaceConfig, root: Path, gateway: str, hidden: Iterable[Path]
    ) -> None:
        self.kind, self._root = config.sandbox, str(root)
        self.owner = _nobody() if self.kind == "user" else None
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
    """Return the folders of this Python that are inside scratch folders and would be hidden."""
    prefixes = {sys.prefix, sys.base_prefix}
    return [path for path in prefixes if any(Path(path).is_relative_to(s) for s in confine.SCRATCH)]


def _nobody() -> tuple[int, int]:
    try:
        entry = pwd.getpwnam(USER)
    except KeyError:
        raise ConfigError(f"workspace.sandbox = 'user': there is no user {USER!r} here") from None
    if os.getuid():
        raise ConfigError("workspace.sandbox = 'user' needs a runner of root; use 'unshare'")
    return entry.pw_uid, entry.pw_gid


MAX_DIFFED_FILE_BYTES = 2**20  # bytes of a file for which `diff` shows lines
MAX_PACK_BYTES = 4 * 2**20  # bytes of changed files that are stored until scoring
NOT_COMPARED = {".git", "__pycache__", ".pytest_cache"}


def changes(old: Path, new: Path) -> list[str]:
    """List the names of files that were added, changed or deleted."""
    before, after = files_of(old), files_of(new)
    same = {name for name in before.keys() & after.keys() if _same(before[name], after[name])}
    return sorted((before.keys() | after.keys()) - same)


def diff(old: Path, new: Path) -> str:
    """Return the changes as a unified diff; binary and large files only by name."""
    parts, both_trees = [], (files_of(old), files_of(new))  # excludes names that pass through links
    for name in changes(old, new):
        before, after = (_lines(files.get(name)) for files in both_trees)
        if before is None or after is None:
            parts.append(f"Binary or large files a/{name} and b/{name} differ\n")
            continue
        lines = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
        parts += [line if line.endswith("\n") else f"{line}\n" for line in lines]
    return "".join(parts)


def carry_over(old: Path, new: Path, copy: Path) -> None:
    """Apply the changes from `old` to `new` to `copy`, a copy of `old`."""
    changed, after = changes(old, new), files_of(new)
    _delete(copy, changed)
    for name in changed:
        if name in after:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(after[name], copy / name, follow_symlinks=False)


def pack(old: Path, new: Path) -> bytes:
    """Pack the changes in an archive: the names of changed files, then those that still exist.
    Raises WorkspaceError if they cannot be read or are too large."""
    try:
        changed, after = changes(old, new), files_of(new)
        existing = {name: after[name] for name in changed if name in after}
        if (size := sum(file.lstat().st_size for file in existing.values())) > MAX_PACK_BYTES:
            raise WorkspaceError(f"its changed files have {size} bytes, over {MAX_PACK_BYTES}")
        buffer, names = io.BytesIO(), "\0".join(changed).encode(errors="surrogateescape")
        with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
            head = tarfile.TarInfo("changed")
            head.size = len(names)
            archive.addfile(head, io.BytesIO(names))
            for name, file in existing.items():
                archive.add(file, name, recursive=False)
        return buffer.getvalue()
    except OSError as error:
        raise no_space_or(error, "read") from None


def unpack(copy: Path, packed: bytes) -> None:
    """Apply the changes of `pack` to a copy of the original folder."""
    try:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            head, *files = archive.getmembers()
            names = archive.extractfile(head)
            assert names is not None
            _delete(copy, names.read().decode(errors="surrogateescape").split("\0"))
            if hasattr(tarfile, "tar_filter"):
                archive.extractall(copy, files, filter="tar")
            else:  # Python before 3.11.4; names of `files_of` do not leave the folder
                archive.extractall(copy, files)
    except OSError as error:
        raise no_space_or(error, "copy") from None


def _delete(copy: Path, changed: list[str]) -> None:
    """Delete changed files, existing ones first, so that no name passes through a link of the
    agent."""
    existing = files_of(copy)
    for name in changed:
        if name in existing:
            existing[name].unlink()
    for name in changed:
        if (folder := copy / name).is_dir():  # a file has taken its place
            cleaner.remove(folder)


def files_of(folder: Path) -> dict[str, Path]:
    """Map names to paths of the files and links below a folder."""
    files = {}
    for parent, folders, names in os.walk(folder):
        links = [name for name in folders if Path(parent, name).is_symlink()]
        folders[:] = [name for name in folders if name not in NOT_COMPARED]
        for name in (*names, *links):
            path = Path(parent, name)
            if path.is_symlink() or path.is_file():  # no pipes, which would block a reader
                files[str(path.relative_to(folder))] = path
    return files


def _same(a: Path, b: Path) -> bool:
    if a.is_symlink() or b.is_symlink():
        return a.is_symlink() and b.is_symlink() and a.readlink() == b.readlink()
    if a.stat().st_mode != b.stat().st_mode:
        return False
    return filecmp.cmp(a, b, shallow=False)


def _lines(file: Path | None) -> list[str] | None:
    """Return the lines of a file, none if it does not exist; None if it is large or not text."""
    if file is None:
        return []
    if file.is_symlink():
        return [f"-> {file.readlink()}\n"]
    if file.stat().st_size > MAX_DIFFED_FILE_BYTES:
        return None
    try:
        return file.read_text(encoding="utf-8").splitlines(keepends=True)
    except UnicodeDecodeError:
        return None
