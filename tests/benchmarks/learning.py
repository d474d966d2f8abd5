"""What credit is worth: how fast presets learn the tasks of examples/bench, at equal rollouts.

    python -m tests.benchmarks.bench_runs examples/bench/bench.toml \\
        --results tests/benchmarks/results/learning.jsonl
    python -m tests.benchmarks.learning [--json | --figure FILE | --write | --advice]

The first command runs what the results file does not have yet, and may be stopped at any moment;
`--tasks`, `--presets`, `--seeds` and `--budget-minutes` make pieces of it. The second prints what
is there: a Markdown table for each task, or one JSON object, and says what is missing; `--write`
puts it into "Which credit when" of CREDIT.md;
`--advice` trains one step of each task and compares the adviser's choice for it with the baseline.

A run is that of `agentrl train`: runner, gateway, store, policy server and learner, with an agent
that speaks HTTP and a model of 0.1 M parameters. All presets have equal numbers of rollouts,
those of branches and replays included, and every seed's model, tasks and order. Held-out tasks are
scored before training and eight times in it, 32 rollouts at temperature 1. Learning rates are
chosen by one rule, in favour of the baseline: of the task's `lrs`, or the bench file's, the one
with which the baseline has the largest area under the curve on `tuning_seeds`, none of which is
reported. All presets of the task have it.

Scores are normalised by those of the best and of a random policy. A curve is the interquartile mean
over seeds, `final` that of the last three evaluations, `area` that of the mean over the run, and
`ratio` the rollouts after which a preset is at the final level of the baseline, over those that
the baseline took itself; `ratio_90` of 90 % of this level. Intervals are 95 % of a bootstrap over
seeds, which are paired, after arXiv 2108.13264.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Callable, Iterable
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

import agentrl.algorithms
from agentrl.advise import advise
from agentrl.core.config import RunConfig
from tests.benchmarks.bench import Bench, BenchPlan, read_bench
from tests.benchmarks.bench_runs import FORK, read_results, run_piece
from tests.benchmarks.report import arguments

FILE = Path(__file__).parents[2] / "examples" / "bench" / "bench.toml"
RESULTS = Path(__file__).parent / "results" / "learning.jsonl"
CREDIT = Path(str(agentrl.algorithms.__file__)).parent / "CREDIT.md"
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
SAMPLES = 2000  # of the bootstrap
LAST = 3  # evaluations whose mean is the final level
GENERAL = ("auto", "batch-td", "gigpo")  # presets with a column of the page
HEADINGS = ("preset", "lr", "seeds", "final level", "area", "rollouts to 90 %", "rollouts to 100 %")
Array = NDArray[np.float64]
Summary = dict[str, dict[str, dict[str, Any]]]  # by task and preset


def on_grid(curve: list[tuple[float, float]], budget: float, points: int) -> Array:
    """[points] scores at evenly spaced numbers of rollouts, interpolated."""
    spent, scores = np.array(curve, dtype=np.float64).T
    return np.interp(np.linspace(0.0, budget, points), spent, scores)


def interquartile_mean(x: Array, axis: int = 0) -> Array:
    """Over an axis: the mean without a quarter, rounded down, at each end."""
    cut = x.shape[axis] // 4
    ordered = np.moveaxis(np.sort(x, axis=axis), axis, 0)
    middle: Array = ordered[cut : len(ordered) - cut].mean(axis=0)
    return middle


def final_level(x: Array) -> Array:
    """[..., points] -> [...]"""
    level: Array = x[..., -LAST:].mean(axis=-1)
    return level


def area(curves: Array) -> Array:
    """[seeds, points] -> [seeds]: the mean score over the run."""
    mean: Array = (curves[:, 1:] + curves[:, :-1]).mean(axis=1) / 2
    return mean


def reached(curves: Array, level: Array | float, budget: float) -> Array:
    """[..., points] -> [...]: rollouts after which a curve first is at its level; inf where it
    never is."""
    above = curves >= np.asarray(level)[..., None]
    at = np.argmax(above, axis=-1, keepdims=True)
    now, before = (
        np.take_along_axis(curves, place, axis=-1)[..., 0] for place in (at, np.maximum(at - 1, 0))
    )
    share = np.where(at[..., 0] > 0, (level - before) / np.where(now > before, now - before, 1), 1)
    spent = (at[..., 0] - 1 + share) * budget / (curves.shape[-1] - 1)
    return np.where(above.any(axis=-1), spent, np.inf)


def bootstrap(estimate: Callable[[NDArray[np.int64]], Array], seeds: int) -> list[float]:
    """The estimate and the ends of its interval. estimate: [draws] of drawn seeds, given as indices
    [draws, seeds]."""
    dice = np.random.default_rng(0)
    drawn = estimate(dice.integers(0, seeds, (SAMPLES if seeds > 1 else 1, seeds)))
    low, high = np.quantile(drawn, [0.025, 0.975], method="inverted_cdf")
    return [float(estimate(np.arange(seeds)[None])[0]), float(low), float(high)]


def rollouts_ratio(curves: Array, base: Array, share: float, budget: float) -> list[float]:
    """Rollouts of one preset until `share` of the other's final level, over those of the other
    until there. curves, base: [seeds, points] of the same seeds."""

    def estimate(drawn: NDArray[np.int64]) -> Array:
        ours, theirs = (interquartile_mean(x[drawn], axis=1) for x in (curves, base))
        level = share * final_level(theirs)
        spent = reached(theirs, level, budget)
        other = reached(ours, level, budget)
        return np.where(spent > 0, other / np.where(spent > 0, spent, 1.0), 1.0)

    return bootstrap(estimate, len(curves))


def summary(curves: Array, base: Array, budget: float) -> dict[str, Any]:
    """Of one preset on one task against the baseline; [seeds, points] each."""
    areas, theirs = area(curves), area(base)
    final = final_level(curves)

    def of_drawn(x: Array) -> list[float]:
        return bootstrap(lambda drawn: interquartile_mean(x[drawn], axis=1), len(curves))

    def gain(drawn: NDArray[np.int64]) -> Array:
        return interquartile_mean(areas[drawn], 1) - interquartile_mean(theirs[drawn], 1)

    return {
        "seeds": len(curves),
        "final": of_drawn(final),
        "area": of_drawn(areas),
        "gain": bootstrap(gain, len(curves)),
        "ratio_90": rollouts_ratio(curves, base, 0.9, budget),
        "ratio": rollouts_ratio(curves, base, 1.0, budget),
        "curve": interquartile_mean(curves).round(4).tolist(),
    }


def curves_of(plan: BenchPlan, task: str, preset: str) -> tuple[float, dict[int, Array]]:
    """Learning rate, and the normalised curve of each seed that is done, without rollouts that had
    no outcome; none before the learning rate is chosen."""
    lr = plan.learning_rate(task)
    if lr is None:
        return 0.0, {}
    bench, about = plan.bench, plan.bench.tasks[task]
    budget, points = about.rollouts or bench.rollouts, bench.evaluations + 1
    found = {}
    for seed in bench.seeds_of((task, preset)):
        row = plan.done.get(plan.piece((task, preset), lr, seed).digest)
        if row is not None:
            if row.failed:
                print(
                    f"{task} {preset} seed {seed}: {row.failed:g} rollouts failed", file=sys.stderr
                )
            scores = on_grid(row.curve, budget, points)
            found[seed] = (scores - about.random) / (about.best - about.random)
    return lr, found


def summarise(plan: BenchPlan) -> Summary:
    """Every preset on the seeds that the baseline has, too."""
    found: Summary = {}
    bench = plan.bench
    for task in bench.tasks:
        _, base = curves_of(plan, task, bench.baseline_of(task))
        for preset in bench.presets_of(task):
            lr, own = curves_of(plan, task, preset)
            if shared := sorted(own.keys() & base.keys()):
                ours, theirs = (np.stack([c[seed] for seed in shared]) for c in (own, base))
                budget = bench.tasks[task].rollouts or bench.rollouts
                row = {"lr": lr, **summary(ours, theirs, budget)}
                found.setdefault(task, {})[preset] = row
    return found


def headline(bench: Bench, found: Summary) -> dict[str, dict[str, Any]]:
    """By task: final levels of the baseline and of the best preset that plays no extra rollouts,
    which of those that were run on most seeds is soonest at the former, with its ratio."""
    best: dict[str, dict[str, Any]] = {}
    for task, rows in found.items():
        base = bench.baseline_of(task)
        others = [name for name in rows if name != base and bench.presets[name].cost == 1.0]
        if others:
            most = max(rows[name]["seeds"] for name in others)
            others = [name for name in others if rows[name]["seeds"] == most]
            winner = min(others, key=lambda name: (rows[name]["ratio"][0], -rows[name]["area"][0]))
            ratio, *interval = rows[winner]["ratio"]
            best[task] = {
                "broadcast": rows[base]["final"][0], "best": rows[winner]["final"][0],
                "preset": winner, "rollouts_ratio": ratio, "interval": interval,
            }  # fmt: skip
    return best


def missing(plan: BenchPlan, found: Summary) -> dict[str, dict[str, int]]:
    """By task and preset the reported seeds that are not in the results yet."""
    bench = plan.bench

    def left(task: str, preset: str) -> int:
        done: int = found.get(task, {}).get(preset, {}).get("seeds", 0)
        return len(bench.seeds_of((task, preset))) - done

    return {
        task: {name: count for name in bench.presets_of(task) if (count := left(task, name))}
        for task in bench.tasks
    }


def never_worse(bench: Bench, found: Summary) -> dict[str, int]:
    """Presets without extra rollouts that no task shows to be worse than the bench's baseline, by
    the interval of the gain in area, with the number of tasks where both were run on all seeds: an
    interval of a few is wide, which speaks for nobody."""
    kept: dict[str, int] = {}
    tasks = [task for task in found if bench.baseline_of(task) == bench.baseline]
    for name in sorted({name for task in tasks for name in found[task]} - {bench.baseline}):
        run = [(task, found[task][name]) for task in tasks if name in found[task]]
        whole = sum(row["seeds"] == len(bench.seeds_of((task, name))) for task, row in run)
        if bench.presets[name].cost == 1.0 and whole and all(row["gain"][2] >= 0 for _, row in run):
            kept[name] = whole
    return kept


def advised(plan: BenchPlan, found: Summary) -> dict[str, dict[str, Any]]:
    """By task that is scored by outcomes: the preset that `agentrl algorithms --for` recommends
    after one step of the baseline, and its gain in area over the baseline with its interval; None
    where the task has no results of that preset."""
    bench, choices = plan.bench, dict[str, dict[str, Any]]()
    for task in (name for name, about in bench.tasks.items() if not about.measure):
        lr, seed = bench.lrs_of(task)[0], bench.tuning_seeds[0]
        whole = plan.piece((task, bench.baseline_of(task)), lr, seed).config
        output = str(plan.work / "advice" / task)
        config = replace(
            whole, name=task, output=output, steps=1, store=f"sqlite:///{output}/run.db"
        )
        run_piece(config)
        with FORK.Pool(1) as apart:  # torch's threads here would block the processes of later runs
            lines: list[str] = apart.apply(_advise, (config,))
        (preset,) = (line.partition("choice: ")[2] for line in lines if "choice: " in line)
        shutil.rmtree(output)
        rows = found.get(task, {})
        gains = [rows[x]["gain"] for x in rows if preset_of(bench, x) == preset]
        choices[task] = {"choice": preset, "gain": gains[0] if gains else None}
    return choices


def _advise(config: RunConfig) -> list[str]:
    return asyncio.run(advise(config))


def preset_of(bench: Bench, name: str) -> str:
    """The library's preset of a preset of the bench."""
    options = (setting.partition("=") for setting in bench.presets[name].settings)
    return next(value for key, _, value in options if key == "algorithm.preset")


