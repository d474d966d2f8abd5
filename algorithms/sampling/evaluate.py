"""Evaluations: held-out tasks played by the current policy, through the same queue as training;
scores with confidence intervals, pass@k and the best step; and functions of the run file that
measure checkpoints (`eval.functions`).
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, variance

from msgspec.structs import replace

from agentrl.algorithms.sampling.tasks import evaluation_rollouts
from agentrl.algorithms.train.features import Feature, ServedRun
from agentrl.algorithms.verdict import trial_name
from agentrl.core import user_code
from agentrl.core.config import RunConfig
from agentrl.core.config.derived import has_no_own_policy, initial_version
from agentrl.core.errors import ConfigError, TrainingError
from agentrl.core.loading import import_error, load_attribute
from agentrl.core.processes import log_phase
from agentrl.core.types import (
    POLICY,
    ErrorKind,
    Json,
    NewRollout,
    Purpose,
    Rollout,
    Scope,
    commonest_message,
    fix_hint,
)
from agentrl.store.base import Store
from agentrl.store.records import GroupRow

log = logging.getLogger("agentrl.algorithm")

SOLVED = 0.5  # smallest reward of a solved sample, for pass@k
Z = 1.96  # quantile of the normal distribution for a two-sided 95 % interval
FEW_TASKS, ENOUGH_TASKS = 20, 40  # held-out tasks; below the first a run reports their uncertainty


def score_metrics(name: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """<name>: mean outcome; <name>/<role>: mean outcome of each role that has its own, such as the
    players of a game; <name>_missing: number of rollouts without an outcome, such as crashes and
    time-outs, which no mean includes."""
    outcomes: dict[str, list[float]] = {name: [rollout.reward() for rollout in rollouts]}
    for row in (row for rollout in rollouts for row in rollout.rewards):
        if row.scope is Scope.ROLE and row.name == "outcome":
            outcomes.setdefault(f"{name}/{row.target}", []).append(row.value)
    finite = {key: [x for x in values if not math.isnan(x)] for key, values in outcomes.items()}
    missing = {f"{name}_missing": float(len(rollouts) - len(finite[name]))}
    return missing | {key: fmean(values) for key, values in finite.items() if values}


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
        solved = [(len(xs), sum(x >= SOLVED for x in xs)) for xs in by_task]
        for k in sorted({*(2**i for i in range(samples.bit_length())), samples}):
            values = [pass_at(k, n, c) for n, c in solved if n >= k]
            if values:
                key = f"{name}/pass@{k}"
                metrics |= {key: fmean(values)} | _bounds(key, values)
    return metrics


def pass_at(k: int, n: int, c: int) -> float:
    """pass@k for c successes in n samples: the unbiased estimator 1 - C(n - c, k) / C(n, k), arXiv
    2107.03374."""
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
    """How uncertain a score on so few tasks is, by Wilson's interval; empty for enough."""
    if not 0 < n < FEW_TASKS:
        return ""
    margin, enough = (50 * Z / math.sqrt(tasks + Z * Z) for tasks in (n, ENOUGH_TASKS))
    return (
        f"{n} held-out task{'s' if n > 1 else ''}: with rewards of 0 and 1 a score moves in steps"
        f" of {100 / n:.0f} points, and is known to ±{margin:.0f} points; {ENOUGH_TASKS} tasks give"
        f" ±{enough:.0f}"
    )


def common_score(config: RunConfig, rollouts: Sequence[Rollout], tasks: int) -> dict[str, float]:
    """eval/common: the score on the tasks that all evaluations of the run share, if this one has
    more. An evaluation takes the first tasks of the same list."""
    limits = [limit for limit in (config.eval.tasks, config.eval.curve_tasks) if limit]
    common = min(limits, default=tasks)
    if not (config.eval.every and config.steps) or tasks <= common:
        return {}
    rewards = [
        x
        for rollout in rollouts
        if rollout.index % tasks < common and not math.isnan(x := rollout.reward())
    ]
    return {"eval/common": fmean(rewards)} if rewards else {}


async def heldout_scores(store: Store, run: str) -> dict[int, float]:
    """Held-out scores by step, all on the same tasks, best first, ties by step."""
    series = await store.series(run, ["eval/score", "eval/common"], after=0, points=sys.maxsize)
    scores = dict(series["eval/score"]) | dict(series["eval/common"])
    return dict(sorted(scores.items(), key=lambda row: (-row[1], row[0])))


def best_step(scores: Mapping[int, float]) -> int:
    """The step with the best score; the last of equal ones, because the sampled policy may still
    improve when the greedy one always succeeds. 0 without scores."""
    return max(scores, key=lambda step: (scores[step], step), default=0)


# Start of the message of a failure without a number.
NO_NUMBER = "VerifierError: the verifier returned"
MIN_ALIKE_FAILURES = 4  # rollouts with the same failure, from which it is not chance
MAX_TRIALS = 1000  # groups of evaluations before the first step


def temperatures(config: RunConfig, step: int) -> dict[str, float]:
    """The temperatures of an evaluation, by metric name. Before and after training also temperature
    1, but not for upstreams, which have their own sampling settings."""
    also = config.eval.samples > 0 and step in (0, config.steps) and not has_no_own_policy(config)
    return {"score": config.eval.temperature} | ({"sampled": 1.0} if also else {})


