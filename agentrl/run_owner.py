"""The owner of a run: the process that started it, for its whole life. A second start is refused.

The owner holds a lease in the store. On its own machine the kernel knows whether it lives, so a run
whose owner was killed resumes at once. On another machine it is gone once nothing extends its
lease. Processes of the owner open the run in its name.
"""

from __future__ import annotations

import asyncio
import os
import platform
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from agentrl.config import RunConfig
from agentrl.errors import AgentRLError, ConfigError, Conflict, StoreError
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.types import Json, Record, RunState

VARIABLE = "AGENTRL_OWNER"  # environment variable of the owner's processes
LEASE, BEAT_PAUSE, LOOK_PAUSE = 60.0, 10.0, 1.0  # seconds
HELD = set[str]()  # ids of the owners in this process


class Owner(Record, frozen=True):
    id: str
    host: str
    pid: int
    born: int | None  # its start in the kernel's clock, as process ids are reused; None: unknown
    machine: str  # a boot of a kernel, and a container in it: its process ids can be compared
    since: float  # unix seconds

    def lives(self) -> bool | None:
        """Whether it still holds the run; None: it is on another machine."""
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
    cure: str = "wait for it, or stop it first",
    tell: Callable[[str], object] = print,
) -> AsyncIterator[Holding]:
    """Open a run as its owner until the block ends. Raises ConfigError while another owner lives,
    unless `take_over`, and TakenOver in place of the block's error if that was the reason.

    Of an owner on another machine it waits for a sign of life, no longer than its lease."""
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
        state = await _open(store, run, open_run, take_over=take_over, cure=cure, tell=tell)
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
            with suppress(StoreError):  # then its lease ends, or the next start sees its end
                await store.hold_run(run, owner, lease=0.0)
    finally:
        HELD.discard(me.id)


async def check_free(config: RunConfig, *, take_over: bool = False, cure: str = "") -> None:
    """Raises ConfigError while the run has an owner that lives, unless `take_over`: then that owner
    loses it, and stops. A missing store, or one that cannot be opened, has no owner."""
    named = "" if Path(config.output).name == config.name else " output=FOLDER"
    cure = cure or (
        "stop it first; give --take-over, in Python `fit(take_over=True)`, to stop it and go on "
        f"here; or start another run with name=NAME{named}"
    )
    with suppress(StoreError):
        async with open_store(config.store, create=False) as store:
            state = await store.run(config.name)
            if state is not None and state.owned_until:
                held = hold(store, config.name, state.config, take_over=take_over, cure=cure)
                async with held:
                    pass


async def open_as_child(store: Store, config: RunConfig) -> RunState:
    """Open a run in the name of the owner that started this process, if one did."""
    owner = os.environ.pop(VARIABLE, "")
    settings = msgspec.to_builtins(config)
    return await store.open_run(config.name, settings, owner=owner, lease=LEASE if owner else 0.0)


async def _open(
    store: Store,
    run: str,
    open_run: Callable[..., Awaitable[RunState]],
    *,
    take_over: bool,
    cure: str,
    tell: Callable[[str], object],
) -> RunState:
    first: RunState | None = None
    while True:
        state = await store.run(run)
        owner = _owner(state)
        lives = owner.lives() if owner and state and state.owned_until else False
        heard = first is not None and _lease(first) != _lease(state)
        if not take_over and (lives or (lives is None and heard)):
            raise ConfigError(f"run {run!r} is live ({owner}): {cure}")
        gone = state.owner if state and (take_over or lives is False) else ""
        try:
            return await open_run(gone=gone)
        except Conflict:  # it was heard of lately, or another process was faster than this one
            if first is None:
                tell(f"Run {run!r} may be live ({owner}); waiting for a sign of it ...")
            first = first or state
            await asyncio.sleep(LOOK_PAUSE)


async def _keep(store: Store, run: str, owner: str) -> None:
    while True:
        await asyncio.sleep(BEAT_PAUSE)
        with suppress(StoreError):  # the run's processes wait for the store, too
            await _extend(store, run, owner)


async def _extend(store: Store, run: str, owner: str) -> None:
    if not await store.hold_run(run, owner, lease=LEASE):
        other = _owner(await store.run(run)) or "another process"
        raise TakenOver(f"run {run!r} was taken over ({other}): it goes on there and ends here")


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
