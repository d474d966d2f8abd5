"""What the user sees while a run works: a view that only follows the store."""

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
from agentrl.config.policies import has_no_own_policy, policy_by_role
from agentrl.store.base import Store
from agentrl.telemetry.failures import FirstFailures
from agentrl.telemetry.report import refused, unheard, unread
from agentrl.types import EMPTY, Counts, Purpose, StepRow

REFRESH = 0.5  # seconds between redraws
PLAIN_LINES = 20  # step lines of a whole run where there is no terminal to redraw


async def follow(
    store: Store, config: RunConfig, console: Console | None = None, *, quiet: bool = False
) -> None:
    """Show the run until cancelled: redrawn on a terminal, as lines elsewhere; quiet: only what it
    warns of."""
    console = console or Console()
    model, failures = Progress(config), FirstFailures(config)
    if not quiet:
        where = escape(config.output)
        console.print(f"[bold]{config.name}[/]: {config.steps} steps, {where}", highlight=False)
    try:
        if quiet or not console.is_terminal:
            return await _follow_plain(store, model, console, failures, quiet=quiet)
        with Live(model.table(), console=console, refresh_per_second=4, transient=True) as live:
            while True:
                await model.update(store)
                model.warn(console)
                await failures.say(store, console, model.committed)
                live.update(model.table())
                await _next_change(store)
    finally:  # what ended the run may be news
        await model.update(store)
        await failures.say(store, console, model.committed)


