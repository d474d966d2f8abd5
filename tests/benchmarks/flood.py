"""Does a store's server answer while connections that never finish a request pour in?

python -m tests.benchmarks.flood --json [--connections 10000]

One thread opens half-open connections as fast as it can; another process asks `/healthz` by a new
connection, again and again, from the first of them to ten seconds after the last.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing import Event, Pipe, Process
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event as EventType
from pathlib import Path

import psutil

HALF = b"POST /v1/cursor HTTP/1.1\r\nhost: localhost\r\n"
WHOLE = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"


def ask(port: int, done: EventType, to: Connection) -> None:
    """Sends the seconds of every request, infinity for one that was not answered."""
    seconds = []
    while not done.is_set():
        began = time.perf_counter()
        answered = False
        address = ("127.0.0.1", port)
        with (
            contextlib.suppress(OSError),
            socket.create_connection(address, timeout=10) as connection,
        ):
            connection.sendall(WHOLE)
            answered = connection.recv(4096).startswith(b"HTTP/1.1 200")
        seconds.append(time.perf_counter() - began if answered else float("inf"))
        time.sleep(0.02)
    to.send(seconds)


def flood(port: int, pid: int, connections: int) -> dict[str, float]:
    done, (receive, send) = Event(), Pipe(duplex=False)
    asking = Process(target=ask, args=(port, done, send))
    asking.start()
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        for _ in range(connections):
            connection = socket.create_connection(("127.0.0.1", port), timeout=30)
            stack.enter_context(connection).sendall(HALF)
        poured = time.perf_counter() - began
        time.sleep(10)
        memory = psutil.Process(pid).memory_info().rss / 2**20
    done.set()
    seconds = sorted(receive.recv())
    asking.join()
    return {
        "connections": connections,
        "poured_in_s": round(poured, 2),
        "requests": len(seconds),
        "healthz_p99_s": round(seconds[int(0.99 * (len(seconds) - 1))], 3),
        "healthz_max_s": round(seconds[-1], 3),
        "rss_mb": round(memory, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "keys").write_text("admin:flood-secret\n")
        command = [
            sys.executable,
            "-m",
            "agentrl",
            "store",
            "serve",
            f"sqlite:///{folder}/store.db",
        ]
        command += ["--port", "0", "--keys", f"{folder}/keys"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            port = int(server.stdout.readline().strip().rpartition(":")[2])
            result = flood(port, server.pid, options.connections)
            server.terminate()
    print(
        json.dumps(result) if options.json else "\n".join(f"{k:<15} {v}" for k, v in result.items())
    )


if __name__ == "__main__":
    main()
