"""The report of a finished run: scores, two rollouts, paths, and the curve as `curve.png`."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import isnan, nan
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agentrl.algorithms.ratings import game_figures, win_rate_table
from agentrl.algorithms.sampling.evaluate import MAX_TRIALS, best_step
from agentrl.core.config import RunConfig, derived, store_of
from agentrl.core.types import (
    FailureCount,
    Purpose,
    RolloutState,
    StepRow,
    are_shares,
    how_many,
    one_line,
    score_text,
    step_in_words,
    step_number,
)
from agentrl.store.base import Store

MAX_COUNTED_FAILURES = 1000  # failed rollouts whose kinds are counted


async def print_report(
    store: Store,
    config: RunConfig,
    steps: list[StepRow],
    checkpoint: str | None,
    seconds: float,
    console: Console | None = None,
) -> None:
    """Print the report of a run, and save its learning curve."""
    from agentrl.algorithms.why import verdict
    from agentrl.transcript import examples

    console = console or Console()
    table = score_table(steps, await _outcomes(store, config, steps))
    if table.row_count:
        console.print(table)
    if (rates := win_rate_table(steps)) is not None:
        console.print(rates)
    async for title, example in examples(store, config, steps):
        console.print(f"[bold]{title}[/]")
        console.print(example)
    rows = [times(config, steps, seconds), await _failures(store, config)]
    rows.append("; ".join(untrained_sentences(steps)))
    if sentence := verdict(config, steps):
        rows.append(f"{sentence}{store_option(config)}")
    for row in (*rows, *policies_without_calls(config, steps).values()):
        if row:
            console.print(row, highlight=False, markup=False)
    curve = save_curve(config, steps)
    paths = {"store": config.store, "checkpoint": checkpoint, "curve": curve}
    if any("eval/score" in row.metrics for row in steps if row.step):
        paths["best"] = Path(config.output, "checkpoints", "best")
    for name, path in paths.items():
        if path:
            note = below_untrained(steps) if name == "best" else ""
            console.print(f"{name:<11}{path}{note}", highlight=False, markup=False, soft_wrap=True)
    where = f" {config.store}" if store_option(config) else ""
    view = f"agentrl view{where} --run {config.name} --open"
    console.print(f"Next: {view}", highlight=False, markup=False, soft_wrap=True)


def below_untrained(steps: Sequence[StepRow]) -> str:
    """A note on the best checkpoint if its score is below that of the untrained policy, or ""."""
    scores = {
        row.step: row.metrics.get("eval/common", row.metrics["eval/score"])
        for row in steps
        if "eval/score" in row.metrics
    }
    first = scores.pop(0, nan)
    best = best_step(scores)
    if not scores or not scores[best] < first:
        return ""
    share = are_shares(row.metrics for row in steps)
    low, high = (score_text(score, share) for score in (scores[best], first))
    return f" ({step_in_words(best, Purpose.EVAL)}: {low}, below the untrained policy's {high})"


def store_option(config: RunConfig) -> str:
    """The --store option of a command about the run; empty for the default store, which commands
    find from the working directory."""
    return "" if config.store == store_of(config.name) else f" --store {config.store}"


def score_table(steps: list[StepRow], outcomes: Iterable[float] = ()) -> Table:
    """A table of held-out scores before and after training (or of the only evaluation), also by
    role, and the games of the first and last step. outcomes: of evaluated rollouts."""
    share = are_shares((row.metrics for row in steps), outcomes)
    figures = [row_figures for row in steps if (row_figures := game_figures(row.metrics))]
    steps = [row for row in steps if any(name.startswith("eval/") for name in row.metrics)] or steps
    shown = {"before": steps[0].metrics, "after": steps[-1].metrics}
    if len(steps) == 1:
        shown = {"mean": steps[0].metrics}
    table = _table("held-out tasks", *shown)
    named = {name for metrics in shown.values() for name in metrics}
    ordered = sorted(named, key=lambda name: re.sub(r"\d+", lambda m: m[0].zfill(9), name))
    for key in ("eval/score", "eval/sampled"):
        for name in ordered:
            bound = name.endswith(("_low", "_high"))
            if (name == key or name.startswith(f"{key}/")) and not bound:
                title = key.removeprefix("eval/") if name == key else f"  {name[len(key) + 1 :]}"
                table.add_row(title, *(_score(metrics, name, share) for metrics in shown.values()))
        missing = [metrics.get(f"{key}_missing", 0.0) for metrics in shown.values()]
        if any(missing):
            table.add_row("  without a score", *(f"{value:.0f}" for value in missing))
    for name, label in function_names(steps).items():
        table.add_row(label, *(f"{metrics.get(name, nan):.3g}" for metrics in shown.values()))
    for name in figures[-1] if figures else ():
        table.add_row(f"training: {name}", figures[0].get(name, "-"), figures[-1][name])
    return table


def trained_reward(config: RunConfig, steps: Sequence[StepRow], metrics: dict[str, float]) -> str:
    """The trained reward if it is not the outcome, for example a judge's."""
    name = derived.trained_reward(config)
    mean = metrics.get(f"reward/{name}/mean", nan)
    if name == "outcome" or isnan(mean):
        return ""
    of = {f"reward/{name}/{end}": f"reward/{end}" for end in ("mean", "std")}
    share = are_shares({of[key]: x for key, x in row.metrics.items() if key in of} for row in steps)
    return f"  {name} {score_text(mean, share)}"


