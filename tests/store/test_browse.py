"""Curves, pages and searches, the same on every backend; and stores that are only read."""

from __future__ import annotations

import hashlib
import math
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from agentrl.core.errors import Forbidden, Invalid, NotFound
from agentrl.core.types import ErrorKind, Purpose, Reward, RolloutState, Scope
from agentrl.store import open_store
from tests.store.conftest import refused


async def claim(store, n=1, *, lease=10.0):
    return await store.claim(n, runner="test", lease=lease)


async def fill(store, kit, groups=6, n=2):
    """Groups g00, g01, ... of one step each: the first rollout of a group fails, and the others
    have an outcome of a tenth of their step and a reward for the format of their one call."""
    for step in range(groups):
        await store.enqueue(kit.group(f"g{step:02}", n, step=step))
        for i, attempt in enumerate(await claim(store, n)):
            if i == 0:
                await store.finish([kit.bad(attempt)])
                continue
            said = {"role": "assistant", "content": f'the "answer" of {step}'}
            call = kit.call(
                attempt, [1, step], [2], role=f"role-{step % 2}", version=step, answer=said,
                messages=[{"role": "user", "content": f"für {step}"}],
            )  # fmt: skip
            await store.add_transitions([call])
            rewards = [
                Reward(value=step / 10),
                Reward(value=-1.0, name="format", scope=Scope.TRANSITION, target=call.id),
            ]
            await store.finish([kit.good(attempt, rewards=rewards)])


async def found(store, **wanted):
    return [row.id for row in (await store.search("run", **wanted)).rows]


# -- curves ----------------------------------------------------------------------------------------


async def test_a_curve_has_every_step_where_there_are_few(store):
    for step, value in enumerate([0.25, math.nan, 0.5]):
        await store.log("run", step, {"reward": value, f"only/{step}": 1.0})
    curves = await store.series("run", ["reward", "only/1", "unknown"])
    (first, nothing, last) = curves["reward"]
    assert (first, last, nothing[0]) == ((0, 0.25), (2, 0.5), 1)
    assert math.isnan(nothing[1])
    assert (curves["only/1"], curves["unknown"]) == ([(1, 1.0)], [])
    assert (await store.series("run", ["reward"], 1))["reward"] == [(2, 0.5)]
    assert await store.series("nobody", ["reward"]) == {"reward": []}
    assert await store.metric_names("run") == ["only/0", "only/1", "only/2", "reward"]
    assert await store.metric_names("nobody") == []
    with pytest.raises(Invalid, match="points"):
        await store.series("run", ["reward"], points=1)


async def test_a_long_curve_is_thinned_and_keeps_its_ends(store):
    for step in range(60):
        seldom = {"eval/score": float(step)} if step % 7 == 3 else {}
        await store.log("run", step, {"reward": float(step), **seldom})
    for points in (2, 5, 7, 40, 400):
        curves = await store.series("run", ["reward", "eval/score"], points=points)
        for curve in curves.values():
            assert 2 <= len(curve) <= points
            assert all(value == step for step, value in curve), points
            assert curve == sorted(set(curve)), points
        ends = [(curve[0], curve[-1]) for curve in curves.values()]
        assert ends == [((0, 0.0), (59, 59.0)), ((3, 3.0), (59, 59.0))], points
        if points >= 40:  # no more than one in each bucket: nothing is lost
            assert [step for step, _ in curves["eval/score"]] == list(range(3, 60, 7))
        (later,) = (await store.series("run", ["reward"], 49, points)).values()
        assert (later[0][0], later[-1][0]) == (50, 59), points


async def test_steps_come_in_pages(store):
    for step in range(5):
        await store.log("run", step, {"reward": float(step)})
    page = await store.steps("run", after=1, limit=2)
    assert [(row.step, row.metrics) for row in page] == [(2, {"reward": 2.0}), (3, {"reward": 3.0})]
    assert await store.steps("run", limit=0) == []
    with pytest.raises(Invalid, match="limit"):
        await store.steps("run", limit=-1)


# -- pages -----------------------------------------------------------------------------------------


async def test_groups_come_newest_first_with_their_outcomes(store, kit):
    await fill(store, kit)
    await store.enqueue(kit.group("g99", 1, step=5, purpose=Purpose.EVAL))
    (newest, *_, oldest) = await store.groups("run")
    assert (newest.id, newest.purpose, newest.state) == ("g99", Purpose.EVAL, "open")
    assert (newest.states, newest.outcomes) == ([RolloutState.QUEUED], [None])
    assert (oldest.id, oldest.step, oldest.state, oldest.trained) == ("g00", 0, "settled", None)
    assert (oldest.rollouts, oldest.outcomes) == (["g00/0", "g00/1"], [None, 0.0])
    assert (oldest.n, oldest.failed) == (2, 1)
    assert [group.id for group in await store.groups("run", step=5)] == ["g99", "g05"]
    assert [group.id for group in await store.groups("run", purpose=Purpose.EVAL)] == ["g99"]
    assert len(await store.groups("run", state="settled")) == 6
    assert await store.groups("nobody") == []
    with pytest.raises(Invalid, match="limit"):
        await store.groups("run", limit=0)

    await store.claim_groups("run", 1, 2, timeout=0)
    await store.commit_step(kit.step(0, ["g00"], discarded=["g01"]))
    taken = await store.groups("run", trained=0)
    assert [(group.id, group.state) for group in taken] == [
        ("g01", "discarded"),
        ("g00", "trained"),
    ]


