"""Upkeep of every store: after any prune a run goes on exactly as it would have."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from agentrl.core.errors import Conflict, NotFound
from agentrl.core.types import Credit, Purpose, float32
from agentrl.store.records import Pruned
from agentrl.store.sql import maintenance
from tests.store.conftest import refused

DAY = 86_400.0
TOOLS = [{"name": "lookup"}]
LIMITS = [
    {"keep_last": 0},
    {"keep_last": 2},
    {"keep_last": 9},
    {"older_than": 0.0},
    {"older_than": 1.5 * DAY},
    {"keep_last": 1, "older_than": 2.5 * DAY},
    {"run": "run", "keep_last": 1},
    {"run": "other", "keep_last": 0},
]


async def work(store, kit, group, n=2, *, tools=TOOLS, **more):
    """A group of which every rollout made two calls and succeeded; the first one lost a runner."""
    await store.enqueue(kit.group(group, n, **more))
    for attempt in await store.claim(n, runner="test", lease=10):
        calls = [kit.call(attempt, [1, 2], [3], tools=tools), kit.call(attempt, [1, 2, 3], [4])]
        await store.add_transitions(calls)
        await store.finish([kit.good(attempt, spans=[kit.span(attempt)])])


async def train(store, kit, clock, steps=4):
    """`steps` steps a day apart, each after an evaluation; then a claimed group, a settled one, one
    half in the queue, and the evaluation that the next step waits for. Returns the last commit."""
    for step in range(steps):
        await work(store, kit, f"eval/{step}", purpose=Purpose.EVAL, step=step, tools=[{"n": step}])
        await work(store, kit, f"train/{step}", step=step)
        await store.claim_groups("run", 1, 1)
        commit = kit.step(step, [f"train/{step}"])
        await store.commit_step(commit)
        clock.now += DAY
    for group in ("train/claimed", "train/settled"):
        await work(store, kit, group, step=steps)
    await store.claim_groups("run", 1, 1)
    await work(store, kit, f"eval/{steps}", purpose=Purpose.EVAL, step=steps)
    await store.enqueue(kit.group("train/open", 2, step=steps))
    await store.claim(1, runner="test", lease=3600.0)
    return commit


async def other_run(store, kit, clock):
    await store.open_run("other", {})
    await work(store, kit, "other/0", run="other")
    await store.claim_groups("other", 1, 1)
    await store.commit_step(kit.step(0, ["other/0"], run="other"))
    clock.now += DAY


async def left(store):
    """Groups of which the rollouts are still there."""
    runs = [await store.rollouts(run) for run in await store.runs()]
    return {rollout.group for rollouts in runs for rollout in rollouts}


async def lasting(store):
    """All that a prune may not touch."""
    names = await store.runs()
    return [
        [
            await store.run(run),
            await store.counts(run),
            await store.steps(run),
            await store.policies(run),
        ]
        for run in names
    ]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
async def test_a_run_goes_on_exactly_and_a_dry_run_predicts_it(store, kit, clock, limits):
    await other_run(store, kit, clock)
    await train(store, kit, clock)
    before, cursor = await lasting(store), await store.cursor()
    waiting = await store.claim_groups("run", 1, 2)
    traces = [await store.trace(f"eval/4/{i}") for i in range(2)]
    stats = await store.stats()

    predicted = await store.prune(**limits, dry_run=True)
    assert await store.stats() == stats
    assert await store.prune(**limits) == predicted
    assert await store.prune(**limits) == Pruned()

    after = await store.stats()
    for table in ("rollouts", "attempts", "transitions", "spans", "rewards"):
        assert after.rows[table] == stats.rows[table] - getattr(predicted, table)
    assert await lasting(store) == before
    assert await store.cursor() >= cursor
    assert await store.claim_groups("run", 1, 2) == waiting
    assert [await store.trace(f"eval/4/{i}") for i in range(2)] == traces
    assert (await store.open_run("run", {})).step == 4
    groups = [group.id for group in await store.claim_groups("run", 2, 2)]
    assert groups == ["train/claimed", "train/settled"]
    await store.commit_step(kit.step(4, groups, epoch=2))
    (attempt,) = await store.claim(9, runner="test", lease=10)
    assert attempt.rollout.id == "train/open/1"


async def test_what_goes_and_what_stays(store, kit, clock):
    await train(store, kit, clock)
    stats = await store.stats()
    assert [stats.rows[name] for name in ("runs", "rollouts", "transitions")] == [1, 24, 44]
    assert stats.bytes > stats.free >= 0
    assert stats.cursor == await store.cursor()
    assert stats.rows["payloads"] == 5  # of all training, and of each evaluation
    pruned = await store.prune(keep_last=2)
    assert await left(store) == {
        *(f"{kind}/{step}" for kind in ("eval", "train") for step in (2, 3)),
        *("eval/4", "train/claimed", "train/settled", "train/open"),
    }
    # Four groups of two rollouts: one attempt, two calls, a span and a reward each.
    assert msgspec.structs.replace(pruned, bytes=0, events=0) == Pruned(
        rollouts=8, attempts=8, transitions=16, spans=8, rewards=8
    )
    assert pruned.bytes > 0
    assert pruned.events > 0
    assert await store.trace("train/0/0") is None
    with pytest.raises(NotFound):
        await store.settled("eval/0")
    await store.prune(keep_last=0)  # payloads go with the last that needs them
    assert (await store.stats()).rows["payloads"] == 1
    (group,) = await store.claim_groups("run", 1, 1)
    assert group.rollouts[0].transitions[0].tools == TOOLS


async def test_both_limits_protect(store, kit, clock):
    await train(store, kit, clock)
    await store.prune(keep_last=1, older_than=2.5 * DAY)
    assert {"train/2", "eval/2"} <= await left(store)
    assert not {"train/1", "eval/1"} & await left(store)


async def test_a_step_is_committed_once_though_its_evidence_is_gone(store, kit, clock):
    commit = await train(store, kit, clock)
    steps = await store.steps("run")
    await store.prune(keep_last=0)
    await store.commit_step(commit)
    assert await store.steps("run") == steps
    with pytest.raises(Conflict, match="trained already"):
        await store.enqueue(kit.group("train/3", 2))
    with pytest.raises(Conflict, match="was trained at step 3"):
        await store.commit_step(kit.step(4, ["train/3"]))


async def test_credit_goes_with_its_call_and_discarded_groups_go_too(store, kit):
    for group in ("train/0", "train/1"):
        await work(store, kit, group, 1)
    groups = await store.claim_groups("run", 1, 2)
    call = groups[0].rollouts[0].transitions[0].id
    numbers = dict.fromkeys(("advantage", "baseline", "gate", "weight", "psi"), float32([1.0]))
    credits = [Credit(transition=call, policy="policy", **numbers)]
    await store.commit_step(kit.step(0, ["train/0"], credits=credits))
    await store.commit_step(kit.step(1, [], discarded=["train/1"]))
    assert (await store.stats()).rows["credits"] == 1
    first = await store.prune(keep_last=1, dry_run=True)
    assert first.rollouts == 1
    both = await store.prune(keep_last=0)
    assert both.rollouts == 2
    assert first.bytes == both.bytes - first.bytes + len(numbers) * 4
    assert (await store.stats()).rows["credits"] == 0
    assert await store.credits("train/0/0") == []


async def test_groups_asked_for_ahead_can_be_asked_for_again(store, kit, clock):
    """Sampled ahead and trained early, a group is still one that a restarted run asks for."""
    await work(store, kit, "ahead", step=1)
    await store.claim_groups("run", 1, 1)
    await store.commit_step(kit.step(0, ["ahead"]))
    assert (await store.prune(keep_last=0)).rollouts == 0
    assert await store.enqueue(kit.group("ahead", 2, step=1)) == 0


async def test_late_evidence_goes_with_its_rollout(store, kit, clock):
    await store.enqueue(kit.group("train/0"))
    (lost,) = await store.claim(1, runner="test", lease=10)
    clock.now += 11
    (attempt,) = await store.claim(1, runner="test", lease=10)
    assert await store.add_transitions([kit.call(lost, [1], [2])]) == [False]
    await store.finish([kit.good(attempt)])
    await store.claim_groups("run", 1, 1)
    await store.commit_step(kit.step(0, ["train/0"]))
    pruned = await store.prune(keep_last=0)
    assert (pruned.rollouts, pruned.attempts, pruned.transitions) == (1, 2, 1)
    with pytest.raises(NotFound):
        await store.add_transitions([kit.call(lost, [1], [2])])


async def test_a_follower_with_an_old_cursor_is_woken(store, kit, clock):
    await train(store, kit, clock)
    cursor = await store.cursor()
    await store.prune(keep_last=0)
    assert await store.wait(0, timeout=0) >= cursor
    newest = await store.cursor()
    follower = asyncio.create_task(store.wait(newest, timeout=10))
    await store.enqueue(kit.group("more"))
    assert await follower > newest


async def test_a_prune_beside_a_run_at_work(opener, store, kit, clock, monkeypatch):
    """Everybody's transactions take turns; what is written meanwhile is as it would have been."""
    monkeypatch.setattr(maintenance, "ROWS_PER_TRANSACTION", 1)
    await train(store, kit, clock, steps=8)
    predicted = await store.prune(keep_last=1, dry_run=True)
    other, groups = opener(clock=clock), [f"train/9{i}" for i in range(10)]

    async def run_on():
        for group in groups:
            await work(other, kit, group, step=8, priority=1)

    pruned, _ = await asyncio.gather(store.prune(keep_last=1), run_on())
    assert pruned == predicted
    claimed = await store.claim_groups("run", 1, 12, timeout=10)
    assert [group.id for group in claimed[:10]] == groups
    for group in claimed:
        assert [len(rollout.transitions) for rollout in group.rollouts] == [2, 2]
        assert group.rollouts[0].transitions[0].tools == TOOLS


