"""Scoring the current policy on held-out tasks, through the same queue as training."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from msgspec.structs import replace

from agentrl.algorithms.sampling.rollouts import evaluation_rollouts
from agentrl.config import RunConfig
from agentrl.config.policies import has_no_own_policy
from agentrl.loading import import_error, load_attribute
from agentrl.processes import PHASE
from agentrl.store.base import Store
from agentrl.types import Json, NewRollout, Rollout, Scope

log = logging.getLogger("agentrl.algorithm")


def temperatures(config: RunConfig, step: int) -> dict[str, float]:
    """At which a policy is scored; the first and the last one also as it was sampled, but not
    endpoints, which have their own sampling settings."""
    also = config.eval.sampled and step in (0, config.steps) and not has_no_own_policy(config)
    return {"score": config.eval.temperature} | ({"sampled": 1.0} if also else {})


async def evaluate_heldout(
    store: Store,
    config: RunConfig,
    epoch: int,
    step: int,
    tasks: list[dict[str, Json]],
    candidate: str | None = None,
    seats: Mapping[str, str] = {},
) -> None:
    """Log the scores of one rollout per task after `step` steps, as `eval/<name>` and so on for
    each named temperature, unless they are in the store already. seats: role or policy -> policy
    that plays it."""
    done = {row.step: row.metrics for row in await store.steps(config.name)}
    if "eval/score" in done.get(step, {}):
        return
    if step in (0, config.steps):
        after = f" after {step} steps" if config.steps else ""
        log.log(PHASE, f"scoring {len(tasks)} held-out tasks{after}")
    started = time.monotonic()
    asked = {}
    for name, temperature in temperatures(config, step).items():
        sampling = replace(config.sampling, temperature=temperature)
        asked[name] = evaluation_rollouts(config, step, name, tasks, sampling, seats, candidate)
    metrics: dict[str, float] = {}
    for name, rollouts in (await play(store, asked)).items():
        metrics |= {f"eval/{key}": x for key, x in score_metrics(name, rollouts).items()}
    metrics["time/eval"] = time.monotonic() - started
    await store.log(config.name, step, metrics, epoch=epoch)


async def evaluate_functions(store: Store, config: RunConfig, epoch: int, step: int) -> None:
    """Log what `eval.functions` say about the policy after `step` steps, as eval/function/<name>,
    or <name>/<key> of several numbers. Raises ConfigError for one that raises."""
    if not config.eval.functions:
        return
    metrics: dict[str, float] = {}
    state = await store.run(config.name)
    last = state and state.checkpoint and config.checkpoint(state.checkpoint)
    checkpoint = Path(last or config.model_path())
    for path in config.eval.functions:
        function = load_attribute(path, Path(config.root), key="eval.functions")
        try:
            found = await asyncio.to_thread(function, checkpoint)
        except Exception as error:  # the user's function is a boundary
            raise import_error(f"eval.functions = {path!r}", error) from error
        name = f"eval/function/{path.rpartition(':')[2]}"
        several = found if isinstance(found, Mapping) else {"": found}
        metrics |= {f"{name}/{key}".rstrip("/"): float(x) for key, x in several.items()}
    if metrics:
        await store.log(config.name, step, metrics, epoch=epoch)


async def play(
    store: Store, asked: Mapping[str, Sequence[NewRollout]]
) -> dict[str, Sequence[Rollout]]:
    """The rollouts of each of `asked`, a group by name, once all of them have ended. Those that
    ended before are not played again, so a process that was killed may ask once more."""
    for rollouts in asked.values():
        await store.enqueue(rollouts)
    for rollouts in asked.values():
        await store.settled(rollouts[0].group)
    return {
        name: await store.rollouts(rollouts[0].run, group=rollouts[0].group)
        for name, rollouts in asked.items()
    }


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


async def heldout_scores(store: Store, run: str) -> dict[int, float]:
    """The scores of trained policies by their steps, the best first, the earlier of equal ones."""
    found = await store.series(run, ["eval/score"], after=0, points=sys.maxsize)
    return dict(sorted(found["eval/score"], key=lambda row: (-row[1], row[0])))


async def has_stalled(store: Store, config: RunConfig) -> bool:
    """Whether the last `eval.patience` held-out scores were no better than one before."""
    steps = list(await heldout_scores(store, config.name)) if config.eval.patience else []
    stalled = 0 < config.eval.patience <= sum(step > steps[0] for step in steps)
    if stalled:
        log.log(PHASE, f"held-out scores have not risen since step {steps[0]}: training ends")
    return stalled
