"""Which checkpoint of a run is meant: the best by its held-out score, the last one, or one by name
or number of steps."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.algorithms.sampling.scores import heldout_scores
from agentrl.checkpoints.saved import SavedCheckpoint, checkpoint_at
from agentrl.config import RunConfig, from_store, store_in
from agentrl.errors import AgentRLError, ConfigError, NotFound
from agentrl.scores import are_shares, score_text
from agentrl.store import open_store
from agentrl.types import RunState, StepRow

BEST, LAST = "best", "last"


@dataclass(frozen=True, slots=True)
class Chosen:
    """A checkpoint of a run, with what the run measured."""

    saved: SavedCheckpoint
    why: str  # it was chosen, for a message
    config: RunConfig  # the run's
    steps: Sequence[StepRow]

    @property
    def shares(self) -> bool:
        """Whether the run's scores are shown as percentages."""
        return are_shares(row.metrics for row in self.steps)


async def choose(store_url: str, run: str, which: str = BEST) -> Chosen:
    """`which`: "best", "last", a number of steps or a path. Raises NotFound for a run without
    checkpoints, ConfigError for one that is not there."""
    async with open_store(store_url, readonly=True) as store:
        state = await store.run(run)
        if state is None or state.checkpoint is None:
            raise NotFound(
                f"run {run!r} has no checkpoint in {store.url}, which has runs {await store.runs()}"
            )
        scores, steps, url = await heldout_scores(store, run), await store.steps(run), store.url
    folder = _folder(url, state)
    config = from_store(state.config)
    if which in (BEST, LAST) or which.isdecimal():
        share = are_shares(row.metrics for row in steps)
        known = {step: score_text(score, share) for step, score in scores.items()}
        path, why = _named(folder, state, known, which)
    else:
        path, why = Path(which), "as given"
    return Chosen(checkpoint_at(path), why, config, steps)


def of_its_run(checkpoint: Path) -> Chosen | None:
    """A checkpoint with what its run measured, if that is in the store next to the checkpoints."""
    output = checkpoint.parent.parent

    async def read() -> Chosen:
        async with open_store(store_in(output), readonly=True) as store:
            (run,) = await store.runs()
        return await choose(store_in(output), run, str(checkpoint))

    if not (output / "store.db").is_file():
        return None
    try:
        return asyncio.run(read())
    except (AgentRLError, ValueError):  # a store of several runs, or of another version
        return None


def _folder(url: str, state: RunState) -> Path:
    """The run's checkpoints: next to the store's file, which may have been moved, or in the run's
    original output folder."""
    assert state.checkpoint is not None
    scheme, _, file = url.partition(":///")
    own = [Path(file.partition("?")[0]).parent] if scheme == "sqlite" else []
    folders = [folder / "checkpoints" for folder in (*own, Path(state.config["output"]))]
    name = Path(state.checkpoint).name
    return next((path for path in folders if (path / name).is_dir()), folders[-1])


def _named(
    folder: Path, state: RunState, scores: Mapping[int, str], which: str
) -> tuple[Path, str]:
    assert state.checkpoint is not None
    last, best = folder / Path(state.checkpoint).name, folder / BEST
    if which.isdecimal():
        found = sorted(path for path in folder.glob(f"{int(which):06d}*") if path.is_dir())
        if not found:
            there = sorted({path.name for path in folder.glob("[0-9]*") if path.is_dir()})
            raise ConfigError(
                f"there is no checkpoint after {which} steps in {folder}, only "
                f"{', '.join(there) or 'none'}; choose one of them (the newest and the best are "
                "kept: keep_checkpoints)"
            )
        return found[-1], "as asked for"
    if which == LAST:
        return last, "the last"
    if not scores:
        return last, "the last: no held-out score says which is best"
    if not best.is_dir():
        return last, "the last: the best by held-out score is not on disk"
    score = next(iter(scores.values()))
    return best.resolve(), f"the best by held-out score, {score}"