async def evaluate_heldout(
    store: Store,
    config: RunConfig,
    epoch: int,
    step: int,
    tasks: list[dict[str, Json]],
    candidate: str | None = None,
) -> None:
    """Log the scores on `tasks` after `step` steps, as `eval/<name>` for each of `temperatures`,
    unless the store has them already. Each task is rolled out once; before and after training
    `eval.samples` times at the last temperature. Before the first step it raises TrainingError if
    all rollouts fail for one cause; the next start plays them again, so that the cause can be
    fixed."""
    by_step = {row.step: row.metrics for row in await store.steps(config.name)}
    if "eval/score" in by_step.get(step, {}):
        return
    outer = step in (0, config.steps)
    if outer:
        after = f" after {step} steps" if config.steps else ""
        log_phase(log, f"scoring {len(tasks)} held-out tasks{after}")
        if step == 0 and (warning := few_tasks(len(tasks))):
            log_phase(log, warning)
    trial = await failed_trials(store, config.name) if step == 0 else 0
    started = time.monotonic()
    requested, named = {}, temperatures(config, step)
    for name, temperature in named.items():
        sampling = replace(config.sampling, temperature=temperature)
        again = max(1, config.eval.samples) if outer and name == [*named][-1] else 1
        requested[name] = evaluation_rollouts(
            config, step, trial_name(name, trial), tasks * again, sampling, candidate=candidate
        )
    metrics = {"eval/tasks": float(len(tasks))}
    played = await play(store, requested)
    if step == 0 and config.steps:
        check_first(config, [row for rollouts in played.values() for row in rollouts])
    for name, rollouts in played.items():
        scores = score_metrics(name, rollouts) | spread_metrics(name, rollouts, len(tasks), config)
        metrics |= {f"eval/{key}": x for key, x in scores.items()}
    metrics |= common_score(config, played["score"], len(tasks))
    metrics["time/eval"] = time.monotonic() - started
    await store.log(config.name, step, metrics, epoch=epoch)


def check_first(
    config: RunConfig, rollouts: Sequence[Rollout], *, unchanged_only: bool = False
) -> None:
    """Raise TrainingError if all of a run's first rollouts failed for one cause and have no reward
    to learn from. unchanged_only: only if the verifier returned no number, which a repetition
    cannot change."""
    failures = [row.failure for row in rollouts if row.failure and math.isnan(row.reward())]
    if not failures or len(failures) < len(rollouts):
        return
    same_kind = len({failure.kind for failure in failures}) == 1
    no_number = all(failure.message.startswith(NO_NUMBER) for failure in failures)
    if not no_number and (unchanged_only or not same_kind or len(failures) < MIN_ALIKE_FAILURES):
        return
    kind, message = failures[0].kind, commonest_message(failures)
    why = f" by {kind}: {message}"
    if kind is ErrorKind.VERIFIER:
        name, message = config.verifier.path, message.removeprefix("VerifierError: ")
        why = f", because of {name}: {message}" if name else f", because of {message}"
    raise TrainingError(
        f"all {len(rollouts)} rollouts failed{why}. Example: agentrl show {rollouts[0].id}."
        f" {fix_hint(kind, message)}, and rerun the command"
    )


async def failed_trials(store: Store, run: str) -> int:
    """How many evaluations before the first step ended the run, because every rollout failed."""
    rows = await store.groups(run, purpose=Purpose.EVAL, step=0, limit=MAX_TRIALS)
    trials: dict[str, list[GroupRow]] = {}
    for row in rows:
        trials.setdefault(row.id.rpartition("/")[2].partition(".")[2], []).append(row)
    return sum(all(map(all_failed, groups)) for groups in trials.values())


def all_failed(group: GroupRow) -> bool:
    """Whether every rollout failed, without a reward."""
    return 0 < group.n == group.failed and all(outcome is None for outcome in group.outcomes)


async def play(
    store: Store, requested: Mapping[str, Sequence[NewRollout]]
) -> dict[str, Sequence[Rollout]]:
    """Request groups by name and wait for them to end; returns their rollouts. Rollouts that have
    ended before do not run again, so a restarted process may repeat the request."""
    for rollouts in requested.values():
        await store.enqueue(rollouts)
    for rollouts in requested.values():
        await store.settled(rollouts[0].group)
    return {
        name: await store.rollouts(rollouts[0].run, group=rollouts[0].group)
        for name, rollouts in requested.items()
    }


class EvalFunctions(Feature):
    """They are called at each evaluation."""

    live: ServedRun

    async def start(self, run: ServedRun) -> None:
        self.live = run

    async def evaluate(self, step: int, limit: int) -> None:
        live = self.live
        await evaluate_functions(live.store, live.config, live.state.epoch, step)


async def evaluate_functions(store: Store, config: RunConfig, epoch: int, step: int) -> None:
    """Log the results of `eval.functions` on the policy after `step` steps, as
    eval/function/<name>, or <name>/<key> for a mapping. Raises ConfigError if a function raises or
    returns anything but numbers."""
    metrics: dict[str, float] = {}
    state = await store.run(config.name)
    last = state and state.checkpoint and config.checkpoint_path(state.checkpoint)
    begun = "" if config.policies else initial_version(config, POLICY)[1].directory
    checkpoint = Path(last or begun or config.model_path())
    for path in config.eval.functions:
        function = load_attribute(path, Path(config.root), key="eval.functions")
        try:
            result = await user_code.in_thread(function, checkpoint)
        except Exception as error:  # the user's function is a boundary
            raise import_error(f"eval.functions = {path!r}", error) from error
        name = f"eval/function/{path.rpartition(':')[2]}"
        numbers = result if isinstance(result, Mapping) else {"": result}
        try:
            metrics |= {f"{name}/{key}".rstrip("/"): float(x) for key, x in numbers.items()}
        except (TypeError, ValueError):
            raise ConfigError(
                f"eval.functions = {path!r} returned {result!r:.80}; it must return a number, or a "
                "mapping of names to numbers"
            ) from None
    if metrics:
        await store.log(config.name, step, metrics, epoch=epoch)
