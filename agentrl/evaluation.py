"""The held-out score of a checkpoint, or of a model in an environment without a run file.

A checkpoint is scored in a separate run without steps, in a folder beside that of the trained run.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console

from agentrl import trainer
from agentrl.core import files
from agentrl.core.config import LoraConfig, PolicyConfig, RunConfig, derived
from agentrl.core.config.run_file import store_in
from agentrl.core.errors import AgentRLError, ConfigError, NotFound
from agentrl.core.processes import PHASE, run_blocking
from agentrl.core.types import (
    Failure,
    Purpose,
    Rollout,
    RunState,
    TrainingResult,
    commonest_message,
)
from agentrl.store import open_store
from agentrl.trainer import STEPS

TRIES = 5  # attempts to lock the newest checkpoint while training continues


def evaluate(
    config: RunConfig,
    checkpoint: Path | None,
    tasks: str | None,
    *,
    level: int = PHASE,
) -> TrainingResult:
    """Score a checkpoint, by default the run's last one; before training, the model that the run
    starts from; and `[upstreams]` if the run has no model of its own. Writes to the store that the
    run file names, if any."""
    config = trainer.hide_secrets(config)
    if derived.has_no_own_policy(config) and checkpoint:
        raise ConfigError(
            f"{checkpoint}: [upstreams] answer every call, so a checkpoint has no effect; "
            "remove it, or set policy.model"
        )
    with _held(config, checkpoint) as held:
        return _evaluate(config, held, tasks, level)


@contextmanager
def _held(config: RunConfig, checkpoint: Path | None) -> Iterator[Path | None]:
    """Lock a checkpoint, by default the run's last one, so that the run does not prune it
    meanwhile."""
    with ExitStack() as stack:
        if checkpoint:
            checkpoint = named(config, checkpoint)
            stack.enter_context(files.reading(checkpoint))
        elif not derived.has_no_own_policy(config):
            for tries_left in reversed(range(TRIES)):
                if (checkpoint := find_checkpoint(config)) is None:
                    break
                try:
                    stack.enter_context(files.reading(checkpoint))
                    break
                except ConfigError:  # it was pruned; the store has a newer one now
                    if not tries_left:
                        raise
        yield checkpoint


def _evaluate(
    config: RunConfig, checkpoint: Path | None, tasks: str | None, level: int
) -> TrainingResult:
    replace = msgspec.structs.replace
    name = evaluation_name(config.name)
    heldout = str(Path(tasks).resolve()) if tasks and ":" not in tasks else tasks
    run = evaluation_run(config.for_evaluation(), name, checkpoint and checkpoint.resolve())
    run = run.without_warmup()
    config = replace(
        run,
        store=run.store if trainer.has_own_store(config) else config.store,
        tasks=replace(config.tasks, heldout=heldout or config.tasks.heldout),
        eval=replace(config.eval, tasks=0) if tasks else config.eval,
    )
    trainer.check(config)
    if scored := scored_line(config, checkpoint):
        Console().print(scored, highlight=False, markup=False, soft_wrap=True)
    return run_blocking(_score(config, level))


def evaluation_name(run: str) -> str:
    """A unique name for an evaluation of a run, even if another one begins in the same second."""
    return f"{run}-eval-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


async def _score(config: RunConfig, level: int) -> TrainingResult:
    try:
        result = await trainer.launch(config, level=level)
    except BaseException:
        await _remove_unstarted(config)
        raise
    async with open_store(config.store, readonly=True) as store:
        check_any_succeeded(await store.rollouts(config.name, purpose=Purpose.EVAL), config.name)
    return result


async def _remove_unstarted(config: RunConfig) -> None:
    """Delete the output of an evaluation that failed before its first rollout began."""
    if not trainer.has_own_store(config):
        return  # a store of several runs keeps the row with the settings
    with suppress(AgentRLError):
        async with open_store(config.store, readonly=True) as store:
            if any(row.attempt for row in await store.rollouts(config.name)):
                return
        with files.exclusive(Path(config.output)):
            shutil.rmtree(config.output, ignore_errors=True)


def scored_line(config: RunConfig, checkpoint: Path | None) -> str:
    """A line for the console that names the scored weights, if they are the run's own."""
    if checkpoint:
        named = STEPS.match(checkpoint.name)
        after = f" after step {int(named[1])}" if named else ""
        return f"scoring the policy{after}: {checkpoint}"
    if derived.has_no_own_policy(config):
        return ""
    policies = [derived.view(config, name).policy for name in derived.trained_policies(config)]
    models = sorted({policy.model or policy.build for policy in policies})
    return f"scoring the policy before training: {', '.join(models)}"


