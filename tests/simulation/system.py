"""The simulated operating system: what the real code gets from the standard library.

Clocks, random ids, threads, files' descriptors, Unix sockets and connections of SQLite, each with
its owner, so that a kill frees exactly what the kernel would. `installed` puts it in the place of
the real one, in the modules that use it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sqlite3
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from agentrl.algorithms.model import digests
from agentrl.core import processes
from agentrl.store import run_folder, sqlite
from agentrl.store.sql import writer
from tests.simulation import loop as sim
from tests.simulation.loop import LANE, Process, SimulatedLoop, Thread

LOCK_PAUSE = 0.02  # seconds between two tries for the lock of SQLite, to have fewer events
CHECKPOINT_ROWS = 100  # rows between two checkpoints of SQLite's log, as a run has few
EPOCH = 1_900_000_000.0  # unix seconds at the start


class System:
    """Owns the processes and what the kernel keeps for them."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self.loop, self.jumped, self.over = loop, 0.0, False
        self.lost_time = 0.0  # seconds of suspensions and of jumps of the clock
        self.processes: dict[str, Process] = {}
        self.by_pid: dict[int, Process] = {}
        self.kernel = loop.kernel = Process(loop, "kernel", 1)
        self.descriptors: dict[int, Process] = {}
        self.sockets: dict[str, DatagramSocket] = {}
        self.graveyard: list[Any] = []
        self.idle: list[SimulatedConnection] = []
        self.at_commit: Callable[[Process, str], None] = lambda process, when: None
        self.deaf = False  # whether there are no Unix sockets
        self.retries = False  # whether an aborted transaction is run again
        self.statement: Callable[[Process], None] = lambda process: None
        self.sync: Callable[[int], None] = lambda descriptor: None
        self.is_lost: Callable[[str], bool] = lambda what: False

    def new_process(self, name: str) -> Process:
        pid = 1000 + len(self.by_pid)
        process = self.processes[name] = self.by_pid[pid] = Process(self.loop, name, pid)
        return process

    def here(self) -> Process:
        lane = LANE.get(None)
        return self.kernel if lane is None else lane.process

    def kill(self, process: Process) -> None:
        if process.alive:
            self.graveyard.append((process, [*process.tasks], [*process.threads]))
            self.loop.kill(process)
            for descriptor in [d for d, owner in self.descriptors.items() if owner is process]:
                del self.descriptors[descriptor]
                with contextlib.suppress(OSError):
                    REAL_CLOSE(descriptor)

    # -- clocks and ids ----------------------------------------------------------------------------

    def time(self) -> float:
        return EPOCH + self.loop.now + self.jumped

    def uuid4(self) -> uuid.UUID:
        return uuid.UUID(int=self.loop.random.getrandbits(128), version=4)

    def token_hex(self, n: int = 32) -> str:
        return self.loop.random.randbytes(n).hex()

    def getpid(self) -> int:
        return self.here().pid

    def born(self, pid: int) -> int | None:
        if not self.by_pid[pid].alive:
            raise ProcessLookupError(pid)
        return pid

    def aborted(self) -> Exception:
        """The error that a statement or commit of an aborted transaction raises."""
        error = self.sqlite_error("SQLITE_IOERR", "disk I/O error")
        return Aborted(*error.args) if self.retries else error

    def can_retry(self, error: Exception) -> bool:
        return isinstance(error, Aborted)

    def sqlite_error(self, name: str, message: str) -> Exception:
        error = sqlite3.OperationalError(message)
        error.sqlite_errorname, error.sqlite_errorcode = name, getattr(sqlite3, name)
        return error

    # -- files -------------------------------------------------------------------------------------

    def open(self, *args: Any, **more: Any) -> int:
        descriptor = REAL_OPEN(*args, **more)
        self.descriptors[descriptor] = self.here()
        return descriptor

    def close(self, descriptor: int) -> None:
        if descriptor in self.descriptors:
            del self.descriptors[descriptor]
            REAL_CLOSE(descriptor)

    def connection(self, *args: Any, **more: Any) -> SimulatedConnection:
        """A connection that a process has left, if there is one: a new one has to read the
        schema."""
        if self.idle:
            conn = self.idle.pop()
            conn.execute("pragma query_only = off")
            conn.execute("pragma busy_timeout = 60000")
        else:
            conn = SimulatedConnection(*args, **more)
        conn.system, conn.process, conn.uses = self, self.here(), conn.uses + 1
        conn.process.owned.append(partial(conn.leave, conn.uses))
        return conn

    def close_idle(self) -> None:
        """Close the database, which nobody uses."""
        while self.idle:
            self.idle.pop().close()


REAL_OPEN, REAL_CLOSE, REAL_LISTDIR = os.open, os.close, os.listdir


