"""A throwaway PostgreSQL server, started from the binaries that are installed."""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg

OPTIONS = (
    *("fsync=off", "full_page_writes=off"),  # it need not survive a power cut
    "autovacuum=off",  # sizes change by what a test does
    *("listen_addresses=", "max_connections=300", "shared_buffers=32MB", "deadlock_timeout=50ms"),
)


def binaries() -> Path | None:
    """The folder of `postgres` and `initdb`: that on PATH, or the newest Debian has."""
    found = [Path(path).resolve().parent for path in [shutil.which("initdb")] if path]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((path for path in found if (path / "postgres").exists()), None)


def unprivileged() -> dict[str, Any]:
    """Options of Popen: the server refuses to run as root."""
    if os.geteuid():
        return {}
    names = {user.pw_name: user for user in pwd.getpwall()}
    user = names.get("postgres") or names["nobody"]
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


class Server:
    """Listens on a Unix socket in a folder of its own; a database for each test."""

    def __init__(self, bin: Path, folder: Path) -> None:
        self._bin, self._folder = bin, folder
        self._numbers = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        self._user = unprivileged()
        if self._user:
            os.chown(folder, self._user["user"], self._user["group"])
        command = [bin / "initdb", "-D", folder / "data", "-U", "agentrl", "-A", "trust", "-N"]
        command += ["-E", "UTF8", "--locale", "C.UTF-8"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder, **self._user)

    def url(self, database: str) -> str:
        return f"postgresql:///{database}?host={self._folder}&user=agentrl"

    def start(self) -> None:
        options = [word for option in OPTIONS for word in ("-c", option)]
        command = [self._bin / "postgres", "-D", self._folder / "data", "-k", self._folder]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *options], stdout=log, stderr=log, cwd=self._folder, **self._user
            )
        for _ in range(600):
            with contextlib.suppress(psycopg.OperationalError):
                self._admin("select 1")
                return
            if self._process.poll() is not None:
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.05)
        raise RuntimeError((self._folder / "log").read_text())

    def kill(self) -> None:
        """Without a word to anybody, as when the power fails (`immediate` shutdown)."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait()

    def make(self, template: str = "template0") -> str:
        """URL of a new database: empty, or a copy of another that nobody uses."""
        name = f"test{next(self._numbers)}"
        self._admin(f"create database {name} template {template}")
        return self.url(name)

    def demand_password(self, role: str) -> None:
        rules = self._folder / "data" / "pg_hba.conf"
        rules.write_text(f"local all {role} scram-sha-256\n{rules.read_text()}")
        self._admin("select pg_reload_conf()")

    def _admin(self, sql: str) -> None:
        with psycopg.connect(self.url("postgres"), autocommit=True) as conn:
            conn.execute(sql.encode())


@contextlib.contextmanager
def running() -> Iterator[Server]:
    bin = binaries()
    assert bin is not None
    folder = Path(tempfile.mkdtemp(prefix="agentrl-pg-"))
    try:
        server = Server(bin, folder)
        server.start()
        try:
            yield server
        finally:
            server.kill()
    finally:  # each database is hundreds of files: on a busy disk that takes longer than a test may
        removing = subprocess.Popen(["rm", "-rf", folder], start_new_session=True)
        removing.returncode = 0  # nobody waits for it


@contextlib.contextmanager
def pooler(url: str, folder: Path, mode: str) -> Iterator[str]:
    """The URL of pgbouncer in front of a server, which lends its sessions by `mode`."""
    params = psycopg.conninfo.conninfo_to_dict(url)
    port = 6432  # of a Unix socket, so any number is free
    settings = folder / "pgbouncer.ini"
    settings.write_text(
        f"[databases]\n* = host={params['host']} user=agentrl\n[pgbouncer]\nlisten_addr =\n"
        f"unix_socket_dir = {folder}\nlisten_port = {port}\nauth_type = any\npool_mode = {mode}\n"
    )
    user = unprivileged()
    if user:
        os.chown(folder, user["user"], user["group"])
        folder.chmod(0o755)
    program = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
    assert program is not None
    with (folder / "pgbouncer.log").open("wb") as log:
        process = subprocess.Popen([program, settings], stdout=log, stderr=log, cwd=folder, **user)
    try:
        at = f"postgresql:///{params['dbname']}?host={folder}&port={port}&user=agentrl"
        for _ in range(200):
            with contextlib.suppress(psycopg.OperationalError):
                psycopg.connect(at).close()
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
        else:
            raise RuntimeError((folder / "pgbouncer.log").read_text())
        yield at
    finally:
        process.terminate()
        process.wait()
