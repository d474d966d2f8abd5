"""What a finished run leaves to look at: table, two traces, learning curve, paths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agentrl.config import RunConfig
from agentrl.config import policies as team
from agentrl.store.base import Store
from agentrl.telemetry.show import render_trace
from agentrl.types import Purpose, Rollout, StepRow

WIN_RATE, ELO = "selfplay/win_rate/", "selfplay/elo/"


async def print_report(
    store: Store,
    config: RunConfig,
    steps: list[StepRow],
    checkpoint: str | None,
    seconds: float,
    console: Console | None = None,
) -> None:
    """Print the report of a run and save its learning curve."""
    console = console or Console()
    table = score_table(steps)
    if table.row_count:
        console.print(table)
    if (pool := win_rate_table(steps)) is not None:
        console.print(pool)
    for title, rollout in (await _examples(store, config)).items():
        trace = await store.trace(rollout.id)
        if trace:
            console.print(f"[bold]{title}[/]")
            console.print(render_trace(trace))
    rows = [_split(steps, seconds), await _failures(store, config), _refused(steps)]
    for row in (*rows, *policies_without_calls(config, steps).values()):
        if row:
            console.print(row, highlight=False, markup=False)
    paths = {"store": config.store, "checkpoint": checkpoint, "curve": save_curve(config, steps)}
    for name, path in paths.items():
        if path:
            console.print(f"{name:<11}{path}", highlight=False, markup=False, soft_wrap=True)


def save_curve(config: RunConfig, steps: list[StepRow]) -> Path | None:
    """Save reward per step, of each role too where there are several, and held-out score as
    `curve.png`; None when nothing was trained."""
    committed = [row for row in steps if row.committed and "reward/mean" in row.metrics]
    if not committed:
        return None
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    means = [row.metrics["reward/mean"] for row in committed]
    spread = [row.metrics.get("reward/std", 0.0) for row in committed]
    x = [row.step for row in committed]
    low, high = zip(
        *((m - s / 2, m + s / 2) for m, s in zip(means, spread, strict=True)), strict=True
    )
    axes.fill_between(x, low, high, alpha=0.15, linewidth=0)
    axes.plot(x, means, label="training reward (mean ± half a standard deviation)")
    for role, points in reward_curves(committed).items():
        axes.plot(*zip(*points, strict=True), "--", linewidth=1, label=f"{role} (training)")
    held = [(row.step, row.metrics["eval/score"]) for row in steps if "eval/score" in row.metrics]
    if held:
        how = "" if config.eval.temperature else ", greedy"
        axes.plot(*zip(*held, strict=True), "o-", label=f"held-out{how}")
    axes.set(xlabel="step", ylabel="reward", title=config.name)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path = Path(config.output, "curve.png")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def reward_curves(steps: list[StepRow]) -> dict[str, list[tuple[int, float]]]:
    """The learning curve of each role, as (step, mean reward); empty where there is one role."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in steps:
        for name, value in row.metrics.items():
            if name.startswith("role/") and name.endswith("/reward"):
                role = name.removeprefix("role/").removesuffix("/reward")
                found.setdefault(role, []).append((row.step, value))
    return found


def score_table(steps: list[StepRow]) -> Table:
    """Held-out scores before and after, or of the one evaluation there was, and those of roles."""
    shown = {"before": steps[0].metrics, "after": steps[-1].metrics}
    if len(steps) == 1:
        shown = {"mean": steps[0].metrics}
    table = Table(title="held-out tasks", title_justify="left")
    for column in ("", *shown):
        table.add_column(column, justify="right" if column else "left")
    for key in ("eval/score", "eval/sampled"):
        if any(key in metrics for metrics in shown.values()):
            values = [_score(metrics.get(key)) for metrics in shown.values()]
            table.add_row(key.removeprefix("eval/"), *values)
        every = {name for metrics in shown.values() for name in metrics}
        for name in sorted(name for name in every if name.startswith(f"{key}/")):
            values = [_score(metrics.get(name)) for metrics in shown.values()]
            table.add_row(f"  {name.removeprefix(f'{key}/')}", *values)
        missing = [metrics.get(f"{key}_missing", 0.0) for metrics in shown.values()]
        if any(missing):
            table.add_row("  without a score", *(f"{value:.0f}" for value in missing))
    return table