def _table(title: str, *columns: str) -> Table:
    """A table whose first column has no name and is left-aligned."""
    table = Table("", title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _score(metrics: Mapping[str, float], name: str, share: bool) -> str:
    """A metric as text, with its confidence interval if it has one."""
    present = [metrics[key] for key in (name, f"{name}_low", f"{name}_high") if key in metrics]
    if not present:
        return "-"
    value, *bounds = (score_text(x, share, ".3g") for x in present)
    return f"{value} ({' to '.join(bounds)})" if bounds else value


async def _outcomes(store: Store, config: RunConfig, steps: list[StepRow]) -> list[float]:
    """The outcomes of the last evaluation."""
    evaluated = [row.step for row in steps if any(name.startswith("eval/") for name in row.metrics)]
    return [
        row.reward()
        for step in evaluated[-1:]
        for row in await store.rollouts(config.name, purpose=Purpose.EVAL, step=step)
    ]


async def _failures(store: Store, config: RunConfig) -> str:
    """A sentence with the number of failed rollouts, by kind, and the last message; without the
    trial rollouts that stopped earlier starts of the run."""
    failures = await store.search(
        config.name, state=RolloutState.FAILED, limit=MAX_COUNTED_FAILURES, budget=5.0
    )
    first = await store.groups(config.name, purpose=Purpose.EVAL, step=0, limit=MAX_TRIALS)
    trials = {re.sub(r"\.\d+$", "", id): id for id in sorted(group.id for group in first)}
    ended = {group.id for group in first} - {*trials.values()}
    rows = [row for row in failures.rows if row.group not in ended]
    if not rows:
        return ""
    kinds = Counter(row.error for row in rows if row.error is not None)
    counts = ", ".join(f"{kinds[kind]} {kind}" for kind in sorted(kinds))
    number = len(rows)
    if number == MAX_COUNTED_FAILURES:
        number, counts = (
            (await store.counts(config.name)).failed,
            f"of the last {MAX_COUNTED_FAILURES} {counts}",
        )
    last = await store.trace(rows[0].id)
    failure = last.rollout.failure if last is not None else None
    message = "" if failure is None else failure.message
    return f"{how_many(number)} ({counts}); the last one: {message}"


def untrained_calls(steps: Iterable[StepRow]) -> tuple[int, int]:
    """The numbers of untrained calls without token ids, and of those longer than the context."""
    rows = [row.metrics for row in steps]
    long = sum(int(row.get("calls/too_long", 0.0)) for row in rows)
    return sum(int(row.get("calls/refused", 0.0)) for row in rows) - long, long


def untrained_sentences(steps: Iterable[StepRow]) -> list[str]:
    kinds = ("without token ids", "longer than the model's context")
    counted = zip(untrained_calls(steps), kinds, strict=True)
    return [f"{n} model calls {kind} were not trained" for n, kind in counted if n]


def policies_without_calls(config: RunConfig, steps: list[StepRow]) -> dict[str, str]:
    """Policy -> a sentence for the user, for policies that should have learned but had no calls:
    the agent may use other names for its roles."""
    sentences = {}
    for name in derived.trained_policies(config) if config.policies else []:
        calls = [row.metrics[f"{name}/calls"] for row in steps if f"{name}/calls" in row.metrics]
        if calls and not any(calls):
            roles = [
                role for role, player in derived.policy_by_role(config).items() if player == name
            ]
            called = ", ".join(map(repr, sorted(reward_curves(steps)))) or "none of several"
            sentences[name] = (
                f"the policy {name!r} has learned nothing: no call was made in its roles "
                f"({', '.join(map(repr, roles))}); the roles with calls are {called}"
            )
    return sentences


async def roles_without_calls(store: Store, config: RunConfig) -> str:
    """A sentence about the run file's roles without a call in the first trained step, or empty."""
    named = derived.policy_by_role(config)
    if not (named and config.steps):
        return ""
    seen: set[str] = set()
    for rollout in await store.rollouts(config.name, purpose=Purpose.TRAIN, trained=0):
        trace = await store.trace(rollout.id)
        seen.update(call.role for call in (trace.transitions if trace else ()))
        if seen >= named.keys():
            return ""
    missing = [repr(role) for role in named if role not in seen]
    called = ", ".join(map(repr, sorted(seen))) or "none"
    return (
        f"no call was made in the first step in the role {', '.join(missing)}, which the run "
        f"file names; the roles with calls are {called}. Roles are graph nodes, agent names, model "
        "names or those of `with agentrl.role(...)`"
    )


def failure_sentence(config: RunConfig, failed: FailureCount) -> str:
    """The kind of a failure, how often it occurred, its message, and the command that shows it."""
    times = f"{failed.attempts} attempts" if failed.attempts > 1 else "an attempt"
    return (
        f"{failed.kind}: {times} failed so far: {one_line(failed.message)}\n"
        f"  see it: agentrl show {failed.rollout}{store_option(config)}"
    )


def figure(metrics: dict[str, float], key: str) -> str:
    value = metrics.get(key, nan)
    return "-" if isnan(value) else f"{value:.3f}"


def health(metrics: dict[str, float], policy: str = "") -> list[str]:
    """The metrics of a step that are the first to show problems. policy: if there are several."""
    prefix = f"{policy}/" if policy else ""
    names = {"entropy": "policy/entropy", "KL": "old/kl", "clipped": "policy/clip_fraction"}
    if metrics.get(f"{prefix}staleness/version_max"):
        names |= {"lag": "staleness/version_mean", "ESS": "sampler/ess"}
    keys = {word: prefix + key for word, key in names.items() if prefix + key in metrics}
    figures = [f"{word} {figure(metrics, key)}" for word, key in keys.items()]
    return [policy, *figures] if policy and figures else figures


def idle_sides(metrics: dict[str, float]) -> list[str]:
    """The fractions of a step during which sampler and learner waited for each other."""
    whole = metrics.get("time/learner_idle", 0.0) + metrics.get("time/update", 0.0)
    sides = {side: metrics.get(f"time/{side}_idle", 0.0) for side in ("sampler", "learner")}
    return [f"{side} idle {idle / whole:.0%}" for side, idle in sides.items()] if whole else []


def rate(metrics: dict[str, float], key: str) -> str:
    """The count `key` per second of rollouts, without groups that were ready before the step."""
    seconds, groups = metrics.get("time/rollouts", 0.0), metrics.get("groups", 0.0)
    waited = max(0.0, 1.0 - metrics.get("groups/ready", 0.0) / max(groups, 1.0))
    return f"{metrics.get(key, 0.0) * waited / seconds:.0f}" if seconds and waited else "-"


def times(config: RunConfig, steps: list[StepRow], seconds: float) -> str:
    """The time of this start by activity."""
    steps = [row for row in steps if row.at > time.time() - seconds] or steps

    def total(name: str) -> float:
        return sum(row.metrics.get(name, 0.0) for row in steps)

    names = {"build": "building the model", "rollouts": "rollouts", "update": "updates"}
    spent = {word: total(f"time/{name}") for name, word in names.items()}
    spent |= {"evaluation": total("time/eval"), "checkpoints": total("time/checkpoint")}
    whole = {word: round(value) for word, value in spent.items()}  # the rounded parts add up
    whole = {"start-up": max(round(seconds) - sum(whole.values()), 0), **whole}
    parts = [f"{value} {word}" for word, value in whole.items() if value]
    if config.algorithm.samples_during_update:  # otherwise sampling and learning alternate
        waited = (
            f"{side} idle {total(f'time/{side}_idle'):.0f}" for side in ("sampler", "learner")
        )
        parts += waited
    wasted = total("tokens/wasted")
    end = f"; {wasted:.0f} tokens of cancelled rollouts" if wasted else ""
    return f"{seconds:.0f} s: {', '.join(parts)}{end}"


FUNCTIONS = "eval/function/"  # metrics of `eval.functions`


def save_curve(config: RunConfig, steps: list[StepRow]) -> Path | None:
    """Save reward per step (also per role, if there are several) and held-out scores as
    `curve.png`; None if nothing was trained. The first step's reward is at 1, and the score of the
    untrained policy at 0."""
    committed = [row for row in steps if row.committed and "reward/mean" in row.metrics]
    if not committed:
        return None
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    means = [row.metrics["reward/mean"] for row in committed]
    spread = [row.metrics.get("reward/std", 0.0) for row in committed]
    x = [step_number(row.step) for row in committed]
    low = [mean - std / 2 for mean, std in zip(means, spread, strict=True)]
    high = [mean + std / 2 for mean, std in zip(means, spread, strict=True)]
    axes.fill_between(x, low, high, alpha=0.15, linewidth=0)
    at = f"at temperature {config.sampling.temperature:g}"
    axes.plot(x, means, label=f"training reward, {at} (mean ± half a deviation)")
    for role, points in reward_curves(committed).items():
        curve = [(step_number(step), reward) for step, reward in points]
        axes.plot(*zip(*curve, strict=True), "--", linewidth=1, label=f"{role} (training)")
    held_out = {"eval/score": measured_how(config, steps), "eval/sampled": "at temperature 1"}
    labels = {name: f"held-out, {how}" for name, how in held_out.items()}
    for name, label in {**labels, **function_names(steps)}.items():
        if held := [(row.step, row.metrics[name]) for row in steps if name in row.metrics]:
            axes.plot(
                *zip(*held, strict=True), "o:" if name == "eval/sampled" else "o-", label=label
            )
    axes.set(xlabel="steps", ylabel="reward", title=config.name)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path = Path(config.output, "curve.png")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def measured_how(config: RunConfig, steps: Sequence[StepRow]) -> str:
    """How held-out scores are measured: greedy or sampled, and on how many tasks."""
    at = config.eval.temperature
    counted = {row.metrics["eval/tasks"] for row in steps if "eval/tasks" in row.metrics}
    how = f"at temperature {at:g}" if at else "greedy"
    return f"{how}, {' or '.join(f'{n:.0f}' for n in sorted(counted))} tasks" if counted else how


def function_names(steps: Sequence[StepRow]) -> dict[str, str]:
    """Metric -> label of the metrics of `eval.functions`."""
    names = {name for row in steps for name in row.metrics if name.startswith(FUNCTIONS)}
    return {name: name.removeprefix(FUNCTIONS) for name in sorted(names)}


def reward_curves(steps: list[StepRow]) -> dict[str, list[tuple[int, float]]]:
    """Role -> learning curve as (step, mean reward); empty for a single role."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in steps:
        for name, value in row.metrics.items():
            if name.startswith("role/") and name.endswith("/reward"):
                role = name.removeprefix("role/").removesuffix("/reward")
                curves.setdefault(role, []).append((row.step, value))
    return curves
