"""The planted faults: patches of the library, each of which the schedules must find.

Each is applied to a copy of the library and searched there, in a process of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PATCHES = sorted((Path(__file__).parent / "planted_faults").glob("*.patch"))
COPIED = ("agentrl", "store", "runners", "algorithms", "tests")


@contextmanager
def planted(patch: Path) -> Iterator[Path]:
    """A copy of the library with a patch."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        for name in COPIED:
            ignored = shutil.ignore_patterns("__pycache__", "node_modules")
            shutil.copytree(ROOT / name, Path(folder, name), symlinks=True, ignore=ignored)
        subprocess.run(["git", "apply", "--unsafe-paths", str(patch)], cwd=folder, check=True)
        yield Path(folder)


def search(patch: Path, *, max_seeds: int, processes: int) -> dict[str, Any]:
    """Run schedules until one finds the fault; returns the number of seeds and what it said."""
    with planted(patch) as folder:
        command = [sys.executable, "-m", "tests.benchmarks.simulation", "--until-found", "--json"]
        command += ["--seeds", str(max_seeds), "--processes", str(processes)]
        env = os.environ | {"PYTHONHASHSEED": "0"}
        done = subprocess.run(
            command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True, check=False
        )
        report = json.loads(done.stdout)
    why = report["violated"][0][1] if report["violations"] else ""
    return {"found": bool(why), "seeds": report["schedules"], "why": why}


def search_all(*, max_seeds: int, processes: int) -> dict[str, Any]:
    results = {
        patch.stem: search(patch, max_seeds=max_seeds, processes=processes) for patch in PATCHES
    }
    return {
        "planted_found": sum(result["found"] for result in results.values()),
        "planted": results,
    }
