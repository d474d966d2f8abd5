"""The console output of a run: progress and warnings from the store, and lines of its logs."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from agentrl.algorithms.ratings import game_figures
from agentrl.core.config import RunConfig
from agentrl.core.config.derived import has_no_own_policy
from agentrl.core.files import duration_text
from agentrl.core.processes import PHASE
from agentrl.core.types import (
    EMPTY,
    Counts,
    ErrorKind,
    Purpose,
    StepRow,
    are_shares,
    how_many,
    missing_text,
    score_text,
    step_in_words,
    step_number,
)
from agentrl.store.base import Store
from agentrl.telemetry import report
from agentrl.telemetry.report import (
    failure_sentence,
    figure,
    function_names,
    health,
    idle_sides,
    rate,
    roles_without_calls,
)

# Width of an interval above which it is printed, as for fewer than about 25 tasks.
WIDE = 0.35
BAR = 30  # columns
REDRAW_INTERVAL = 0.5  # seconds between redraws
PLAIN_LINES = 20  # step lines of a whole run without a terminal to redraw
LINE = re.compile(r"\S+ \S+ ([A-Z]+) (agentrl[\w.]*): (.*)")  # the format of `log_to_stderr`
IDS = re.compile(r"\S*\d\S*")  # the parts that differ between messages of one kind
LOG_POLL = 0.5  # seconds between reads of log files
# Seconds by which logged lines are delayed, so that earlier steps are printed first.
LOG_DELAY = 1.0
PREPARING = "preparing the policy and starting the agents ..."
RESUMED = "{} of {} steps are done already; --fresh would start over"
UNSEEN_TOOLS = (
    "tools are not seen: {:.0f} model calls sent tools, but no prompt has the name of one. The chat"
    " template of the policy's server renders none; choose a model or template that does"
)
UNTRAINED = (
    "{} model calls are not trained: their upstream gave no token ids. Serve the policy with an"
    " engine that gives them."
)
DISCARDED = (
    "{} groups were discarded: they have unknown token ids, or impossible rewards or log-probs."
    " For details see {}."
)
ROLLED_BACK = (
    "{:.0f} steps were rolled back and are trained again from step {}, because of a damaged"
    " checkpoint or --from"
)


async def show_progress(
    store: Store,
    config: RunConfig,
    console: Console | None = None,
    *,
    quiet: bool = False,
    first: Callable[[float], object] = lambda at: None,
) -> None:
    """Show a run until cancelled: live on a terminal, else in lines; quiet: warnings only. first:
    prints the log lines of processes up to a time; called before newer rows of the store are
    printed."""
    console = console or Console()
    progress, warnings = Progress(config), RunWarnings(config, console, first=first)
    if not quiet:
        where = escape(config.output)
        steps = f"{config.steps} steps, " if config.steps else ""
        console.print(f"[bold]{config.name}[/]: {steps}{where}", highlight=False)
    try:
        # A notebook sets this variable for its commands; it cannot move the cursor up.
        if quiet or not console.is_terminal or "JPY_PARENT_PID" in os.environ:
            return await _print_lines(store, progress, warnings, quiet=quiet)
        with Live(progress.table(), console=console, refresh_per_second=4, transient=True) as live:
            while True:
                await _update(store, progress, warnings)
                live.update(progress.table())
                await _next_change(store)
    finally:  # the last rows may explain why the run ended
        await _update(store, progress, warnings)


async def _update(store: Store, progress: Progress, warnings: RunWarnings) -> None:
    await progress.update(store)
    await warnings.print_new(store, progress.rows)


async def _print_lines(
    store: Store, progress: Progress, warnings: RunWarnings, *, quiet: bool
) -> None:
    printed, scored = -1, -1
    interval = max(1, progress.config.steps // PLAIN_LINES)
    await progress.update(store)
    if not quiet and (done := len(progress.committed)):
        warnings.console.print(RESUMED.format(done, progress.config.steps), highlight=False)
    preparing = not (quiet or progress.ready)

    def print_new() -> None:
        nonlocal printed, scored
        printed = min(printed, len(progress.committed) - 1)
        for row in [] if quiet else progress.rows:
            if row.step > scored and (line := progress.scores_line(row)):
                scored = row.step
                warnings.first(row.at)
                warnings.console.print(line, highlight=False, soft_wrap=True)
            if row.step > printed and row.committed:
                printed = row.step
                if row.step % interval == 0 or step_number(row.step) == progress.config.steps:
                    line = progress.line(row)
                    warnings.first(row.at)
                    warnings.console.print(line, highlight=False, soft_wrap=True)

    try:
        while True:
            print_new()
            if preparing:
                warnings.console.print(PREPARING, highlight=False)
            preparing = False
            await warnings.print_new(store, progress.rows)  # after earlier steps
            await _next_change(store)
            await progress.update(store)
    finally:  # steps since the last read
        await progress.update(store)
        print_new()


async def _next_change(store: Store) -> None:
    cursor = await store.cursor()
    started = time.monotonic()
    await store.wait(cursor, timeout=5.0)
    remaining = REDRAW_INTERVAL - (time.monotonic() - started)
    if remaining > 0:  # a busy run changes hundreds of times a second
        await store.wait(2**62, timeout=remaining)


@dataclass(slots=True)
class Progress:
    """The state of a run at the last read of the store."""

    config: RunConfig
    rows: list[StepRow] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    ready: bool = False
    fractions: bool = True  # all rewards so far are from 0 to 1, so they are shown as percentages

    async def update(self, store: Store) -> None:
        """Read new steps only: a committed step changes only if it is rolled back."""
        state = await store.run(self.config.name)
        done = min(len(self.committed), state.step if state else 0)
        self.rows[done:] = await store.steps(self.config.name, after=done - 1)
        self.counts = await store.counts(self.config.name)
        self.judge()
        self.ready = has_no_own_policy(self.config) or bool(await store.policies(self.config.name))

    def judge(self) -> None:
        self.fractions &= are_shares(row.metrics for row in self.rows)

    @property
    def committed(self) -> list[StepRow]:
        return [row for row in self.rows if row.committed]

    def seconds_left(self) -> float | None:
        """The estimated remaining seconds, from the last ten steps and all evaluations, without the
        first of each, which includes the start of the agents. None before the first step."""
        rows, steps, interval = self.committed, self.config.steps, self.config.eval.every
        if not rows:
            return None
        recent, done = rows[1:][-10:] or rows, len(rows)
        step = _step_seconds(recent)
        times = {row.step: row.metrics.get("time/eval") for row in self.rows}
        scored = {at: seconds for at, seconds in times.items() if seconds is not None}
        planned = [*range(0, steps, interval or steps), steps] if scored else []
        due = sum(at not in scored for at in {*planned} if at >= done)
        seconds = [*scored.values()]
        return step * (steps - done) + due * fmean(seconds[1:] or seconds or [0.0])

    def table(self) -> Group:
        """Rows of cells, no wider than the terminal: long cells are cut, not wrapped."""
        done, left = len(self.committed), self.seconds_left()
        bar = ProgressBar(total=max(1, self.config.steps), completed=done, width=BAR)
        remaining = f"{duration_text(left)} left" if left is not None else ""
        rows: list[Sequence[RenderableType]] = [
            (bar, f"step {done}/{self.config.steps}", remaining)
        ]
        if not self.ready:
            rows.append((PREPARING,))
        elif not done:
            finished = self.counts.succeeded + self.counts.failed
            rows.append((f"scoring the untrained policy: {finished} rollouts done",))
        else:
            last = self.committed[-1].metrics
            scores = [
                m["eval/score"] for m in (row.metrics for row in self.rows) if "eval/score" in m
            ]
            first, now = (self.number(x) for x in (scores[0], scores[-1])) if scores else ("", "")
            heldout = f"{now} (from {first})" if scores else "-"
            reward, *rates = self._reward_and_rates(last)
            rows += [(reward, f"held-out {heldout}"), rates]
            if idle := idle_sides(last):
                rows.append(idle)
            for policy in self.config.policies or [""]:
                if figures := health(last, policy):
                    rows.append(figures)
        if self.counts.failed:
            rows.append((how_many(self.counts.failed),))
        return Group(*map(_in_one_line, rows))

    def line(self, row: StepRow) -> str:
        """A line about a committed step, with the remaining time if it is the last one so far."""
        metrics, parts = row.metrics, [f"step {step_number(row.step)}/{self.config.steps}"]
        if EMPTY in metrics:
            parts.append(f"nothing to learn from: {failures_of(metrics) or 'no rollout failed'}")
        else:
            parts += self._reward_and_rates(metrics)
            if row.step == 0:  # corrects the estimate
                parts.append(f"{_step_seconds([row]):.2g} s a step")
            parts += filter(None, [failures_of(metrics)])
            if row.step == self.committed[-1].step:
                parts.append(f"{duration_text(self.seconds_left() or 0.0)} left")
        return "  ".join(parts)

    def scores_line(self, row: StepRow) -> str:
        """A line about the evaluation of the policy after `row.step` steps; empty without one."""
        score = row.metrics.get("eval/score")
        parts = [f"held-out {self.number(score)}{self._of(row)}"] if score is not None else []
        functions = function_names([row]).items()
        parts += [f"{label} {row.metrics[name]:.3g}" for name, label in functions]
        # After a warm-up the policy is no longer untrained.
        first = "before the first step" if self.config.warmup.data else "untrained"
        when = step_in_words(row.step, Purpose.EVAL) if row.step else first
        when = f"{when}:" if self.config.steps else ""  # `agentrl eval` scores any checkpoint
        return "  ".join(filter(None, [when, *parts])) if parts else ""

    def _of(self, row: StepRow) -> str:
        """The number of tasks of a held-out score, and its interval if they are few."""
        count = row.metrics.get("eval/tasks")
        tasks = f" of {count:.0f} task{'s' * (count != 1)}" if count else ""
        tasks += missing_text(row.metrics.get("eval/score_missing", 0.0))
        ends = ("eval/score_low", "eval/score_high")
        bounds = [row.metrics.get(end, math.nan) for end in ends]
        if self.fractions and bounds[1] - bounds[0] > WIDE:
            tasks += f" (95 % interval {' to '.join(map(self.number, bounds))})"
        return tasks

    def number(self, value: float) -> str:
        return score_text(value, self.fractions)

    def _reward_and_rates(self, metrics: dict[str, float]) -> tuple[str, str, str]:
        if "data/epochs" in metrics:  # a run on a data set has no rollouts
            names = {"loss": "preferences/loss", "accuracy": "rewards/accuracies"}
            loss, accuracy = (f"{word} {figure(metrics, name)}" for word, name in names.items())
            change = round(-metrics.get("logps/chosen_drop", math.nan), 3) + 0.0  # no -0.000
            return loss, accuracy, f"log-prob of the chosen {change:+.3f}"
        outcome = f"reward {self.number(metrics.get('reward/mean', math.nan))}"
        if not self.fractions:
            outcome += f" ± {figure(metrics, 'reward/std')}"
        outcome += report.trained_reward(self.config, self.committed, metrics)
        seats = "  ".join(f"{name} {value}" for name, value in game_figures(metrics).items())
        return (
            seats or outcome,
            f"{rate(metrics, 'rollouts')} rollouts/s",
            f"{rate(metrics, 'tokens/completion')} tokens/s",
        )


def _step_seconds(rows: Sequence[StepRow]) -> float:
    """The mean seconds of steps, without evaluations."""
    parts = ("time/rollouts", "time/update", "time/checkpoint")
    return fmean(sum(row.metrics.get(part, 0.0) for part in parts) for row in rows)


def _in_one_line(cells: Sequence[RenderableType]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for _ in cells:
        grid.add_column(no_wrap=True, overflow="ellipsis")
    grid.add_row(*cells)
    return grid


@dataclass(slots=True)
class RunWarnings:
    """Prints each warning of a run once. Failures from before this start are printed only if
    another of the same kind follows."""

    config: RunConfig
    console: Console
    earlier_failures: dict[ErrorKind, int] | None = None  # attempts by kind, before this start
    first: Callable[[float], object] = lambda at: None  # as in `show_progress`
    roles_checked: bool = False
    discarded: int = 0  # number of groups at the last warning
    printed: set[Hashable] = field(default_factory=set)

    async def print_new(self, store: Store, rows: Sequence[StepRow]) -> None:
        """Print the new warnings of these steps."""
        committed = [row for row in rows if row.committed]
        for row in rows:
            if not row.committed and (steps := row.metrics.get("steps/rolled_back")):
                sentence = ROLLED_BACK.format(steps, step_number(row.step))
                self._print_once(("rolled back", row.step), sentence)
        if committed and not self.roles_checked:
            self.roles_checked = True
            self._print_once("roles", await roles_without_calls(store, self.config))
        discarded = sum(int(row.metrics.get("groups/unreadable", 0)) for row in committed)
        if discarded >= 10 * self.discarded and discarded:
            self.discarded = discarded
            log = Path(self.config.output, "logs", "algorithm.log")
            self._print_once(("discarded", discarded), DISCARDED.format(discarded, log))
        without_ids, _ = report.untrained_calls(committed)
        if without_ids > 0:
            self._print_once("untrained", UNTRAINED.format(without_ids))
        failures = await store.failures(self.config.name)
        if self.earlier_failures is None:
            self.earlier_failures = {row.kind: row.attempts for row in failures}
        for failed in failures:
            if failed.attempts > self.earlier_failures.get(failed.kind, 0):
                self._print_once(("failure", failed.kind), failure_sentence(self.config, failed))
        unseen = sum(row.metrics.get("calls/tools_unseen", 0.0) for row in committed)
        if unseen:
            self._print_once("tools", UNSEEN_TOOLS.format(unseen))

    def _print_once(self, key: Hashable, sentence: str) -> None:
        if sentence and key not in self.printed:
            self.printed.add(key)
            self._print(sentence)

    def _print(self, sentence: str) -> None:
        self.first(time.time())
        self.console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def failures_of(metrics: Mapping[str, float]) -> str:
    """How many of a step's rollouts failed, by kind; empty if none did."""
    start = "rollouts/failed/"
    kinds = {name.removeprefix(start): n for name, n in metrics.items() if name.startswith(start)}
    failed, total = metrics.get("rollouts/failed", 0.0), metrics.get("rollouts", metrics.get(EMPTY))
    if not failed or total is None:
        return ""
    counted = ", ".join(f"{count:.0f} {kind}" for kind, count in sorted(kinds.items()))
    return f"{failed:.0f} of {total:.0f} rollouts failed{f' ({counted})' if counted else ''}"


