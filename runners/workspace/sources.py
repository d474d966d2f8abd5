"""Sources of workspaces: the protocols of a source and of a workspace, and templates.

Each source becomes a template once per runner: a git repository with a single commit, which hides
all commits after the revision.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import msgspec

from agentrl.core import processes
from agentrl.core.errors import AgentRLError
from agentrl.core.types import Json, Task
from agentrl.runners.gateway.attribution import AgentPlace
from agentrl.runners.workspace import cleaner


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


MAX_TEMPLATES = 64  # cached templates; those in use are never evicted
GIT_TIMEOUT = 300.0  # seconds
# Excludes the user's own git settings, hooks and filters.
GIT = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
# Missing objects are not fetched either: settings of a repository can name programs for it.
GIT |= {"GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1"}
WHO = {"NAME": "agentrl", "EMAIL": "agentrl@localhost", "DATE": "2000-01-01T00:00:00Z"}
GIT |= {f"GIT_{role}_{k}": v for role in ("AUTHOR", "COMMITTER") for k, v in WHO.items()}


@dataclass(slots=True)
class Template:
    folder: Path
    users: int = 0  # workspaces that use it


class Templates:
    """Owns the folder of the templates; evicts the least recently used."""

    def __init__(self, folder: Path, root: Path, owner: tuple[int, int] | None) -> None:
        """`root`: base of relative paths. `owner`: uid and gid of the files."""
        self._folder, self._root, self._owner = folder, root, owner
        self._building: OrderedDict[bytes, asyncio.Task[Template]] = OrderedDict()

    async def take(self, source: Json) -> Template:
        """Return the template of "git:PATH@REV", a folder, or a mapping of names to texts, until
        `release`. Raises WorkspaceError."""
        key = msgspec.json.encode(source, order="deterministic")
        earlier = self._building.get(key)
        if earlier is None or (
            earlier.done() and earlier.exception()
        ):  # the source may exist by now
            folder = self._folder / f"{len(self._building)}-{os.urandom(6).hex()}"
            work = partial(_build, source, folder, self._root, self._owner)
            self._building[key] = asyncio.create_task(_template(work, folder))
        building = self._building[key]
        self._building.move_to_end(key)
        template = await asyncio.shield(building)
        template.users += 1
        return template

    async def release(self, template: Template) -> None:
        template.users -= 1
        for key, task in list(self._building.items())[
            : max(0, len(self._building) - MAX_TEMPLATES)
        ]:
            if self._building.get(key) is not task or not task.done():  # a concurrent release
                continue
            if task.exception():
                del self._building[key]
            elif not (unused := task.result()).users:
                del self._building[key]
                await processes.call(partial(cleaner.remove, unused.folder))


async def _template(work: partial[None], folder: Path) -> Template:
    try:
        await processes.call(work)
    except BaseException:
        cleaner.remove(folder)
        raise
    return Template(folder)


def _build(source: Json, folder: Path, root: Path, owner: tuple[int, int] | None) -> None:
    try:
        folder.mkdir()
        if isinstance(source, Mapping):
            write_files(folder, source)
        elif not isinstance(source, str) or not source:
            raise WorkspaceError(
                f"the source of a workspace must be 'git:PATH@REV', a folder or a mapping of names"
                f" to texts, not {source!r:.80}"
            )
        elif source.startswith("git:"):
            _check_out(source, folder, root)
        elif not (root / source).is_dir():
            raise WorkspaceError(f"there is no folder {root / source} for the workspace")
        else:
            ignore = shutil.ignore_patterns(".git")
            shutil.copytree(root / source, folder, symlinks=True, ignore=ignore, dirs_exist_ok=True)
        _git(["init", "--quiet", "--template=", "--initial-branch=main"], folder)
        _git(["add", "--all", "--force"], folder)
        _git(["commit", "--quiet", "--allow-empty", "--no-verify", "--message=start"], folder)
        change_owner(folder, owner)
    except OSError as error:
        raise no_space_or(error, "make") from None
    except ValueError as error:  # an invalid file name or text
        raise WorkspaceError(f"cannot make a workspace: {error}") from None


def _check_out(source: str, folder: Path, root: Path) -> None:
    name, at, revision = source.removeprefix("git:").rpartition("@")
    path = root / (name if at else revision)
    if not path.is_dir():
        raise WorkspaceError(f"{source}: there is no repository {path}")
    # A new repository reads the objects, because the settings of the given one may name programs.
    git_folder = folder.with_suffix(".git")
    try:
        tree = _git(["rev-parse", "--verify", f"{revision if at else 'HEAD'}^{{tree}}"], path)
        kind = _git(["rev-parse", "--show-object-format"], path)
        objects = _git(["rev-parse", "--path-format=absolute", "--git-path", "objects"], path)
        git_folder.mkdir()
        _git(["init", "--quiet", "--bare", "--template=", f"--object-format={kind}"], git_folder)
        env = {"GIT_DIR": str(git_folder), "GIT_OBJECT_DIRECTORY": objects}
        _git(["read-tree", tree], git_folder, env)
        _git(
            ["checkout-index", "--all", f"--prefix={folder}/"],
            git_folder,
            env | {"GIT_WORK_TREE": "."},
        )
    except WorkspaceError as error:
        raise WorkspaceError(f"{source} cannot be checked out: {error}") from None
    finally:
        cleaner.remove(git_folder)


def copy_files(source: Path, target: Path) -> None:
    """Copy a folder with modes and times. Takes a third of the time of `cp -a` or `shutil.copytree`
    for small repositories."""
    target.mkdir(mode=0o700)
    with os.scandir(source) as entries:
        for entry in entries:
            to = target / entry.name
            if entry.is_dir(follow_symlinks=False):
                copy_files(Path(entry.path), to)
            elif entry.is_symlink():
                to.symlink_to(os.readlink(entry.path))  # noqa: PTH115
            else:
                shutil.copyfile(entry.path, to)
                _like(entry.stat(), to)
    _like(source.stat(), target)


def _like(status: os.stat_result, to: Path) -> None:
    to.chmod(status.st_mode)
    os.utime(to, ns=(status.st_atime_ns, status.st_mtime_ns))


def write_files(folder: Path, files: Mapping[str, Json]) -> None:
    """Write files to a folder. Raises WorkspaceError for a name that leads out of it."""
    for name, text in files.items():
        parts = PurePosixPath(name).parts
        if not parts or parts[0] == "/" or {"..", ".git"}.intersection(parts):
            raise WorkspaceError(f"{name!r} is not a valid file name in a workspace")
        if not isinstance(text, str):
            raise WorkspaceError(f"the content of {name!r} must be a text, not {text!r:.80}")
        file = folder
        for part in parts[:-1]:
            file /= part
            if file.is_symlink() or file.is_file():  # left there by an agent
                file.unlink()
            file.mkdir(exist_ok=True)
        file /= parts[-1]
        if file.is_symlink():
            file.unlink()
        elif file.is_dir():
            cleaner.remove(file)
        file.write_text(text, encoding="utf-8")


def change_owner(folder: Path, owner: tuple[int, int] | None) -> None:
    """Set uid and gid of a folder's files, unless `owner` is None."""
    if owner is not None:
        for parent, folders, names in os.walk(folder):
            for name in (".", *folders, *names):
                os.chown(Path(parent, name), *owner, follow_symlinks=False)


