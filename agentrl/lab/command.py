"""The commands `agentrl algorithms`, `agentrl bench` and `agentrl plan`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from math import inf
from pathlib import Path
from typing import Any

import click

from agentrl.algorithms.preflight.simulation import Simulation, Workload
from agentrl.cli import CommandGroup, numbers
from agentrl.config import load
from agentrl.errors import ConfigError, nearest

SIZES = {
    "calls": (1.0, "Mean number of model calls per rollout."),
    "tokens": (None, "Mean number of completion tokens per call."),
    "token-sigma": (0.0, "Sigma of their lognormal distribution."),
    "tool": (0.0, "Mean seconds of a tool between two calls."),
    "tool-sigma": (0.0, "Sigma of their lognormal distribution."),
    "decode": (None, "Seconds of one decode step of an engine."),
    "per-call": (0.0, "Seconds that each call adds to it."),
    "prompt": (0.0, "Seconds to prefill the new part of a call's prompt."),
    "update": (None, "Seconds of the learner per step."),
    "publish": (0.0, "Seconds to send new weights to the engines."),
}


def _sizes(command: Any) -> Any:
    for name, (default, about) in reversed(SIZES.items()):
        given: dict[str, Any] = {"required": True} if default is None else {"default": default}
        number = click.FloatRange(min=0)
        command = click.option(f"--{name}", type=number, help=about, **given)(command)
    return command


@click.command()
@click.argument("run_file", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@_sizes
@click.option("--engines", type=click.IntRange(min=1), default=1, help="vLLM servers.")
@click.option(
    "--ahead", default="0.5,1,2,4,8", show_default=True, callback=numbers(float),
    help="Values of max_staleness.",
)  # fmt: skip
def plan(
    run_file: Path, overrides: tuple[str, ...], engines: int, ahead: list[float], **sizes: float
) -> None:
    """Predict the step time of RUN_FILE for values of algorithm.max_staleness and async_sampling.

    Simulates rollouts, engines and learner from the given durations; nothing is run."""
    config = load(run_file, overrides)
    algorithm, slots = config.algorithm, config.runner.processes * config.runner.concurrency
    for key in ("group_quorum", "group_deadline"):
        if getattr(algorithm, key) is not None:
            raise ConfigError(f"algorithm.{key} is not simulated; remove it from the run file")
    work = Workload(
        groups=algorithm.groups,
        group_size=algorithm.group_size,
        ready=algorithm.group_order == "ready",
        slots=slots or algorithm.groups * algorithm.group_size,
        engines=engines,
        **sizes,
    )
    settings = [(0.0, "none")]
    settings += [(k, way) for k in ahead for way in ("drained", "in_flight")]
    found = [
        (k, way, Simulation(work, k, in_flight=way == "in_flight").run()) for k, way in settings
    ]
    click.echo("max_staleness  overlap    s/step  speed-up  sampler idle  learner idle  max lag")
    first = found[0][2].seconds
    for k, way, each in found:
        click.echo(
            f"{k:<13g}  {way:<9}  {each.seconds:>6.4g}  {first / each.seconds:>7.2f}x  "
            f"{each.sampler_idle:>12.0%}  {each.learner_idle:>12.0%}  {each.max_lag:>7}"
        )
    fastest = min(each.seconds for *_, each in found)
    k, way, best = next(row for row in found if row[2].seconds <= 1.05 * fastest)
    idle, more = "learner", "engines"
    if best.sampler_idle > best.learner_idle:
        idle, more = "sampler", "learner GPUs, or fewer engines"
    click.echo(
        f"Best: max_staleness = {k:g}, async_sampling = {way!r}, the smallest within 5 % of the "
        f"fastest. There the {idle} is idle more; {more} would use that time."
    )


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
    from agentrl.lab.bench import BenchPlan, read_bench
    from agentrl.lab.bench_runs import read_results, run_pieces

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


@click.group(cls=CommandGroup, path="algorithms", invoke_without_command=True)
@click.option("--for", "run_file", type=click.Path(path_type=Path), help="Only those for this run.")
@click.pass_context
def algorithms(context: click.Context, run_file: Path | None) -> None:
    """List the presets and modifiers of `algorithm.preset`."""
    if context.invoked_subcommand is None:
        from agentrl.lab.catalogue import catalogue

        if run_file is None:
            click.echo("\n".join(catalogue()))
        else:
            context.invoke(advise, run_file=run_file)


@algorithms.command("show")
@click.argument("name")
def show_algorithm(name: str) -> None:
    """Print the components and options of NAME, such as gspo or grpo+tis."""
    from agentrl.lab.catalogue import record

    click.echo("\n".join(record(name)))


@algorithms.command()
@click.argument("run_file", type=click.Path(path_type=Path))
def advise(run_file: Path) -> None:
    """Presets that fit RUN_FILE, by its settings and its rollouts in the store."""
    from agentrl.lab.advise import advise as read

    click.echo("\n".join(asyncio.run(read(load(run_file, [])))))
