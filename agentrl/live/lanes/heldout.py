"""Held-out scores of the versions that answer sessions.

Each is scored once, by a run of its own without steps, in the process `agentrl live score` and the
folder `<output>/heldout/<version>-<digest>`, which exists until the score is a document. So a watch
that is killed goes on with the evaluation, and neither engine nor learner of the live run takes
part. Always true: only scores of the same tasks, agent and verifier are compared.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections import defaultdict
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from agentrl import trainer
from agentrl.algorithms.sampling.scores import confidence_interval
from agentrl.base.files import delete_directory, make_folder
from agentrl.base.processes import Child, log_phase
from agentrl.base.threads import run_blocking
from agentrl.config import RunConfig
from agentrl.config.run_file import store_in
from agentrl.errors import AgentRLError, StoreError
from agentrl.live.lanes.verdict import Scored
from agentrl.live.records.documents import Documents, HeldOutScore, Told, Version, put_score
from agentrl.scores import missing_text
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.types import Json, Purpose

log = logging.getLogger("agentrl.live")
FOLDER, RUN_FILE, TASKS = "heldout", "score.json", "eval/tasks"
LOOK, LEAST_PAUSE = 60.0, 1.0  # seconds between two looks at the lanes
LANES_PAUSE = 5.0  # the same while tasks are played
NICENESS = 10  # of the processes of an evaluation
T = TypeVar("T")


async def run(store: Store, config: RunConfig) -> None:
    """Score versions once they are in a lane, until cancelled. Returns if there are no held-out
    tasks. Raises AgentRLError if an evaluation fails; call it again then."""
    known, cursor, digest = Documents(store, config.name), 0, ""
    seated: list[int] = []
    while config.tasks.heldout:
        now = await known.told()
        if (lanes := _to_score(now)) != seated:  # a comparison goes on with the tasks it began with
            seated, digest = lanes, digest_of(config)
        if (version := unscored(now, digest)) is None:
            cursor = await store.wait(cursor, timeout=LOOK)
            await asyncio.sleep(LEAST_PAUSE)
            continue
        log_phase(log, f"version {version.version}: playing the held-out tasks")
        playing = scored(config, version, digest)
        try:
            score = await _while_in_a_lane(known, version.version, playing)
        except StoreError:
            raise
        except AgentRLError as error:
            failed = HeldOutScore(version=version.version, digest=digest, failed=str(error))
            if now.scores.get(version.version) != failed:
                await put_score(store, config.name, failed)
            raise
        if score is None:
            log.info("version %d: not played further, it is in no lane now", version.version)
        else:
            await put_score(store, config.name, score)
            log.info(
                "version %d: %.1f %% held-out%s",
                version.version,
                100 * (score.score or 0.0),
                missing_text(score.missing),
            )
        delete_directory(folder_of(config, version.version, digest))


async def _while_in_a_lane(
    known: Documents, version: int, work: Coroutine[Any, Any, T]
) -> T | None:
    """What `work` returns; None if it is cancelled, because the version was decided against."""
    playing = asyncio.create_task(work)
    try:
        while not (await asyncio.wait([playing], timeout=LANES_PAUSE))[0]:
            with suppress(StoreError):  # it is played on meanwhile
                if version not in _to_score(await known.told()):
                    return None
        return playing.result()
    finally:
        playing.cancel()
        await asyncio.wait([playing])


def _to_score(known: Told) -> list[int]:
    """The version that serves, then its candidate."""
    lanes = (known.lanes.serving, known.lanes.candidate) if known.lanes else ()
    return [version for version in lanes if version is not None]


def unscored(known: Told, digest: str) -> Version | None:
    """The version to score next. digest: of what is played now."""
    done = {one.version for one in known.scores.values() if one.digest == digest and not one.failed}
    left = [one for one in _to_score(known) if one not in done]
    return next((known.versions[one] for one in left if one in known.versions), None)


def comparable(known: Told, ours: int, theirs: int) -> tuple[Scored, Scored]:
    """The scores of two versions; none if they are not of the same tasks, played in the same way:
    they will be soon."""
    one, other = known.scores.get(ours), known.scores.get(theirs)
    return (None, None) if one and other and one.digest != other.digest else (one, other)


def digest_of(config: RunConfig) -> str:
    """A hash of what a score depends on beside the version: the settings of tasks, agent, verifier,
    sampling and evaluations, and the files that they name."""
    tables = [config.tasks, config.agent, config.verifier, config.sampling, config.eval]
    settings = [msgspec.to_builtins(table) for table in tables]
    named = {Path(config.root, part) for text in _texts(settings) for part in _parts(text)}
    files = {str(path): path.read_bytes() for path in sorted(named) if path.is_file()}
    return blake2b(msgspec.json.encode([settings, files]), digest_size=16).hexdigest()


def _texts(value: Json) -> Iterator[str]:
    """All texts in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def _parts(text: str) -> tuple[str, ...]:
    """What may be the name of a file: `file.py:name` is a function in it."""
    return tuple(part for part in (text, text.rpartition(":")[0]) if part and len(part) < 256)


