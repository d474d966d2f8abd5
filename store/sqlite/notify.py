"""Change notifications between processes that share a store file.

Owns: one Unix datagram socket per open store, in a folder of the temporary directory named after
the file's device and inode, and one thread that listens to it. Invariant: the folder, whose name is
predictable, is only used if it belongs to this user and is closed to others; a notification is one
byte of topics and only a hint to query the store. A lost one costs at most `POLL_PAUSE` seconds,
because the thread also polls the file's change counter (`pragma data_version`) and whether the file
still exists. Without sockets or a shared temporary directory, it only polls.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sqlite3
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from agentrl.store.sql.feed import ALL
from agentrl.store.sqlite.connection import Location, StoreFile

POLL_PAUSE = 1.0  # seconds
CLOSE = b"\0"


class ChangeNotifier:
    """Notifies other processes, and passes their notifications to `notify`."""

    def __init__(self, location: Location, file: StoreFile, notify: Callable[[int], None]) -> None:
        self._location, self._file = location, file
        self._notify = notify
        self._folder = folder(location.path)
        self._name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._socket = self._bind()
        self._sender = None if self._socket is None else _datagrams()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="store-notifier", daemon=True)
        self._thread.start()

    def notify_others(self, topics: int) -> None:
        """Notify other processes after a commit. Never blocks, never raises."""
        if self._sender is None:
            return
        message = bytes((topics,))
        try:
            names = os.listdir(self._folder)  # noqa: PTH208 - on the path of every commit
        except OSError:
            return
        for name in names:
            if name != self._name:
                self._send(message, f"{self._folder}/{name}")

    def close(self) -> None:
        self._closed.set()
        self._send(CLOSE, f"{self._folder}/{self._name}")
        self._thread.join()
        if self._socket is not None and self._sender is not None:
            self._socket.close()
            self._sender.close()
            with contextlib.suppress(OSError):
                (self._folder / self._name).unlink(missing_ok=True)
                self._folder.rmdir()  # succeeds for the last process

    def _bind(self) -> socket.socket | None:
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if not _private(self._folder):
                return None
            listening = _datagrams()
        except (OSError, AttributeError):  # no folder, or no Unix sockets on this system
            return None
        try:
            listening.bind(str(self._folder / self._name))
        except OSError:
            listening.close()
            return None
        return listening

    def _send(self, message: bytes, path: str) -> None:
        if self._sender is None:
            return
        try:
            self._sender.sendto(message, path)
        except ConnectionRefusedError:  # its process died without closing
            with contextlib.suppress(OSError):
                Path(path).unlink()
        except OSError:  # it is gone, or its buffer is full and it will query anyway
            return

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                self._file.check()
                with closing(self._location.connect(readonly=True)) as conn:
                    self._hear(conn)
            except Exception:  # noqa: BLE001 - waiting tasks must query, and get the error
                self._notify(ALL)
                self._closed.wait(POLL_PAUSE)

    def _hear(self, conn: sqlite3.Connection) -> None:
        seen, checked = _version(conn), time.monotonic()
        self._notify(ALL)  # for changes between a waiter's last query and this version
        while not self._closed.is_set():
            topics = self._receive()
            if time.monotonic() - checked >= POLL_PAUSE:
                self._file.check()
                version, checked = _version(conn), time.monotonic()
                if version != seen:
                    seen, topics = version, ALL
            if topics:
                self._notify(topics)

    def _receive(self) -> int:
        """Return the topics of all pending notifications; none after a silent pause."""
        if self._socket is None:
            self._closed.wait(POLL_PAUSE)
            return 0
        self._socket.settimeout(POLL_PAUSE)
        topics = 0
        try:
            topics |= self._socket.recv(1)[0]
            self._socket.settimeout(0)
            while True:
                topics |= self._socket.recv(1)[0]
        except (TimeoutError, BlockingIOError):
            return topics


def folder(path: Path) -> Path:
    """Return the folder of a store file's sockets: equal for every path to the file, and short,
    because a socket's path is limited to about a hundred bytes."""
    file = path.stat()
    return Path(tempfile.gettempdir()) / f"agentrl-bells-{file.st_dev:x}-{file.st_ino:x}"


def _private(path: Path) -> bool:
    """Whether the path is a folder, not a link, that only this user may enter."""
    found = path.lstat()
    mine = found.st_uid == os.geteuid()
    return mine and stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o700


def _datagrams() -> socket.socket:
    """Create a non-blocking socket. Receiving and sending use separate ones, as a timeout applies
    to the whole socket."""
    datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    datagrams.setblocking(False)
    return datagrams


def _version(conn: sqlite3.Connection) -> int:
    (version,) = conn.execute("pragma data_version").fetchone()
    return int(version)
