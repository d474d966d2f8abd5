"""Evaluate a trained run: its held-out score, or the games of an evaluation plan.

Every evaluation is a run without steps in a folder next to the evaluated run's. The name of a
plan's run has a hash of everything that affects its games. So the same command finds finished
games, also after `kill -9`, and plays the rest; other weights or settings make another run.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import isfinite, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import msgspec
from rich.console import Console

from agentrl import trainer
from agentrl.base.failures import commonest_failure
from agentrl.base.files import make_folder
from agentrl.base.loading import load_tasks
from agentrl.base.processes import PHASE
from agentrl.base.threads import run_blocking
from agentrl.config import LoraConfig, PolicyConfig, RunConfig
from agentrl.config import policies as team
from agentrl.config.base import played_tables, tables
from agentrl.config.policies import EvaluationPlan, FrozenPolicy
from agentrl.config.run_file import store_in
from agentrl.config.schema import WarmupConfig
from agentrl.errors import AgentRLError, ConfigError
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.types import Json, Purpose, Rollout, RolloutState, RunState

STEPS = re.compile(r"(\d+)(?:\.\d+)?$")  # a checkpoint's name: its steps and its writer's epoch
GAMES = (
    "agent", "workspace", "verifier", "judges", "reward_models", "sampling", "policy", "policies",
    "upstreams", "roles", "role_rules",
)  # fmt: skip
"""The settings that affect games, besides the seed and those of parts."""
Played = dict[str, list[Rollout]]  # by lineup, in the order of the tasks


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint directory from `agentrl train`."""

    path: Path
    steps: int


def evaluate(
    config: RunConfig,
    checkpoint: Path | None,
    tasks: str | None,
    *,
    level: int = PHASE,
) -> trainer.TrainingResult:
    """Score a checkpoint, by default the run's last one, or `[upstreams]` if the run has no model
    of its own. Writes to the store that the run file names, if any."""
    config = trainer.hide_secrets(config)
    if team.has_no_own_policy(config):
        if checkpoint:
            raise ConfigError(
                f"{checkpoint}: [upstreams] answer every call, so a checkpoint has no effect; "
                "remove it, or set policy.model"
            )
    else:
        checkpoint = checkpoint or last_checkpoint(config)
        if not checkpoint.is_dir():
            raise ConfigError(f"{checkpoint}: no such checkpoint directory")
    replace = msgspec.structs.replace
    name = f"{config.name}-eval-{time.strftime('%Y%m%d-%H%M%S')}"
    heldout = str(Path(tasks).resolve()) if tasks and ":" not in tasks else tasks
    own = evaluation_run(config, name, checkpoint and checkpoint.resolve())
    evaluated = {key: one.evaluated(config) for key, one in tables(own) if "." not in key}
    own = replace(own, **evaluated)
    config = replace(
        own,
        store=own.store if trainer.has_own_store(config) else config.store,
        tasks=replace(config.tasks, heldout=heldout or config.tasks.heldout),
        eval=replace(config.eval, tasks=0) if tasks else config.eval,
    )
    trainer.check(config)
    if checkpoint:
        Console().print(scored_line(checkpoint), highlight=False, markup=False, soft_wrap=True)
    return run_blocking(_score(config, level))


async def _score(config: RunConfig, level: int) -> trainer.TrainingResult:
    result = await trainer.front(config, level=level)
    async with open_store(config.store, readonly=True) as store:
        check_any_succeeded(await store.rollouts(config.name, purpose=Purpose.EVAL), config.name)
    return result


def check_any_succeeded(rows: Sequence[Rollout], name: str, option: str = "") -> None:
    """Raises AgentRLError, with the most frequent cause, if every rollout failed. option: an
    addition to the command for the message."""
    failures = [row.failure for row in rows if row.failure]
    if failures and len(failures) == len(rows):
        cause = commonest_failure(failures, len(rows))
        raise AgentRLError(
            f"{name}: every rollout failed, {cause}; fix this and repeat the command{option}"
        )


def scored_line(checkpoint: Path) -> str:
    """A line for the console that names the scored weights."""
    named = STEPS.match(checkpoint.name)
    after = f" after step {int(named[1])}" if named else ""
    return f"scoring the policy{after}: {checkpoint}"


def checkpoint_at(path: Path) -> SavedCheckpoint:
    """The checkpoint at a path. Raises ConfigError if there is none."""
    named = STEPS.match(path.name)
    if not path.is_dir():
        raise ConfigError(f"{path}: no such checkpoint directory")
    if named is None or not (path / "state.json").is_file():
        raise ConfigError(f"{path} is not a checkpoint of a run; give <output>/checkpoints/...")
    return SavedCheckpoint(path.resolve(), int(named[1]))


def checkpoints_of(config: RunConfig) -> list[SavedCheckpoint]:
    """The checkpoints of a run on disk, oldest first."""
    folder = Path(config.output, "checkpoints")
    found = [path for path in folder.glob("*") if STEPS.match(path.name) and path.is_dir()]
    return sorted(map(checkpoint_at, found), key=lambda one: (one.steps, one.path.name))


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
    tasks = load_tasks(getattr(config.tasks, key), Path(config.root), key=f"tasks.{key}")
    return tasks[: limit or None]