def no_space_or(error: OSError, verb: str) -> WorkspaceError:
    where = f" ({error.filename})" if error.filename else ""
    return WorkspaceError(f"cannot {verb} a workspace: {error.strerror or error}{where}")


def _git(arguments: list[str], folder: Path, env: Mapping[str, str] | None = None) -> str:
    """Run git and return what it prints. Raises WorkspaceError with the last line of its errors."""
    safe = ["-c", "safe.directory=*", "-c", "gc.auto=0", "-c", "core.hooksPath=/dev/null"]
    # `add` writes a single pack file: fewer files are faster to copy.
    safe += ["-c", "core.fsmonitor=false"]
    safe += ["-c", "core.bigFileThreshold=1", "-c", "core.fsync=none"]
    try:
        completed = subprocess.run(
            ["git", *safe, "-C", str(folder), *arguments],
            env={"PATH": os.environ.get("PATH", ""), **GIT, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIT_TIMEOUT,
            check=False,
        )
    except FileNotFoundError:
        raise WorkspaceError("git is not installed on this machine") from None
    except subprocess.TimeoutExpired:
        raise WorkspaceError(f"git {arguments[0]} ran longer than {GIT_TIMEOUT:g} s") from None
    if completed.returncode:
        last = completed.stderr.strip().rpartition("\n")[2] or f"exit status {completed.returncode}"
        raise WorkspaceError(f"git {arguments[0]}: {last}")
    return completed.stdout.removesuffix("\n")
