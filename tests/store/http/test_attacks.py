"""Attacks on a store's server by callers that have no key. Everything stays on this machine."""

from __future__ import annotations

import contextlib
import itertools
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

ADMIN = "admin-secret"
LATEST = 1.0  # seconds until /healthz answers, whatever else goes on
MAX_RESIDENT_BYTES = 300 * 2**20  # resident bytes of the server
START = b"POST /v1/cursor HTTP/1.1\r\nhost: localhost\r\n"


@dataclass
class Served:
    port: int
    pid: int

    def health(self) -> float:
        """Seconds until a new connection is answered: the best of three, for other programs keep
        the cores busy too."""
        return min(self._answered() for _ in range(3))

    def _answered(self) -> float:
        began = time.perf_counter()
        with self.connect() as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        return time.perf_counter() - began

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def resident(self) -> int:
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()

    def most_files(self) -> int:
        return resource.prlimit(self.pid, resource.RLIMIT_NOFILE)[0]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Started with as few files as many systems give; one for all attacks, which it survives."""
    folder = tmp_path_factory.mktemp("served")
    keys = folder / "keys"
    keys.write_text(f"admin:{ADMIN}\n")
    url = f"sqlite:///{folder / 'store.db'}"
    command = [sys.executable, "-m", "agentrl", "store", "serve", url, "--port", "0"]
    command = ["prlimit", "--nofile=1024:", *command, "--keys", str(keys)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        yield Served(int(address.rpartition(":")[2]), process.pid)
        process.terminate()


ENDLESS = {
    "one header": lambda: itertools.chain([START + b"x: "], itertools.repeat(b"a" * 2**20)),
    "many headers": lambda: itertools.chain([START], itertools.repeat(b"a: b\r\n" * 2**17)),
    "an address": lambda: itertools.chain([b"GET /"], itertools.repeat(b"a" * 2**20)),
    "trailers": lambda: itertools.chain(
        [START + b"transfer-encoding: chunked\r\n\r\n0\r\nx: "], itertools.repeat(b"a" * 2**20)
    ),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_headers_without_end_are_refused(served: Served, kind: str) -> None:
    with served.connect() as connection, contextlib.suppress(ConnectionError):
        for sent, part in enumerate(ENDLESS[kind]()):
            connection.sendall(part)
            assert sent < 20, "the server took 20 MB of headers"
    assert served.health() < LATEST
    assert served.resident() < MAX_RESIDENT_BYTES


def test_who_sends_too_large_headers_is_told(served: Served) -> None:
    url = f"http://127.0.0.1:{served.port}/healthz"
    for headers in ({"x": "a" * 40_000}, {f"x{i}": "a" for i in range(101)}):
        answer = httpx.get(url, headers=headers)
        assert answer.status_code == 431
        assert "send less" in answer.text
    assert httpx.get(url, headers={f"x{i}": "a" * 300 for i in range(90)}).status_code == 200


@pytest.mark.parametrize("many", [1_500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_half_sent_requests_keep_nobody_out(served: Served, many: int) -> None:
    """They are more than the files that the server was started with."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 11_000:
        pytest.skip("this system allows fewer open files than the test needs")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 11_000), hard))
    try:
        with contextlib.ExitStack() as stack:
            for number in range(many):
                stack.enter_context(served.connect()).sendall(START)
                if number % 1000 == 999:
                    assert served.health() < LATEST
            assert served.resident() < MAX_RESIDENT_BYTES
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert served.most_files() > 1024


@pytest.mark.slow
def test_half_a_request_is_not_waited_for(served: Served) -> None:
    """Nor the rest of a body that nobody reads, however steadily it drips."""
    starts = [b"", START, b"GET /healthz HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n"]
    connections = [served.connect() for _ in starts]
    for connection, start in zip(connections, starts, strict=True):
        connection.sendall(start)
    for connection, start in zip(connections, starts, strict=True):
        connection.settimeout(20)
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began < 20:
                if start:
                    connection.sendall(b"a")
                connection.settimeout(1)
                with contextlib.suppress(TimeoutError):
                    if not connection.recv(65536):
                        break
        assert time.monotonic() - began < 15, start
        connection.close()
