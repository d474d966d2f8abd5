"""A run that evaluates a checkpoint: one without steps, in a folder beside that of the trained."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from agentrl.base.failures import commonest_message
from agentrl.base.threads import run_blocking
from agentrl.config import LoraConfig, PolicyConfig, RunConfig
from agentrl.config import policies as team
from agentrl.config.run_file import store_in
from agentrl.errors import AgentRLError, ConfigError, NotFound
from agentrl.store import open_store
from agentrl.types import Failure, Rollout, RunState


def check_any_succeeded(rows: Sequence[Rollout], name: str, option: str = "") -> None:
    """Raises AgentRLError, with the most frequent cause, if every rollout failed. option: an
    addition to the command for the message."""
    failures = [row.failure for row in rows if row.failure]
    if failures and len(failures) == len(rows):
        cause = commonest_failure(failures, len(rows))
        raise AgentRLError(
            f"{name}: every rollout failed, {cause}; fix this and repeat the command{option}"
        )


def commonest_failure(failures: Sequence[Failure], total: int) -> str:
    """A sentence about the most frequent kind in `failures`: how many of `total` rollouts failed
    this way, and their most frequent message."""
    ((kind, count),) = Counter(failure.kind for failure in failures).most_common(1)
    message = commonest_message([failure for failure in failures if failure.kind is kind])
    return f"{count} of {total} failed by {kind}: {message}"


def named(config: RunConfig, checkpoint: Path) -> Path:
    """A directory, or one of the run's checkpoints by its name, such as `best`. Raises ConfigError
    if there is none."""
    own = Path(config.output, "checkpoints")
    if found := [path for path in (checkpoint, own / checkpoint) if path.is_dir()]:
        return found[0]
    names = ", ".join(sorted(path.name for path in own.glob("*") if path.is_dir()))
    known = f"; in {own} are {names}" if names else ""
    raise ConfigError(f"{checkpoint}: no such checkpoint directory{known}")


def evaluation_run(config: RunConfig, name: str, checkpoint: Path | None) -> RunConfig:
    """A run without steps, with this name and in a sibling folder, with a checkpoint's policies."""
    own = policies_at(config, checkpoint) if checkpoint else {}
    output = Path(config.output).with_name(name)
    own |= {"name": name, "output": str(output), "store": store_in(output), "steps": 0}
    return msgspec.structs.replace(config.without_warmup() if checkpoint else config, **own)


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
    found = find_checkpoint(config)
    if found is None:
        raise ConfigError(f"run {config.name!r} has no checkpoint yet; train it: agentrl train")
    return found


def find_checkpoint(config: RunConfig) -> Path | None:
    """The last checkpoint in a run's store; None if the run has not been trained."""

    async def read() -> RunState | None:
        with suppress(NotFound):  # no store yet
            async with open_store(config.store, readonly=True) as store:
                return await store.run(config.name)
        return None

    state = run_blocking(read())
    return config.checkpoint_path(state.checkpoint) if state and state.checkpoint else None
