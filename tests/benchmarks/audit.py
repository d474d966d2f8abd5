"""What an audit names: `python -m tests.benchmarks.audit [--json] [--only NAME]...`.

NAME: of a verifier, or `training` (see `audit_training`), which takes some minutes and is done only
if it is asked for, or `rescore`: `seconds` and `cpu_seconds` of `agentrl rescore` for 10,000 stored
rollouts and a plain function.

`named`: verifiers with a planted hole that are found exploitable, with the attack; `alarms`: honest
verifiers that are not found sound; `seconds`: of the slowest audit, its process included, and
`cpu_seconds`, which a busy machine does not change. Each runs as before the first step of a run,
with its ten seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from agentrl.store import open_store
from tests.agentrl.test_rescore import VERIFIER, filled
from tests.benchmarks.audit_training import figures
from tests.benchmarks.verifiers.holes import HOLES
from tests.benchmarks.verifiers.honest import HONEST

FOLDER = Path(__file__).parent / "verifiers"
SECONDS = 6  # of scoring; the rest of ten is for the process
RUN = """\
name = "{name}"
steps = 1
[agent]
path = "{module}.py:{name}"  # is not run
[tasks]
train = "tasks.py:{tasks}"
[verifier]
path = "{module}.py:{name}"
"""


def audit(module: str, name: str, tasks: str, folder: Path = FOLDER) -> dict[str, Any]:
    """The report of one verifier, by the command line. folder: of its module and tasks.py."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "run.toml")
        file.write_text(RUN.format(module=module, name=name, tasks=tasks))
        command = [sys.executable, "-m", "agentrl", "audit", str(file), f"root={folder}", "--json"]
        env = {**os.environ, "PYTHONPATH": str(folder)}
        cpu, started = _cpu_of_children(), time.monotonic()
        done = subprocess.run(
            [*command, "--seconds", str(SECONDS)],
            capture_output=True, text=True, cwd=scratch, env=env, check=False,
        )  # fmt: skip
        seconds, cpu = time.monotonic() - started, _cpu_of_children() - cpu
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    report: dict[str, Any] = json.loads(done.stdout)
    found = [one for one in report["findings"] if one["alarm"]]
    return {
        "name": name, "verdict": report["verdict"], "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "attacks": [f"{one['attack']} {one['variant']}".strip() for one in found],
        "tasks": report["tasks"], "scored": report["scored"], "shape": report["shape"],
    }  # fmt: skip


def rescored(groups: int = 1250) -> dict[str, Any]:
    """Rescore groups of eight rollouts by the command line."""
    with tempfile.TemporaryDirectory() as scratch:
        url, folder = f"sqlite:///{scratch}/store.db", Path(scratch)
        asyncio.run(_fill(url, groups))
        (folder / "again.py").write_text(VERIFIER)
        command = [sys.executable, "-m", "agentrl", "rescore", "r", "--store", url]
        cpu, started = _cpu_of_children(), time.monotonic()
        done = subprocess.run(
            [*command, "--verifier", "again.py:strict", "--json"],
            capture_output=True, text=True, cwd=folder, check=True,
        )  # fmt: skip
        seconds, cpu = time.monotonic() - started, _cpu_of_children() - cpu
    return {
        "rollouts": json.loads(done.stdout)["scored"], "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
    }  # fmt: skip


def _cpu_of_children() -> float:
    """Seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def _fill(url: str, groups: int) -> None:
    async with open_store(url) as store:
        await filled(store, groups, ["a", "b"] * 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", action="append", help="a verifier, training, or rescore")
    given = parser.parse_args()
    parts = {"training": figures, "rescore": rescored}
    if asked := [name for name in given.only or () if name in parts]:
        print(json.dumps({name: parts[name]() for name in asked}))
        return
    rows = []
    for module, verifiers in (("holes", HOLES), ("honest", HONEST)):
        for name, tasks in verifiers.items():
            if given.only and name not in given.only:
                continue
            rows.append({"module": module} | audit(module, name, tasks))
            if not given.json:
                print(*rows[-1].values(), flush=True)
    holes = [row for row in rows if row["module"] == "holes"]
    honest = [row for row in rows if row["module"] == "honest"]
    result = {
        "named": sum(row["verdict"] == "exploitable" for row in holes), "of": len(holes),
        "alarms": sum(row["verdict"] != "no hole found" for row in honest),
        "seconds": max(row["seconds"] for row in rows),
        "cpu_seconds": max(row["cpu_seconds"] for row in rows), "rows": rows,
    }  # fmt: skip
    summary = {key: value for key, value in result.items() if key != "rows"}
    print(json.dumps(result if given.json else summary))


if __name__ == "__main__":
    main()
