"""Scoring the current policy on held-out tasks, through the same queue as training."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from agentrl.algorithms.sampling.rollouts import evaluation_rollouts
from agentrl.algorithms.sampling.scores import common_score, score_metrics, spread_metrics
from agentrl.config import RunConfig
from agentrl.config.policies import has_no_own_policy
from agentrl.loading import import_error, load_attribute
from agentrl.processes import PHASE
from agentrl.store.base import Store
from agentrl.types import Json, NewRollout, Rollout

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
    """Log the scores of tasks after `step` steps, as `eval/<name>` and so on for each named
    temperature, unless they are in the store already. Each task is played once, before and after
    training with the last of the temperatures `eval.samples` times. seats: role or policy -> policy
    that plays it."""
    done = {row.step: row.metrics for row in await store.steps(config.name)}
    if "eval/score" in done.get(step, {}):
        return
    outer = step in (0, config.steps)
    if outer:
        after = f" after {step} steps" if config.steps else ""
        log.log(PHASE, f"scoring {len(tasks)} held-out tasks{after}")
    started = time.monotonic()
    asked, known = {}, temperatures(config, step)
    for name, temperature in known.items():
        sampling = replace(config.sampling, temperature=temperature)
        samples = config.eval.samples if outer and name == [*known][-1] else 1
        rounds = tasks * samples
        asked[name] = evaluation_rollouts(config, step, name, rounds, sampling, seats, candidate)
    metrics: dict[str, float] = {}
    played = await play(store, asked)
    for name, rollouts in played.items():
        found = score_metrics(name, rollouts) | spread_metrics(name, rollouts, len(tasks), config)
        metrics |= {f"eval/{key}": x for key, x in found.items()}
    metrics |= common_score(config, played["score"], len(tasks))
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