async def test_pages_of_groups_repeat_nothing_while_groups_arrive(store, kit):
    await fill(store, kit)
    seen, page = [], await store.groups("run", limit=2)
    while page:
        seen += [group.id for group in page]
        await store.enqueue(kit.group(f"h{len(seen)}", 1))
        page = await store.groups("run", before=seen[-1], limit=2)
    assert seen == [f"g0{step}" for step in range(5, -1, -1)]


async def test_rollouts_come_in_pages(store, kit):
    await fill(store, kit)
    for filters in ({}, {"purpose": Purpose.TRAIN}, {"state": RolloutState.FAILED}, {"step": 3}):
        whole = [row.id for row in await store.rollouts("run", **filters)]
        assert whole, filters
        seen, page = [], await store.rollouts("run", **filters, limit=2)
        while page:
            seen += [row.id for row in page]
            page = await store.rollouts("run", **filters, after=seen[-1], limit=2)
        assert seen == whole
    assert len(await store.rollouts("run", step=3)) == 2
    assert len(await store.rollouts("run", state=RolloutState.FAILED)) == 6
    assert await store.rollouts("run", state=RolloutState.RUNNING) == []
    with pytest.raises(NotFound, match="first page"):
        await store.rollouts("run", after="gone")


# -- searches --------------------------------------------------------------------------------------


SEARCHES = [  # what is wanted, and the steps of whose second rollouts are found, or names
    ({"rewards": {"outcome": (0.3, None)}}, [5, 4, 3]),
    ({"rewards": {"outcome": (None, 0.1)}}, [1, 0]),
    ({"rewards": {"outcome": (0.2, 0.3), "format": (-1.0, -1.0)}}, [3, 2]),
    ({"rewards": {"outcome": (0.2, 0.3), "format": (0.0, None)}}, []),
    ({"role": "role-1"}, [5, 3, 1]),
    ({"role": "role-1", "version": 3}, [3]),
    ({"role": "role-0", "version": 3}, []),
    ({"policy": "policy", "steps": (1, 2)}, [2, 1]),
    ({"policy": "another"}, []),
    ({"steps": (None, 1), "state": RolloutState.SUCCEEDED}, [1, 0]),
    ({"steps": (5, None), "state": RolloutState.FAILED}, ["g05/0"]),
    ({"state": RolloutState.CANCELLED}, []),
    ({"error": ErrorKind.AGENT, "steps": (4, None)}, ["g05/0", "g04/0"]),
    ({"error": ErrorKind.TIMEOUT}, []),
    ({"text": 'the "answer" of 4'}, [4]),
    ({"text": "für 2"}, [2]),
    ({"text": "boom", "steps": (0, 0)}, ["g00/0"]),
    ({"text": "% _"}, []),
    ({"purpose": Purpose.EVAL}, []),
]


async def test_a_search_finds_what_was_asked_for(store, kit):
    await fill(store, kit)
    for wanted, steps in SEARCHES:
        ids = [step if isinstance(step, str) else f"g0{step}/1" for step in steps]
        assert await found(store, **wanted) == ids, wanted
    rows, cursor, looked = await store.search("run")
    assert (len(rows), cursor, looked) == (12, None, 12)
    good, bad = rows[8:10]
    assert (good.id, good.group, good.index, good.step, good.attempts) == ("g01/1", "g01", 1, 1, 1)
    assert (good.state, good.error, good.trained) == (RolloutState.SUCCEEDED, None, None)
    assert [(row.name, row.value) for row in good.rewards] == [("outcome", 0.1), ("format", -1.0)]
    assert (bad.state, bad.error, bad.rewards) == (RolloutState.FAILED, ErrorKind.AGENT, [])
    assert await store.search("nobody") == ([], None, 0)


async def test_pages_of_a_search_repeat_nothing_while_rollouts_arrive(store, kit):
    await fill(store, kit)
    seen, cursor = [], None
    for _ in range(99):
        rows, cursor, _ = await store.search(
            "run", rewards={"format": (None, None)}, before=cursor, limit=1
        )
        seen += [row.id for row in rows]
        await store.enqueue(kit.group(f"late-{len(seen)}-{cursor}", 1, step=9))
        if cursor is None:
            break
    assert seen == [f"g0{step}/1" for step in range(5, -1, -1)]


async def test_a_search_whose_time_is_up_goes_on_where_it_ended(store, kit):
    await store.enqueue([row for i in range(40) for row in kit.group(f"g{i:02}", 10, step=i)])
    looked, cursor, pages = 0, None, 0
    while pages == 0 or cursor is not None:
        rows, cursor, more = await store.search("run", text="x", before=cursor, budget=1e-9)
        looked, pages = looked + more, pages + 1
        assert rows == []
    assert (looked, pages) == (400, 5)  # of 125 at most, and one that finds nothing more


