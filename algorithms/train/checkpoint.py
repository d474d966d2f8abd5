"""Checkpoints on disk. A directory that exists is complete, even if the process was killed.

A checkpoint has the learner's files (a Hugging Face directory plus optimizer state), `state.json`,
the state of the algorithm and the random number generators, and `SHA256SUMS`, the digests of all,
which detect damage. It is written to a partial directory, synced and renamed, before the store
commit that names it. Its name contains the writer's epoch and its state the run's identity, so a
fenced process that is still alive cannot change another process's checkpoint.
"""

from __future__ import annotations

import base64
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from agentrl.algorithms.model import digests
from agentrl.algorithms.sampling.evaluate import best_step, heldout_scores
from agentrl.core import files
from agentrl.core.config import RunConfig
from agentrl.core.errors import AgentRLError, DamagedError, PolicyError
from agentrl.core.files import PARTIAL, atomic_directory, delete_directory
from agentrl.core.types import Json
from agentrl.store.base import Store

STATE = "state.json"
BEST = "best"  # link to the checkpoint with the best held-out score
NAME = re.compile(r"(\d+)(?:\.(\d+))?$")


def checkpoint_name(steps: int, epoch: int) -> str:
    """The name of the checkpoint after `steps` steps, written by the run's owner of this epoch."""
    return f"{steps:06d}" if epoch == 1 else f"{steps:06d}.{epoch}"


class Saveable(Protocol):
    """An object that can be written into a directory."""

    def save(self, directory: Path) -> None: ...


class Checkpointable(Saveable, Protocol):
    """A learner, or a set of them."""

    def load(self, directory: Path) -> None: ...


def parse_name(path: Path) -> tuple[int, int] | None:
    """The steps and the epoch in a checkpoint's name; None for any other name."""
    match = NAME.match(path.name)
    return (int(match[1]), int(match[2] or 1)) if match else None


def save_checkpoint(
    directory: Path, learner: Checkpointable, state: Mapping[str, Json], run: str = ""
) -> None:
    """Write a checkpoint, replacing one of the same name. state: the algorithm's, as JSON values;
    run: the identity of the run.

    Raises AgentRLError, with nothing left behind, if it cannot be written."""
    begin_checkpoint(directory, learner, state, run)()


def begin_checkpoint(
    directory: Path, learner: Checkpointable, state: Mapping[str, Json], run: str = ""
) -> Callable[[], None]:
    """Write the files of a checkpoint. Returns a function, which any thread may call, that
    completes it and gives it its name. Both raise AgentRLError as `save_checkpoint` does."""
    content = {"run": run, "state": state, "random": random_state()}
    with ExitStack() as stack:
        partial = stack.enter_context(_new_directory(directory))
        learner.save(partial)
        (partial / STATE).write_text(json.dumps(content), encoding="utf-8")
        return stack.pop_all().close


@contextmanager
def _new_directory(directory: Path) -> Iterator[Path]:
    """A partial folder that atomically becomes `directory`, with digests of its files. Raises
    AgentRLError, with nothing left behind, if it cannot be written."""
    try:
        with atomic_directory(directory) as partial:
            yield partial
            digests.write(partial)
    except (OSError, SafetensorError) as error:
        raise AgentRLError(
            f"checkpoint {directory} cannot be written ({error}); free disk space or check "
            "the permissions of the folder, then start the run again"
        ) from error


def load_checkpoint(directory: Path, learner: Checkpointable) -> dict[str, Json]:
    """Restore learner and random state; returns the `state` given to `save_checkpoint`.

    Raises DamagedError if its files have changed, PolicyError if it is of another model; nothing
    is changed then."""
    digests.check(directory)
    try:
        content = json.loads((directory / STATE).read_text(encoding="utf-8"))
        if "run" in content and not (directory / digests.FILE).is_file():
            raise DamagedError(
                f"checkpoint {directory}: {digests.FILE} is missing, so it cannot be verified;"
                " restore a copy, or take another checkpoint"
            )
        state: dict[str, Json] = content["state"]
        before = random_state()
        try:
            set_random_state(content["random"])  # only torch and random can validate their states
        finally:
            set_random_state(before)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise DamagedError(
            f"checkpoint {directory}: {STATE} is missing or incomplete; "
            "resume from another checkpoint"
        ) from error
    learner.load(directory)
    set_random_state(content["random"])
    return state


def save_policy(directory: Path, learner: Saveable) -> None:
    """Write only the policy, as `export_checkpoint` does, replacing an older one.

    Raises AgentRLError, with nothing left behind, if it cannot be written."""
    with _new_directory(directory) as partial:
        learner.save(partial)
        for file in partial.iterdir():
            if not _is_policy_file(file):
                file.unlink()