def page(bench: Bench, found: Summary, left: dict[str, dict[str, int]]) -> str:
    """The part of CREDIT.md that is written from the results."""
    names = " | ".join(f"`{name}`" for name in GENERAL)
    lines = [
        f"| task | baseline | {names} | better | worse |",
        f"|---|---|{'---|' * len(GENERAL)}---|---|",
    ]
    for task, rows in found.items():
        base = bench.baseline_of(task)
        cells = [task, f"{rows[base]['final'][0]:.2f}" if base in rows else ""]
        cells += [of_seeds(rows[name]) if name in rows else "" for name in GENERAL]
        several = {name: row["gain"] for name, row in rows.items() if row["seeds"] > 1}
        cells.append(listed(name for name, (_, low, _) in several.items() if low > 0))
        cells.append(listed(name for name, (_, _, high) in several.items() if high < 0))
        lines.append(f"| {' | '.join(cells)} |")
    runs = sum(sum(presets.values()) for presets in left.values())
    good = ", ".join(f"`{name}` ({n})" for name, n in never_worse(bench, found).items())
    lines += ["", "Worse on no task, with the number of tasks on which they and the baseline "
              f"have all seeds: {good or 'none'}."]  # fmt: skip
    whole = [task for task, presets in left.items() if not presets]
    lines += ["", f"Complete tasks: {', '.join(whole) or 'none'}; missing runs: {runs}."]
    return "\n".join(lines)


