"""Evaluate a trained run: its held-out score, by a run without steps in a folder beside it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from agentrl import trainer
from agentrl.base.failures import commonest_failure
from agentrl.base.processes import PHASE
from agentrl.base.threads import run_blocking
from agentrl.config import LoraConfig, PolicyConfig, RunConfig
from agentrl.config import policies as team
from agentrl.config.base import tables
from agentrl.config.run_file import store_in
from agentrl.config.schema import WarmupConfig
from agentrl.errors import AgentRLError, ConfigError
from agentrl.store import open_store
from agentrl.types import Purpose, Rollout, RunState

STEPS = re.compile(r"(\d+)(?:\.\d+)?$")  # a checkpoint's name: its steps and its writer's epoch


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