def _score(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1%}" if 0.0 <= value <= 1.0 else f"{value:.3g}"


async def _examples(store: Store, config: RunConfig) -> dict[str, Rollout]:
    """The latest evaluated rollout that succeeded and the latest that did not, by title."""
    found: dict[str, Rollout] = {}
    rollouts = await store.rollouts(config.name, purpose=Purpose.EVAL)
    for rollout in sorted(rollouts, key=lambda item: item.step, reverse=True):
        found.setdefault("A success" if rollout.reward() > 0 else "A failure", rollout)
    return {
        f"{title}, after {row.step} steps": row
        for title, row in sorted(found.items(), reverse=True)
    }


async def _failures(store: Store, config: RunConfig) -> str:
    failed = [row.failure for row in await store.rollouts(config.name) if row.failure]
    if not failed:
        return ""
    kinds = sorted({failure.kind for failure in failed})
    counts = ", ".join(f"{sum(f.kind == kind for f in failed)} {kind}" for kind in kinds)
    return f"{len(failed)} rollouts failed ({counts}); the last one: {failed[-1].message}"


def untrained_calls(steps: Iterable[StepRow]) -> tuple[int, int]:
    """Calls that were not trained: those without token ids, those that the model cannot read."""
    rows = [row.metrics for row in steps]
    long = sum(int(row.get("calls/too_long", 0.0)) for row in rows)
    return sum(int(row.get("calls/refused", 0.0)) for row in rows) - long, long


def _refused(steps: list[StepRow]) -> str:
    without, long = untrained_calls(steps)
    parts = [f"{without} model calls without token ids were not trained"] if without else []
    if long:
        parts.append(f"{long} model calls longer than the model's context were not trained")
    return "; ".join(parts)


def policies_without_calls(config: RunConfig, steps: list[StepRow]) -> dict[str, str]:
    """Of several policies those that had their turn to learn and no call to learn from, each with a
    sentence: its roles may have other names in the agent."""
    found = {}
    for name in team.trained(config) if config.policies else []:
        calls = [row.metrics[f"{name}/calls"] for row in steps if f"{name}/calls" in row.metrics]
        if calls and not any(calls):
            own = [role for role, player in team.claims(config).items() if player == name]
            heard = ", ".join(map(repr, sorted(reward_curves(steps)))) or "none of several"
            found[name] = (
                f"the policy {name!r} has learned nothing: no call was made in its roles "
                f"({', '.join(map(repr, own))}); the roles that spoke are {heard}"
            )
    return found


def _split(steps: list[StepRow], seconds: float) -> str:
    total = {
        part: sum(row.metrics.get(f"time/{part}", 0.0) for row in steps)
        for part in ("build", "rollouts", "update", "eval")
    }
    parts = ", ".join(f"{part} {value:.0f}" for part, value in total.items())
    return f"{seconds:.0f} s in all: {parts}"


def win_rate_table(steps: Sequence[StepRow]) -> Table | None:
    """Row against column: the policy's win rate as the pool estimated it when the row's snapshot
    was taken, or in the last row in the end, and Elo ratings in the end. None: there is no pool."""
    known = {row.step + 1: row.metrics for row in steps if row.committed}
    last = known[max(known)] if known else {}
    pool = {_taken(key): last[key] for key in sorted(last) if key.startswith(ELO)}
    if not pool:
        return None
    table = Table(title="win rate of the row against the column", title_justify="left")
    for column in ("", *(f"@{taken}" for taken in pool), "Elo"):
        table.add_column(column, justify="right" if column else "left")
    for taken, rating in pool.items():
        table.add_row(f"@{taken}", *_rates(known.get(taken, {}), pool), f"{rating:.0f}")
    table.add_row("in the end", *_rates(last, pool), f"{last['selfplay/elo']:.0f}")
    return table


def _rates(metrics: dict[str, float], columns: dict[int, float]) -> list[str]:
    found = {_taken(key): value for key, value in metrics.items() if key.startswith(WIN_RATE)}
    return [f"{found[taken]:.0%}" if taken in found else "" for taken in columns]


def _taken(key: str) -> int:
    """The steps after which the snapshot of a metric was taken."""
    return int(key.rpartition("@")[2])
