"""The live view of a run. It reads nothing but the store."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from agentrl.config import RunConfig
from agentrl.config.policies import has_no_own_policy
from agentrl.store.base import Store
from agentrl.telemetry.warnings import RunWarnings
from agentrl.types import EMPTY, Counts, StepRow

REFRESH = 0.5  # seconds between redraws
PLAIN_LINES = 20  # step lines of a whole run where there is no terminal to redraw


async def show_progress(
    store: Store, config: RunConfig, console: Console | None = None, *, quiet: bool = False
) -> None:
    """Show the run until cancelled, redrawn on a terminal, else in lines; quiet: warnings only."""
    console = console or Console()
    progress, warnings = Progress(config), RunWarnings(config, console)
    if not quiet:
        where = escape(config.output)
        console.print(f"[bold]{config.name}[/]: {config.steps} steps, {where}", highlight=False)
    try:
        if quiet or not console.is_terminal:
            return await _print_lines(store, progress, warnings, quiet=quiet)
        with Live(progress.table(), console=console, refresh_per_second=4, transient=True) as live:
            while True:
                await _update(store, progress, warnings)
                live.update(progress.table())
                await _next_change(store)
    finally:  # the last changes may be what ended the run
        await _update(store, progress, warnings)


async def _update(store: Store, progress: Progress, warnings: RunWarnings) -> None:
    await progress.update(store)
    await warnings.print_new(store, progress.rows)


async def _print_lines(
    store: Store, progress: Progress, warnings: RunWarnings, *, quiet: bool
) -> None:
    printed = -1
    every = max(1, progress.config.steps // PLAIN_LINES)
    while True:
        await _update(store, progress, warnings)
        printed = min(printed, len(progress.committed) - 1)
        for row in [] if quiet else progress.rows:
            if row.step > printed and row.committed:
                printed = row.step
                if row.step % every == 0 or row.step + 1 == progress.config.steps:
                    warnings.console.print(progress.line(row), highlight=False)
        await _next_change(store)


async def _next_change(store: Store) -> None:
    cursor = await store.cursor()
    started = time.monotonic()
    await store.wait(cursor, timeout=5.0)
    remaining = REFRESH - (time.monotonic() - started)
    if remaining > 0:  # a busy run changes hundreds of times a second
        await store.wait(2**62, timeout=remaining)


@dataclass(slots=True)
class Progress:
    """A run as of the last read of the store."""

    config: RunConfig
    rows: list[StepRow] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    ready: bool = False

    async def update(self, store: Store) -> None:
        """Reads only new steps: a committed one changes only when it is taken back."""
        state = await store.run(self.config.name)
        done = min(len(self.committed), state.step if state else 0)
        self.rows[done:] = await store.steps(self.config.name, after=done - 1)
        self.counts = await store.counts(self.config.name)
        self.ready = has_no_own_policy(self.config) or bool(await store.policies(self.config.name))

    @property
    def committed(self) -> list[StepRow]:
        return [row for row in self.rows if row.committed]

    def seconds_left(self) -> float | None:
        """From the mean of the last ten steps, evaluations included; None before the first."""
        recent = self.committed[-10:]
        if not recent:
            return None
        parts = ("time/rollouts", "time/update", "time/eval")
        spent = sum(row.metrics.get(part, 0.0) for row in recent for part in parts)
        return spent / len(recent) * (self.config.steps - len(self.committed))

    def table(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        done, left = len(self.committed), self.seconds_left()
        bar = ProgressBar(total=max(1, self.config.steps), completed=done, width=40)
        remaining = f"{left:.0f} s left" if left is not None else ""
        grid.add_row(bar, f"step {done}/{self.config.steps}", remaining)
        if not self.ready:
            grid.add_row("preparing the policy and starting the agents ...")
        elif not done:
            finished = self.counts.succeeded + self.counts.failed
            grid.add_row(f"scoring the untrained policy: {finished} rollouts done")
        else:
            last = self.committed[-1].metrics
            scores = [
                m["eval/score"] for m in (row.metrics for row in self.rows) if "eval/score" in m
            ]
            heldout = f"{scores[-1]:.3f} (from {scores[0]:.3f})" if scores else "-"
            reward, *rates = _reward_and_rates(last)
            grid.add_row(reward, f"held-out {heldout}", *rates)
            for policy in self.config.policies or [""]:
                if health := _health(last, policy):
                    grid.add_row(*health)
        if self.counts.failed:
            grid.add_row(f"{self.counts.failed} rollouts failed")
        return grid

    def line(self, row: StepRow) -> str:
        """A committed step in one line."""
        metrics, parts = row.metrics, [f"step {row.step + 1}/{self.config.steps}"]
        if EMPTY in metrics:
            failed, every = metrics.get("rollouts/failed", 0.0), metrics[EMPTY]
            parts.append(f"nothing to learn from: {failed:.0f} of {every:.0f} rollouts failed")
        else:
            parts += [*_reward_and_rates(metrics), f"{self.seconds_left():.0f} s left"]
        if "eval/score" in metrics:
            parts.append(f"held-out {metrics['eval/score']:.3f}")
        return "  ".join(parts)


def _reward_and_rates(metrics: dict[str, float]) -> tuple[str, str, str]:
    return (
        f"reward {_number(metrics, 'reward/mean')} ± {_number(metrics, 'reward/std')}",
        f"{_rate(metrics, 'rollouts')} rollouts/s",
        f"{_rate(metrics, 'tokens/completion')} tokens/s",
    )


def _number(metrics: dict[str, float], key: str) -> str:
    value = metrics.get(key, math.nan)
    return "-" if math.isnan(value) else f"{value:.3f}"


def _health(metrics: dict[str, float], policy: str = "") -> list[str]:
    """Those metrics of the step that show first when training goes wrong. policy: which one, of
    several."""
    prefix = f"{policy}/" if policy else ""
    names = {"entropy": "policy/entropy", "KL": "old/kl", "clipped": "policy/clip_fraction"}
    keys = {word: prefix + key for word, key in names.items() if prefix + key in metrics}
    found = [f"{word} {_number(metrics, key)}" for word, key in keys.items()]
    return [policy, *found] if policy and found else found


def _rate(metrics: dict[str, float], key: str) -> str:
    seconds = metrics.get("time/rollouts", 0.0)
    return f"{metrics.get(key, 0.0) / seconds:.0f}" if seconds else "-"
