"""Scores of evaluations: means, confidence intervals, pass@k, and the best of a run."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping, Sequence
from statistics import fmean, variance

from agentrl.base.processes import log_phase
from agentrl.config import RunConfig
from agentrl.store.base import Store
from agentrl.types import Rollout, Scope

log = logging.getLogger("agentrl.algorithm")

Z = 1.96  # quantile of the normal distribution for a two-sided 95 % interval
FEW_TASKS, ENOUGH_TASKS = 20, 40  # held-out tasks; below the first a run says what they are worth


def score_metrics(name: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """<name>: mean outcome; <name>/<role>: mean outcome of each role that has its own, such as the
    players of a game; <name>_missing: number of rollouts without an outcome, such as crashes and
    time-outs, which no mean includes."""
    outcomes: dict[str, list[float]] = {name: [rollout.reward() for rollout in rollouts]}
    for row in (row for rollout in rollouts for row in rollout.rewards):
        if row.scope is Scope.ROLE and row.name == "outcome":
            outcomes.setdefault(f"{name}/{row.target}", []).append(row.value)
    known = {key: [x for x in values if not math.isnan(x)] for key, values in outcomes.items()}
    missing = {f"{name}_missing": float(len(rollouts) - len(known[name]))}
    return missing | {key: fmean(values) for key, values in known.items() if values}


def spread_metrics(
    name: str, rollouts: Sequence[Rollout], tasks: int, config: RunConfig
) -> dict[str, float]:
    """<name>_low, <name>_high: 95 % confidence interval of the mean over tasks. With several
    rollouts per task also <name>/pass@k, for k = 1, 2, 4 ... and their number."""
    by_task: list[list[float]] = [[] for _ in range(tasks)]
    for rollout in rollouts:
        if not math.isnan(value := rollout.reward()):
            by_task[rollout.index % tasks].append(value)
    metrics, samples = _bounds(name, [fmean(xs) for xs in by_task if xs]), config.eval.samples
    if len(rollouts) > tasks:
        solved = [(len(xs), sum(x >= config.eval.threshold for x in xs)) for xs in by_task]
        for k in sorted({*(2**i for i in range(samples.bit_length())), samples}):
            values = [pass_at(k, n, c) for n, c in solved if n >= k]
            if values:
                key = f"{name}/pass@{k}"
                metrics |= {key: fmean(values)} | _bounds(key, values)
    return metrics


def pass_at(k: int, n: int, c: int) -> float:
    """pass@k for c right ones of n samples: the unbiased estimator 1 - C(n - c, k) / C(n, k),
    arXiv 2107.03374."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def _bounds(name: str, values: Sequence[float]) -> dict[str, float]:
    if len(values) < 2:
        return {}
    low, high = confidence_interval(values)
    return {f"{name}_low": low, f"{name}_high": high}


def confidence_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of two or more values. Pass one value per task, because samples
    of a task are not independent. For values in [0, 1] it is Wilson's, with the effective sample
    size for their standard error (Korn and Graubard 1998), so it is not empty if all are equal."""
    mean, error2 = fmean(values), variance(values) / len(values)
    if not 0.0 <= min(values) <= max(values) <= 1.0:
        return mean - Z * math.sqrt(error2), mean + Z * math.sqrt(error2)
    n = mean * (1.0 - mean) / error2 if error2 else float(len(values))
    middle, scale = (mean + Z * Z / (2 * n)) / (1 + Z * Z / n), Z / (1 + Z * Z / n)
    half = scale * math.sqrt(mean * (1 - mean) / n + Z * Z / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def few_tasks(n: int) -> str:
    """How little a score on so few tasks says, by Wilson's interval; empty for enough."""
    if not 0 < n < FEW_TASKS:
        return ""
    known, enough = (50 * Z / math.sqrt(tasks + Z * Z) for tasks in (n, ENOUGH_TASKS))
    return (
        f"{n} held-out task{'s' if n > 1 else ''}: with rewards of 0 and 1 a score moves in steps"
        f" of {100 / n:.0f} points, and is known to ±{known:.0f} points; {ENOUGH_TASKS} tasks give"
        f" ±{enough:.0f}"
    )


def common_score(config: RunConfig, rollouts: Sequence[Rollout], tasks: int) -> dict[str, float]:
    """eval/common: the score on the tasks that all evaluations of the run share, if this one has
    more. An evaluation takes the first tasks of the same list."""
    limits = [limit for limit in (config.eval.tasks, config.eval.curve_tasks) if limit]
    common = min(limits, default=tasks)
    if not (config.eval.every and config.steps) or tasks <= common:
        return {}
    known = [
        x
        for rollout in rollouts
        if rollout.index % tasks < common and not math.isnan(x := rollout.reward())
    ]
    return {"eval/common": fmean(known)} if known else {}


async def heldout_scores(store: Store, run: str) -> dict[int, float]:
    """Held-out scores by step, all on the same tasks, best first, ties by step."""
    series = await store.series(run, ["eval/score", "eval/common"], after=0, points=sys.maxsize)
    scores = dict(series["eval/score"]) | dict(series["eval/common"])
    return dict(sorted(scores.items(), key=lambda row: (-row[1], row[0])))


def best_step(scores: Mapping[int, float]) -> int:
    """The step with the best score, of equal ones the last: where the greedy policy always succeeds
    the sampled one still becomes more certain. 0 without scores."""
    return max(scores, key=lambda step: (scores[step], step), default=0)


def has_stalled(scores: Mapping[int, float], patience: int) -> bool:
    """Whether none of the last `patience` held-out scores is a new best. scores: of
    `heldout_scores`. patience: 0: never."""
    steps = list(scores)
    stalled = 0 < patience <= sum(step > steps[0] for step in steps)
    if stalled:
        log_phase(log, f"held-out scores have not risen since step {steps[0]}: training ends")
    return stalled
