"""Held-out scores of the versions that answer sessions.

Each is scored once, by a run of its own without steps, in the process `agentrl live score` and the
folder `<output>/heldout/<version>`, which exists until the score is a document. So a watch that is
killed goes on with the evaluation, and neither engine nor learner of the live run takes part.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from agentrl import trainer
from agentrl.base.files import delete_directory, make_folder
from agentrl.base.processes import Child, log_phase
from agentrl.base.threads import run_blocking
from agentrl.config import RunConfig
from agentrl.config.base import tables
from agentrl.config.run_file import store_in
from agentrl.errors import AgentRLError
from agentrl.live.records.documents import Documents, HeldOutScore, Told, Version, put_score
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.types import Purpose

log = logging.getLogger("agentrl.live")
FOLDER, RUN_FILE = "heldout", "score.json"
LOOK, LEAST_PAUSE = 60.0, 1.0  # seconds between two looks at the lanes
NICENESS = 10  # of the processes of an evaluation


async def run(store: Store, config: RunConfig) -> None:
    """Score versions once they are in a lane, until cancelled. Returns if there are no held-out
    tasks. Raises AgentRLError if an evaluation fails; call it again then."""
    known, cursor = Documents(store, config.name), 0
    while config.tasks.heldout:
        if version := unscored(await known.told()):
            log_phase(log, f"version {version.version}: playing the held-out tasks")
            score = await scored(config, version)
            await put_score(store, config.name, score)
            log.info("version %d: %.1f %% of held-out tasks", score.version, 100 * score.score)
        else:
            cursor = await store.wait(cursor, timeout=LOOK)
            await asyncio.sleep(LEAST_PAUSE)


def unscored(known: Told) -> Version | None:
    """The version to score next: that which serves, then its candidate."""
    lanes = known.lanes
    versions = (lanes.serving, lanes.candidate) if lanes else ()
    left = (one for one in versions if one is not None and one not in known.scores)
    return next((known.versions[one] for one in left if one in known.versions), None)


async def scored(config: RunConfig, version: Version) -> HeldOutScore:
    """Play the held-out tasks with a version. Raises AgentRLError if no rollout has a reward."""
    settings = evaluation_of(config, version)
    folder, logs = make_folder(Path(settings.output)), make_folder(Path(config.output, "logs"))
    file = trainer.write_settings(folder / RUN_FILE, settings)
    playing = Child("heldout", ["live", "score", str(file)], logs / "heldout.log")
    await playing.start()
    try:
        if code := await playing.wait():
            raise AgentRLError(playing.last_error() or f"the evaluation ended with code {code}")
        score = await _read(settings, version.version)
    except AgentRLError:
        delete_directory(folder)  # what it has played is played anew
        raise
    finally:
        await playing.stop()
    delete_directory(folder)
    return score


async def _read(settings: RunConfig, version: int) -> HeldOutScore:
    from agentrl.evaluation.checkpoint.runs import check_any_succeeded

    async with open_store(settings.store, readonly=True) as store:
        rows = await store.steps(settings.name)
        check_any_succeeded(await store.rollouts(settings.name, purpose=Purpose.EVAL), "held-out")
    found = {name: value for row in rows for name, value in row.metrics.items()}
    if "eval/score" not in found:
        raise AgentRLError("no held-out task has a reward; see logs/heldout.log")
    mean = found["eval/score"]
    low, high = (found.get(f"eval/score_{end}", mean) for end in ("low", "high"))
    return HeldOutScore(
        version=version, score=mean, low=low, high=high, tasks=int(found["eval/tasks"])
    )


def evaluation_of(config: RunConfig, version: Version) -> RunConfig:
    """The settings of a run without steps that plays the held-out tasks with a version."""
    from agentrl.evaluation.checkpoint.runs import evaluation_run

    name = f"{config.name}-heldout-{version.version}"
    made = evaluation_run(config, name, Path(config.output, version.path).resolve())
    own: dict[str, Any] = {
        key: one.evaluated(config) for key, one in tables(made) if "." not in key
    }
    output = Path(config.output, FOLDER, str(version.version)).resolve()
    own |= {"output": str(output), "store": store_in(output)}
    for key in ("runner", "engine"):  # the ports of the live run are taken
        if hasattr(table := getattr(made, key), "port"):
            own[key] = replace(table, port=0)
    return replace(made, **own)


def play(config: RunConfig) -> None:
    """Play the held-out tasks, in this process and those that it starts."""
    os.nice(NICENESS)
    run_blocking(trainer.front(config))