async def _follow_plain(
    store: Store, model: Progress, console: Console, failures: FirstFailures, *, quiet: bool = False
) -> None:
    printed = -1
    every = max(1, model.config.steps // PLAIN_LINES)
    while True:
        await model.update(store)
        model.warn(console)
        printed = min(printed, len(model.committed) - 1)
        await failures.say(store, console, model.committed)
        for row in [] if quiet else model.rows:
            if row.step > printed and row.committed:
                printed = row.step
                if row.step % every == 0 or row.step + 1 == model.config.steps:
                    console.print(model.line(row), highlight=False)
        await _next_change(store)


async def silent_roles(store: Store, config: RunConfig) -> str:
    """A sentence about the roles that the run file names and no call of the first trained step has;
    empty where all spoke. Of several policies, one without any call is reported by `unheard`."""
    named = policy_by_role(config)
    if not named:
        return ""
    heard: set[str] = set()
    for row in await store.rollouts(config.name, purpose=Purpose.TRAIN, trained=0):
        trace = await store.trace(row.id)
        heard.update(call.role for call in (trace.transitions if trace else ()))
        if heard >= named.keys():
            return ""
    playing = {named[role] for role in heard & named.keys()}
    silent = [
        repr(role)
        for role, player in named.items()
        if role not in heard and (player in playing or player not in config.policies)
    ]
    if not silent:
        return ""
    spoke = ", ".join(map(repr, sorted(heard))) or "none"
    return (
        f"no call was made in the first step in the role {', '.join(silent)}, which the run file "
        f"names; the roles that spoke are {spoke}. Roles are graph nodes, agent names, model names "
        "or what `with agentrl.role(...)` says"
    )


async def _next_change(store: Store) -> None:
    cursor = await store.cursor()
    started = time.monotonic()
    await store.wait(cursor, timeout=5.0)
    remaining = REFRESH - (time.monotonic() - started)
    if remaining > 0:  # a busy run changes hundreds of times a second
        await store.wait(2**62, timeout=remaining)


@dataclass(slots=True)
class Progress:
    """A run as of the last look at the store."""

    config: RunConfig
    rows: list[StepRow] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    ready: bool = False
    warned: bool = False
    silent: str | None = None  # once it is known: a sentence, or nothing to say
    unreadable: int = 0  # groups of which that was said
    unheard: set[str] = field(default_factory=set)  # policies of which that was said
    again: set[int] = field(default_factory=set)  # steps of which that was said

    async def update(self, store: Store) -> None:
        """Committed steps change only by being taken back, so only what came after is read."""
        state = await store.run(self.config.name)
        done = min(len(self.committed), state.step if state else 0)
        self.rows[done:] = await store.steps(self.config.name, after=done - 1)
        self.counts = await store.counts(self.config.name)
        if self.committed and self.silent is None:
            self.silent = await silent_roles(store, self.config)
        self.ready = has_no_own_policy(self.config) or bool(await store.policies(self.config.name))

    def warn(self, console: Console) -> None:
        """Says once that there are calls which are not learned from, and how many, and of each
        policy that has none, the roles of the run file in which nobody has spoken, and every step
        that had to do without groups."""
        for policy, sentence in unheard(self.config, self.committed).items():
            if policy not in self.unheard:
                self.unheard.add(policy)
                console.print(sentence, highlight=False, markup=False)
        for row in self.rows:
            taken = row.metrics.get("steps/taken_back", 0.0)
            if taken and not row.committed and row.step not in self.again:
                self.again.add(row.step)
                console.print(
                    f"{taken:.0f} steps were taken back, and are trained again from step"
                    f" {row.step + 1}: their checkpoint was damaged, or --from said so",
                    highlight=False,
                )
        if self.silent:
            console.print(self.silent, highlight=False, markup=False)
            self.silent = ""
        unreadable = sum(int(row.metrics.get("groups/unreadable", 0)) for row in self.committed)
        if unreadable > self.unreadable:
            self.unreadable = unreadable
            console.print(unread(self.config, unreadable), highlight=False, markup=False)
        without, _ = refused(self.committed)
        if without > 0 and not self.warned:
            self.warned = True
            console.print(
                f"[bold]{without} model calls are not trained[/]: their upstream gave no token"
                ' ids. Serve the policy with ids, or set algorithm.inexact = "retokenize".',
                highlight=False,
            )

    @property
    def committed(self) -> list[StepRow]:
        return [row for row in self.rows if row.committed]

    def seconds_left(self) -> float | None:
        """From the mean of the last ten steps, evaluations included; None before the first."""
        recent = self.committed[-10:]
        if not recent:
            return None
        spent = sum(_seconds(row.metrics) for row in recent) / len(recent)
        return spent * (self.config.steps - len(self.committed))

    def table(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        done = len(self.committed)
        bar = ProgressBar(total=max(1, self.config.steps), completed=done, width=40)
        left = self.seconds_left()
        grid.add_row(
            bar,
            f"step {done}/{self.config.steps}",
            f"{left:.0f} s left" if left is not None else "",
        )
        if not self.ready:
            grid.add_row("preparing the policy and starting the agents ...")
        elif not done:
            finished = self.counts.succeeded + self.counts.failed
            grid.add_row(f"scoring the untrained policy: {finished} rollouts done")
        else:
            last = self.committed[-1].metrics
            grid.add_row(
                f"reward {_number(last, 'reward/mean')} ± {_number(last, 'reward/std')}",
                f"held-out {self._heldout()}",
                f"{_rate(last, 'rollouts')} rollouts/s",
                f"{_rate(last, 'tokens/completion')} tokens/s",
            )
            for policy in self.config.policies or [""]:
                if health := _health(last, policy):
                    grid.add_row(*health)
        if self.counts.failed:
            grid.add_row(f"{self.counts.failed} rollouts failed")
        return grid

    def line(self, row: StepRow) -> str:
        metrics = row.metrics
        score = f"  held-out {metrics['eval/score']:.3f}" if "eval/score" in metrics else ""
        left = self.seconds_left()
        if EMPTY in metrics:
            failed, every = metrics.get("rollouts/failed", 0.0), metrics[EMPTY]
            none = f"nothing to learn from: {failed:.0f} of {every:.0f} rollouts failed"
            return f"step {row.step + 1}/{self.config.steps}  {none}{score}"
        return (
            f"step {row.step + 1}/{self.config.steps}"
            f"  reward {_number(metrics, 'reward/mean')} ± {_number(metrics, 'reward/std')}"
            f"  {_rate(metrics, 'rollouts')} rollouts/s"
            f"  {_rate(metrics, 'tokens/completion')} tokens/s"
            f"  {left:.0f} s left{score}"
        )

    def _heldout(self) -> str:
        scores = [row.metrics["eval/score"] for row in self.rows if "eval/score" in row.metrics]
        return f"{scores[-1]:.3f} (from {scores[0]:.3f})" if scores else "-"


def _seconds(metrics: dict[str, float]) -> float:
    return sum(metrics.get(f"time/{part}", 0.0) for part in ("rollouts", "update", "eval"))


def _number(metrics: dict[str, float], key: str) -> str:
    value = metrics.get(key, math.nan)
    return "-" if math.isnan(value) else f"{value:.3f}"


def _health(metrics: dict[str, float], policy: str = "") -> list[str]:
    """What tells first that training goes wrong, as far as the step measured it: of the policy or,
    of several, of one, which is named."""
    prefix = f"{policy}/" if policy else ""
    found = [
        f"{word} {_number(metrics, prefix + key)}"
        for word, key in (
            ("entropy", "policy/entropy"),
            ("KL", "old/kl"),
            ("clipped", "policy/clip_fraction"),
        )
        if prefix + key in metrics
    ]
    return [policy, *found] if policy and found else found


def _rate(metrics: dict[str, float], key: str) -> str:
    seconds = metrics.get("time/rollouts", 0.0)
    return f"{metrics.get(key, 0.0) / seconds:.0f}" if seconds else "-"
