"""Installs the harnesses of the presets: `python -m tests.runners.harnesses.install [NAME]...`.

Each gets a folder of its own, because their dependencies exclude each other, and a link in
.harnesses/bin, where `agentrl` looks beside PATH. What is there already is left alone."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from agentrl.runners.harness import HARNESSES, INSTALLED, load_preset


def install(name: str, folder: Path) -> None:
    preset = load_preset(name, Path())
    link, own = folder / "bin" / preset.program, folder / name
    if link.exists():
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    own.mkdir(exist_ok=True)
    tool, _, *packages = shlex.split(preset.install)
    if shutil.which(tool) is None and tool == "npm":
        sys.exit(f"{name} needs npm: install Node.js 20 or newer, then run the same command again")
    if tool == "npm":
        options = ["--prefix", str(own), "--no-audit", "--no-fund", "--loglevel=error"]
        commands = [["npm", "install", *options, *packages]]
        program = own / "node_modules" / ".bin" / preset.program
    else:
        program = own / "bin" / preset.program
        pip = [str(own / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        commands = [[sys.executable, "-m", "venv", str(own)], [*pip, "install", "-q", *packages]]
    for command in commands:
        subprocess.run(command, check=True)
    link.symlink_to(program.absolute())


if __name__ == "__main__":
    for harness in sys.argv[1:] or HARNESSES:
        print(f"Installing {harness} ...", flush=True)
        install(harness, Path(INSTALLED))
