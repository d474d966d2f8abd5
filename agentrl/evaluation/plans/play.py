"""Play the games of an evaluation plan, by a run without steps in a folder beside the evaluated.

The name of a plan's run has a hash of everything that affects its games. So the same command finds
finished games, also after `kill -9`, and plays the rest; other weights or settings make another
run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from math import isfinite, sqrt
from pathlib import Path
from statistics import fmean, stdev

import msgspec
from rich.console import Console

from agentrl import trainer
from agentrl.base import folder_lock
from agentrl.base.files import make_folder
from agentrl.base.threads import run_blocking
from agentrl.checkpoints.saved import SavedCheckpoint
from agentrl.config import RunConfig
from agentrl.config.policies import FrozenPolicy
from agentrl.config.run_file import tasks_of as tasks_of_split
from agentrl.errors import AgentRLError, ConfigError
from agentrl.evaluation.checkpoint.runs import check_any_succeeded, evaluation_run
from agentrl.evaluation.plans.plan import EvaluationPlan
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.types import Json, Purpose, Rollout, RolloutState

GAMES = (
    "agent", "workspace", "verifier", "judges", "reward_models", "sampling", "policy", "policies",
    "upstreams", "roles", "role_rules", "prompts", "selfplay", "images", "seed",
)  # fmt: skip
"""The settings that affect games."""
LineupRollouts = dict[str, list[Rollout]]  # by lineup, in the order of the tasks


def frozen_policy(
    config: RunConfig, checkpoint: SavedCheckpoint, policy: str
) -> tuple[str, FrozenPolicy]:
    """The served name and record of a policy in a checkpoint; the name of another run's policy
    contains the run's. Raises ConfigError if the checkpoint has no such policy."""
    directory = checkpoint.path / policy if config.policies else checkpoint.path
    if not any((directory / f).is_file() for f in ("config.json", "adapter_config.json")):
        raise ConfigError(
            f"{checkpoint.path}: the policy {policy!r} is not in it; give a checkpoint of a run "
            f"with {'these policies' if config.policies else 'one policy'}"
        )
    output = checkpoint.path.parent.parent
    who = policy if output == Path(config.output).resolve() else f"{output.name}-{policy}"
    name = f"{who}@{checkpoint.path.name}".replace(".", "-")  # adapters' names have no dots
    return name, FrozenPolicy(policy=policy, directory=str(directory), steps=checkpoint.steps)


def tasks_of(config: RunConfig, limit: int = 0) -> list[dict[str, Json]]:
    """The first `limit` (0: all) held-out tasks or, without any, training tasks."""
    key = "heldout" if config.tasks.heldout else "train"
    if not getattr(config.tasks, key):
        raise ConfigError("tasks.heldout is missing: there is nothing to play")
    tasks = tasks_of_split(config, key)
    return tasks[: limit or None]


def run_plan(
    config: RunConfig,
    checkpoint: SavedCheckpoint,
    plan: EvaluationPlan,
    kind: str,
    *,
    fresh: bool = False,
) -> LineupRollouts:
    """Play a plan and return its games by lineup. config: the trained run; checkpoint: of the
    policies that are not players of the plan; fresh: play all games again. Raises AgentRLError if
    every game failed or a role made no call."""
    own = plan_run(config, checkpoint, plan, kind)
    trainer.check(own)
    if fresh:
        trainer.clear(own)
    read = {Path(one.directory) for one in plan.players.values() if one.directory}
    read = {folder.parent if config.policies else folder for folder in read}
    with folder_lock.reading(*(folder for folder in read | {checkpoint.path} if folder.is_dir())):
        return run_blocking(played(own, plan))


def plan_run(
    config: RunConfig, checkpoint: SavedCheckpoint, plan: EvaluationPlan, kind: str
) -> RunConfig:
    """The settings of the evaluation run."""
    settings = [getattr(config, key) for key in GAMES]
    directories = [str(checkpoint.path), *(one.directory for one in plan.players.values())]
    # The newest modification time (ns) tells apart weights that another run wrote to the same path.
    # 0: a hub name.
    weights = [
        (name, max((file.stat().st_mtime_ns for file in Path(name).rglob("*")), default=0))
        for name in directories
        if name
    ]
    about = msgspec.json.encode([plan, weights, settings])
    name = f"{config.name}-{kind}-{sha256(about).hexdigest()[:8]}"
    return msgspec.structs.replace(
        evaluation_run(config, name, checkpoint.path),
        tasks=msgspec.structs.replace(
            config.tasks, heldout=config.tasks.heldout or config.tasks.train
        ),
    )


async def played(config: RunConfig, plan: EvaluationPlan) -> LineupRollouts:
    output = make_folder(Path(config.output))
    async with open_store(config.store) as store:
        found = await ended(store, config, plan)
        if found is None:
            file = output / "plan.json"
            file.write_bytes(msgspec.json.encode(plan))
            console = Console(stderr=True)  # stdout is for the result
            await trainer.supervise(store, config, play=file, console=console)
            found = await ended(store, config, plan)
        if found is None:
            raise AgentRLError(f"{output}: games are missing; repeat the command")
        for name, seats in plan.lineups.items():
            await check_heard(store, name, found[name], seats)
    return found


async def ended(store: Store, config: RunConfig, plan: EvaluationPlan) -> LineupRollouts | None:
    """The games of each lineup, if all have ended."""
    found: LineupRollouts = {name: [] for name in plan.lineups}
    if await store.run(config.name) is None:
        return None
    for row in await store.rollouts(config.name, purpose=Purpose.EVAL):
        if row.state.terminal:
            found[row.group.rpartition("/")[2]].append(row)
    if any(len(rows) < len(plan.tasks) for rows in found.values()):
        return None
    return {name: sorted(rows, key=lambda row: row.index) for name, rows in found.items()}


async def check_heard(
    store: Store, lineup: str, rows: Sequence[Rollout], seats: Mapping[str, str]
) -> None:
    """Raises ConfigError for a role without a call in any game, which is probably misspelled."""
    silent = set(seats)
    for row in rows:
        if not silent:
            return
        trace = await store.trace(row.id)
        silent.difference_update(call.role for call in (trace.transitions if trace else ()))
    if silent:
        check_any_succeeded(rows, lineup, " with --fresh")
        raise ConfigError(
            f"nobody plays the role {sorted(silent)[0]!r} in {lineup}: no call of the agent has "
            "this role. If the tasks seat an opponent of their own there, name others with "
            "tasks.heldout=FILE; else use the roles of its calls (agentrl.role, graph nodes or "
            "model names). Then repeat the command with --fresh"
        )


def outcomes(rows: Iterable[Rollout]) -> list[float]:
    """The outcome of each game; NaN if missing."""
    return [row.reward() if row.state is RolloutState.SUCCEEDED else float("nan") for row in rows]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error of the finite values; NaN if there are too few."""
    known = [value for value in values if isfinite(value)]
    mean = fmean(known) if known else float("nan")
    error = stdev(known) / sqrt(len(known)) if len(known) > 1 else float("nan")
    return mean, error


def as_json(value: object) -> str:
    """Formatted JSON, with null for NaN."""
    return msgspec.json.format(msgspec.json.encode(value)).decode()