class SimulatedConnection(sqlite.SqliteConnection):
    """Lets faults happen, and other processes run, at statements and commits."""

    system: System | None = None  # while a process has it
    process: Process
    uses = 0

    def close(self) -> None:
        if self.system is None:
            super().close()
        else:
            self.leave(self.uses)

    def leave(self, use: int) -> None:
        """Roll back what a process has not committed, and keep the connection for another."""
        if self.system is not None and use == self.uses:
            system, self.system = self.system, None
            self.rollback()
            system.idle.append(self)

    def execute(self, sql: str, parameters: Any = (), /) -> Any:
        system = self.system
        if system is None:
            return super().execute(sql, parameters)
        if sql == "commit":
            system.at_commit(self.process, "before")
            cursor = super().execute(sql)
            system.at_commit(self.process, "after")
            return cursor
        if self.in_transaction and not sql.startswith("rollback"):  # which no database refuses
            system.statement(self.process)
        return super().execute(sql, parameters)


class Aborted(sqlite3.OperationalError):
    """Like PostgreSQL's error for a deadlock or a serialization failure: nothing of the transaction
    is stored, and it may be run again."""

    sqlite_errorname, sqlite_errorcode = "SQLITE_BUSY", sqlite3.SQLITE_BUSY


class DatagramSocket:
    """A Unix datagram socket, whose address is a file, too."""

    def __init__(self, system: System) -> None:
        self._system, self._path = system, ""
        self._received: list[bytes] = []
        self._timeout: float | None = None
        self._waiting: Thread | None = None
        self.process = system.here()

    def setblocking(self, blocking: bool) -> None:
        self._timeout = None if blocking else 0.0

    def settimeout(self, timeout: float) -> None:
        self._timeout = timeout

    def bind(self, path: str) -> None:
        Path(path).touch()
        self._path = path
        self._system.sockets[path] = self

    def recv(self, size: int) -> bytes:
        if not self._received:
            if self._timeout == 0.0:
                raise BlockingIOError
            self._waiting = sim.current_thread()
            self._waiting.block(self._timeout)
            self._waiting = None
            if not self._received:
                raise TimeoutError
        return self._received.pop(0)

    def sendto(self, message: bytes, path: str) -> None:
        receiver = self._system.sockets.get(path)
        if receiver is None:
            raise FileNotFoundError(path)
        if not receiver.process.alive:
            raise ConnectionRefusedError(path)
        if self._system.is_lost("notification"):
            return
        receiver._received.append(message)
        if receiver._waiting is not None:
            receiver._waiting.wake()

    def close(self) -> None:
        self._system.sockets.pop(self._path, None)


class InlinePool:
    """In place of a pool of threads that only computes."""

    def __init__(self, *args: Any) -> None: ...

    def __enter__(self) -> InlinePool:
        return self

    def __exit__(self, *error: object) -> None: ...

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        return map(function, items)


@contextmanager
def harmless() -> Iterator[None]:
    """Context in which closing has no effect, because it happens for killed processes."""
    quiet = sys.unraisablehook
    sys.unraisablehook = lambda *arguments: None
    nothing = lambda *arguments, **more: None  # noqa: E731
    try:
        with patch.object(os, "close", nothing), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    finally:
        sys.unraisablehook = quiet


@contextmanager
def installed(system: System) -> Iterator[None]:
    """Context in which the library's code runs on this system."""
    real_socket = socket.socket

    def make_socket(family: int = -1, kind: int = -1, *more: Any, **named: Any) -> Any:
        if family == socket.AF_UNIX and kind == socket.SOCK_DGRAM:
            if system.deaf:
                raise OSError("no Unix sockets")
            return DatagramSocket(system)
        return real_socket(family, kind, *more, **named)

    sockets = SimpleNamespace(
        socket=make_socket, AF_UNIX=socket.AF_UNIX, SOCK_DGRAM=socket.SOCK_DGRAM
    )
    import threading

    threads = SimpleNamespace(
        Thread=Thread, Event=sim.Event, Lock=threading.Lock, local=threading.local
    )

    def start(function: Callable[[], Any]) -> Any:
        from concurrent.futures import Future

        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - as a pool does
                future.set_exception(error)

        Thread(target=work).start()
        return future

    def can_continue(session: Any, error: Exception) -> bool:
        return bool(session.conn.in_transaction) and not system.can_retry(error)

    with contextlib.ExitStack() as stack:
        for place, name, value in (
            (time, "time", system.time),
            (time, "monotonic", system.loop.time),
            (time, "sleep", sim.sleep),
            (uuid, "uuid4", system.uuid4),
            (secrets, "token_hex", system.token_hex),
            (secrets, "token_urlsafe", system.token_hex),
            (os, "getpid", system.getpid),
            (os, "open", system.open),
            (os, "close", system.close),
            (os, "fsync", system.sync),
            (os, "listdir", lambda path=".": sorted(REAL_LISTDIR(path))),  # on every file system
            (sqlite, "LOCK_PAUSE", LOCK_PAUSE),
            (sqlite, "CHECKPOINT_ROWS", CHECKPOINT_ROWS),
            (run_folder, "_born", system.born),
            (sqlite, "threading", threads),
            (sqlite, "socket", sockets),
            (sqlite, "SqliteConnection", system.connection),
            (sqlite.SqliteSession, "can_retry", lambda self, error, since: system.can_retry(error)),
            (sqlite.SqliteSession, "can_continue", can_continue),
            (writer, "threading", threads),
            (writer, "SimpleQueue", sim.Queue),
            (digests, "ThreadPoolExecutor", InlinePool),
            (processes, "_start", start),
        ):
            stack.enter_context(patch.object(place, name, value))
        yield