def run_plan(
    config: RunConfig,
    checkpoint: SavedCheckpoint,
    plan: EvaluationPlan,
    kind: str,
    *,
    fresh: bool = False,
) -> Played:
    """Play a plan and return its games by lineup. config: the trained run; checkpoint: of the
    policies that are not players of the plan; fresh: play all games again. Raises AgentRLError if
    every game failed or a role made no call."""
    own = plan_run(config, checkpoint, plan, kind)
    trainer.check(own)
    if fresh:
        trainer.clear(own)
    return run_blocking(_played(own, plan))


def plan_run(
    config: RunConfig, checkpoint: SavedCheckpoint, plan: EvaluationPlan, kind: str
) -> RunConfig:
    """The settings of the evaluation run."""
    keys = dict.fromkeys((*GAMES, *played_tables(config), "seed"))
    settings = [getattr(config, key, None) for key in keys]  # a part may be missing
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


def evaluation_run(config: RunConfig, name: str, checkpoint: Path | None) -> RunConfig:
    """A run without steps, with this name and in a sibling folder, with a checkpoint's policies."""
    own = policies_at(config, checkpoint) if checkpoint else {}
    output = Path(config.output).with_name(name)
    own |= {"name": name, "output": str(output), "store": store_in(output), "steps": 0}
    own |= {"warmup": WarmupConfig()} if checkpoint else {}
    return msgspec.structs.replace(config, **own)


def policies_at(config: RunConfig, checkpoint: Path) -> dict[str, Any]:
    """Settings that load the policies of a checkpoint; frozen policies keep theirs."""
    if not config.policies:
        return {"policy": _policy_at(config.policy, checkpoint)}
    members = dict(config.policies)
    for name in team.trained_policies(config):
        folder = checkpoint / name
        if not folder.is_dir():
            raise ConfigError(f"{checkpoint} has no policy {name!r}, which the run file trains")
        found = _policy_at(team.view(config, name).policy, folder)
        members[name] = msgspec.structs.replace(
            members[name], model=found.model, lora=msgspec.to_builtins(found.lora)
        )
    return {"policies": members}


def _policy_at(policy: PolicyConfig, checkpoint: Path) -> PolicyConfig:
    """Settings that load a checkpoint: a model, or an adapter and the model that it names."""
    replace, file = msgspec.structs.replace, checkpoint / "adapter_config.json"
    if not file.is_file():
        return replace(policy, model=str(checkpoint), build="")
    adapter = json.loads(file.read_text(encoding="utf-8"))
    targets = adapter.get("target_modules")
    lora = LoraConfig(
        rank=adapter["r"],
        alpha=adapter["lora_alpha"],
        targets=sorted(targets) if isinstance(targets, list) else [],
        adapter=str(checkpoint),
    )
    return replace(policy, model=adapter["base_model_name_or_path"], build="", lora=lora)


def last_checkpoint(config: RunConfig) -> Path:
    """The last checkpoint in a run's store. Raises ConfigError if there is none."""
    untrained = f"run {config.name!r} has not been trained yet; train it first: agentrl train"
    file = Path(config.store.removeprefix("sqlite:///").partition("?")[0])
    if config.store.startswith("sqlite:///") and not file.is_file():
        raise ConfigError(f"{untrained} (there is no {config.store})")

    async def read() -> RunState | None:
        async with open_store(config.store, readonly=True) as store:
            return await store.run(config.name)

    state = run_blocking(read())
    if state is None:
        raise ConfigError(untrained)
    if state.checkpoint is None:
        raise ConfigError(f"run {config.name!r} has no checkpoint yet: train it, or name one")
    return config.checkpoint(state.checkpoint)


async def _played(config: RunConfig, plan: EvaluationPlan) -> Played:
    output = make_folder(Path(config.output))
    async with open_store(config.store) as store:
        found = await _ended(store, config, plan)
        if found is None:
            file = output / "plan.json"
            file.write_bytes(msgspec.json.encode(plan))
            console = Console(stderr=True)  # stdout is for the result
            await trainer.supervise(store, config, play=file, console=console)
            found = await _ended(store, config, plan)
        if found is None:
            raise AgentRLError(f"{output}: games are missing; repeat the command")
        for name, seats in plan.lineups.items():
            await _check_heard(store, name, found[name], seats)
    return found


async def _ended(store: Store, config: RunConfig, plan: EvaluationPlan) -> Played | None:
    """The games of each lineup, if all have ended."""
    found: Played = {name: [] for name in plan.lineups}
    if await store.run(config.name) is None:
        return None
    for row in await store.rollouts(config.name, purpose=Purpose.EVAL):
        if row.state.terminal:
            found[row.group.rpartition("/")[2]].append(row)
    if any(len(rows) < len(plan.tasks) for rows in found.values()):
        return None
    return {name: sorted(rows, key=lambda row: row.index) for name, rows in found.items()}


async def _check_heard(
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