def of_seeds(row: dict[str, Any]) -> str:
    """The ratio of a preset; one seed has no interval."""
    ratio = shown(row["ratio"], "-")
    return ratio if row["seeds"] > 1 else ratio.partition(" ")[0]


def listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def with_results(text: str, part: str) -> str:
    """CREDIT.md with this part in the place of the one that is there."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n{part}\n{end}{after}"


def markdown(found: Summary) -> str:
    """A table for each task, the largest area first."""
    lines = []
    for task, rows in found.items():
        lines += [f"### {task}", "", f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
        for preset, row in sorted(rows.items(), key=lambda item: -item[1]["area"][0]):
            cells = [shown(row[key]) for key in ("final", "area", "ratio_90", "ratio")]
            lines.append(f"| {preset} | {row['lr']:g} | {row['seeds']} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def shown(interval: list[float], to: str = " to ") -> str:
    one, low, high = (f"{x:.2f}" if isfinite(x) else "never" for x in interval)
    return f"{one} ({low}{to}{high})"


def finite(value: Any) -> Any:
    """The same with None where a level is never reached, as JSON has no infinity."""
    if isinstance(value, dict):
        return {key: finite(x) for key, x in value.items()}
    if isinstance(value, list):
        return [finite(x) for x in value]
    return value if not isinstance(value, float) or isfinite(value) else None


def figure(bench: Bench, found: Summary, path: Path) -> None:
    """The curves over training rollouts, a plot for each task."""
    from matplotlib.figure import Figure

    columns = min(3, len(found))
    rows = -(-len(found) // columns)
    drawing = Figure(figsize=(5 * columns, 3.4 * rows), layout="constrained")
    plots = np.ravel(drawing.subplots(rows, columns, squeeze=False))
    for axes, (task, presets) in zip(plots, found.items(), strict=False):
        for preset, row in presets.items():
            budget = bench.tasks[task].rollouts or bench.rollouts
            axes.plot(np.linspace(0, budget, len(row["curve"])), row["curve"], label=preset)
        axes.set(title=task, xlabel="rollouts", ylabel="score", ylim=(-0.05, 1.05))
        axes.legend(fontsize=7)
    drawing.savefig(path, dpi=110)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--figure", type=Path, help="draw the curves into this file, too")
    parser.add_argument("--write", action="store_true", help="write CREDIT.md's page again")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--advice", action="store_true", help="train one step of each task")
    options = parser.parse_args()
    bench = read_bench(FILE)
    work = Path("runs/bench").resolve()  # not part of a digest
    plan = BenchPlan(bench, FILE, work, read_results(options.results))
    found = summarise(plan)
    left = missing(plan, found)
    if options.figure is not None and found:
        figure(bench, found, options.figure)
    if options.json:
        parts = {"tasks": headline(bench, found), "presets": found, "missing": left}
        print(json.dumps(finite(parts)))
    elif options.advice:
        print(json.dumps(finite(advised(plan, found))))
    elif options.write:
        CREDIT.write_text(with_results(CREDIT.read_text(), page(bench, found, left)))
    else:
        print(markdown(found))
        for task, presets in left.items():
            shown_left = ", ".join(f"{name} ({n})" for name, n in presets.items())
            print(f"missing of {task}, with seeds: {shown_left or 'nothing'}")


if __name__ == "__main__":
    main()
