"""Installs the clients: `python -m tests.benchmarks.clients.install [NAME]...`.

Each list of packages gets a folder of its own below .clients, because they exclude each other. What
is there already is left alone; a client that cannot be installed is reported and does not stop the
others."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = Path(".clients")
UV = "uv==0.13.9"  # links the packages that environments share, where pip copies them


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A row of the table: what to install, and how it is started."""

    name: str
    title: str
    packages: tuple[str, ...] = ()  # of pip
    npm: tuple[str, ...] = ()
    program: str = ""  # in agents/, unless it is a harness
    argument: str = ""
    harness: str = ""
    always_streams: bool = False

    @property
    def folder(self) -> Path:
        """Where its packages are, shared by clients with the same."""
        packages = self.packages or self.npm
        digest = hashlib.sha256("\n".join(packages).encode()).hexdigest()[:8]
        first = packages[0].partition("==")[0] if self.packages else packages[0].rpartition("@")[0]
        plain = "".join(c if c.isalnum() else "-" for c in first.partition("[")[0]).strip("-")
        return FOLDER / f"{'pip' if self.packages else 'npm'}-{plain}-{digest}"

    @property
    def versions(self) -> str:
        """The pinned packages of its title, as `name version`."""
        if self.packages:
            pins = [one.partition("==") for one in self.packages]
        else:
            pins = [one.rpartition("@") for one in self.npm]
        shown = [(name.partition("[")[0], version) for name, _, version in pins if version]
        titled = re.split(r"[ ,]+", self.title.lower())
        wanted = [pin for pin in shown if pin[0] in titled] or shown[:1]
        return ", ".join(f"{name} {version}" for name, version in wanted)

    @property
    def ways(self) -> tuple[bool, ...]:
        """Whether to stream, for each time that it is played."""
        return (True,) if self.harness or self.always_streams else (False, True)

    @property
    def installed(self) -> bool:
        return (self.folder / ".installed").is_file()


def clients(names: Iterable[str] = ()) -> list[Client]:
    """The clients of clients.toml, or those of `names`."""
    found = tomllib.loads((HERE / "clients.toml").read_text(encoding="utf-8"))
    chosen = list(names) or list(found)
    if unknown := [name for name in chosen if name not in found]:
        sys.exit(f"clients.toml has no {', '.join(unknown)}; it has {', '.join(found)}")
    return [
        Client(
            name=name,
            **{k: tuple(v) if isinstance(v, list) else v for k, v in found[name].items()},
        )
        for name in chosen
    ]


def install(client: Client) -> str:
    """Install a client; return why that failed, or nothing."""
    folder, log = client.folder, client.folder / "failure.txt"
    if client.installed:
        return ""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for command in _commands(client):
        done = subprocess.run(command, capture_output=True, text=True, env=_environment())
        if done.returncode:
            log.write_text(done.stderr, encoding="utf-8")
            return (done.stderr.strip().splitlines() or ["no message"])[-1]
    (folder / ".installed").touch()
    return ""


def _commands(client: Client) -> list[list[str]]:
    if client.npm:
        if shutil.which("npm") is None:
            sys.exit(f"{client.name} needs npm: install Node.js 20 or newer, then run it again")
        quiet = ["--no-audit", "--no-fund", "--loglevel=error"]
        return [["npm", "install", "--prefix", str(client.folder), *quiet, *client.npm]]
    tools, python = FOLDER / "uv", str(client.folder / "bin" / "python")
    first = []
    if not (tools / "bin" / "uv").exists():
        pip = [str(tools / "bin" / "python"), "-m", "pip", "install", "-q", UV]
        first = [[sys.executable, "-m", "venv", str(tools)], pip]
    uv = str(tools / "bin" / "uv")
    return [
        *first,
        [uv, "venv", "-q", "--python", sys.executable, "--allow-existing", str(client.folder)],
        [uv, "pip", "install", "-q", "--python", python, *client.packages],
    ]


def _environment() -> dict[str, str]:
    return os.environ | {"UV_CACHE_DIR": str((FOLDER / "cache").absolute())}


if __name__ == "__main__":
    for one in clients(sys.argv[1:]):
        print(f"Installing {one.name} ...", flush=True)
        if failure := install(one):
            print(f"  {one.name} cannot be installed: {failure}", flush=True)
