"""Is anything lost or done twice when processes are killed with `kill -9` under load?

Runners claim, write calls and finish; gateways write calls of an attempt that the parent keeps
alive; an algorithm enqueues, claims groups and commits steps. Each writes a line to a file of its
own after the store has acknowledged something. Twice: all of them in the database file themselves,
then through `agentrl store serve`, where every other kill is the server's, which starts again on
its port while its callers repeat what they got no answer to. Who is killed is killed at a random
moment and replaced, at least fifty times each. Then everything acknowledged must be in the store
(`kill9_lost`), and no fence claimed twice, no group committed twice, no call trained that was not
of a last attempt (`kill9_duplicated`). The baseline is what a queue in memory would have lost at
the last kill: the outcomes that had been acknowledged and were not yet trained.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import sqlite3
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from agentrl.core.errors import Fenced
from agentrl.core.types import NewRollout, Outcome, Reward, StepCommit, Transition
from agentrl.store import Store, open_store
from tests import factories
from tests.benchmarks import store_load as load
from tests.benchmarks.store import Figures

KINDS = ("algorithm", "runner", "gateway", "runner")
LEASE = 2.0  # seconds: what a killed runner held comes back soon
PAUSES = (0.0, 0.3)  # seconds of undisturbed work before a kill
Say = Callable[..., None]


def measure(quick: bool) -> Figures:
    """Figures of both parts together, and those of the one with a server as `served_*`."""
    direct, served = (part(served, kills=4 if quick else 60) for served in (False, True))
    total = {name: direct[name] + served[name] for name in direct}
    return total | {f"served_{name}": value for name, value in served.items()}


def part(served: bool, kills: int) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = str(folder / "store.db")
        asyncio.run(prepare(path))
        with load.Served(path) if served else contextlib.nullcontext() as server:
            killed = work(path, folder, kills, server)
        said = acknowledged(folder)
        asyncio.run(drain(path))
        figures = {"kills": killed.total(), "kills_server": killed["server"]}
        return figures | asyncio.run(verdict(path, said))


async def prepare(path: str) -> None:
    async with open_store(path) as store:
        await store.open_run("run", {})
        await store.open_run("proxy", {})
        await store.enqueue([rollout("proxy", "proxy", 0)])
        await store.claim(1, runner="parent", lease=3600, run="proxy")


def work(path: str, folder: Path, kills: int, server: load.Served | None) -> Counter[str]:
    """Keeps processes of every kind at work, and kills one after another; how many of each."""
    chance = random.Random(0)
    context = multiprocessing.get_context("spawn")
    url = server.url if server else path
    killed: Counter[str] = Counter()

    def start(kind: str) -> tuple[str, BaseProcess, Path]:
        log = folder / f"{kind}-{uuid.uuid4().hex}.log"
        log.touch()
        process = context.Process(target=peer, args=(kind, url, str(log)), daemon=True)
        process.start()
        return kind, process, log

    peers = [start(kind) for kind in KINDS]
    for number in range(kills):
        if server and number % 2:
            wait_for_work(server, list(folder.glob("*.log")))
            time.sleep(chance.uniform(*PAUSES))
            server.kill()
            server.start()
            killed["server"] += 1
            continue
        kind, process, log = peers.pop(0)
        wait_for_work(process, [log])
        time.sleep(chance.uniform(*PAUSES))
        process.kill()
        process.join()
        killed[kind] += 1
        peers.append(start(kind))
    for _, process, _ in peers:
        process.kill()
        process.join()
    return killed


def wait_for_work(process: BaseProcess | load.Served, logs: list[Path], least: int = 5) -> None:
    """Until the logs are longer by some lines than when this began, or, of a process, began."""
    end = time.monotonic() + 60
    before = lines(logs) if isinstance(process, load.Served) else 0
    while lines(logs) < before + least:
        if not process.is_alive() or time.monotonic() > end:
            raise RuntimeError(f"{logs[0].name}: no work was done before the kill.")
        time.sleep(0.01)


def lines(logs: list[Path]) -> int:
    return sum(log.read_bytes().count(b"\n") for log in logs)


# -- the processes ---------------------------------------------------------------------------------


def peer(kind: str, url: str, log: str) -> None:
    out = os.open(log, os.O_WRONLY | os.O_APPEND)

    def say(what: str, *values: Any) -> None:
        os.write(out, json.dumps([what, *values]).encode() + b"\n")

    async def run() -> None:
        async with open_store(url) as store:
            await {"runner": runner, "gateway": gateway, "algorithm": algorithm}[kind](store, say)

    asyncio.run(run())


async def runner(store: Store, say: Say) -> None:
    async def one() -> None:
        while True:
            for attempt in await store.claim(
                1, runner="r", lease=LEASE, run="run", claim_id=uuid.uuid4().hex, timeout=1.0
            ):
                say("claim", attempt.rollout.id, attempt.fence, attempt.id)
                calls = [call(attempt.id, i) for i in range(3)]
                if all(await store.add_transitions(calls)):
                    say("calls", [call.id for call in calls])
                await store.heartbeat([attempt.id], lease=LEASE)
                outcome = Outcome(
                    attempt=attempt.id, fence=attempt.fence, rewards=[Reward(value=1.0)]
                )
                if (await store.finish([outcome]))[0]:
                    say("finish", attempt.rollout.id, attempt.id)

    await asyncio.gather(*(one() for _ in range(4)))


async def gateway(store: Store, say: Say) -> None:
    (row,) = await store.rollouts("proxy")
    assert row.attempt is not None

    async def one() -> None:
        while True:
            made = call(str(row.attempt), 0, id=uuid.uuid4().hex)
            if (await store.add_transitions([made]))[0]:
                say("calls", [made.id])
            await asyncio.sleep(0.005)

    await asyncio.gather(*(one() for _ in range(4)))


async def algorithm(store: Store, say: Say) -> None:
    with contextlib.suppress(Fenced):
        state = await store.open_run("run", {})
        step = state.step
        while True:
            names = [uuid.uuid4().hex for _ in range(8)]
            new = [rollout("run", name, i) for name in names for i in range(4)]
            await store.enqueue(new)
            say("enqueue", [one.id for one in new])
            groups = await store.claim_groups("run", state.epoch, 8, timeout=0.2)
            ids = [group.id for group in groups]
            await store.commit_step(commit(state.epoch, step, ids))
            say("commit", step, ids)
            step += 1


def rollout(run: str, group: str, i: int) -> NewRollout:
    return NewRollout(
        id=f"{group}/{i}", run=run, group=group, index=i, task={}, max_attempts=1_000_000
    )


def call(attempt: str, index: int, **more: Any) -> Transition:
    about = {"id": f"{attempt}-{index}", "attempt": attempt, "index": index}
    return factories.call(prompt=range(64), completion=range(16), **about | more)


def commit(epoch: int, step: int, groups: list[str]) -> StepCommit:
    return StepCommit(
        run="run", epoch=epoch, step=step, groups=groups, versions={}, checkpoint="", metrics={}
    )


# -- the verdict -----------------------------------------------------------------------------------


@dataclass
class Said:
    """Everything that was acknowledged, over all processes."""

    rollouts: set[str]
    claims: Counter[tuple[str, int]]
    calls: set[str]
    finished: dict[str, str]  # rollout: attempt
    steps: dict[int, list[str]]
    finished_twice: int = 0


def acknowledged(folder: Path) -> Said:
    said = Said(set(), Counter(), set(), {}, {})
    for log in folder.glob("*.log"):
        for line in log.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                continue  # cut short by the kill: not said
            match json.loads(line):
                case ["enqueue", ids]:
                    said.rollouts |= set(ids)
                case ["claim", id, fence, _]:
                    said.claims[id, fence] += 1
                case ["calls", ids]:
                    said.calls |= set(ids)
                case ["finish", id, attempt]:
                    said.finished_twice += id in said.finished
                    said.finished[id] = attempt
                case ["commit", step, groups]:
                    said.steps[step] = groups
    return said


async def drain(path: str) -> None:
    """The run ends as it would have ended: what is left is done, and trained."""
    async with open_store(path) as store:
        state, step = await store.open_run("run", {}), None
        while (counts := await store.counts("run")).queued + counts.running:
            for one in await store.claim(64, runner="drain", lease=60, run="run", timeout=0.1):
                await store.finish([Outcome(attempt=one.id, fence=one.fence)])
        step = state.step
        while groups := await store.claim_groups("run", state.epoch, 64, timeout=0):
            await store.commit_step(commit(state.epoch, step, [group.id for group in groups]))
            step += 1


async def verdict(path: str, said: Said) -> dict[str, int]:
    async with open_store(path) as store:
        rows = {row.id: row for row in await store.rollouts("run")}
        counts = await store.counts("run")
    conn = sqlite3.connect(path)
    calls = {id for (id,) in conn.execute("select id from transitions where late = 0")}
    records = dict(conn.execute("select step, record from steps where committed"))
    check = conn.execute("pragma integrity_check").fetchall()
    conn.close()
    trained = Counter(id for record in records.values() for id in json.loads(record)["groups"])
    groups = {row.group for row in rows.values()}
    lost = (
        len(said.rollouts - rows.keys())
        + len(said.calls - calls)
        + sum(not rows[id].state.terminal or not rows[id].rewards for id in said.finished)
        + sum(json.loads(records[step])["groups"] != ids for step, ids in said.steps.items())
        + len(groups - trained.keys())
        + (check != [("ok",)])
    )
    twice = (
        sum(n - 1 for n in said.claims.values())
        + sum(n - 1 for n in trained.values())
        + said.finished_twice
        + sum(rows[id].attempt != attempt for id, attempt in said.finished.items())
        + abs(counts.groups_trained - len(trained))
    )
    trained_by_ack = {id for ids in said.steps.values() for id in ids}
    waiting = sum(rows[id].group not in trained_by_ack for id in said.finished)
    return {
        "kill9_lost": lost,
        "kill9_duplicated": twice,
        "acknowledged_rollouts": len(said.rollouts),
        "acknowledged_claims": said.claims.total(),
        "acknowledged_calls": len(said.calls),
        "acknowledged_outcomes": len(said.finished),
        "acknowledged_steps": len(said.steps),
        "baseline_in_memory_lost_outcomes": waiting,
    }
