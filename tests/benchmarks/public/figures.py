"""Figures of the public benchmark: means over held-out tasks with intervals, and the table."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any

Z = 1.96  # 95 %
Figures = dict[str, Any]
Rows = Mapping[tuple[str, str, int], Figures]  # by task, arm and seed
MEASURES = ("reward", "strict", "lenient")
HARDEST, EASIEST = 0.03, 0.6  # shares right before training between which a task shows anything
LEARNED = "It learned"  # how `agentrl why` begins


def values(figures: Figures, measure: str) -> list[float]:
    """A number for each held-out task."""
    return [float(value) for value in figures[measure]]


def interval(numbers: Sequence[float]) -> list[float]:
    """Mean, and the ends of its interval. A one and a zero are added for its width alone, so that
    a few equal numbers do not seem exact (Agresti and Coull)."""
    mean = fmean(numbers)
    wide = [*numbers, min(0.0, *numbers), max(1.0, *numbers)]
    half = Z * stdev(wide) / math.sqrt(len(wide))
    return [mean, mean - half, mean + half]


def averaged(runs: Sequence[Figures], when: str, measure: str) -> list[float]:
    """Of each task the mean over seeds, whose runs have the same held-out tasks."""
    columns = [values(run[when], measure) for run in runs]
    return [fmean(task) for task in zip(*columns, strict=True)]


def gain(runs: Sequence[Figures], measure: str) -> list[float]:
    """Mean and interval of what each task gained."""
    before, after = (averaged(runs, when, measure) for when in ("before", "after"))
    return interval([b - a for a, b in zip(before, after, strict=True)])


def summary(rows: Rows) -> dict[str, Figures]:
    """All figures of each task."""
    by_task: dict[str, dict[str, dict[int, Figures]]] = defaultdict(lambda: defaultdict(dict))
    for (task, arm, seed), figures in rows.items():
        by_task[task][arm][seed] = figures
    return {task: of_task(arms) for task, arms in by_task.items() if "train" in arms}


def of_task(arms: Mapping[str, Mapping[int, Figures]]) -> Figures:
    seeds = sorted(arms["train"])
    runs = [arms["train"][seed] for seed in seeds]
    summary: Figures = {"seeds": seeds, "heldout": len(runs[0]["after"]["strict"])}
    for measure in MEASURES:
        for when in ("before", "after"):
            summary[f"{measure}_{when}"] = interval(averaged(runs, when, measure))
        summary[f"{measure}_gain"] = gain(runs, measure)
    start = summary["strict_before"][0]
    summary["suits"] = EASIEST >= start >= HARDEST
    summary["by_seed"] = [gain([run], "strict")[0] for run in runs]
    summary |= {"cpu_per_step": [run.get("cpu_per_step") for run in runs]}
    summary |= {"peak_mb": [run["peak_mb"] for run in runs], "why": [run["why"] for run in runs]}
    summary["reason"] = [next(iter(run["reasons"]), "") for run in runs]
    summary["unsaid"] = [seed for seed, run in zip(seeds, runs, strict=True) if unsaid(run)]
    for arm, when, name in (("tokens", "before", "more_tokens"), *BASELINES):
        for run in arms.get(arm, {}).values():
            summary |= {f"{m}_{name}": interval(values(run[when], m)) for m in MEASURES}
    if trl_runs := [*arms.get("trl", {}).values()]:
        for measure in ("reward", "strict"):
            summary[f"trl_{measure}_after"] = interval(averaged(trl_runs, "after", measure))
        for key in ("cpu_per_step", "peak_mb"):
            summary[f"trl_{key}"] = [run[key] for run in trl_runs]
            ours = median(run[key] for run in runs)
            summary[f"{key}_over_trl"] = ours / median(summary[f"trl_{key}"])
    return summary


BASELINES = (("baselines", "digits", "digits"), ("baselines", "common", "common"))


def unsaid(run: Figures) -> bool:
    """Whether the reward alone rose, and `agentrl why` calls that learning."""
    alone = gain([run], "reward")[1] > 0 >= gain([run], "strict")[1]
    return alone and run["why"].startswith(LEARNED)


HEAD = ("task", "seeds", "reward", "right", "gain", "named", "4 x tokens", "constant", "numbers",
        "CPU s a step", "GB")  # fmt: skip


def table(by_task: Mapping[str, Figures]) -> str:
    """A table in Markdown, in per cent, and what `agentrl why` says of each run."""
    lines = [HEAD, *(cells(task, row) for task, row in by_task.items())]
    above, *rows = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([above, f"|{'---|' * len(HEAD)}", *rows, "", *why_lines(by_task)])


def cells(task: str, row: Figures) -> list[str]:
    reward, right, named = (
        f"{percent(row[f'{m}_before'])} to {percent(row[f'{m}_after'])}" for m in MEASURES
    )
    mean, low, high = (100 * x for x in row["strict_gain"])
    gained = f"{mean:+.0f} ({low:+.0f} to {high:+.0f})"
    others = [percent(row.get(f"strict_{name}")) for name in ("more_tokens", "common", "digits")]
    cost = [x for x in row["cpu_per_step"] if x]
    costs = [f"{median(cost):.1f}" if cost else "", f"{median(row['peak_mb']) / 1000:.1f}"]
    seeds = ", ".join(map(str, row["seeds"]))
    return [task, seeds, reward, right, gained, named, *others, *costs]


def why_lines(by_task: Mapping[str, Figures]) -> list[str]:
    """What `agentrl why` says of each run, and TRL's figures."""
    lines = list[str]()
    for task, row in by_task.items():
        for seed, *why in zip(row["seeds"], row["why"], row["reason"], strict=True):
            silent = " UNSAID: the reward rose alone." * (seed in row["unsaid"])
            lines.append(f"- `{task}`, seed {seed}: {' '.join(filter(None, why))}{silent}")
        if not row["suits"]:
            lines.append(f"- `{task}` is too easy or too hard for this model to show anything")
        if "trl_strict_after" in row:
            reward, right = (percent(row[f"trl_{m}_after"]) for m in ("reward", "strict"))
            cpu, peak = (median(row[f"trl_{key}"]) for key in ("cpu_per_step", "peak_mb"))
            lines.append(
                f"- `{task}` by TRL: reward {reward}, right {right}, {cpu:.1f} CPU s a step,"
                f" {peak / 1000:.1f} GB"
            )
    return lines


def percent(bounds: Sequence[float] | None) -> str:
    return "" if bounds is None else f"{100 * bounds[0]:.0f}"