async def test_a_search_that_makes_no_sense_is_refused(store):
    for wrong in ({"limit": 0}, {"budget": 0}, {"budget": 11}):
        await refused(store.search("run", **wrong), wrong, *wrong)
    await refused(store.search("run", before="g05/1"), "before", "cursor")


# -- attempts --------------------------------------------------------------------------------------


async def test_attempts_show_what_came_late(store, kit, clock):
    await store.enqueue(kit.group("g", 1))
    assert await store.attempts("g/0") == []
    (slow,) = await claim(store)
    await store.add_transitions([kit.call(slow, [1], [2])])
    clock.now += 11
    (second,) = await claim(store)
    late = kit.call(slow, [1, 2, 3], [4])
    assert await store.add_transitions([late]) == [False]
    assert await store.finish([kit.good(slow, 0.5)]) == [False]
    await store.add_spans([kit.span(second)])
    await store.add_transitions([kit.call(second, [1], [7])])
    await store.finish([kit.good(second)])
    one, two = await store.attempts("g/0")
    assert (one.id, one.fence, one.state, one.runner) == (slow.id, 1, "expired", "test")
    assert one.failure.kind is ErrorKind.LOST_RUNNER
    assert [list(call.completion) for call in one.transitions] == [[2]]
    assert [list(call.prompt) for call in one.late_transitions] == [[1, 2, 3]]
    assert (one.rewards, [row.value for row in one.late_rewards]) == ([], [0.5])
    assert (two.id, two.state, two.failure, len(two.spans)) == (second.id, "succeeded", None, 1)
    assert (two.late_transitions, two.late_rewards) == ([], [])
    assert two.ended == clock.now == two.started


# -- stores that are only read ---------------------------------------------------------------------


WRITES = {
    "open_run": ("run", {}), "log": ("run", 0, {}), "enqueue": ([],), "cancel": (["g00/0"],),
    "finish": ([],), "vacuum": (), "heartbeat": ([],), "add_spans": ([],),
    "add_transitions": ([],), "rewind": ("run", 1, 0, None), "draft_dataset": ("x", {}),
    "add_items": ("x", 1, [], []), "commit_dataset": ("x", 1), "add_judgements": ([],),
    "add_rewards": ([],), "hold_run": ("run", "me"), "forget": ([],),
    "add_logprobs": ("m", {}), "put_documents": ("run", "note", {}), "put_images": ("run", []),
}  # fmt: skip


async def test_a_store_that_is_only_read_answers_readers_and_refuses_writers(store, opener, kit):
    await fill(store, kit, 2)
    reader = opener(readonly=True)
    assert await reader.runs() == ["run"]
    assert [group.id for group in await reader.groups("run")] == ["g01", "g00"]
    assert (await reader.trace("g01/1")).transitions
    assert await reader.settled("g00")
    seen = await reader.cursor()
    await store.enqueue(kit.group("new", 1))
    assert await reader.wait(seen, timeout=10) > seen
    assert not await reader.settled("new", timeout=0)
    options = {verb: {"lease": 1.0} for verb in ("heartbeat", "hold_run")}
    for verb, arguments in WRITES.items():
        with pytest.raises(Forbidden, match="reading only"):
            await getattr(reader, verb)(*arguments, **options.get(verb, {}))
    for verb in (reader.claim(1, runner="r", lease=1.0), reader.prune(keep_last=1)):
        with pytest.raises(Forbidden, match="reading only"):
            await verb


def test_every_verb_that_writes_was_tried() -> None:
    from agentrl.store.http.wire import READERS, VERBS

    assert {"claim", "prune", "publish", "claim_groups", "commit_step", *WRITES} == (
        VERBS.keys() - READERS
    )


def fingerprint(path: Path) -> dict[str, str]:
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.parent.iterdir())
    }


@pytest.mark.parametrize("disk", ["writable", "readonly"])
async def test_reading_leaves_every_byte_of_a_file(tmp_path, kit, monkeypatch, disk):
    path = tmp_path / "store.db"
    async with open_store(str(path)) as store:
        await store.open_run("run", {})
        await fill(store, kit, 2)
    with closing(sqlite3.connect(path)) as conn:
        conn.execute("pragma wal_checkpoint(truncate)")
    before = fingerprint(path)
    if disk == "readonly":
        monkeypatch.setattr("os.access", lambda *_: False)  # root may write everywhere
    async with open_store(f"sqlite:///{path}", readonly=True) as store:
        assert await store.runs() == ["run"]
        assert len(await store.groups("run")) == 2
        assert await found(store, role="role-1") == ["g01/1"]
        assert len(await store.rollouts("run", step=1)) == 2
        assert await store.metric_names("run") == []
    after = fingerprint(path)
    if disk == "writable":  # where SQLite coordinates readers and writers through two more files
        assert not path.with_name("store.db-wal").read_bytes()
        del after["store.db-wal"], after["store.db-shm"]
    assert after == before
