"""The listening socket goes from a gateway without supervisor to the next one."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agentrl.core.config import RunConfig
from agentrl.core.errors import ConfigError
from agentrl.live import handover
from tests.agentrl.live.shop import free_port

# The orphans of these tests are threads, which end by SystemExit.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def config_of(folder: Path, port: int = 0) -> RunConfig:
    plain = RunConfig()
    return replace(plain, output=str(folder), runner=replace(plain.runner, port=port))


def port_of(held: socket.socket) -> int:
    return int(held.getsockname()[1])


def test_a_new_run_listens_at_its_port(tmp_path: Path) -> None:
    with handover.listening(config_of(tmp_path)) as first:
        taken = config_of(tmp_path, port_of(first))
        with pytest.raises(ConfigError, match=f"runner.port = {port_of(first)}"):
            handover.listening(taken)


def ends(then: Callable[[], object] = lambda: None) -> Callable[[], None]:
    """What an orphan does that has given its socket; here it is a thread."""

    def end() -> None:
        then()
        sys.exit()

    return end


def test_an_orphan_hands_the_socket_over_with_its_waiting_connections(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)  # longer than the name of a Unix socket may be
    deep.mkdir()
    config, orphaned, given = config_of(deep), threading.Event(), threading.Event()
    with handover.listening(config) as held:
        handover.offer(deep, held, orphaned, ends(given.set))
        with socket.create_connection(held.getsockname()) as waiting:
            orphaned.set()
            with handover.listening(config) as taken:
                assert given.is_set()
                assert port_of(taken) == port_of(held)
                accepted, _ = taken.accept()
                with accepted:
                    waiting.sendall(b"x")
                    assert accepted.recv(1) == b"x"


def test_another_port_is_heeded_though_an_orphan_has_a_socket(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    orphaned = threading.Event()
    orphaned.set()
    held = handover.listening(config_of(tmp_path))
    before = port_of(held)
    handover.offer(tmp_path, held, orphaned, ends(held.close))
    wanted = free_port()
    with handover.listening(config_of(tmp_path, wanted)) as taken:
        assert port_of(taken) == wanted
    assert f"listens at 127.0.0.1:{wanted} now, no longer at 127.0.0.1:{before}" in caplog.text


def test_who_asks_and_ends_at_once_leaves_the_socket_to_the_next(
    tmp_path: Path, monkeypatch: Any
) -> None:
    config, orphaned = config_of(tmp_path), threading.Event()
    answered = threading.Event()
    real = socket.socket.close

    def closed(self: socket.socket) -> None:
        real(self)
        if self.family == socket.AF_UNIX and threading.current_thread().daemon:
            answered.set()

    def broken(self: socket.socket, *_: Any) -> None:
        raise BrokenPipeError

    with handover.listening(config) as held, monkeypatch.context() as patch:
        patch.setattr(socket.socket, "close", closed)
        patch.setattr(socket.socket, "sendall", broken)  # as if who asked has ended
        handover.offer(tmp_path, held, orphaned, ends())
        handover._connect(tmp_path / handover.FILE).close()
        assert answered.wait(10.0)
        patch.undo()
        orphaned.set()
        with handover.listening(config) as taken:
            assert port_of(taken) == port_of(held)


def test_a_run_that_is_served_is_not_served_twice(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(handover, "PATIENCE", 0.2)
    config = config_of(tmp_path)
    with handover.listening(config) as held:
        handover.offer(tmp_path, held, threading.Event(), lambda: None)
        with pytest.raises(ConfigError, match=f"process {os.getpid()} serves run 'run': stop it"):
            handover.listening(config)


def test_an_orphan_that_does_not_end_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(handover, "DELIVERY", 0.2)
    config, orphaned = config_of(tmp_path), threading.Event()
    orphaned.set()
    with handover.listening(config) as held:
        handover.offer(tmp_path, held, orphaned, lambda: None)
        with pytest.raises(ConfigError, match=f"process {os.getpid()}, .* does not end: kill it"):
            handover.listening(config)
