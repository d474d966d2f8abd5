"""The owner of a run, and the search for stores with runs. The owner is the process that started a
run; while it lives, a second start is rejected. It holds a lease in the store. On its own machine
the kernel knows whether it lives, so after a kill the run can be resumed immediately. An owner on
another machine is considered dead when its lease is no longer extended. Processes of the owner open
the run in its name. Stores are searched below `runs/` and the working directory, in addition to a
shared store. No database is opened for that, so a damaged or locked store is found like any other.
"""

from __future__ import annotations

import asyncio
import os
import platform
import re
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from agentrl.core.config import RunConfig, store_of
from agentrl.core.errors import AgentRLError, ConfigError, Conflict, NotFound, StoreError
from agentrl.core.types import Json, Record, RunState
from agentrl.store import open_store
from agentrl.store.base import Store

OWNER_VARIABLE = "AGENTRL_OWNER"  # environment variable of the owner's processes
LEASE, BEAT_PAUSE, CHECK_PAUSE = 60.0, 10.0, 1.0  # seconds
HELD = set[str]()  # ids of the owners in this process


class Owner(Record, frozen=True):
    id: str
    host: str
    pid: int
    born: int | None  # its start in the kernel's clock, as process ids are reused; None: unknown
    # Id of the kernel's boot and of the container, within which process ids are comparable.
    machine: str
    since: float  # unix seconds

    def lives(self) -> bool | None:
        """Whether the owner is alive; None: it is on another machine."""
        if self.machine != _machine():
            return None
        if self.pid == os.getpid():
            return self.id in HELD
        try:
            return _born(self.pid) in (None, self.born)
        except ProcessLookupError:
            return False

    def __str__(self) -> str:
        since = time.strftime("%H:%M on %d %B", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {since}"


@dataclass(frozen=True, slots=True)
class Holding:
    """A held run. `keeping` ends only if another process takes it over, with TakenOver."""

    owner: str
    state: RunState
    keeping: asyncio.Task[None]


class TakenOver(AgentRLError):
    """Another process has become the owner of a run."""


@asynccontextmanager
async def hold(
    store: Store,
    run: str,
    settings: dict[str, Json],
    *,
    take_over: bool = False,
    fix_hint: str = "wait for it, or stop it first",
    tell: Callable[[str], object] = print,
) -> AsyncIterator[Holding]:
    """Open a run as its owner until the block ends. Raises ConfigError while another owner lives,
    unless `take_over`, and TakenOver in place of the block's error if that was the reason.

    For an owner on another machine it waits for a renewal of the lease, until the lease has
    expired."""
    me = Owner(
        id=uuid.uuid4().hex,
        host=platform.node(),
        pid=os.getpid(),
        born=_born(os.getpid()),
        machine=_machine(),
        since=time.time(),
    )
    owner = msgspec.json.encode(me).decode()
    HELD.add(me.id)
    open_run = partial(store.open_run, run, settings, owner=owner, lease=LEASE)
    try:
        state = await _open(store, run, open_run, take_over=take_over, fix_hint=fix_hint, tell=tell)
        keeping = asyncio.create_task(_keep(store, run, owner))
        try:
            yield Holding(owner, state, keeping)
        except AgentRLError:
            with suppress(StoreError):
                await _extend(store, run, owner)
            raise
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            # Otherwise the lease expires, or the next start sees that the process has ended.
            with suppress(StoreError):
                await store.hold_run(run, owner, lease=0.0)
    finally:
        HELD.discard(me.id)


async def check_free(config: RunConfig, *, take_over: bool = False, fix_hint: str = "") -> None:
    """Raises ConfigError while the run has a living owner, unless `take_over`: then that owner
    loses the run and stops. A run in a missing or unreadable store has no owner."""
    named = "" if Path(config.output).name == config.name else " output=FOLDER"
    fix_hint = fix_hint or (
        "stop it first; give --take-over, in Python `fit(take_over=True)`, to stop it and continue "
        f"here; or start another run with name=NAME{named}"
    )
    with suppress(StoreError):
        async with open_store(config.store, create=False) as store:
            state = await store.run(config.name)
            if state is not None and state.owned_until:
                held = hold(
                    store, config.name, state.config, take_over=take_over, fix_hint=fix_hint
                )
                async with held:
                    pass


async def open_as_child(store: Store, config: RunConfig) -> RunState:
    """Open a run in the name of the owner that started this process, if there is one."""
    owner = os.environ.pop(OWNER_VARIABLE, "")
    settings = msgspec.to_builtins(config)
    return await store.open_run(config.name, settings, owner=owner, lease=LEASE if owner else 0.0)


async def _open(
    store: Store,
    run: str,
    open_run: Callable[..., Awaitable[RunState]],
    *,
    take_over: bool,
    fix_hint: str,
    tell: Callable[[str], object],
) -> RunState:
    first: RunState | None = None
    while True:
        state = await store.run(run)
        owner = _owner(state)
        lives = owner.lives() if owner and state and state.owned_until else False
        heard = first is not None and _lease(first) != _lease(state)
        if not take_over and (lives or (lives is None and heard)):
            raise ConfigError(f"run {run!r} is live ({owner}): {fix_hint}")
        gone = state.owner if state and (take_over or lives is False) else ""
        try:
            return await open_run(gone=gone)
        except Conflict:  # its lease was renewed lately, or another process was faster
            if first is None:
                tell(f"Run {run!r} may be live ({owner}); waiting for a sign of it ...")
            first = first or state
            await asyncio.sleep(CHECK_PAUSE)


async def _keep(store: Store, run: str, owner: str) -> None:
    while True:
        await asyncio.sleep(BEAT_PAUSE)
        with suppress(StoreError):  # the run's processes also wait for the store
            await _extend(store, run, owner)


async def _extend(store: Store, run: str, owner: str) -> None:
    if not await store.hold_run(run, owner, lease=LEASE):
        new_owner = _owner(await store.run(run)) or "another process"
        raise TakenOver(
            f"run {run!r} was taken over ({new_owner}): it continues there and ends here"
        )


def _owner(state: RunState | None) -> Owner | None:
    return msgspec.json.decode(state.owner, type=Owner) if state and state.owner else None


def _lease(state: RunState | None) -> tuple[str, float] | None:
    return (state.owner, state.owned_until) if state else None


def _machine() -> str:
    if sys.platform.startswith("linux"):
        with suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    return platform.node()


def _born(pid: int) -> int | None:
    """When a process started, in the kernel's clock; None: unknown. Raises ProcessLookupError if it
    has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:  # another kernel than Linux, or it hides other users' processes
        with suppress(PermissionError):
            os.kill(pid, 0)
        return None
    if state in (b"Z", b"X"):
        raise ProcessLookupError(pid)
    return int(fields[18])


# Variable with the URL of a shared store, for example of a team.
STORE_VARIABLE = "AGENTRL_STORE_URL"
MAX_DEPTH, MAX_FOLDERS = 4, 4000  # folders below the first, and in all, that are searched
PASSED_OVER = {"node_modules", "site-packages", "checkpoints", "venv", "workspaces"}
OPENING_PATIENCE = 2.0  # seconds until a store counts as locked


@dataclass(frozen=True, slots=True)
class Place:
    """A store. key: its part of an address, without `/`; label: as a person would call it."""

    key: str
    url: str
    label: str

    def stamp(self) -> object:
        """A value that changes with every write to the file; None for a store that is not a
        file."""
        if not self.url.startswith("sqlite:///"):
            return None
        path = Path(self.url.removeprefix("sqlite:///").partition("?")[0])
        return tuple(map(_stamp_of, (path, path.with_name(f"{path.name}-wal"))))


def _stamp_of(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def places(locations: Sequence[str] = ()) -> list[Place]:
    """The stores at the given URLs, files and folders; by default that of STORE_VARIABLE and all
    below the working directory. Raises NotFound for a path that does not exist."""
    shared = [url] if not locations and (url := os.environ.get(STORE_VARIABLE)) else []
    labels: dict[str, str] = {}  # URL -> label
    for location in (*shared, *(locations or ["."])):
        if "://" in location:
            parts = urlsplit(location)
            labels[location] = f"{parts.hostname or ''}{parts.path}".strip("/") or location
        elif Path(location).is_dir():
            labels |= {_url(file): _label(file) for file in _files(Path(location))}
        elif Path(location).exists():
            labels[_url(Path(location))] = _label(Path(location))
        else:
            raise NotFound(f"{location}: there is no such store, file or folder.")
    keys: dict[str, str] = {}
    for url, label in labels.items():
        key = re.sub(r"[^\w.-]+", "~", label.removeprefix("runs/")) or "here"
        while key in keys:
            key += "~"
        keys[key] = url
    return [Place(key, url, labels[url]) for key, url in keys.items()]


def _url(file: Path) -> str:
    return f"sqlite:///{file.resolve()}"


def _label(file: Path) -> str:
    """The folder of a store, relative to the working directory."""
    path = file.resolve()
    named = path.parent if path.name == "store.db" else path
    below_cwd = named.is_relative_to(Path.cwd())
    return str(named.relative_to(Path.cwd()) if below_cwd else named).removesuffix(".db")


def _is_another(file: Path) -> bool:
    """Whether a file that was not named by anybody is a database of another program."""
    from agentrl.store.sqlite import APPLICATION_ID

    try:
        with file.open("rb") as opened:
            head = opened.read(72)
    except OSError:
        return False  # reported when it is opened
    mine = head.startswith(b"SQLite format 3\0") and head[68:] == APPLICATION_ID.to_bytes(4)
    return not (mine or not head or file.name == "store.db")


def _files(folder: Path) -> Iterator[Path]:
    """The stores in a folder and below it, breadth first and by name."""
    folders, folders_left = [folder], MAX_FOLDERS
    for _ in range(MAX_DEPTH + 1):
        below: list[Path] = []
        for directory in folders[:folders_left]:
            try:
                entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
            except OSError:
                continue
            files = (Path(x.path) for x in entries if x.name.endswith(".db") and x.is_file())
            # In shared folders other users have databases too.
            all_are_stores = "runs" in directory.absolute().parts
            yield from (file for file in files if all_are_stores or not _is_another(file))
            below += [
                Path(x.path)
                for x in entries
                if x.is_dir(follow_symlinks=False)
                and not x.name.startswith(".")
                and x.name not in PASSED_OVER
            ]
        folders_left -= len(folders)
        folders = below
        if folders_left <= 0:
            return


def store_with(name: str) -> str:
    """URL of the store that has a run or rollout: its default store, else by a search. Raises as
    `find`."""
    default = store_of(name)
    return default if Path(default.removeprefix("sqlite:///")).exists() else find(name)


def run_and_store(name: str) -> tuple[str, str]:
    """The name of a run and the URL of its store, by its name or a folder that has only this run,
    such as its output folder. Raises NotFound and StoreError."""
    if not Path(name).is_dir() or Path(store_of(name).removeprefix("sqlite:///")).exists():
        return name, store_with(name)
    candidates = {
        (run, place.url) for place in places([name]) for run in asyncio.run(_runs(place.url))
    }
    if len(candidates) == 1:
        return candidates.pop()
    if not candidates:
        raise NotFound(f"the folder {name} has no run")
    runs = ", ".join(sorted(run for run, _ in candidates))
    raise StoreError(f"the folder {name} has {len(candidates)} runs: name one, of {runs}")


async def _runs(url: str) -> list[str]:
    async with open_store(url, readonly=True) as store:
        return await store.runs()


def find(name: str) -> str:
    """URL of the store with a run, by the run's name or the id of one of its rollouts.

    Raises NotFound if no store has it, and StoreError if several have."""
    run = name.partition("/")[0]
    stores, all_runs = asyncio.run(_search(run))
    if len(stores) > 1:
        listed = ", ".join(sorted(stores))
        raise StoreError(f"{len(stores)} stores have a run {run!r}: add --store, of {listed}")
    if stores:
        return stores[0]
    near = get_close_matches(run, all_runs, n=1)
    hint = (
        f"; did you mean {near[0]!r}?"
        if near
        else f"; set {STORE_VARIABLE} or add --store for others"
    )
    existing = f"there are {', '.join(sorted(all_runs)[:20])}" if all_runs else "there is none"
    default = store_of(run).removeprefix("sqlite:///")
    lost = f"there is no {default}, and no other store below {Path.cwd()} has a run {run!r}"
    raise NotFound(f"{lost}: {existing}{hint}")


async def _search(run: str) -> tuple[list[str], set[str]]:
    """The URLs of stores with a run, and the names of all runs."""
    stores, all_runs = list[str](), set[str]()
    for place in places():
        try:
            async with asyncio.timeout(OPENING_PATIENCE), open_store(place.url, readonly=True) as x:
                runs = await x.runs()
        except (AgentRLError, TimeoutError):
            continue  # `agentrl view` lists it with its error
        all_runs |= {*runs}
        stores += [place.url] * (run in runs)
    return stores, all_runs
