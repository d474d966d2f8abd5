"""Hands over the listening socket of a live run, which outlives its processes. The supervisor owns
it and gateways inherit it, so a restarted gateway accepts the connections that arrived meanwhile.
If the supervisor is killed, its gateway continues for a while and passes the socket to the next
supervisor, which requests it over a Unix socket in the run's folder.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from agentrl.core.config import RunConfig
from agentrl.core.errors import ConfigError

log = logging.getLogger("agentrl.live")
FILE = "gateway.sock"
VARIABLE = "AGENTRL_LISTENER"  # environment variable: the inherited file descriptor
ORPHANED, OWNED = b"O", b"L"  # whether the supervisor of the gateway that answers has ended
PATIENCE = 5.0  # seconds in which a gateway notices the end of its supervisor
BACKLOG = 4096  # connections that wait while no gateway runs
DELIVERY = 60.0  # seconds within which an orphaned gateway ends after handing over the socket


def listening(config: RunConfig) -> socket.socket:
    """The socket of a run: that of an orphaned gateway, which ends, or a new one. Raises
    ConfigError if another process serves the run or does not end, and if the port is taken."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            connection = _connect(Path(config.output, FILE))
        except OSError:  # no gateway serves
            return _listen(config.runner.host, config.runner.port)
        with connection:
            if (listener := _receive(connection)) is not None:
                return _as_configured(listener, config)
            owner = _other_end(connection)
        if time.monotonic() > deadline:
            raise ConfigError(f"{owner} serves run {config.name!r}: stop it first")
        time.sleep(0.1)


def inherited() -> socket.socket:
    """The socket that the supervisor gave to this process."""
    return socket.socket(fileno=int(os.environ.pop(VARIABLE)))


def offer(
    output: Path, held: socket.socket, orphaned: threading.Event, handed_over: Callable[[], object]
) -> None:
    """Offer the socket to supervisors, in a separate thread; call `handed_over` once one has it."""
    server = socket.socket(socket.AF_UNIX)
    with suppress(FileNotFoundError):
        (output / FILE).unlink()
    with _short(output / FILE) as path:
        server.bind(path)
    (output / FILE).chmod(0o600)
    server.listen()
    thread = threading.Thread(
        target=_answer, args=(server, held, orphaned, handed_over), daemon=True
    )
    thread.start()


def _answer(
    server: socket.socket,
    held: socket.socket,
    orphaned: threading.Event,
    handed_over: Callable[[], object],
) -> None:
    with server:
        while True:
            asking, _ = server.accept()
            with asking, suppress(OSError):  # the supervisor may have ended
                if orphaned.is_set():
                    socket.send_fds(asking, [ORPHANED], [held.fileno()])
                    handed_over()
                    threading.Event().wait()  # `asking` stays open until this process has ended
                asking.sendall(OWNED)


def _connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        with _short(path) as short:
            connection.connect(short)
    except OSError:
        connection.close()
        raise
    connection.settimeout(DELIVERY)
    return connection


def _receive(connection: socket.socket) -> socket.socket | None:
    """The socket of an orphaned gateway, once it has ended; None if it has a supervisor, or was
    killed before it answered. Raises ConfigError if it does not end: only one process may write to
    its sessions."""
    try:
        status, files, _, _ = socket.recv_fds(connection, 1, 1)
    except OSError:
        return None
    if status != ORPHANED or not files:
        return None
    listener = socket.socket(fileno=files[0])
    try:
        connection.recv(1)  # empty once the gateway has ended
    except TimeoutError:
        listener.close()
        raise ConfigError(
            f"{_other_end(connection)}, the gateway of an earlier agentrl live, does not end: "
            "kill it, and rerun the command"
        ) from None
    except OSError:  # the gateway was killed
        pass
    return listener


def _other_end(connection: socket.socket) -> str:
    """A description of the process to which a Unix socket is connected."""
    if not hasattr(socket, "SO_PEERCRED"):
        return "another process"
    pid, _, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    )
    return f"process {pid}"


def _as_configured(listener: socket.socket, config: RunConfig) -> socket.socket:
    """The socket of the run, or a new one if the settings now have another port or host. In that
    case connections that were not yet accepted are lost."""
    host, port = listener.getsockname()[:2]
    configured = config.runner.host, config.runner.port or port
    with suppress(OSError):  # a host without an address: `_listen` reports it
        if _address(*configured)[1][:2] == (host, port):
            return listener
    log.warning("the gateway listens at %s:%d now, no longer at %s:%d", *configured, host, port)
    listener.close()
    return _listen(*configured)


def _address(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    family, _, _, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    return family, address


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, address = _address(host, port)
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"runner.port = {port}: the gateway cannot listen there ({error.strerror or error});"
            " choose another port, or 0 for any free one"
        ) from error


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """A short path for a Unix socket: at most 107 bytes are allowed."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        short = Path(f"/proc/self/fd/{folder}", path.name)
        yield str(short if short.parent.is_dir() else path)
    finally:
        os.close(folder)