def export_checkpoint(source: Path, target: Path) -> None:
    """Copy the policy of a checkpoint, without the files that only a resumed run needs, into a new
    Hugging Face directory, or for an adapter a peft directory.

    Raises PolicyError, with nothing written, if `target` exists or `source` is incomplete."""
    if target.exists():
        raise PolicyError(f"{target} exists already; give the name of a new directory")
    files = [file for file in sorted(source.glob("*")) if file.is_file() and _is_policy_file(file)]
    complete = any((folder / STATE).is_file() for folder in (source, source.parent))
    if not complete or not any(map(_is_weights, files)):
        raise PolicyError(
            f"{source}: it is not a checkpoint of a run; give <output>/checkpoints/..."
        )
    digests.check(source)
    for file in filter(_is_weights, files):
        try:
            with safe_open(file, framework="pt"):
                pass  # opening it checks every tensor against the file's length
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


def prune(folder: Path, *, keep: int, last: Path, run: str = "") -> None:
    """Delete old checkpoints of a run, after its owner has committed `last`: all but the `keep`
    newest, the best, and those being scored or read by another process. Also deletes those of
    rewound steps, even if these were trained again, and partial ones of killed processes. Keeps
    checkpoints of other runs and later owners, and files with other names."""
    current = parse_name(last)
    assert current is not None
    saved = [
        (path, steps) for path, (steps, epoch) in _checkpoints(folder, run) if epoch <= current[1]
    ]
    # If two have the same number of steps, the later owner's is valid, because it rewound the run.
    newest = {steps: path for path, steps in reversed(saved)}
    rewound = [path for path, steps in saved if steps > current[0]]
    retrained = [path for path, steps in saved if steps <= current[0] and path != newest[steps]]
    trained = [path for path, steps in saved if steps <= current[0] and path == newest[steps]]
    scored = {path.name for path in folder.parent.glob("evaluation/*")}
    best = (folder / BEST).resolve()  # kept until the next evaluation, even if rewound
    old = [path for path in trained[keep:] if path.name.partition(".")[0] not in scored]
    for path in (*rewound, *(path for path in retrained + old if path.resolve() != best)):
        if path.resolve() != last.resolve():
            with files.deleting(path) as unread:
                if unread:
                    delete_directory(path)
    for path in folder.glob(f"*{PARTIAL}*"):
        named = parse_name(Path(path.name.partition(PARTIAL)[0]))
        if named and named[1] <= current[1]:
            shutil.rmtree(path, ignore_errors=True)


async def mark_best(store: Store, config: RunConfig, run: str) -> None:
    """Link the checkpoint with the best held-out score, the last of equal ones. run: the run's
    identity."""
    scores = await heldout_scores(store, config.name)
    _link_best(Path(config.output, "checkpoints"), best_step(scores), run)


def _link_best(folder: Path, steps: int, run: str) -> None:
    saved = [path for path, named in _checkpoints(folder, run) if named[0] <= steps]
    if saved:  # empty steps save none
        new = folder / f"{BEST}{PARTIAL}"
        new.unlink(missing_ok=True)
        new.symlink_to(saved[0].name)
        new.replace(folder / BEST)


def earlier_checkpoints(folder: Path, last: Path, run: str) -> list[Path]:
    """The run's checkpoints on disk with fewer steps than `last`, newest first."""
    before, _ = parse_name(last) or (0, 0)
    return [path for path, (steps, _) in _checkpoints(folder, run) if steps < before]


def _checkpoints(folder: Path, run: str) -> list[tuple[Path, tuple[int, int]]]:
    """The run's checkpoints on disk, with their steps and epochs, newest first."""
    checkpoints = [
        (path, named)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (named := parse_name(path)) and path.is_dir() and _is_of(path, run)
    ]
    return sorted(checkpoints, key=lambda row: row[1], reverse=True)


def _is_of(path: Path, run: str) -> bool:
    """Whether a checkpoint belongs to this run; true if its state has no identity or cannot be
    read."""
    try:
        content = json.loads((path / STATE).read_text(encoding="utf-8"))
        return content.get("run", "") in ("", run)
    except (OSError, ValueError, AttributeError):
        return True


def random_state() -> dict[str, Json]:
    """The state of the process-wide generators of `random` and torch (CPU)."""
    version, words, gauss = random.getstate()
    torch_bytes = torch.get_rng_state().numpy().tobytes()
    return {
        "python": [version, list(words), gauss],
        "torch": base64.b64encode(torch_bytes).decode(),
    }


def set_random_state(state: Mapping[str, Json]) -> None:
    """Restore the result of `random_state`."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch_bytes = bytearray(base64.b64decode(state["torch"]))
    torch.set_rng_state(torch.frombuffer(torch_bytes, dtype=torch.uint8))


def _is_policy_file(file: Path) -> bool:
    """Whether a file is part of the policy, not of the optimizer, the state or another model."""
    if file.suffix == ".safetensors":
        return _is_weights(file)
    return file.name not in (STATE, digests.FILE)


def _is_weights(file: Path) -> bool:
    """Whether a file has a name that transformers or peft use for weights."""
    return file.suffix == ".safetensors" and file.name.startswith(("model", "adapter_model"))
