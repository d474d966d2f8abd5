"""Find the stores of runs: below `runs/` and the working directory, and a shared one.

No database is opened here, so that a damaged or locked store is found like any other.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from urllib.parse import urlsplit

from agentrl.config import store_of
from agentrl.errors import AgentRLError, NotFound, StoreError
from agentrl.store import open_store

VARIABLE = "AGENTRL_STORE_URL"  # of a shared store, which everybody of a team may name
DEEPEST, MOST_FOLDERS = 4, 4000  # folders below the first, and in all, that are searched
PASSED_OVER = {"node_modules", "site-packages", "checkpoints", "venv", "workspaces"}
OPENING_PATIENCE = 2.0  # seconds until a store counts as locked


@dataclass(frozen=True, slots=True)
class Place:
    """A store. key: its part of an address, without `/`; label: as a person would call it."""

    key: str
    url: str
    label: str

    def stamp(self) -> object:
        """What changes whenever the file is written; None for a store that is no file."""
        if not self.url.startswith("sqlite:///"):
            return None
        path = Path(self.url.removeprefix("sqlite:///").partition("?")[0])
        return tuple(map(_stamp_of, (path, path.with_name(f"{path.name}-wal"))))


def _stamp_of(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def places(given: Sequence[str] = ()) -> list[Place]:
    """The stores at the given URLs, files and folders; by default the one that VARIABLE names and
    all below the working directory. Raises NotFound for a path that does not exist."""
    shared = [url] if not given and (url := os.environ.get(VARIABLE)) else []
    found: dict[str, str] = {}  # URL -> label
    for one in (*shared, *(given or ["."])):
        if "://" in one:
            parts = urlsplit(one)
            found[one] = f"{parts.hostname or ''}{parts.path}".strip("/") or one
        elif Path(one).is_dir():
            found |= {_url(file): _label(file) for file in _files(Path(one))}
        elif Path(one).exists():
            found[_url(Path(one))] = _label(Path(one))
        else:
            raise NotFound(f"{one}: there is no such store, file or folder.")
    keys: dict[str, str] = {}
    for url, label in found.items():
        key = re.sub(r"[^\w.-]+", "~", label.removeprefix("runs/")) or "here"
        while key in keys:
            key += "~"
        keys[key] = url
    return [Place(key, url, found[url]) for key, url in keys.items()]


def _url(file: Path) -> str:
    return f"sqlite:///{file.resolve()}"


def _label(file: Path) -> str:
    """The folder of a store, relative to the working directory."""
    whole = file.resolve()
    named = whole.parent if whole.name == "store.db" else whole
    here = named.is_relative_to(Path.cwd())
    return str(named.relative_to(Path.cwd()) if here else named).removesuffix(".db")


def _is_another(file: Path) -> bool:
    """Whether a file that was not named by anybody is a database of another program."""
    from agentrl.store.sqlite.migrations import APPLICATION_ID

    try:
        with file.open("rb") as opened:
            head = opened.read(72)
    except OSError:
        return False  # said where it is opened
    mine = head.startswith(b"SQLite format 3\0") and head[68:] == APPLICATION_ID.to_bytes(4)
    return not (mine or not head or file.name == "store.db")


def _files(folder: Path) -> Iterator[Path]:
    """The stores of a folder and those below, in breadth and by name."""
    folders, left = [folder], MOST_FOLDERS
    for _ in range(DEEPEST + 1):
        below: list[Path] = []
        for one in folders[:left]:
            try:
                entries = sorted(os.scandir(one), key=lambda entry: entry.name)
            except OSError:
                continue
            files = (Path(x.path) for x in entries if x.name.endswith(".db") and x.is_file())
            mine = "runs" in one.absolute().parts  # elsewhere others have databases too
            yield from (file for file in files if mine or not _is_another(file))
            below += [
                Path(x.path)
                for x in entries
                if x.is_dir(follow_symlinks=False)
                and not x.name.startswith(".")
                and x.name not in PASSED_OVER
            ]
        left -= len(folders)
        folders = below
        if left <= 0:
            return


def store_with(name: str) -> str:
    """URL of the store that has a run or rollout: its default store, else one that is found. Raises
    as `find`."""
    own = store_of(name)
    return own if Path(own.removeprefix("sqlite:///")).exists() else find(name)


def find(name: str) -> str:
    """URL of the store with a run, by the run's name or the id of one of its rollouts.

    Raises NotFound if no store has it, and StoreError if several have."""
    run = name.partition("/")[0]
    found, every = asyncio.run(_search(run))
    if len(found) > 1:
        listed = ", ".join(sorted(found))
        raise StoreError(f"{len(found)} stores have a run {run!r}: add --store, of {listed}")
    if found:
        return found[0]
    near = get_close_matches(run, every, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; set {VARIABLE} or add --store for others"
    known = f"there are {', '.join(sorted(every)[:20])}" if every else "there is none"
    own = store_of(run).removeprefix("sqlite:///")
    lost = f"there is no {own}, and no other store below {Path.cwd()} has a run {run!r}"
    raise NotFound(f"{lost}: {known}{hint}")


async def _search(run: str) -> tuple[list[str], set[str]]:
    """The URLs of stores with a run, and the names of all runs."""
    found, every = list[str](), set[str]()
    for place in places():
        try:
            async with asyncio.timeout(OPENING_PATIENCE), open_store(place.url, readonly=True) as x:
                runs = await x.runs()
        except (AgentRLError, TimeoutError):
            continue  # `agentrl view` lists it, with what is wrong with it
        every |= {*runs}
        found += [place.url] * (run in runs)
    return found, every