def check_any_succeeded(rows: Sequence[Rollout], name: str, option: str = "") -> None:
    """Raises AgentRLError, with the most frequent cause, if every rollout failed. option: an
    addition to the command for the message."""
    failures = [row.failure for row in rows if row.failure]
    if failures and len(failures) == len(rows):
        cause = commonest_failure(failures, len(rows))
        raise AgentRLError(
            f"{name}: every rollout failed, {cause}; fix this and rerun the command{option}"
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
    folder = Path(config.output, "checkpoints")
    if existing := [path for path in (checkpoint, folder / checkpoint) if path.is_dir()]:
        return existing[0]
    names = ", ".join(sorted(path.name for path in folder.glob("*") if path.is_dir()))
    listing = f"; in {folder} are {names}" if names else ""
    raise ConfigError(f"{checkpoint}: no such checkpoint directory{listing}")


def evaluation_run(config: RunConfig, name: str, checkpoint: Path | None) -> RunConfig:
    """A run without steps, with this name and in a sibling folder, with a checkpoint's policies."""
    changes = policies_at(config, checkpoint) if checkpoint else {}
    output = Path(config.output).with_name(name)
    changes |= {"name": name, "output": str(output), "store": store_in(output), "steps": 0}
    return msgspec.structs.replace(config.without_warmup() if checkpoint else config, **changes)


def policies_at(config: RunConfig, checkpoint: Path) -> dict[str, Any]:
    """Settings that load the policies of a checkpoint; frozen policies keep theirs."""
    if not config.policies:
        return {"policy": _policy_at(config.policy, checkpoint)}
    members = dict(config.policies)
    for name in derived.trained_policies(config):
        folder = checkpoint / name
        if not folder.is_dir():
            raise ConfigError(f"{checkpoint} has no policy {name!r}, which the run file trains")
        policy = _policy_at(derived.view(config, name).policy, folder)
        members[name] = msgspec.structs.replace(
            members[name], model=policy.model, lora=msgspec.to_builtins(policy.lora)
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
    checkpoint = find_checkpoint(config)
    if checkpoint is None:
        raise ConfigError(f"run {config.name!r} has no checkpoint yet; train it: agentrl train")
    return checkpoint


def find_checkpoint(config: RunConfig) -> Path | None:
    """The last checkpoint in a run's store; None if the run has not been trained."""

    async def read() -> RunState | None:
        with suppress(NotFound):  # no store yet
            async with open_store(config.store, readonly=True) as store:
                return await store.run(config.name)
        return None

    state = run_blocking(read())
    return config.checkpoint_path(state.checkpoint) if state and state.checkpoint else None


TIMEOUT = 10.0  # seconds for the list of models
MODEL = "model"  # name of the endpoint


def settings_of(environment: str, model: str, name: str, key_env: str) -> dict[str, Any]:
    """Settings of a run. model: the URL of a server, or what `policy.model` may be; name: of the
    model at the server; key_env: the variable with its key. Raises ConfigError."""
    if not model:
        raise ConfigError("--model is missing: give a server's URL, or a model's name or folder")
    run = re.sub(r"[^A-Za-z0-9._-]+", "-", environment).strip("-._") or "environment"
    data: dict[str, Any] = {"name": run, "root": str(Path.cwd()), "environment": environment}
    if not model.startswith(("http://", "https://")):
        if name or key_env:
            raise ConfigError(f"--model-name and --key-env need a URL, and {model!r} is not one")
        return data | {"policy": {"model": model}}
    served = {"base_url": model, "model": name or _only_model(model, key_env), "key_env": key_env}
    return data | {"upstreams": {MODEL: served}, "roles": {"*": MODEL}}


def _only_model(url: str, key_env: str) -> str:
    """The name of the model that a server has. Raises ConfigError unless it has one."""
    key = os.environ.get(key_env, "") if key_env else ""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(f"{url.rstrip('/')}/models", headers=headers, timeout=TIMEOUT)
        answer.raise_for_status()
        names = [model["id"] for model in msgspec.json.decode(answer.content)["data"]]
    except (httpx.HTTPError, msgspec.DecodeError, LookupError, TypeError) as error:
        raise ConfigError(
            f"--model {url}: its list of models cannot be read ({error}); give --model-name, and"
            " check that the server runs and that the URL ends in /v1"
        ) from None
    if len(names) != 1:
        listed = ", ".join(map(str, names[:10])) or "none"
        raise ConfigError(f"--model {url} serves {listed}: choose one with --model-name")
    return str(names[0])