def folder_of(config: RunConfig, version: int, digest: str) -> Path:
    return Path(config.output, FOLDER, f"{version}-{digest[:8]}").resolve()


async def scored(config: RunConfig, version: Version, digest: str) -> HeldOutScore:
    """Play the held-out tasks with a version. Raises AgentRLError if no rollout has a reward, and
    if the tasks, agent or verifier are not those of the digest."""
    settings = evaluation_of(config, version, folder_of(config, version.version, digest))
    folder, logs = make_folder(Path(settings.output)), make_folder(Path(config.output, "logs"))
    for other in folder.parent.iterdir():
        if other != folder:  # of a version that is in no lane now, or of other tasks
            delete_directory(other)
    file = trainer.write_settings(folder / RUN_FILE, settings)
    playing = Child("heldout", ["live", "score", str(file)], logs / "heldout.log")
    await playing.start()
    try:
        if code := await playing.wait():
            raise AgentRLError(playing.last_error() or f"the evaluation ended with code {code}")
        if digest_of(config) != digest:
            raise AgentRLError("tasks, agent or verifier were changed while they were played")
        return await _read(settings, version.version, digest)
    except AgentRLError:
        delete_directory(folder)  # what it has played is played anew
        raise
    finally:
        await playing.stop()


async def _read(settings: RunConfig, version: int, digest: str) -> HeldOutScore:
    from agentrl.evaluation.checkpoint.runs import check_any_succeeded

    async with open_store(settings.store, readonly=True) as store:
        steps = await store.steps(settings.name)
        rows = await store.rollouts(settings.name, purpose=Purpose.EVAL)
    tasks = next((int(row.metrics[TASKS]) for row in steps if TASKS in row.metrics), 0)
    trials = [row.group for row in rows if row.group.rpartition("/")[2].startswith("score")]
    scored = [row for row in rows if trials and row.group == max(trials)]
    if not (tasks and scored):
        raise AgentRLError("the evaluation ended without playing the held-out tasks")
    check_any_succeeded(scored, "held-out")
    return score_of(version, [(row.index % tasks, row.reward()) for row in scored], digest)


def score_of(version: int, outcomes: Sequence[tuple[int, float]], digest: str) -> HeldOutScore:
    """outcomes: of each rollout, with the number of its task; NaN: none. A missing one may be worth
    anything that outcomes are, which widens the interval. Raises AgentRLError if all are."""
    known = [value for _, value in outcomes if not math.isnan(value)]
    if not known:
        raise AgentRLError("no held-out task has a reward; see logs/heldout.log")
    ends = []
    for worth, end in ((min(0.0, *known), 0), (max(1.0, *known), 1)):
        by_task = defaultdict[int, list[float]](list)
        for task, value in outcomes:
            by_task[task].append(worth if math.isnan(value) else value)
        means = [fmean(values) for values in by_task.values()]
        ends.append(confidence_interval(means)[end] if len(means) > 1 else None)
    return HeldOutScore(
        version=version, score=fmean(known), low=ends[0], high=ends[1], tasks=len(by_task),
        missing=len(outcomes) - len(known), digest=digest,
    )  # fmt: skip


def evaluation_of(config: RunConfig, version: Version, output: Path) -> RunConfig:
    """The settings of a run without steps that plays the held-out tasks with a version."""
    from agentrl.evaluation.checkpoint.runs import evaluation_run

    name = f"{config.name}-heldout-{version.version}"
    folder = Path(config.output, version.path).resolve()
    made = evaluation_run(config.for_evaluation(), name, folder)
    own: dict[str, Any] = {"output": str(output), "store": store_in(output)}
    for key in ("runner", "engine"):  # the ports of the live run are taken
        if hasattr(table := getattr(made, key), "port"):
            own[key] = replace(table, port=0)
    return replace(made, **own)


def play(config: RunConfig) -> None:
    """Play the held-out tasks, in this process and those that it starts."""
    os.nice(NICENESS)
    run_blocking(trainer.front(config))
