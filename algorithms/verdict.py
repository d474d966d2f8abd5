"""The verdict on the scores of a run: how they changed, compared with chance. The report, `agentrl
view` and `agentrl why` all use this rule to judge whether a run became better or worse.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from statistics import fmean, stdev

from agentrl.core.config import RunConfig
from agentrl.core.types import Rollout, are_shares, gain_text, score_text
from agentrl.store.base import Store

HELD_OUT, SAMPLED, TRAINING = "held-out", "sampled held-out", "training reward"
EVALUATIONS = {HELD_OUT: "score", SAMPLED: "sampled"}  # names of their groups
# Standard errors from which a change is significant: three tests (held-out, sampled, training)
# together report a false change in 1 of 50 runs.
LOOKS_Z = 2.5
MIN_TREND_STEPS = 5  # steps needed to estimate noise from the scatter around a line


@dataclass(frozen=True, slots=True)
class Change:
    """The means of the first and of the last fifth of all measurements."""

    first: float
    last: float
    best: float  # maximum over all fifths
    noise: float  # the largest difference to expect by chance; infinite if unknown
    share: bool = False  # whether it is shown as a percentage

    @property
    def gain(self) -> float:
        return self.last - self.first

    @property
    def risen(self) -> bool:
        """Whether the value rose significantly and has not lost most of the gain again."""
        return self.gain > self.noise and self.gain >= self.best - self.last

    @property
    def fallen(self) -> bool:
        """Whether the value fell significantly, or has lost most of an earlier gain (the best of
        five needs more evidence than a single difference)."""
        lost = self.best - self.last
        return -self.gain > self.noise or (lost > self.gain and lost > 1.5 * self.noise)

    @property
    def text(self) -> str:
        chance = f", of which chance explains {self.chance}" if self.chance else ""
        gain = gain_text(self.gain, self.share)
        return f"{self.format(self.first)} to {self.format(self.last)} ({gain}{chance})"

    @property
    def chance(self) -> str:
        """The noise in words; empty if it is unknown."""
        return gain_text(self.noise, self.share).lstrip("+") if self.noise < math.inf else ""

    def format(self, value: float) -> str:
        """A value of this score in words."""
        return score_text(value, self.share)


def changes_text(changes: Mapping[str, Change]) -> str:
    """The changes as text; empty if there are none."""
    texts = [f"{name} {change.text}" for name, change in changes.items()]
    return f"means of the first and last fifth: {', '.join(texts)}" if texts else ""


def changes_of(rows: Sequence[Mapping[str, float]], config: RunConfig) -> dict[str, Change]:
    """How the held-out scores and the training reward changed. The training reward is left out
    where it is not evidence: in games, where one seat's win is another's loss, if tasks are chosen
    by their reward, and for data sets, where rewards are constant."""
    chosen = config.tasks.order == "difficulty" or not config.plays_rollouts
    game = any("selfplay/games" in row for row in rows)
    trained = [_trained(row) for row in rows if "reward/mean" in row and not (game or chosen)]
    changes = held_out_changes(rows)
    if len(trained) > 1:
        changes[TRAINING] = change_of(trained, same_tasks=False, share=are_shares(rows))
    return changes


def held_out_changes(rows: Sequence[Mapping[str, float]]) -> dict[str, Change]:
    """How the scores of evaluations changed, by their name. rows: the metrics of steps."""
    share = are_shares(rows)
    measured = {
        name: [_held_out(row, f"eval/{key}") for row in rows if f"eval/{key}" in row]
        for name, key in EVALUATIONS.items()
    }
    return {
        name: change_of(values, same_tasks=True, share=share)
        for name, values in measured.items()
        if len(values) > 1
    }


def not_improved(rows: Sequence[Mapping[str, float]]) -> str:
    """A sentence with the evidence that a run did not improve; empty without evidence, or if
    a score rose and none fell. The training reward is not evidence for this, because each step has
    other tasks."""
    changes = held_out_changes(rows)
    fallen = [
        f"{name} {x.format(x.first)} to {x.format(x.last)}, at best {x.format(x.best)}{_by_luck(x)}"
        for name, x in changes.items()
        if x.fallen
    ]
    if fallen:
        return f"it got worse ({', '.join(fallen)})"
    if any(x.last > x.first or x.first == x.last == 1.0 for x in changes.values()):
        return ""
    unchanged = [
        f"{name} {x.format(x.first)} to {x.format(x.last)}{_by_luck(x)}"
        for name, x in changes.items()
    ]
    return f"no improvement was measured ({', '.join(unchanged)})" if unchanged else ""


def _by_luck(change: Change) -> str:
    return f", where chance makes up to {change.chance}" if change.chance else ""


def change_of(
    measured: Sequence[tuple[float, float]], *, same_tasks: bool, share: bool = False
) -> Change:
    """measured: values with the variance of their errors, which repeated measurements on the same
    tasks share. With different tasks, single measurements at both ends are not evidence; the
    scatter of many around a line is."""
    size = math.ceil(len(measured) / 5)
    means = [fmean(x for x, _ in measured[i : i + size]) for i in range(0, len(measured), size)]
    first, last = measured[:size], measured[-size:]
    error = sum(error for _, error in (*first, *last)) / size
    noise = LOOKS_Z * math.sqrt(error if same_tasks else error / size if size > 1 else math.inf)
    if not same_tasks and len(measured) >= MIN_TREND_STEPS:
        noise = min(noise, _by_chance([x for x, _ in measured], len(measured) - size))
    return Change(means[0], fmean(x for x, _ in last), max(means), noise, share)


def trial_name(name: str, trial: int) -> str:
    """The name of an evaluation that is played again, after so many that failed."""
    return f"{name}.{trial:02d}" if trial else name


async def evaluation(store: Store, run: str, step: int, name: str) -> list[Rollout]:
    """The rollouts of an evaluation; before the first step those of the last start, because in
    earlier starts all rollouts failed."""
    group, latest = f"{run}/eval/{step:06d}/{name}", list[Rollout]()
    for trial in count():
        rows = await store.rollouts(run, group=trial_name(group, trial))
        if not rows or step:
            return rows or latest
        latest = rows
    raise AssertionError


def task_input(row: Rollout) -> str:
    """The input of a task; its question, if the input is only an index."""
    question = row.task.get("question", row.task.get("input", row.task))
    return json.dumps(question, sort_keys=True)


async def paired(
    store: Store,
    run: str,
    changes: Mapping[str, Change],
    steps: Mapping[str, Sequence[int]],
    without: Container[str] = (),
) -> dict[str, Change]:
    """The changes with the noise of a paired comparison of tasks. steps: of the evaluations, by
    name. without: inputs of trained tasks, which are left out if other tasks remain."""
    result = dict(changes)
    for name in changes.keys() & EVALUATIONS.keys():
        size = math.ceil(len(steps[name]) / 5)
        group = EVALUATIONS[name]
        rows = [
            [await evaluation(store, run, step, group) for step in chosen_steps]
            for chosen_steps in (steps[name][:size], steps[name][-size:])
        ]
        leaks = any(
            task_input(row) in without for end in rows for rollouts in end for row in rollouts
        )
        ends = [[_by_task(rollouts, without) for rollouts in end] for end in rows]
        by_task = [outcomes for end in ends for outcomes in end]
        common = [task for task in by_task[0] if all(task in outcomes for outcomes in by_task)]
        first, last = (
            [fmean(outcomes[task] for outcomes in end) for task in common] for end in ends
        )
        if len(common) > 1:
            differences = [b - a for a, b in zip(first, last, strict=True)]
            values = [value for outcomes in by_task for value in outcomes.values()]
            most = max(values) - min(values)
            # Where all are equal they do not show how far apart others could be.
            noise = _noise_of_mean(differences, most) if most else changes[name].noise
            change = replace(changes[name], noise=min(changes[name].noise, noise))
            # Some have no outcome, or were trained.
            if leaks or any(len(outcomes) > len(common) for outcomes in by_task):
                change = replace(change, first=fmean(first), last=fmean(last), noise=noise)
            result[name] = change
    return result


def _noise_of_mean(differences: Sequence[float], most: float) -> float:
    """The noise of the mean of paired differences. `most`: one task that rose and one that fell by
    this much are added (Agresti and Min, 2005), so that few equal tasks are weak evidence."""
    more = [*differences, most, -most]
    return LOOKS_Z * stdev(more) / math.sqrt(len(more))


def _by_task(rollouts: Sequence[Rollout], without: Container[str]) -> dict[str, float]:
    """The mean outcome of each task with an outcome; without trained tasks, if others remain."""
    outcomes: dict[str, list[float]] = {}
    for row in [row for row in rollouts if task_input(row) not in without] or rollouts:
        if math.isfinite(value := row.reward()):
            outcomes.setdefault(repr(row.task), []).append(value)
    return {task: fmean(values) for task, values in outcomes.items()}


def _by_chance(values: Sequence[float], span: int) -> float:
    """The difference of two values of a line, `span` apart, that chance makes of this scatter
    around it. Few values estimate their scatter badly, so they have a larger quantile."""
    n, middle, mean = len(values), (len(values) - 1) / 2, fmean(values)
    squares = sum((i - middle) ** 2 for i in range(n))
    slope = sum((i - middle) * (x - mean) for i, x in enumerate(values)) / squares
    squared_error = sum((x - mean - slope * (i - middle)) ** 2 for i, x in enumerate(values))
    error = math.sqrt(squared_error / (n - 2) / squares)
    return span * error * LOOKS_Z * (1 + (LOOKS_Z**2 + 1) / (4 * (n - 2)))  # of Student's t


def _held_out(row: Mapping[str, float], name: str) -> tuple[float, float]:
    """A score, on the tasks that all evaluations share, and the variance of its error."""
    score = row.get("eval/common", row[name]) if name == "eval/score" else row[name]
    return score, ((row.get(f"{name}_high", math.inf) - row.get(f"{name}_low", 0.0)) / 4) ** 2


def _trained(row: Mapping[str, float]) -> tuple[float, float]:
    """The mean reward of all sampled rollouts, and the variance of its error: rollouts of a group
    have the same task."""
    mean = row.get("reward/sampled_mean", row["reward/mean"])
    return mean, row.get("reward/std", math.inf) ** 2 / max(row.get("groups", 1.0), 1.0)