def console_level(*, quiet: bool, verbose: bool) -> int:
    """The lowest log level that the console shows."""
    return logging.WARNING if quiet else logging.INFO if verbose else PHASE


@dataclass(slots=True)
class LogFollower:
    """Prints new lines of the log files of a run's processes.

    Lines at PHASE, between INFO and WARNING, describe the run's current phase. Other messages that
    differ in numbers and ids only are printed once, and counted at the end."""

    console: Console
    level: int
    files: Sequence[Path]
    _read: dict[Path, int] = field(default_factory=dict)  # bytes read
    # (level, kind of message) -> count, last message.
    _alike: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._read = {file: file.stat().st_size for file in self.files if file.is_file()}

    async def follow(self) -> None:
        """Print new log lines until cancelled, and then once more, because the last lines matter
        most."""
        try:
            while True:
                self.look(time.time() - LOG_DELAY)
                await asyncio.sleep(LOG_POLL)
        finally:
            self.look()
            for (level, _), (count, last) in self._alike.items():
                # Each process may log such a message at its start.
                if count > len(self.files) and level != "info":
                    self._say(f"{level}: {count - 1} more like it, the last one: {last}")

    def look(self, until: float = math.inf) -> None:
        """Print the new lines that were logged until that time, in unix seconds."""
        for file in filter(Path.is_file, self.files):
            with file.open("rb") as log:
                log.seek(self._read.setdefault(file, 0))
                for line in log:
                    if not line.endswith(b"\n") or until < _logged_at(line) <= time.time():
                        break
                    self._read[file] += len(line)
                    self._print(file, line.decode("utf-8", "replace").rstrip("\n"))

    def _print(self, file: Path, line: str) -> None:
        match = LINE.fullmatch(line)
        levels = logging.getLevelNamesMapping() | {"PHASE": PHASE}
        if match is None or levels.get(match[1], 0) < self.level:
            return
        level, sentence = match[1].lower(), match[3]
        if level != "phase":
            kind = sentence if level == "info" else IDS.sub("#", sentence)
            count, _ = self._alike.get((level, kind), (0, ""))
            self._alike[level, kind] = count + 1, sentence
            if count:
                return
            sentence = f"{level}: {sentence} ({file.name})"
        self._say(sentence)

    def _say(self, sentence: str) -> None:
        self.console.print(sentence, highlight=False, markup=False, soft_wrap=True)


def _logged_at(line: bytes) -> float:
    """The time of a log line in unix seconds, at the end of its millisecond; 0 for the later lines
    of a message."""
    try:
        return datetime.fromisoformat(line[:23].decode().replace(",", ".")).timestamp() + 1e-3
    except ValueError:
        return 0.0
