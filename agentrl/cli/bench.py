"""`agentrl bench`: presets compared on tasks, at equal numbers of rollouts."""

from __future__ import annotations

import time
from collections.abc import Iterable
from math import inf
from pathlib import Path

import click

from agentrl.errors import ConfigError, nearest


@click.command()
@click.argument("file", metavar="BENCH", type=click.Path(path_type=Path))
@click.option("--tasks", help="Names, with commas; default: all.")
@click.option("--presets", help="Names, with commas; default: all.")
@click.option("--seeds", help="Numbers, with commas; default: all.")
@click.option("--budget-minutes", type=float, default=inf, help="Start nothing that ends later.")
@click.option(
    "--results", type=click.Path(path_type=Path), help="Default: runs/bench/<name of BENCH>.jsonl."
)
def bench(
    file: Path, tasks: str | None, presets: str | None, seeds: str | None,
    budget_minutes: float, results: Path | None,
) -> None:  # fmt: skip
    """Train the tasks of BENCH with its presets, as far as the results file does not have it yet.

    It may be stopped at any moment: what was run is kept, and the same command goes on."""
    from agentrl.evaluation.bench import BenchPlan, read_bench
    from agentrl.evaluation.bench_runs import read_results, run_pieces

    about, work = read_bench(file), Path("runs/bench").resolve()
    results = results or work / f"{file.stem}.jsonl"
    plan = BenchPlan(about, file, work, read_results(results))
    wanted = _named(presets, about.presets, "--presets")
    chosen = _named(tasks, about.tasks, "--tasks")
    pairs = [(t, p) for t in chosen for p in about.presets_of(t) if p in wanted]
    known = sorted({seed for pair in pairs for seed in about.seeds_of(pair)})
    numbers = [int(seed) for seed in _named(seeds, map(str, known), "--seeds")]
    until = time.monotonic() + 60 * budget_minutes
    for pieces in (plan.tuning(chosen), plan.reported(pairs, numbers)):
        run_pieces(pieces, plan.done, results, until=until)
    click.echo(f"{len(plan.done)} results in {results}")


def _named(given: str | None, known: Iterable[str], option: str) -> list[str]:
    names = list(known)
    for name in given.split(",") if given else ():
        if name not in names:
            raise ConfigError(f"{option} {name!r}; {nearest(name, names)}")
    return given.split(",") if given else names
