"""A real server that `openenv init` has written."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx


@contextlib.contextmanager
def served(python: Path, folder: Path, sessions: int = 1) -> Iterator[tuple[str, subprocess.Popen]]:
    """Its address and process. sessions: that it has at a time."""
    program = python.parent / "openenv"
    subprocess.run([program, "init", "my_env"], cwd=folder, check=True, capture_output=True)
    app = folder / "my_env/server/app.py"
    code = app.read_text()
    app.write_text(re.sub(r"max_concurrent_envs=\d+", f"max_concurrent_envs={sessions}", code))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "uvicorn", "server.app:app", "--port", str(port)]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, cwd=folder / "my_env", stdout=log, stderr=log)
        try:
            _wait(server, url := f"http://127.0.0.1:{port}", folder / "server.log")
            yield url, server
        finally:
            server.kill()
            server.wait()


def _wait(server: subprocess.Popen, url: str, log: Path) -> None:
    until = time.monotonic() + 180
    while True:
        with contextlib.suppress(httpx.HTTPError):
            httpx.get(f"{url}/schema")
            return
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.1)
