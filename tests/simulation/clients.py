"""The store's other clients: one that sends invalid requests, one that calls in batches, one that
only reads, one that copies the store, and the requests of monitors and operators.

They must not change how the run ends, either.
"""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from math import inf, nan
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from agentrl.core.config import RunConfig
from agentrl.core.errors import Forbidden, StoreError, Unavailable
from agentrl.core.types import (
    POLICY,
    Branch,
    Credit,
    NewRollout,
    Outcome,
    Reward,
    Scope,
    Span,
    StepCommit,
    StepReward,
    Transition,
    float32,
    int32,
)
from agentrl.store import backends, open_store
from agentrl.store.base import Store
from agentrl.store.http.client import Connections, HttpStore, call
from agentrl.store.records import Item, Side
from tests.simulation.actors import KEYS
from tests.simulation.administrator import IMAGE, OWN
from tests.simulation.invariants import check
from tests.simulation.loop import Violation

if TYPE_CHECKING:
    from tests.simulation.world import World

SOME = 6  # refused calls at a time
CALL = Transition(
    id="odd", attempt="odd", index=0, prompt=int32([1]), completion=int32([2]),
    logprobs=float32([-0.5]),
)  # fmt: skip
ROLLOUT = NewRollout(id="odd", run=OWN, group="odd", index=0, task={})
COMMIT = StepCommit(run=OWN, epoch=1, step=999, groups=[], versions={}, checkpoint=None, metrics={})
LONG = "long" * 200
SPAN = Span(id="odd", attempt="other", parent=None, name="odd", kind="agent", start=1, end=2)


