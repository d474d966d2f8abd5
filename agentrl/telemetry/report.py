"""What a finished run leaves to look at: table, two traces, learning curve, paths."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agentrl.config import RunConfig
from agentrl.config import policies as team
from agentrl.store.base import Store
from agentrl.telemetry.show import render
from agentrl.telemetry.standings import standings
from agentrl.types import Purpose, Rollout, StepRow


async def write(
    store: Store,
    config: RunConfig,
    steps: list[StepRow],
    checkpoint: str | None,
    seconds: float,
    console: Console | None = None,
) -> None:
    """Print the report of a run and save its learning curve."""
    console = console or Console()
    table = scores(steps)
    if table.row_count:
        console.print(table)
    if (pool := standings(steps)) is not None:
        console.print(pool)
    for title, rollout in (await _examples(store, config)).items():
        trace = await store.trace(rollout.id)
        if trace:
            console.print(f"[bold]{title}[/]")
            console.print(render(trace))
    rows = [_split(steps, seconds), await _failures(store, config), _refused(steps)]
    for row in (*rows, *unheard(config, steps).values()):
        if row:
            console.print(row, highlight=False, markup=False)
    paths = {"store": config.store, "checkpoint": checkpoint, "curve": curve(config, steps)}
    for name, path in paths.items():
        if path:
            console.print(f"{name:<11}{path}", highlight=False, markup=False, soft_wrap=True)


def curve(config: RunConfig, steps: list[StepRow]) -> Path | None:
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
    for role, points in roles(committed).items():
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


def roles(steps: list[StepRow]) -> dict[str, list[tuple[int, float]]]:
    """The learning curve of each role, as (step, mean reward); empty where there is one role."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in steps:
        for name, value in row.metrics.items():
            if name.startswith("role/") and name.endswith("/reward"):
                role = name.removeprefix("role/").removesuffix("/reward")
                found.setdefault(role, []).append((row.step, value))
    return found


def scores(steps: list[StepRow]) -> Table:
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


def refused(steps: Iterable[StepRow]) -> tuple[int, int]:
    """Calls that were not trained: those without token ids, those that the model cannot read."""
    rows = [row.metrics for row in steps]
    long = sum(int(row.get("calls/too_long", 0.0)) for row in rows)
    return sum(int(row.get("calls/refused", 0.0)) for row in rows) - long, long


def _refused(steps: list[StepRow]) -> str:
    without, long = refused(steps)
    parts = [f"{without} model calls without token ids were not trained"] if without else []
    if long:
        parts.append(f"{long} model calls longer than the model's context were not trained")
    return "; ".join(parts)


def unread(config: RunConfig, groups: int) -> str:
    """What is said of groups that were discarded because the models cannot read them."""
    log = Path(config.output, "logs", "algorithm.log")
    return (
        f"{groups} groups were discarded: they have token ids that the policy does not have, or "
        f"rewards or log-probs that cannot be. Which, and why, is in {log}."
    )


def unheard(config: RunConfig, steps: list[StepRow]) -> dict[str, str]:
    """Of several policies those that had their turn to learn and no call to learn from, each with a
    sentence: its roles may have other names in the agent."""
    found = {}
    for name in team.trained_policies(config) if config.policies else []:
        calls = [row.metrics[f"{name}/calls"] for row in steps if f"{name}/calls" in row.metrics]
        if calls and not any(calls):
            own = [role for role, player in team.policy_by_role(config).items() if player == name]
            heard = ", ".join(map(repr, sorted(roles(steps)))) or "none of several"
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