async def test_limits_that_make_no_sense(store):
    nan = {"older_than": float("nan")}
    for limits in ({}, {"keep_last": -1}, {"older_than": -1.0}, nan, {"run": "run"}):
        await refused(store.prune(**limits), limits)
    await refused(store.prune(keep_last=1, seconds=-1.0), "seconds", "seconds is how long")
    with pytest.raises(NotFound, match="no run 'nobody'"):
        await store.prune(run="nobody", keep_last=1)


async def test_vacuum_keeps_everything(store, kit, clock):
    await train(store, kit, clock)
    waiting = await store.claim_groups("run", 1, 2)
    await store.prune(keep_last=0)
    before = await store.stats()
    await store.vacuum()
    after = await store.stats()
    assert (after.rows, after.cursor) == (before.rows, before.cursor)
    assert after.bytes <= before.bytes
    assert await store.claim_groups("run", 1, 2) == waiting


@pytest.mark.parametrize("seconds", [0, 3600])
async def test_a_prune_in_steps_removes_the_same(store, kit, clock, monkeypatch, seconds):
    """Each step goes on where the one before it stopped, and a new prune at what is left."""
    monkeypatch.setattr(maintenance, "ROWS_PER_TRANSACTION", 1)
    await other_run(store, kit, clock)
    await train(store, kit, clock)
    predicted = await store.prune(keep_last=1, dry_run=True)
    steps, after = [], None
    while True:
        steps.append(await store.prune(keep_last=1, after=after, seconds=seconds))
        if (after := steps[-1].after) is None:
            break
        if len(steps) == 2:
            after = None  # as if it had been killed
    assert (len(steps) > 3) is (seconds == 0)
    shares = [step.share for step in steps]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    for name in ("rollouts", "attempts", "transitions", "spans", "rewards", "events", "bytes"):
        assert sum(getattr(step, name) for step in steps) == getattr(predicted, name)
