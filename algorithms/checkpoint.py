"""Checkpoints on disk: a directory that is there is whole, whatever was killed when.

A checkpoint is what the learner saved (an ordinary Hugging Face directory plus optimizer state)
and `state.json`: the state of the algorithm and of the random number generators. It is written
beside its place, forced to disk and renamed, before the store commit that names it. Its name holds
the epoch of its writer, so that a fenced process which is still alive harms nobody's.
"""

from __future__ import annotations

import base64
import json
import os
import random
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from agentrl.errors import PolicyError, TrainingError
from agentrl.types import Json

STATE = "state.json"
NAME = re.compile(r"(\d+)(?:\.(\d+))?$")
PARTIAL = ".tmp-"  # in the name of a directory that is being written or deleted


def checkpoint_name(steps: int, epoch: int) -> str:
    """Of the weights after `steps` steps, written by the run's owner of that epoch."""
    return f"{steps:06d}" if epoch == 1 else f"{steps:06d}.{epoch}"


class Kept(Protocol):
    """A learner, or several together."""

    def save(self, directory: Path) -> None: ...
    def load(self, directory: Path) -> None: ...


def save_checkpoint(directory: Path, learner: Kept, state: Mapping[str, Json]) -> None:
    """Write a checkpoint, replacing one of the same name. `state` must survive JSON.

    Raises TrainingError when the disk refuses, with nothing left behind."""
    content = {"state": state, "random": random_state()}
    try:
        with atomic_directory(directory) as partial:
            learner.save(partial)
            (partial / STATE).write_text(json.dumps(content), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise TrainingError(
            f"checkpoint {directory}: it cannot be written ({error}); free disk space or check "
            "the permissions of the folder, then start the run again"
        ) from error


def load_checkpoint(directory: Path, learner: Kept) -> dict[str, Json]:
    """Restore learner and random state; returns the `state` given to `save_checkpoint`.

    Raises PolicyError, with nothing changed, if it is damaged or of another model."""
    try:
        content = json.loads((directory / STATE).read_text(encoding="utf-8"))
        state: dict[str, Json] = content["state"]
        before = random_state()
        try:
            set_random_state(content["random"])  # torch and random alone know what they accept
        finally:
            set_random_state(before)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise PolicyError(
            f"checkpoint {directory}: {STATE} is missing or incomplete; "
            "resume from another checkpoint"
        ) from error
    learner.load(directory)
    set_random_state(content["random"])
    return state


def save_policy(directory: Path, learner: Kept) -> None:
    """Write the policy alone, as `export_checkpoint` does, replacing what is there.

    Raises TrainingError when the disk refuses, with nothing left behind."""
    try:
        with atomic_directory(directory) as partial:
            learner.save(partial)
            for file in partial.iterdir():
                if not _of_the_policy(file):
                    file.unlink()
    except (OSError, SafetensorError) as error:
        raise TrainingError(
            f"{directory}: the policy cannot be written ({error}); free disk space or check the "
            "permissions of the folder, then start the run again"
        ) from error


def export_checkpoint(source: Path, target: Path) -> None:
    """Copy the policy of a checkpoint, without what only a run needs to continue, into a new
    directory: an ordinary Hugging Face one, or of an adapter that of peft.

    Raises PolicyError, with nothing written, if `target` exists or `source` is no whole one."""
    if target.exists():
        raise PolicyError(f"{target}: it is there already; give a directory to be made")
    files = [file for file in sorted(source.glob("*")) if file.is_file() and _of_the_policy(file)]
    whole = any((folder / STATE).is_file() for folder in (source, source.parent))
    if not whole or not any(map(_weights, files)):
        raise PolicyError(f"{source}: it is no checkpoint of a run; give <output>/checkpoints/...")
    for file in filter(_weights, files):
        try:
            with safe_open(file, framework="pt"):
                pass  # its header names every tensor and the file's length
        except (OSError, SafetensorError) as error:
            raise PolicyError(
                f"{source}: {file.name} is incomplete ({error}); export another checkpoint"
            ) from None
    try:
        with atomic_directory(target) as partial:
            for file in files:
                shutil.copyfile(file, partial / file.name)
    except OSError as error:
        raise PolicyError(f"{target}: it cannot be written ({error})") from None


def prune(folder: Path, *, keep: int, protect: Iterable[Path] = ()) -> None:
    """Delete all but the `keep` newest checkpoints of a folder, and what killed processes left.

    Checkpoints are the directories with a `checkpoint_name`; anything else and every path in
    `protect` stays."""
    protected = {path.resolve() for path in protect}
    folders = (path for path in folder.iterdir() if path.is_dir())
    named = [(match, path) for path in folders if (match := NAME.match(path.name))]
    named.sort(key=lambda item: [int(number or 1) for number in item[0].groups()], reverse=True)
    for _, path in named[keep:]:
        if path.resolve() not in protected:
            _delete(path)
    for path in folder.glob(f"*{PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """A new directory to write into, which becomes `path` on leaving, or vanishes on an error."""
    partial = _partial(path)
    partial.mkdir(parents=True)
    try:
        yield partial
        for file in partial.rglob("*"):
            _sync(file)
        _sync(partial)
        if path.exists():
            _delete(path)
        partial.rename(path)
        _sync(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already, unless something failed


def random_state() -> dict[str, Json]:
    """State of the process-wide generators of `random` and torch (CPU)."""
    version, words, gauss = random.getstate()
    torch_bytes = torch.get_rng_state().numpy().tobytes()
    return {
        "python": [version, list(words), gauss],
        "torch": base64.b64encode(torch_bytes).decode(),
    }


def set_random_state(state: Mapping[str, Json]) -> None:
    """Restore what `random_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch_bytes = bytearray(base64.b64decode(state["torch"]))
    torch.set_rng_state(torch.frombuffer(torch_bytes, dtype=torch.uint8))


def _of_the_policy(file: Path) -> bool:
    """Not the optimizer's, the algorithm's or another model's."""
    return _weights(file) if file.suffix == ".safetensors" else file.name != STATE


def _weights(file: Path) -> bool:
    """Under the names that transformers and peft look for."""
    return file.suffix == ".safetensors" and file.name.startswith(("model", "adapter_model"))


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}{PARTIAL}{secrets.token_hex(4)}")


def _delete(path: Path) -> None:
    """Never leaves half a checkpoint under its name."""
    doomed = path.rename(_partial(path))
    shutil.rmtree(doomed, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
