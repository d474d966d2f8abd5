"""Trains the tasks of a bench file with its presets, unless its results file has it.

    python -m tests.benchmarks.bench_runs BENCH [--results FILE] [--tasks A,B] [--presets A,B]

`--seeds` and `--budget-minutes` make pieces of it, too. Each run is trained by the processes that
`agentrl train` would start, which are forked from this one, when it has imported what they need.

What is done is a line of the results file, and is not done again. A piece that was killed continues
after its last committed step, so this may be stopped at any moment.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from multiprocessing.connection import wait
from pathlib import Path

import msgspec

from agentrl import __version__
from agentrl.core.config import RunConfig
from agentrl.core.errors import ConfigError, TrainingError, nearest
from agentrl.core.loading import load_attribute
from agentrl.core.processes import PARENT, allow_files, die_with_parent, environment
from agentrl.core.types import StepRow
from agentrl.store import open_store
from tests.benchmarks.bench import BenchPlan, Piece, Result, read_bench

FORK = multiprocessing.get_context("fork")


def read_results(file: Path) -> dict[str, Result]:
    """By digest. A line that was not written to its end is left out."""
    rows = []
    for line in file.read_bytes().splitlines() if file.is_file() else ():
        try:
            rows.append(msgspec.json.decode(line, type=Result))
        except msgspec.DecodeError:
            continue
    return {row.digest: row for row in rows}


def run_pieces(
    pieces: Iterable[Piece], done: dict[str, Result], file: Path, *, until: float
) -> None:
    """Run the pieces that are not in `done`, one after the other, and add them to it and to the
    file. None is started that would end after `until`, by time.monotonic(), if it took as long as
    the longest so far. Raises TrainingError where one fails."""
    longest = 0.0
    for one in (one for one in pieces if one.digest not in done):
        started = time.monotonic()
        if started + longest > until:
            break
        run_piece(one.config)
        row = done[one.digest] = result(one, time.monotonic() - started)
        file.parent.mkdir(parents=True, exist_ok=True)
        torn = file.is_file() and not file.read_bytes().endswith(b"\n")
        with file.open("ab") as lines:
            lines.write(b"\n" * torn + msgspec.json.encode(row) + b"\n")
        longest = max(longest, row.seconds)
        change = f"{row.curve[0][1]:.3f} to {row.curve[-1][1]:.3f}, {row.seconds:.0f} s"
        print("{} {} lr {:g} seed {}:".format(*one.name), change, flush=True)


def run_piece(config: RunConfig) -> None:
    """Train in an algorithm process, with a runner process. Raises TrainingError if it fails."""
    # Read when torch is imported: threads of tiny models mostly wait for each other.
    os.environ |= {"OMP_NUM_THREADS": "1"} | environment()

    from agentrl.algorithm_process import added_features
    from agentrl.algorithms.train.main import main as algorithm
    from agentrl.environments.runner import played_environment
    from agentrl.runners.main import main

    allow_files()
    logs = Path(config.output, "logs")
    logs.mkdir(parents=True, exist_ok=True)
    runner = partial(main, find_environment=played_environment)
    training = (algorithm, config, added_features(config))
    started = {"algorithm": training, "runner-0": (runner, config.store, config.name)}
    processes = [
        FORK.Process(target=_child, args=(logs / f"{name}.log", *call))
        for name, call in started.items()
    ]
    try:
        for process in processes:
            process.start()
        first = wait([process.sentinel for process in processes])
        if processes[0].sentinel in first:  # else the runner has ended, which it should not
            processes[0].join()
        if processes[0].exitcode != 0:
            raise TrainingError(f"{config.name} has failed; its output: {logs}")
    finally:
        for process in processes:
            process.kill()
            process.join()


def _child(log: Path, function: Callable[..., object], *arguments: object) -> None:
    """What a process of a run does, which ends with its parent."""
    os.environ[PARENT] = str(os.getppid())
    die_with_parent(signal.SIGKILL)
    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    function(*arguments)


async def _steps(config: RunConfig) -> list[StepRow]:
    async with open_store(config.store, create=False) as store:
        return await store.steps(config.name)


def result(one: Piece, seconds: float) -> Result:
    """What came of a piece that has ended; its folder is deleted."""
    config, spent, failed = one.config, 0.0, 0.0
    curve: list[tuple[float, float]] = []
    for row in asyncio.run(_steps(config)):  # of a step, its evaluation comes before its rollouts
        if "eval/score" in row.metrics:
            curve.append((spent, row.metrics["eval/score"]))
        elif one.measure and (row.step % config.eval.every == 0 or row.step == config.steps):
            saved = Path(config.output, "checkpoints").glob(f"{row.step:06d}*")
            policy = max(saved) if row.step else Path(config.policy.model)
            with FORK.Pool(1) as apart:
                curve.append((spent, apart.apply(_measure, (one, policy))))
        spent += row.metrics.get("rollouts", 0.0)
        failed += row.metrics.get("rollouts/failed", 0) + row.metrics.get("eval/score_missing", 0)
    shutil.rmtree(config.output)
    return Result(one.digest, *one.name, curve, round(seconds, 1), failed, __version__)


def _measure(one: Piece, policy: Path) -> float:
    """What the task's own measure says of a checkpoint. It is loaded in a process of its own, so
    that those of later pieces load the task's modules with their own environment."""
    measure = load_attribute(one.measure, Path(one.config.root), key="measure")
    return float(measure(policy))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, metavar="BENCH")
    parser.add_argument("--results", type=Path, help="default: runs/bench/<name of BENCH>.jsonl")
    for name in ("--tasks", "--presets", "--seeds"):
        parser.add_argument(name, default="", help="with commas; default: all")
    parser.add_argument(
        "--budget-minutes", type=float, default=inf, help="start none that ends later"
    )
    given = parser.parse_args()
    bench, work = read_bench(given.file), Path("runs/bench").resolve()
    results = given.results or work / f"{given.file.stem}.jsonl"
    plan = BenchPlan(bench, given.file, work, read_results(results))
    wanted = _named(given.presets, bench.presets, "--presets")
    chosen = _named(given.tasks, bench.tasks, "--tasks")
    pairs = [(t, p) for t in chosen for p in bench.presets_of(t) if p in wanted]
    known = sorted({seed for pair in pairs for seed in bench.seeds_of(pair)})
    numbers = [int(seed) for seed in _named(given.seeds, map(str, known), "--seeds")]
    until = time.monotonic() + 60 * given.budget_minutes
    for pieces in (plan.tuning(chosen), plan.reported(pairs, numbers)):
        run_pieces(pieces, plan.done, results, until=until)
    print(f"{len(plan.done)} results in {results}")


def _named(given: str, known: Iterable[str], option: str) -> list[str]:
    names = list(known)
    for name in given.split(",") if given else ():
        if name not in names:
            raise ConfigError(f"{option} {name!r}; {nearest(name, names)}")
    return given.split(",") if given else names


if __name__ == "__main__":
    main()
