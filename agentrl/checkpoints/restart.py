"""`agentrl train --from`: resume a run from one of its earlier checkpoints.

The store takes back the steps after the checkpoint, so their groups are trained again.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec

from agentrl import run_owner, trainer
from agentrl.algorithms.model import digests
from agentrl.base.files import atomic_directory
from agentrl.base.threads import run_blocking
from agentrl.checkpoints.saved import SavedCheckpoint, checkpoint_at, checkpoints_of
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.store import open_store
from agentrl.types import RunState


def go_back(config: RunConfig, start: str, *, take_over: bool = False) -> None:
    """Take a run back to `start`, a number of steps or a checkpoint's path.

    Changes nothing and raises ConfigError for a checkpoint of another run, DamagedError for a
    damaged one. take_over: from a live process of the run."""
    run_blocking(_go_back(trainer.hide_secrets(config), start, take_over))


async def _go_back(config: RunConfig, start: str, take_over: bool) -> None:
    await run_owner.check_free(config, take_over=take_over)
    async with open_store(config.store, create=False) as store:
        state = await store.run(config.name)
        if state is None:
            raise ConfigError(f"--from {start}: run {config.name!r} has no steps yet; remove it")
        await trainer.refuse_changes(store, config)
        found = None if start == "0" else _chosen(config, state, start)
        state = await store.open_run(config.name, msgspec.to_builtins(config))
        name = None if found is None else _kept(config, found, state.epoch)
        steps = found.steps if found else 0
        await store.rewind(config.name, state.epoch, steps, name)
        taken = {"steps/taken_back": float(state.step - steps)}
        await store.log(config.name, steps, taken, epoch=state.epoch)


def _chosen(config: RunConfig, state: RunState, start: str) -> SavedCheckpoint:
    if start.isdecimal():
        own = checkpoints_of(config)
        found = next((one for one in reversed(own) if one.steps == int(start)), None)
        if found is None:
            there = ", ".join(sorted({str(one.steps) for one in own})) or "none"
            raise ConfigError(
                f"--from {start}: there is no checkpoint after {start} steps in {config.output},"
                f" only after {there}; choose one of them, or 0 for the start"
            )
    else:
        found = checkpoint_at(Path(start))
    content = json.loads((found.path / "state.json").read_text(encoding="utf-8"))
    if content.get("run", "") not in ("", state.identity):
        raise ConfigError(f"--from {start}: it is a checkpoint of another run than {state.run!r}")
    if found.steps > state.step:
        raise ConfigError(
            f"--from {start}: run {state.run!r} has {state.step} steps, but the checkpoint is from"
            f" step {found.steps}; choose an earlier one"
        )
    digests.check(found.path)
    return found


def _kept(config: RunConfig, found: SavedCheckpoint, epoch: int) -> str:
    """The checkpoint's name relative to the run's folder; copies one from elsewhere into it."""
    folder = Path(config.output, "checkpoints")
    if found.path.parent == folder.resolve():
        return f"checkpoints/{found.path.name}"
    name = f"{found.steps:06d}.{epoch}"
    with atomic_directory(folder / name) as partial:
        shutil.copytree(found.path, partial, dirs_exist_ok=True)
    return f"checkpoints/{name}"