def refused(run: str) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Verbs with arguments that every store refuses."""
    calls = [
        replace(CALL, id=LONG), replace(CALL, prompt=[1]), replace(CALL, logprobs=float32()),
        replace(CALL, completion=int32([-1])), replace(CALL, logprobs=float32([nan])),
        replace(CALL, logprobs=float32([1.0])), replace(CALL, spans=[(1, 0)]),
        replace(CALL, spans=[(0, 0), (0, 0)]), replace(CALL, started=-1.0),
        replace(CALL, images=("odd",)), CALL,
    ]  # fmt: skip
    rollouts = [
        replace(ROLLOUT, max_attempts=0), replace(ROLLOUT, branch=Branch(rollout="odd", calls=0)),
        replace(ROLLOUT, seats={"": "odd"}), replace(ROLLOUT, run="unknown"),
        replace(ROLLOUT, branch=Branch(rollout="odd", calls=1, without=("odd",))),
        replace(ROLLOUT, sampling=replace(ROLLOUT.sampling, temperature=inf)),
        replace(ROLLOUT, id=LONG), replace(ROLLOUT, candidate="unknown"),
    ]  # fmt: skip
    rewards = [Reward(nan), Reward(1e300), Reward(1.0, "odd", Scope.TRANSITION)]
    outcomes = [
        *(Outcome("odd", 1, rewards=[reward]) for reward in rewards),
        Outcome("odd", 1, retry=True), Outcome("odd", 1, spans=[SPAN]), Outcome("odd", 1),
    ]  # fmt: skip
    side, item = Side(digest="odd"), Item(position=0, kind="pair", chosen="odd")
    credit = Credit(
        transition="odd", policy=POLICY,
        **{name: [0.5] for name in ("psi", "advantage", "baseline", "gate", "weight")},
    )  # fmt: skip
    return [
        *(("add_transitions", ([record],), {}) for record in calls),
        *(("enqueue", ([record],), {}) for record in rollouts),
        *(("finish", ([record],), {}) for record in outcomes),
        ("enqueue", ([ROLLOUT, replace(ROLLOUT, id="odder", run=run)],), {}),
        ("put_images", (OWN, [replace(IMAGE, body=b"odd")]), {}),
        ("put_images", (OWN, [replace(IMAGE, width=0)]), {}),
        ("put_documents", (OWN, "odd", {"odd": nan}), {}),
        ("put_documents", (OWN, "odd", {"odd": "\ud800"}), {}),
        ("put_documents", (OWN, "candidate", {"odd": "odd"}), {}),
        ("claim", (0,), {"runner": "odd", "lease": 9.0}),
        ("claim", (1,), {"runner": "odd", "lease": 1e6}),
        ("claim", (1,), {"runner": "odd", "lease": 9.0, "claim_id": ""}),
        ("claim_groups", (OWN, 1, 1), {"ordered": True, "groups": [], "timeout": 0.0}),
        ("commit_step", (replace(COMMIT, credits=[credit]),), {}),
        ("commit_step", (replace(COMMIT, groups=["unknown"]),), {}),
        ("commit_step", (replace(COMMIT, metrics={LONG: 1.0}),), {}),
        ("commit_step", (replace(COMMIT, rewards=[StepReward("odd", Reward(nan))]),), {}),
        ("rewind", (OWN, 1, -1, None), {}),
        ("rewind", (OWN, 10**6, 0, None), {}),
        ("add_rewards", ([StepReward("unknown", Reward(1.0))],), {}),
        ("steps", (run,), {"limit": -1}),
        ("rollouts", (run,), {"limit": -1}),
        ("groups", (run,), {"limit": -1}),
        ("series", (run, ["reward"]), {"points": -1}),
        ("search", (run,), {"limit": 0}),
        ("prune", (), {"run": run, "keep_last": -1}),
        ("prune", (), {"run": run, "older_than": -1.0}),
        ("prune", (), {"run": "unknown", "keep_last": 1}),
        ("add_items", ("odd", 1, [item], [side]), {}),
        ("add_items", ("unknown", 1, [], []), {}),
        ("add_items", ("odd", 1, [replace(item, weight=-1.0)], []), {}),
        ("add_items", ("odd", 1, [replace(item, kind="label")], []), {}),
        ("add_items", ("odd", 1, [], [side]), {}),
        ("commit_dataset", ("unknown", 1), {}),
        ("draft_dataset", (LONG, {}), {}),
    ]


class Clients:
    def __init__(self, world: World, config: RunConfig) -> None:
        self.world, self.config = world, config
        self.does = [self.err, self.read, self.copy, self.forget]
        if world.schedule.shape.http:
            self.does += [self.batch, self.ask]

    async def err(self, store: Store, run: str, rollout: str) -> None:
        """Send invalid requests; other verbs of the same transaction are not lost."""
        for verb, args, more in Random(rollout).sample(refused(run), SOME):
            try:
                await getattr(store, verb)(*args, **more)
            except Unavailable:
                raise
            except StoreError:
                continue
            raise Violation(f"{verb}{args}{more} was not refused")

    async def read(self, store: Store, run: str, rollout: str) -> None:
        """Open the store for reading only, as a view does."""
        url = self.config.store.replace(KEYS["admin"], KEYS["reader"])
        async with open_store(url, readonly=True) as view:
            await view.counts(run)
            await view.runs()
            await view.wait(0, timeout=0.5)
            rows = await view.groups(run, limit=1)
            if rows:
                await view.settled(rows[0].id, timeout=0.2)
            try:
                await view.put_documents(run, "note", {"read": 1})
            except Forbidden:
                return
            raise Violation("a store that was opened for reading only was written")

    async def copy(self, store: Store, run: str, rollout: str) -> None:
        """Copy the file, as `agentrl store backup` does: the copy is consistent."""
        copy = Path(self.world.folder, "copy.db")
        await asyncio.to_thread(backends.copy_file, self.world.file, copy)
        with closing(sqlite3.connect(copy)) as conn:
            (sound,) = conn.execute("pragma integrity_check").fetchone()
            check(sound == "ok", f"a copy of the store is damaged: {sound}")
            self.world.invariants.check_counters(conn)
        copy.unlink()

    async def forget(self, store: Store, run: str, rollout: str) -> None:
        """Make a data set of rollouts of the own run, then remove one of them."""
        rows = [row for row in await store.rollouts(OWN) if row.state.terminal][-2:]
        if len(rows) < 2:
            return
        sides = [Side(digest=f"of {row.id}", rollout=row.id) for row in rows]
        first, second = (side.digest for side in sides)
        item = Item(position=0, kind="pair", chosen=first, rejected=second)
        name = f"of {rows[0].id}"
        version = await store.draft_dataset(name, {"of": OWN, "at": rollout})
        await store.add_items(name, version, [item], sides)
        await store.commit_dataset(name, version)
        await store.sides([first, second])
        await store.forget([rows[0].id], dry_run=True)
        await store.forget([rows[0].id])

    async def batch(self, store: Store, run: str, rollout: str) -> None:
        """Several verbs in one request, some of them refused: each has its own answer."""
        assert isinstance(store, HttpStore)
        note = {"batch": self.world.next_serial()}
        results = await store.batch(
            [
                call("counts", run),
                call("put_documents", run, "note", note),
                call("enqueue", [ROLLOUT], epoch=10**6),
                call("put_documents", run, "note", {"odd": object()}),
                call("wait", 0, timeout=1.0),
                call("documents", run, "note"),
            ]
        )
        kinds = [isinstance(result, StoreError) for result in results]
        check(kinds == [False, False, True, True, True, False], f"a batch answered {results}")
        check("batch" in results[-1], f"a verb of a batch is lost: {results[-1]}")

    async def ask(self, store: Store, run: str, rollout: str) -> None:
        """Send what monitors, proxies and mistaken clients send to the server."""
        key = f"authorization: Bearer {KEYS['admin']}\r\n"
        json, text = "content-type: application/json\r\n", "content-type: text/plain\r\n"
        reader = key.replace(KEYS["admin"], KEYS["reader"])
        connections = Connections("http://store")
        for line, lines, body, wanted in (
            ("GET /healthz", "", b"", 200),
            ("GET /openapi.json", "", b"", 200),
            ("GET /v1/traces", key, b"", 405),
            ("POST /v1/unknown", key, b"", 404),
            ("POST /v1/counts", json, b"{}", 401),
            ("POST /v1/counts", key + text, b"{}", 415),
            ("POST /v1/counts", key + json, b"{", 400),
            ("POST /v1/counts", key + json, b"{}", 422),
            ("POST /v1/counts", reader + json, b'{"run": "other"}', 403),
            ("POST /v1/vacuum", reader + json, b"{}", 403),
            ("POST /v1/vacuum", key + json + "idempotency-key: \r\n", b"{}", 422),
        ):
            head = f"{line} HTTP/1.1\r\nhost: store\r\n{lines}".encode()
            try:
                answer = await connections.post(head, body, 5.0)
            except OSError:
                break
            status = answer.status
            check(status in (wanted, 503), f"{line} {lines!r} was answered {status}, not {wanted}")
        connections.close()
