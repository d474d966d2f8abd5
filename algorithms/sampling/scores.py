"""What the rollouts of an evaluation come to, how sure that is, and which evaluation was best."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping, Sequence
from statistics import fmean, variance

from agentrl.config import RunConfig
from agentrl.processes import PHASE
from agentrl.store.base import Store
from agentrl.types import Rollout, Scope

log = logging.getLogger("agentrl.algorithm")

Z = 1.96  # deviations on both sides of the mean of a normal distribution that hold 95 % of it


def score_metrics(name: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """<name>: the mean outcome; <name>/<role>: the mean of each role with its own outcome, such as
    the players of a game; <name>_missing: the number of rollouts without an outcome, such as
    crashes and time-outs, which are in no mean."""
    found: dict[str, list[float]] = {name: [rollout.reward() for rollout in rollouts]}
    for row in (row for rollout in rollouts for row in rollout.rewards):
        if row.scope is Scope.ROLE and row.name == "outcome":
            found.setdefault(f"{name}/{row.target}", []).append(row.value)
    known = {key: [x for x in values if not math.isnan(x)] for key, values in found.items()}
    missing = {f"{name}_missing": float(len(found[name]) - len(known[name]))}
    return missing | {key: fmean(values) for key, values in known.items() if values}


def spread_metrics(
    name: str, rollouts: Sequence[Rollout], tasks: int, config: RunConfig
) -> dict[str, float]:
    """<name>_low, <name>_high: 95 % confidence interval of the mean over the tasks. Of tasks that
    were played several times, <name>/pass@k too, k = 1, 2, 4 ... and the number of times."""
    known: list[list[float]] = [[] for _ in range(tasks)]
    for row in rollouts:
        if not math.isnan(value := row.reward()):
            known[row.index % tasks].append(value)
    found, samples = _bounds(name, [fmean(xs) for xs in known if xs]), config.eval.samples
    if len(rollouts) > tasks:
        solved = [(len(v), sum(x >= config.eval.threshold for x in v)) for v in known]
        for k in sorted({*(2**i for i in range(samples.bit_length())), samples}):
            values = [pass_at(k, n, c) for n, c in solved if n >= k]
            if values:
                key = f"{name}/pass@{k}"
                found |= {key: fmean(values)} | _bounds(key, values)
    return found


def pass_at(k: int, n: int, c: int) -> float:
    """The probability that one of k samples is right where c of n were: the unbiased estimator of
    arXiv 2107.03374, 1 - C(n - c, k) / C(n, k)."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def _bounds(name: str, values: Sequence[float]) -> dict[str, float]:
    if len(values) < 2:
        return {}
    low, high = confidence_interval(values)
    return {f"{name}_low": low, f"{name}_high": high}


def confidence_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % for the mean of two or more values, one of each task, so that a task's samples do not
    count as independent. Of values from 0 to 1 Wilson's, with the sample size that has the
    values' standard error (Korn and Graubard 1998), so it is not empty where all are equal."""
    mean, error2 = fmean(values), variance(values) / len(values)
    if not 0.0 <= min(values) <= max(values) <= 1.0:
        return mean - Z * math.sqrt(error2), mean + Z * math.sqrt(error2)
    n = mean * (1.0 - mean) / error2 if error2 else float(len(values))
    middle, share = (mean + Z * Z / (2 * n)) / (1 + Z * Z / n), Z / (1 + Z * Z / n)
    half = share * math.sqrt(mean * (1 - mean) / n + Z * Z / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def common_score(config: RunConfig, rollouts: Sequence[Rollout], tasks: int) -> dict[str, float]:
    """eval/common: the score of the tasks that every evaluation of the run plays, where this one
    played more. Both numbers of tasks are the first so many of the same list."""
    limits = [limit for limit in (config.eval.tasks, config.eval.curve_tasks) if limit]
    common = min(limits, default=tasks)
    if not (config.eval.every and config.steps) or tasks <= common:
        return {}
    known = [
        x for row in rollouts if row.index % tasks < common and not math.isnan(x := row.reward())
    ]
    return {"eval/common": fmean(known)} if known else {}


async def heldout_scores(store: Store, run: str) -> dict[int, float]:
    """The scores of trained policies by their steps, the best first, the earlier of equal ones,
    all of the same tasks."""
    found = await store.series(run, ["eval/score", "eval/common"], after=0, points=sys.maxsize)
    same = dict(found["eval/score"]) | dict(found["eval/common"])
    return dict(sorted(same.items(), key=lambda row: (-row[1], row[0])))


def has_stalled(scores: Mapping[int, float], patience: int) -> bool:
    """Whether the last `patience` held-out scores were no better than one before. scores: as of
    `heldout_scores`; patience: 0: any number."""
    steps = list(scores)
    stalled = 0 < patience <= sum(step > steps[0] for step in steps)
    if stalled:
        log.log(PHASE, f"held-out scores have not risen since step {steps[0]}: training ends")
    return stalled
