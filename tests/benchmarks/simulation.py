"""Schedules of faults in a simulated run: violations, planted faults that are found, coverage.

    python -m tests.benchmarks.simulation --seeds 10000 --json
    python -m tests.benchmarks.simulation --seed 17 [--schedule FILE]  # replays or shrinks
    python -m tests.benchmarks.simulation --planted                    # only these

See tests/simulation/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=200, help="number of schedules")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="one schedule: run, shrink, and describe it")
    parser.add_argument("--schedule", type=Path, help="a file to replay, or to write")
    parser.add_argument("--planted", action="store_true", help="only search the planted faults")
    parser.add_argument("--real", action="store_true", help="only run the real code")
    parser.add_argument("--until-found", action="store_true", help="stop at the first violation")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--coverage", action="store_true", help="of the real code; needs coverage")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is a part of a schedule
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(
            sys.executable, [sys.executable, "-m", "tests.benchmarks.simulation", *sys.argv[1:]]
        )
    if given.seed is not None or given.schedule is not None:
        sys.exit(replay(given.seed, given.schedule))
    found: dict[str, Any] = {}
    if given.coverage:
        found |= covered(given)
    elif not given.planted:
        found |= schedules(given)
    if not (given.real or given.until_found or given.coverage):
        from tests.simulation.planted import search_all

        found |= search_all(max_seeds=2000, processes=given.processes)
    print(json.dumps(found) if given.json else "\n".join(f"{k}: {v}" for k, v in found.items()))
    missed = [name for name, one in found.get("planted", {}).items() if not one["found"]]
    sys.exit(bool(found.get("violations") or missed))


def schedules(given: argparse.Namespace) -> dict[str, Any]:
    from tests.simulation.explore import explore

    began, violations, seeds = time.perf_counter(), [], 0
    faults, kinds = [], dict[str, int]()
    for result in explore(range(given.first, given.first + given.seeds), given.processes):
        seeds += 1
        faults.append(result.faults)
        for kind, count in result.kinds.items():
            kinds[kind] = kinds.get(kind, 0) + count
        if result.violation:
            violations.append((result.seed, result.violation))
            print(f"seed {result.seed}: {result.violation}", file=sys.stderr)
            if given.until_found:
                break
    return {
        "schedules": seeds, "seconds": round(time.perf_counter() - began, 1),
        "violations": len(violations), "violated": sorted(violations)[:20],
        "faults_min": min(faults), "faults_mean": sum(faults) / len(faults), "kinds": kinds,
    }  # fmt: skip


UNREACHED = {
    "store/postgres/": "needs the server; test_postgres_model.py and the store's contract run it",
    "store/http/serve.py": "a command: arguments, sockets and signals of its process",
    "store/run_folder.py": "the supervisor, which is not simulated, holds and looks for runs",
    "store/backends.py": "chooses a store by its URL; the simulation has one of each",
    "store/urls.py": "users' spelling of URLs",
}
"""Module of the store, or folder -> why the simulation does not reach it."""
COMMIT_PATH = {
    "algorithms/train/loop.py": ("is_empty", "check_failed", "TrainingLoop."),
    "algorithms/train/saving.py": ("Checkpoints.", "_ended"),
    "algorithms/train/checkpoint.py": (
        "checkpoint_name", "parse_name", "save_checkpoint", "begin_checkpoint", "_new_directory",
        "load_checkpoint", "prune", "earlier_checkpoints", "_own", "_is_of", "random_state",
        "set_random_state",
    ),
    "algorithms/train/policies.py": ("PolicySet.",),
    "algorithms/train/serving.py": (
        "PolicyServers.updating", "PolicyServers.publish", "PolicyServers.announce",
        "PolicyServers.during",
    ),
    "algorithms/train/stages.py": ("open_run", "resume_run", "_steps", "_lost", "_train_again"),
}  # fmt: skip
"""Functions, or beginnings of their names: from opening a run over its commits to resuming it."""


def covered(given: argparse.Namespace) -> dict[str, Any]:
    """Share of lines and branches that schedules execute, in percent: of each file, and of all that
    the simulation can reach, which is the store and the loop's commit path."""
    from coverage import Coverage  # type: ignore[import-not-found]

    root = Path(__file__).resolve().parents[2]
    sources = [str(root / "store"), str(root / "algorithms" / "train")]
    measured = Coverage(branch=True, concurrency=["greenlet"], data_file=None, source=sources)
    given.processes = 1
    with measured.collect():
        found = schedules(given)
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        measured.json_report(outfile=report.name)
        files = json.loads(Path(report.name).read_bytes())["files"]
    shares = {name: round(file["summary"]["percent_covered"], 1) for name, file in files.items()}
    reached = [found_in["summary"] for found_in in reachable(files)]
    hit = sum(one["covered_lines"] + one["covered_branches"] for one in reached)
    every = sum(one["num_statements"] + one["num_branches"] for one in reached)
    share = round(100 * hit / every, 1)
    return found | {"coverage_share": share, "not_reached": UNREACHED, "coverage": shares}


def reachable(files: dict[str, Any]) -> Iterator[Any]:
    """The reports of modules and functions that count."""
    for name, file in files.items():
        if name.startswith("store/") and not name.startswith(tuple(UNREACHED)):
            yield file
        for function, report in file["functions"].items():
            if function and function.startswith(COMMIT_PATH.get(name, ())):
                yield report


def replay(seed: int | None, file: Path | None) -> int:
    from tests.simulation import explore
    from tests.simulation.schedule import drawn

    known = explore.load(file) if file is not None and file.exists() else None
    schedule = known or drawn(seed or 0)
    result = explore.run(schedule)
    if result.violation and known is None:
        schedule = explore.shrink(schedule)
        result = explore.run(schedule)
        file = file or Path(f"schedule-{seed}.jsonl")
        explore.save(schedule, file)
        print(f"replay: python -m tests.benchmarks.simulation --seed {seed} --schedule {file}")
    if result.violation:
        print(explore.described(schedule, result))
    else:
        print(f"seed {schedule.seed}: all invariants hold, {result.faults} faults")
    return int(bool(result.violation))


if __name__ == "__main__":
    main()
