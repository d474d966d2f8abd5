"""What every store does, whatever it is made of."""

from __future__ import annotations

import asyncio
import math
import random
import string

import msgspec
import pytest
from msgspec import structs
from msgspec.structs import replace

from agentrl.core.errors import Conflict, Fenced, Invalid, NotFound, StoreError
from agentrl.core.types import (
    Branch,
    Counts,
    Credit,
    ErrorKind,
    Failure,
    NewRollout,
    Outcome,
    PolicyVersion,
    PromptText,
    Purpose,
    Reward,
    RolloutState,
    Sampling,
    Scope,
    StepReward,
    float32,
    int32,
)
from agentrl.store.rows import MAX_LEASE
from tests.store.conftest import refused

SOON = 10.0  # seconds in which whatever is waited for must have happened


async def claim(store, n=1, *, lease=10.0, runner="test", **more):
    return await store.claim(n, runner=runner, lease=lease, **more)


async def settle(store, kit, group, n=1):
    """A group of which every rollout succeeded."""
    await store.enqueue(kit.group(group, n))
    attempts = await claim(store, n)
    await store.finish([kit.good(attempt) for attempt in attempts])
    return attempts


# -- queue -----------------------------------------------------------------------------------------


async def test_enqueue_ignores_what_is_there(store, kit):
    assert await store.enqueue(kit.group("a", 3)) == 3
    assert await store.enqueue(kit.group("a", 4)) == 1
    assert (await store.counts("run")).queued == 4


async def test_a_rollout_comes_out_as_it_went_in(store):
    rollout = NewRollout(
        id="x",
        run="run",
        group="g",
        index=3,
        task={"input": "héllo \u0000", "deep": [{"n": 1.5, "none": None}]},
        purpose=Purpose.EVAL,
        sampling=Sampling(temperature=0.0, max_tokens=7, seed=1),
        step=4,
        max_attempts=2,
        timeout=2.5,
        priority=-1,
        branch=Branch(rollout="other", calls=2, without=["küche"]),
        seats={"planner": "planner@000010", "küche": "solver"},
    )
    await store.enqueue([rollout])
    (attempt,) = await claim(store)
    assert attempt.rollout == rollout
    assert (attempt.fence, len(attempt.id)) == (1, 32)
    (row,) = await store.rollouts("run")
    assert (row.task, row.state, row.attempt) == (rollout.task, RolloutState.RUNNING, attempt.id)
    assert (row.branch, row.seats) == (rollout.branch, rollout.seats)


async def test_a_rollout_travels_with_the_texts_of_its_candidate(store, kit):
    text = PromptText(component="s", role="solver", seed="a", text="b \u00e9", tool="look")
    texts = {"texts": [msgspec.to_builtins(text)], "state": "accepted"}
    await store.put_documents("run", "candidate", {"c": texts})
    await store.enqueue(kit.group("a", 1, candidate="c"))
    (attempt,) = await claim(store, claim_id="x")
    assert attempt.prompts == [text]
    assert (await claim(store, claim_id="x"))[0].prompts == [text]
    assert (await store.rollouts("run"))[0].candidate == "c"
    with pytest.raises(NotFound, match="no candidate 'unknown'"):
        await store.enqueue(kit.group("b", 1, candidate="unknown"))
    with pytest.raises(Invalid, match="candidates"):
        await store.enqueue([*kit.group("c", 1), *kit.group("c", 2, candidate="c")[1:]])
    for wrong in ({}, {"texts": "Be brief."}, [], {"texts": [{"component": "s"}]}):
        put = store.put_documents("run", "candidate", {"d": wrong})
        await refused(put, wrong, "texts of candidate 'd' cannot be used")
    assert await store.documents("run", "candidate") == {"c": texts}


async def test_documents_are_kept_in_order_and_once(store):
    values = {"b": {"x": [1.5, None]}, "a": "\u00e9\0", "c": 7}
    await store.put_documents("run", "note", values)
    await store.put_documents("run", "note", {"b": "again", "d": None})
    await store.put_documents("run", "other", {"b": "another"})
    assert list((await store.documents("run", "note")).items()) == [*values.items(), ("d", None)]
    seen = await store.cursor()
    await store.put_documents("run", "note", {"b": "again"}, replace=True)
    assert await store.cursor() > seen
    found = await store.documents("run", "note")
    assert list(found.items()) == [*(values | {"b": "again"}).items(), ("d", None)]
    assert list(await store.documents("run", "note", after="b")) == ["c", "d"]
    assert (await store.stats()).rows["documents"] == 5
    for wrong in ({"b": 2**70}, {"b": "\ud800"}, {"b": object()}, {"b" * 600: 1}):
        await refused(store.put_documents("run", "note", wrong), wrong)
    with pytest.raises(NotFound):
        await store.put_documents("unknown", "note", values)
    assert await store.documents("unknown", "note") == {}
    assert await store.documents("run", "unknown") == {}


async def test_a_late_reward_counts_and_the_last_of_its_kind_stays(store, kit):
    await store.enqueue([*kit.group("a", 2), *kit.group("b")])
    (attempt,) = await store.claim(1, runner="test", lease=9.0)
    await store.add_transitions([call := kit.call(attempt, [1], [2])])
    await store.finish([kit.good(attempt)])

    def given(rollout="a/0", **fields):
        return StepReward(rollout=rollout, reward=Reward(**{"source": "feedback"} | fields))

    about = {"scope": Scope.TRANSITION, "target": call.id}
    last = given(name="thumb", value=1.0, note="better")
    rows = [given(name="thumb", value=0.0), given(name="thumb", value=0.5, **about), last, last]
    for row in rows:
        await store.add_rewards([row])
    found = (await store.rollouts("run", group="a"))[0].rewards
    assert found[0] == Reward(value=1.0)  # the outcome
    assert sorted(found[1:], key=str) == sorted([last.reward, rows[1].reward], key=str)
    for rollout in ("a/1", "unknown"):
        with pytest.raises(NotFound, match="was never claimed"):
            await store.add_rewards([given(rollout, value=1.0)])
    await store.claim(1, runner="test", lease=9.0)
    with pytest.raises(Invalid, match="has no call"):
        await store.add_rewards([given("a/1", value=1.0, **about)])


async def test_rewards_go_with_the_trace_to_the_attempt_that_only_ends_it(store, kit):
    await store.enqueue(kit.group("a"))
    (first,) = await store.claim(1, runner="test", lease=9.0)
    await store.finish([replace(kit.good(first), ran=True, rewards=[])])
    await store.add_rewards([StepReward(rollout="a/0", reward=Reward(value=0.5, name="thumb"))])
    lost = Failure(kind=ErrorKind.LOST_RUNNER, message="it stops")
    await store.finish([replace(kit.bad(first), failure=lost, retry=True)])
    (second,) = await store.claim(1, runner="test", lease=9.0)
    await store.finish([replace(kit.good(second), rewards=[])])
    assert (await store.rollouts("run"))[0].reward("thumb") == 0.5


async def test_seats_stay_with_a_rollout_to_its_end(store, kit):
    seats = {"player_0": "policy", "player_1": "policy@000010"}
    await store.enqueue(kit.group("a", 1, seats=seats))
    assert await store.enqueue(kit.group("a", 1, seats={"player_0": "other"})) == 0
    await store.enqueue(kit.group("b", 1))
    (first,) = await claim(store, claim_id="c")
    assert (await claim(store, claim_id="c"))[0].rollout.seats == seats
    await store.finish([kit.bad(first, retry=True)])
    again, plain = await claim(store, 2)
    assert (again.fence, again.rollout.seats, plain.rollout.seats) == (2, seats, {})
    await store.finish([kit.good(again), kit.good(plain)])
    assert (await store.trace("a/0")).rollout.seats == seats
    groups = await store.claim_groups("run", 1, 2)
    assert [row.seats for group in groups for row in group.rollouts] == [seats, {}]


async def test_an_integer_that_not_every_reader_has_is_refused(store, kit):
    await store.enqueue(kit.group("c", 1, task={"x": [2**64 - 1, -(2**63)]}))
    (attempt,) = await claim(store, 9)
    assert attempt.rollout.task == {"x": [2**64 - 1, -(2**63)]}
    for value in (2**64, -(2**63) - 1, 10**30):
        x = {"x": value}
        new = [*kit.group("a", 1), *kit.group("b", 1, task={"deep": [x]})]
        await refused(store.enqueue(new), value, "b/0")
        await refused(store.open_run("other", x), value)
        for more in ({"messages": [x]}, {"answer": x}, {"tools": [x]}):
            call = kit.call(attempt, [1], [2], **more)
            await refused(store.add_transitions([call]), more)
        await refused(store.add_spans([kit.span(attempt, attributes=x)]), value)
        await refused(store.finish([kit.good(attempt, result=x)]), value)
    assert (await store.counts("run")).queued == 0
    assert await store.finish([kit.good(attempt)]) == [True]


async def test_claims_highest_priority_then_oldest(store, kit):
    await store.open_run("other", {})
    await store.enqueue(kit.group("old", 2))
    await store.enqueue(kit.group("another", 1, run="other", priority=1))
    await store.enqueue(kit.group("urgent", 1, priority=5))
    await store.enqueue(kit.group("new", 1))
    assert [a.rollout.id for a in await claim(store, 9, run="other")] == ["another/0"]
    order = [attempt.rollout.id for attempt in await claim(store, 9)]
    assert order == ["urgent/0", "old/0", "old/1", "new/0"]
    assert await claim(store) == []


async def test_fifty_workers_never_share_a_rollout(opener, store, kit, clock):
    await store.enqueue(kit.group("a", 200))
    stores = [opener(clock=clock) for _ in range(5)]

    async def work(number):
        mine = []
        while got := await claim(stores[number % 5], 3):
            mine += [attempt.rollout.id for attempt in got]
        return mine

    shares = await asyncio.gather(*(work(number) for number in range(50)))
    taken = [rollout for share in shares for rollout in share]
    assert len(taken) == 200
    assert set(taken) == {rollout.id for rollout in kit.group("a", 200)}


async def test_a_claim_repeats_with_its_id_what_is_still_live(store, kit, clock):
    await store.enqueue(kit.group("a", 5))
    done, lost, kept = await claim(store, 3, claim_id="c")
    assert await claim(store, 3, claim_id="c") == [done, lost, kept]
    (other,) = await claim(store, 1, claim_id="d")
    assert (other.rollout.id, await store.finish([kit.good(other)])) == ("a/3", [True])
    await store.finish([kit.good(done)])
    assert await claim(store, 3, claim_id="c") == [lost, kept]
    clock.now += 6
    assert await store.heartbeat([kept.id], lease=10) == [kept.id]
    clock.now += 6
    assert [attempt.id for attempt in await claim(store, 3, claim_id="c")] == [kept.id]
    await store.cancel([kept.rollout.id])
    async with asyncio.timeout(SOON):
        assert await claim(store, 3, claim_id="c", timeout=60) == []  # at once, and no others
    assert (await store.counts("run")).queued == 2
    with pytest.raises(Invalid, match="claim_id"):
        await claim(store, claim_id="")


async def test_an_expired_lease_becomes_the_next_attempt(store, kit, clock):
    await store.enqueue(kit.group("a", 1))
    (first,) = await claim(store, lease=10)
    clock.now += 9
    assert await store.heartbeat([first.id, "unknown"], lease=10) == [first.id]
    clock.now += 9
    assert await claim(store) == []
    clock.now += 1
    assert await store.heartbeat([first.id], lease=10) == []
    (second,) = await claim(store)
    assert (second.rollout, second.fence) == (first.rollout, 2)
    assert second.id != first.id


async def test_a_heartbeat_never_shortens_a_lease(store, kit, clock):
    await store.enqueue(kit.group("a", 1))
    (attempt,) = await claim(store, lease=100)
    await store.heartbeat([attempt.id], lease=1)
    clock.now += 50
    assert await store.heartbeat([attempt.id], lease=1) == [attempt.id]


async def test_too_many_lost_runners_fail_the_rollout(store, kit, clock):
    await store.enqueue(kit.group("a", 1, max_attempts=2))
    for fence in (1, 2):
        (attempt,) = await claim(store, lease=10)
        assert attempt.fence == fence
        clock.now += 10
    assert await claim(store) == []
    (row,) = await store.rollouts("run")
    assert (row.state, row.attempts) == (RolloutState.FAILED, 2)
    assert row.failure.kind is ErrorKind.LOST_RUNNER
    assert await store.settled("a", timeout=0)


async def test_who_falls_silent_with_others_is_tried_apart(store, kit, clock):
    await store.enqueue(kit.group("a", 20, max_attempts=1))
    assert len(await claim(store, 20, runner="died")) == 20
    clock.now += 10
    held = await claim(store, 20, runner="one")  # a quarter of those it was lost with
    assert [one.rollout.id for one in held] == [f"a/{i}" for i in range(5)]
    assert {one.rollout.max_attempts for one in held} == {2}
    assert await claim(store, 1, runner="one") == []
    assert len(await claim(store, 20, runner="two")) == 5
    await store.finish([kit.good(held[0])])
    assert [one.rollout.id for one in await claim(store, 20, runner="one")] == ["a/10"]
    clock.now += 10
    (alone,) = await claim(store, 20, runner="three")
    assert alone.rollout.id == "a/1"
    await store.finish([kit.good(alone)])
    assert (await store.counts("run")).failed == 0


async def test_who_falls_silent_alone_fails_and_is_named(store, kit, clock):
    await store.enqueue(kit.group("a", 2, max_attempts=2))
    await claim(store, 2, runner="died")
    done = []
    for number in range(9):
        clock.now += 10
        for one in await claim(store, 9, runner=f"r{number}"):
            if one.rollout.id == "a/1":
                done += await store.finish([kit.good(one)])
    rows = {row.id: row for row in await store.rollouts("run")}
    assert (rows["a/1"].state, done) == (RolloutState.SUCCEEDED, [True])
    assert (rows["a/0"].state, rows["a/0"].attempts) == (RolloutState.FAILED, 3)
    assert rows["a/0"].failure.kind is ErrorKind.LOST_RUNNER
    assert "while running rollout a/0 alone" in rows["a/0"].failure.message


async def test_leases_of_one_runner_that_end_one_after_the_other_are_one_death(store, kit, clock):
    await store.enqueue(kit.group("a", 2, max_attempts=1))
    await claim(store, 1, runner="died")
    clock.now += 3
    await claim(store, 1, runner="died")  # after its last heartbeat
    clock.now += 7
    (first,) = await claim(store, 9, runner="one")
    await store.finish([kit.good(first)])
    clock.now += 3
    (second,) = await claim(store, 9, runner="one")
    assert (second.rollout.id, second.fence, second.rollout.max_attempts) == ("a/1", 2, 2)


async def test_a_runner_that_is_heard_again_was_not_silent(store, kit, clock):
    """It let go of one rollout, and keeps the other."""
    await store.enqueue(kit.group("a", 2, max_attempts=1))
    _, kept = await claim(store, 2, runner="one")
    clock.now += 5
    assert await store.heartbeat([kept.id], lease=10) == [kept.id]
    clock.now += 5
    assert await claim(store, 1, runner="other", run="none") == []
    assert await store.heartbeat([kept.id], lease=10) == [kept.id]
    clock.now += 10
    assert await claim(store, 1, runner="other", run="none") == []
    rows = {row.id: row for row in await store.rollouts("run")}
    assert (rows["a/0"].state, rows["a/1"].state) == (RolloutState.QUEUED, RolloutState.FAILED)


@pytest.mark.parametrize("back", [6, 3600, 86400])
async def test_a_clock_set_back_keeps_no_dead_runner_alive(store, kit, clock, back):
    await store.enqueue(kit.group("a", 2))
    lost, kept = await claim(store, 2, lease=10)
    clock.now -= back
    assert await claim(store) == []
    clock.now += 9
    assert await store.heartbeat([kept.id], lease=10) == [kept.id]
    clock.now += 1
    (again,) = await claim(store, 2, runner="other")
    assert again.rollout.id == lost.rollout.id
    assert await store.heartbeat([kept.id], lease=10) == [kept.id]


async def test_a_late_writer_changes_nothing(store, kit, clock):
    await store.enqueue(kit.group("a", 1))
    (old,) = await claim(store, lease=10)
    clock.now += 10
    (new,) = await claim(store)
    assert await store.add_transitions([kit.call(old, [1], [2])]) == [False]
    assert await store.finish([kit.good(old, 9.0)]) == [False]
    await store.add_transitions([kit.call(new, [1], [3])])
    assert await store.finish([kit.good(new, 1.0)]) == [True]
    ((rollout,),) = [group.rollouts for group in await store.claim_groups("run", 1, 1)]
    assert (rollout.attempt, rollout.reward()) == (new.id, 1.0)
    assert [call.completion.tolist() for call in rollout.transitions] == [[3]]
    assert (await store.counts("run")).transitions == 1


async def test_what_ran_is_scored_by_whoever_claims_it_next(store, kit, clock):
    await store.enqueue(kit.group("a", 1))
    (old,) = await claim(store, lease=10)
    await store.add_transitions([kit.call(old, [1], [2]), kit.call(old, [1, 2], [3], index=1)])
    ran = {"result": "é", "calls": [2]}
    left = Outcome(attempt=old.id, fence=old.fence, ran=ran)
    assert await store.finish([left]) == [True]
    assert await store.finish([left]) == [True]
    assert await store.heartbeat([old.id], lease=10) == [old.id]
    assert (await store.counts("run")).running == 1
    clock.now += 10
    (new,) = await claim(store)
    assert (new.fence, new.ran) == (2, ran)
    assert await store.add_transitions([kit.call(old, [1], [9], index=2)]) == [False]
    assert await store.finish([left, kit.good(old, 9.0)]) == [False, False]
    assert await store.heartbeat([old.id], lease=10) == []
    assert await store.finish([kit.good(new, 1.0)]) == [True]
    ((rollout,),) = [group.rollouts for group in await store.claim_groups("run", 1, 1)]
    assert (rollout.attempt, rollout.reward()) == (new.id, 1.0)
    assert [call.completion.tolist() for call in rollout.transitions] == [[2], [3]]
    assert {call.attempt for call in rollout.transitions} == {new.id}
    assert (await store.counts("run")).transitions == 2


async def test_a_runner_lost_while_it_scored_is_the_verifiers_failure(store, kit, clock):
    """Which is not mistaken for one of the agent, and the agent is not run again."""
    await store.enqueue(kit.group("a", 1, max_attempts=2))
    for fence in (1, 2):
        (attempt,) = await claim(store, lease=10)
        assert (attempt.fence, attempt.ran) == (fence, None if fence == 1 else {"calls": 0})
        if fence == 1:
            await store.finish([Outcome(attempt=attempt.id, fence=fence, ran={"calls": 0})])
        clock.now += 10
    assert await claim(store) == []
    (rollout,) = await store.rollouts("run")
    assert rollout.failure.kind is ErrorKind.VERIFIER
    assert "stopped responding while scoring rollout" in rollout.failure.message


async def test_the_outline_of_a_rollout_has_what_its_calls_have(store, kit):
    said = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "yes"}]
    more = {"role": "tool", "content": "row"}
    await store.enqueue(kit.group("a", 1))
    (attempt,) = await claim(store)
    chats = [said[:1], [*said, more], [more], [*said[:1], more], [*said, more, said[1], more]]
    prompts = [[1], [1, 2, 3], [9], [1, 4], [1, 2, 3, 2, 5]]
    calls = [
        kit.call(attempt, prompt, [2], index=i, messages=chat, answer=said[1], role=f"r{i % 2}")
        for i, (prompt, chat) in enumerate(zip(prompts, chats, strict=True))
    ]
    await store.add_transitions(calls)
    rows = await store.outline("a/0")
    assert [(row.id, row.role, row.tokens) for row in rows] == [(c.id, c.role, 1) for c in calls]
    assert [row.messages for row in rows] == [len(chat) for chat in chats]
    assert [(row.parent, row.shared) for row in rows] == [
        (None, 0), (0, 2), (None, 0), (0, 1), (1, 4),
    ]  # fmt: skip
    assert len({row.sampled for row in rows}) == 1
    assert await store.outline("unknown") == []


async def test_some_calls_of_a_rollout_are_as_among_all(store, kit):
    await store.enqueue(kit.group("a", 1))
    (attempt,) = await claim(store)
    chat, prompt = [{"role": "user", "content": "go"}], [1]
    for i in range(7):
        answer = {"role": "assistant", "content": f"answer {i}"}
        call = kit.call(attempt, prompt, [2, i], index=i, messages=chat, answer=answer)
        await store.add_transitions([call])
        chat, prompt = [*chat, answer, {"role": "tool", "content": f"{i}"}], [*prompt, 2, i, 5]
    whole = await store.trace("a/0")
    assert [len(call.messages) for call in whole.transitions] == [1, 3, 5, 7, 9, 11, 13]
    for first, limit in ((0, 3), (2, 2), (5, None), (6, 1), (7, 2), (0, 0)):
        some = await store.trace("a/0", first=first, limit=limit)
        end = None if limit is None else first + limit
        assert some == replace(whole, transitions=whole.transitions[first:end])
    (row,) = await store.attempts("a/0", limit=2)
    assert (row.transitions, row.calls, row.late_calls) == (whole.transitions[:2], 7, 0)
    for wrong in ({"first": -1}, {"limit": -1}):
        with pytest.raises(Invalid, match="numbers of calls"):
            await store.trace("a/0", **wrong)


async def test_what_came_late_is_whole_after_the_rest_has_passed_on(store, kit, clock):
    """And so is what followed it, once all leases were extended."""
    chat = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "yes"}]
    await store.enqueue(kit.group("a", 1))
    (old,) = await claim(store, lease=10)
    first = kit.call(old, [1], [2], messages=chat[:1], answer=chat[1])
    assert await store.add_transitions([first]) == [True]
    clock.now += 10
    late = kit.call(old, [1, 2, 3], [4], messages=[*chat, chat[0]], answer=chat[1])
    assert await store.add_transitions([late]) == [False]
    await store.vacuum()
    last = kit.call(old, [1, 2, 3, 4, 5], [6], messages=[*chat, *chat, chat[0]])
    assert await store.add_transitions([last]) == [True]
    assert await store.finish([Outcome(attempt=old.id, fence=1, ran={"calls": 3})]) == [True]
    clock.now += 3600
    (new,) = await claim(store)
    moved = [replace(call, attempt=new.id) for call in (first, last)]
    assert (await store.trace(new.rollout.id)).transitions == moved
    assert (await store.attempts(new.rollout.id))[0].late_transitions == [late]


async def test_what_ran_is_run_again_if_its_runner_asks_for_it(store, kit):
    await store.enqueue(kit.group("a", 1, max_attempts=4))
    (first,) = await claim(store)
    await store.add_transitions([kit.call(first, [1], [2])])
    await store.finish([Outcome(attempt=first.id, fence=1, ran={"calls": 1})])
    stopped = Failure(kind=ErrorKind.LOST_RUNNER, message="stopped")
    await store.finish([Outcome(attempt=first.id, fence=1, failure=stopped, retry=True)])
    (second,) = await claim(store)
    assert second.ran == {"calls": 1}  # given back: it is only to be scored
    broken = Failure(kind=ErrorKind.VERIFIER, message="broken")
    await store.finish([Outcome(attempt=second.id, fence=2, failure=broken, retry=True)])
    (third,) = await claim(store)
    assert (third.fence, third.ran) == (3, {"calls": 1})  # the answer stays what it was
    gone = Failure(kind=ErrorKind.WORKSPACE, message="gone")
    await store.finish([Outcome(attempt=third.id, fence=3, failure=gone, retry=True)])
    (fourth,) = await claim(store)
    assert (fourth.fence, fourth.ran) == (4, None)
    trace = await store.trace(fourth.rollout.id)
    assert (trace.attempt, trace.transitions) == (fourth.id, [])


async def test_a_lease_that_ran_out_writes_nothing_even_if_nobody_took_over(store, kit, clock):
    await store.enqueue(kit.group("a", 1))
    (attempt,) = await claim(store, lease=10)
    clock.now += 10
    assert await store.add_transitions([kit.call(attempt, [1], [2])]) == [False]
    assert await store.finish([kit.good(attempt)]) == [False]
    assert (await store.rollouts("run"))[0].state is RolloutState.RUNNING


async def test_a_clock_set_back_ends_no_lease_and_no_time_is_negative(store, kit, clock):
    await store.enqueue(kit.group("a", 1))
    (attempt,) = await claim(store)
    clock.now -= 3600
    assert await claim(store) == []
    assert await store.heartbeat([attempt.id], lease=10) == [attempt.id]
    assert await store.add_transitions([kit.call(attempt, [1], [2])]) == [True]
    assert await store.finish([kit.good(attempt)]) == [True]
    (row,) = await store.rollouts("run")
    assert (row.state, row.attempts, row.seconds) == (RolloutState.SUCCEEDED, 1, 0.0)


async def test_a_clock_that_leaps_gives_the_rollout_to_another_once(store, kit, clock):
    """A suspended machine wakes up hours later, and the clock is then corrected."""
    await store.enqueue(kit.group("a", 1))
    (slept,) = await claim(store)
    await store.add_transitions([kit.call(slept, [1], [2])])
    clock.now += 8 * 3600
    assert await store.heartbeat([slept.id], lease=10) == []
    (other,) = await claim(store)
    assert other.fence == slept.fence + 1
    clock.now -= 8 * 3600  # the first lease would hold again: it has been given away
    assert await store.heartbeat([slept.id, other.id], lease=10) == [other.id]
    calls = [kit.call(slept, [1], [3]), kit.call(other, [1], [4])]
    assert await store.add_transitions(calls) == [False, True]
    assert await store.finish([kit.good(slept, 0.0), kit.good(other, 1.0)]) == [False, True]
    (group,) = await store.claim_groups("run", 1, 1)
    (row,) = group.rollouts
    assert (row.attempt, row.reward(), row.transitions) == (other.id, 1.0, calls[1:])
    await store.commit_step(kit.step(0, ["a"]))
    assert await store.claim_groups("run", 1, 1, timeout=0) == []


async def test_a_leap_that_nobody_saw_changes_nothing(store, kit, clock):
    await store.enqueue(kit.group("a", 1))
    (attempt,) = await claim(store)
    clock.now += 3600
    clock.now -= 3600
    assert await store.finish([kit.good(attempt)]) == [True]


async def test_an_old_fence_does_not_finish_the_attempt(store, kit):
    await store.enqueue(kit.group("a", 1))
    (attempt,) = await claim(store)
    wrong = Outcome(attempt=attempt.id, fence=attempt.fence + 1)
    assert await store.finish([wrong]) == [False]
    assert await store.finish([kit.good(attempt)]) == [True]


async def test_nothing_is_added_after_the_end(store, kit):
    (attempt,) = await settle(store, kit, "a")
    assert await store.add_transitions([kit.call(attempt, [1], [2])]) == [False]
    assert (await store.trace("a/0")).transitions == []


async def test_an_outcome_can_be_repeated(store, kit):
    await store.enqueue(kit.group("a", 1))
    (attempt,) = await claim(store)
    outcome = kit.good(attempt, spans=[kit.span(attempt)], result={"answer": 4})
    assert await store.finish([outcome]) == [True]
    assert await store.finish([outcome]) == [True]
    trace = await store.trace("a/0")
    assert (trace.rollout.rewards, trace.rollout.result) == (outcome.rewards, {"answer": 4})
    assert trace.spans == outcome.spans
    assert await store.finish([kit.good(attempt, 0.0)]) == [False]
    assert (await store.trace("a/0")).rollout.reward() == 1.0


async def test_whatever_an_agent_says_when_it_fails_is_kept(store, kit):
    await store.enqueue(kit.group("a", 1))
    (attempt,) = await claim(store)
    failure = Failure(kind=ErrorKind.AGENT, message="zero \0", traceback="half \ud800")
    await store.finish([Outcome(attempt=attempt.id, fence=attempt.fence, failure=failure)])
    (row,) = await store.rollouts("run")
    assert (row.failure.message, row.failure.traceback) == ("zero ?", "half ?")


async def test_a_retry_is_the_next_attempt_and_only_the_last_counts(store, kit):
    await store.enqueue(kit.group("a", 1, max_attempts=2))
    (first,) = await claim(store)
    await store.add_transitions([kit.call(first, [1], [2])])
    assert await store.finish([kit.bad(first, retry=True)]) == [True]
    assert (await store.counts("run")).queued == 1
    (second,) = await claim(store)
    assert second.fence == 2
    call = kit.call(second, [1], [3])
    await store.add_transitions([call])
    await store.finish([kit.bad(second, retry=True)])
    (row,) = (await store.claim_groups("run", 1, 1))[0].rollouts
    assert (row.state, row.failure) == (RolloutState.FAILED, kit.bad(second).failure)
    assert row.transitions == [call]
    assert math.isnan(row.reward())


async def test_what_a_stopping_runner_gives_back_was_no_try(store, kit):
    await store.enqueue(kit.group("a", 1, max_attempts=1))
    stopped = Failure(kind=ErrorKind.LOST_RUNNER, message="stopped")
    for fence in (1, 2, 3):
        (attempt,) = await claim(store)
        assert attempt.fence == fence
        given_back = Outcome(attempt=attempt.id, fence=fence, failure=stopped, retry=True)
        assert await store.finish([given_back]) == [True]
    (attempt,) = await claim(store)
    await store.finish([kit.bad(attempt, retry=True)])  # its one try
    assert (await store.counts("run")).failed == 1


async def test_failures_are_counted_by_kind_those_that_are_tried_again_too(store, kit, clock):
    assert await store.failures("run") == []
    await store.enqueue(kit.group("a", 6, max_attempts=2))
    first, other, running, lost, stopped, good = await claim(store, 6)
    await store.finish([kit.bad(first, retry=True)])
    clock.now += 1
    failure = Failure(kind=ErrorKind.TIMEOUT, message="too slow")
    await store.finish([Outcome(attempt=other.id, fence=1, failure=failure), kit.good(good)])
    (again,) = await claim(store)
    clock.now += 1
    await store.finish([kit.bad(again)])
    kept = Failure(kind=ErrorKind.LOST_RUNNER, message="stopped")
    given_back = Outcome(attempt=stopped.id, fence=1, failure=kept, retry=True)
    await store.finish([given_back, Outcome(attempt=lost.id, fence=1, failure=kept)])
    await store.cancel([running.rollout.id])
    found = await store.failures("run")
    assert [(row.kind, row.attempts, row.rollout, row.message) for row in found] == [
        (ErrorKind.AGENT, 2, "a/0", "boom"),
        (ErrorKind.LOST_RUNNER, 1, "a/3", "stopped"),
        (ErrorKind.TIMEOUT, 1, "a/1", "too slow"),
    ]
    assert await store.failures("other") == []


async def test_cancel(store, kit):
    await store.enqueue(kit.group("a", 3))
    done, running = await claim(store, 2)
    await store.finish([kit.good(done)])
    assert await store.cancel(["a/0", "a/1", "a/2", "unknown"]) == 2
    assert await store.cancel(["a/0", "a/1", "a/2"]) == 0
    assert await store.heartbeat([running.id], lease=10) == []
    assert await store.finish([kit.good(running)]) == [False]
    assert await claim(store) == []
    assert await store.settled("a", timeout=0)
    row = (await store.rollouts("run", state=RolloutState.CANCELLED))[0]
    assert row.failure.kind is ErrorKind.CANCELLED


# -- training --------------------------------------------------------------------------------------


async def test_a_group_is_ready_when_all_are_terminal_failures_too(store, kit):
    await store.enqueue(kit.group("a", 2))
    good, bad = await claim(store, 2)
    await store.finish([kit.good(good)])
    assert not await store.settled("a", timeout=0)
    assert await store.claim_groups("run", 1, 1, timeout=0) == []
    await store.finish([kit.bad(bad)])
    assert await store.settled("a", timeout=0)
    (group,) = await store.claim_groups("run", 1, 1, timeout=0)
    assert [row.state for row in group.rollouts] == [RolloutState.SUCCEEDED, RolloutState.FAILED]


async def test_groups_come_oldest_first_and_again_until_committed(store, kit):
    for name in ("g2", "g3", "g1"):
        await settle(store, kit, name)
    await store.enqueue(kit.group("g0", 1))  # not settled yet
    first = await store.claim_groups("run", 1, 2, timeout=0)
    assert [group.id for group in first] == ["g1", "g2"]
    (attempt,) = await claim(store)
    await store.finish([kit.good(attempt)])
    assert await store.claim_groups("run", 1, 2, timeout=0) == first
    await store.commit_step(kit.step(0, ["g1", "g2"]))
    rest = await store.claim_groups("run", 1, 2, timeout=0)
    assert [group.id for group in rest] == ["g0", "g3"]


async def test_evaluation_is_never_trained(store, kit):
    await store.enqueue(kit.group("e", 1, purpose=Purpose.EVAL))
    (attempt,) = await claim(store)
    await store.finish([kit.good(attempt)])
    assert await store.settled("e", timeout=0)
    assert await store.claim_groups("run", 1, 1, timeout=0) == []


async def test_claim_groups_waits_for_all_it_asked_for(store, kit):
    await settle(store, kit, "a")
    waiting = asyncio.create_task(store.claim_groups("run", 1, 2))
    await settle(store, kit, "b")
    async with asyncio.timeout(SOON):
        assert [group.id for group in await waiting] == ["a", "b"]


async def test_groups_that_are_claimed_in_order_wait_for_the_first(store, kit):
    await store.enqueue(kit.group("a", 1))
    slow = await claim(store)
    for group in ("b", "c", "d"):
        await settle(store, kit, group)
    few = await store.claim_groups("run", 1, 2, ordered=True, timeout=0)
    assert [group.id for group in few] == ["b"]  # c is behind the first two
    waiting = asyncio.create_task(store.claim_groups("run", 1, 2, ordered=True))
    await store.finish([kit.good(attempt) for attempt in slow])
    async with asyncio.timeout(SOON):
        assert [group.id for group in await waiting] == ["a", "b"]
    assert len(await store.claim_groups("run", 1, 2, ordered=True, timeout=0)) == 2
    assert [g.id for g in await store.claim_groups("run", 1, 3, ordered=True)] == ["a", "b", "c"]
    await store.commit_step(kit.step(0, ["a", "b"], discarded=["c"]))
    assert [g.id for g in await store.claim_groups("run", 1, 1, ordered=True)] == ["d"]


async def test_claim_groups_takes_what_there_is_at_the_timeout(store, kit):
    await settle(store, kit, "a")
    assert len(await store.claim_groups("run", 1, 2, timeout=0.01)) == 1


async def test_groups_are_claimed_by_name(store, kit):
    for name in ("a", "b", "c"):
        await settle(store, kit, name)
    await store.enqueue(kit.group("open", 1))
    some = ["c", "open", "a", "none"]
    first = await store.claim_groups("run", 1, 4, groups=some, timeout=0)
    assert [group.id for group in first] == ["a", "c"]
    assert await store.claim_groups("run", 1, 2, groups=some) == first  # again until committed
    assert await store.claim_groups("run", 1, 1, groups=[], timeout=0) == []
    await store.commit_step(kit.step(0, ["a"], discarded=["c"]))
    assert await store.claim_groups("run", 1, 4, groups=some, timeout=0) == []
    assert [g.id for g in await store.claim_groups("run", 1, 9, timeout=0)] == ["b"]
    with pytest.raises(Invalid, match="not both"):
        await store.claim_groups("run", 1, 1, groups=["a"], ordered=True)


async def test_commit_makes_a_step_true_once(store, kit):
    await settle(store, kit, "a")
    await store.claim_groups("run", 1, 1)
    await store.log("run", 0, {"eval/reward": 0.25, "reward": 0.0})
    commit = kit.step(0, ["a"], metrics={"reward": 0.5, "kl": math.nan})
    await store.commit_step(commit)
    await store.commit_step(commit)
    state = await store.run("run")
    assert (state.step, state.checkpoint) == (1, "step-0")
    (row,) = await store.steps("run")
    assert row.committed
    assert row.metrics == {
        "eval/reward": 0.25,
        "reward": 0.5,
        "kl": pytest.approx(math.nan, nan_ok=True),
    }
    assert await store.claim_groups("run", 1, 1, timeout=0) == []
    with pytest.raises(StoreError, match="next one is 1"):
        await store.commit_step(kit.step(0, ["a"], checkpoint="other"))


async def test_a_step_that_learned_nothing_keeps_the_checkpoint_before_it(store, kit):
    for name in ("a", "b"):
        await settle(store, kit, name)
    await store.claim_groups("run", 1, 2)
    await store.commit_step(kit.step(0, ["a"]))
    empty = kit.step(1, [], discarded=["b"], checkpoint=None)
    for _ in range(2):
        await store.commit_step(empty)
    state = await store.run("run")
    assert (state.step, state.checkpoint) == (2, "step-0")


async def train_steps(store, kit, n, *, epoch=1):
    """So many committed steps of a group each, with credit and a reward for its one call, and
    an evaluation of the weights after it."""
    for step in range(n):
        group = f"g{step}"
        (attempt,) = await settle_with_call(store, kit, group)
        await store.claim_groups("run", epoch, 1)
        (call,) = (await store.trace(attempt.rollout.id)).transitions
        hunch = Reward(value=0.5, name="hunch", source="model:hunch")
        given = {
            "credits": [credit(call.id, float(step))],
            "rewards": [StepReward(rollout=attempt.rollout.id, reward=hunch)],
        }
        await store.commit_step(kit.step(step, [group], epoch=epoch, **given))
        await store.enqueue(kit.group(f"e{step + 1}", 1, purpose=Purpose.EVAL, step=step + 1))
        await store.finish([kit.good(attempt) for attempt in await claim(store)])
        await store.log("run", step + 1, {"eval/score": 0.1 * step}, epoch=epoch)


async def test_steps_are_rolled_back_and_trained_again_once(store, kit):
    await train_steps(store, kit, 3)
    await settle(store, kit, "g3")
    await store.claim_groups("run", 1, 1)  # held by the step that never came
    cursor = await store.cursor()
    for _ in range(2):
        await store.rewind("run", 1, 1, "step-0")
    assert await store.cursor() > cursor
    state = await store.run("run")
    assert (state.step, state.checkpoint, state.epoch) == (1, "step-0", 1)
    rows = [(row.step, row.committed, row.metrics) for row in await store.steps("run")]
    assert rows == [(0, True, {"reward": 0.5}), (1, False, {"eval/score": 0.0})]
    counts = await store.counts("run")
    assert (counts.groups_settled, counts.groups_trained) == (3, 1)
    evaluated = await store.rollouts("run", purpose=Purpose.EVAL)
    assert [row.group for row in evaluated] == ["e1"]
    assert len(await store.credits("g0/0")) == 1
    for group in ("g1", "g2"):
        (row,) = await store.rollouts("run", group=group)
        assert [reward.name for reward in row.rewards] == ["outcome"]
        assert await store.credits(row.id) == []
    for step, group in enumerate(("g1", "g2", "g3"), start=1):
        assert [one.id for one in await store.claim_groups("run", 1, 1)] == [group]
        (call,) = (await store.trace(f"{group}/0")).transitions or [None]
        credits = [credit(call.id, 1.0)] if call else []
        await store.commit_step(kit.step(step, [group], credits=credits))
    assert await store.claim_groups("run", 1, 1, timeout=0) == []
    assert (await store.counts("run")).groups_trained == 4
    assert [row.committed for row in await store.steps("run")] == [True] * 4


async def test_discarded_groups_come_back_and_pruned_ones_are_asked_for_again(store, kit):
    await settle(store, kit, "a")
    await settle(store, kit, "b")
    await store.claim_groups("run", 1, 2)
    await store.commit_step(kit.step(0, ["a"], discarded=["b"]))
    await settle(store, kit, "c")
    await store.claim_groups("run", 1, 1)
    await store.commit_step(kit.step(1, ["c"]))
    await store.prune(keep_last=1)  # a and b leave no evidence
    await store.rewind("run", 1, 1, "step-0")
    assert (await store.counts("run")).groups_discarded == 1
    await store.rewind("run", 1, 0, None)
    counts = await store.counts("run")
    assert (counts.groups_settled, counts.groups_trained, counts.groups_discarded) == (1, 0, 0)
    assert (await store.run("run")).checkpoint is None
    await settle(store, kit, "a")
    assert [one.id for one in await store.claim_groups("run", 1, 2)] == ["a", "c"]
    await store.commit_step(kit.step(0, ["a", "c"]))


async def test_only_the_owner_rolls_back_steps_and_only_existing_ones(store, kit):
    await train_steps(store, kit, 1)
    with pytest.raises(Conflict, match="has 1 committed steps"):
        await store.rewind("run", 1, 2, "step-1")
    with pytest.raises(Invalid, match="not -1"):
        await store.rewind("run", 1, -1, None)
    with pytest.raises(NotFound):
        await store.rewind("none", 1, 0, None)
    await store.open_run("run", {})
    with pytest.raises(Fenced):
        await store.rewind("run", 1, 0, None)
    assert (await store.run("run")).step == 1


async def test_who_evaluates_weights_that_are_rolled_back_is_cancelled(store, kit):
    await train_steps(store, kit, 1)
    await store.enqueue(kit.group("late", 3, purpose=Purpose.EVAL, step=2))
    (attempt,) = await claim(store, 1)
    await store.rewind("run", 1, 0, None)
    assert await store.heartbeat([attempt.id], lease=10.0) == []
    assert await store.finish([kit.good(attempt)]) == [False]
    (row,) = await store.rollouts("run", purpose=Purpose.EVAL)
    assert row.state is RolloutState.CANCELLED
    counts = await store.counts("run")
    assert (counts.queued, counts.running) == (0, 0)


async def test_commit_refuses_the_wrong_step_and_groups_it_does_not_hold(store, kit):
    await settle(store, kit, "a")
    await settle(store, kit, "b")
    await store.claim_groups("run", 1, 1)
    with pytest.raises(StoreError, match="next one is 0"):
        await store.commit_step(kit.step(1, ["a"]))
    with pytest.raises(StoreError, match="'b'"):
        await store.commit_step(kit.step(0, ["a", "b"]))
    with pytest.raises(StoreError, match="no group"):
        await store.commit_step(kit.step(0, ["a", "missing"]))
    assert (await store.run("run")).step == 0
    assert await store.steps("run") == []
    await store.commit_step(kit.step(0, ["a"]))
    await store.claim_groups("run", 1, 1)
    with pytest.raises(StoreError, match="trained at step 0"):
        await store.commit_step(kit.step(1, ["b", "a"]))
    assert (await store.counts("run")).groups_trained == 1


def credit(transition, *psi, **more):
    alike = {name: float32([0.5]) for name in ("advantage", "gate", "weight")}
    whole = {**alike, "baseline": float32(), "psi": float32(psi), **more}
    return Credit(transition=transition, policy="policy", **whole)


async def test_credit_is_stored_with_its_step(store, kit):
    await store.enqueue(kit.group("a", 2))
    attempts = await claim(store, 2)
    calls = [kit.call(attempt, [1], [2, 3]) for attempt in attempts for _ in range(2)]
    await store.add_transitions(calls)
    await store.finish([kit.good(attempt) for attempt in attempts])
    await store.claim_groups("run", 1, 1)
    credits = [credit(call.id, 0.25, float(number)) for number, call in enumerate(calls)]
    credits[1] = credit(calls[1].id, 0.0, advantage=float32([0.5, math.nan]))
    commit = kit.step(0, ["a"], credits=credits[:3])
    await store.commit_step(commit)
    await store.commit_step(commit)
    first, second = await store.credits("a/0")
    assert first == credits[0]
    assert (second.transition, second.psi) == (calls[1].id, float32([0.0]))
    assert second.advantage[0] == 0.5
    assert math.isnan(second.advantage[1])
    assert await store.credits("a/1") == credits[2:3]
    assert await store.credits("none") == []
    with pytest.raises(Conflict, match="next one is 1"):
        await store.commit_step(kit.step(0, ["a"], credits=credits[:2]))


async def test_credit_is_about_the_calls_of_the_groups_that_are_trained(store, kit):
    for group in ("a", "b"):
        (attempt,) = await settle_with_call(store, kit, group)
    await store.claim_groups("run", 1, 2)
    (call,) = (await store.trace(attempt.rollout.id)).transitions
    for wrong in (call.id, "unknown"):
        with pytest.raises(NotFound, match=f"credit for call '{wrong}'"):
            await store.commit_step(kit.step(0, ["a"], credits=[credit(wrong, 1.0)]))
    malformed = structs.replace(credit(call.id), psi=int32())
    with pytest.raises(Invalid, match=r"psi must be an array made by agentrl.core.types.float32"):
        await store.commit_step(kit.step(0, ["b"], credits=[malformed]))
    assert (await store.run("run")).step == 0
    assert await store.credits(attempt.rollout.id) == []


async def test_rewards_that_a_step_gave_are_stored_with_it(store, kit):
    await store.enqueue(kit.group("a", 2))
    one, two = sorted(await claim(store, 2), key=lambda attempt: attempt.rollout.id)
    call = kit.call(one, [1], [2])
    await store.add_transitions([call])
    await store.finish([kit.good(one), kit.good(two, rewards=[])])
    await store.claim_groups("run", 1, 1)
    whole = Reward(value=0.5, name="judge", source="model:judge")
    of_call = Reward(
        value=-0.5, name="judge", scope=Scope.TRANSITION, target=call.id, source="model:judge"
    )
    given = [("a/0", whole), ("a/1", whole), ("a/0", of_call)]
    rewards = [StepReward(rollout=rollout, reward=reward) for rollout, reward in given]
    commit = kit.step(0, ["a"], rewards=rewards)
    await store.commit_step(commit)
    await store.commit_step(commit)
    first, second = await store.rollouts("run")
    assert first.rewards == [Reward(value=1.0), whole, of_call]
    assert second.rewards == [whole]
    assert (await store.trace("a/0")).rollout.rewards == first.rewards
    assert (await store.stats()).rows["rewards"] == 4
    with pytest.raises(Conflict, match="next one is 1"):
        await store.commit_step(kit.step(0, ["a"], rewards=rewards[:1]))
    await store.prune(keep_last=0)
    assert (await store.stats()).rows["rewards"] == 0


async def test_a_step_gives_rewards_to_rollouts_that_it_trains(store, kit):
    (attempt,) = await settle_with_call(store, kit, "a")
    (other,) = await settle_with_call(store, kit, "b")
    await store.claim_groups("run", 1, 2)
    (call,) = (await store.trace(other.rollout.id)).transitions
    reward = Reward(value=1.0, name="judge")
    about = structs.replace(reward, scope=Scope.TRANSITION, target=call.id)
    for rollout, given, error, message in (
        (other.rollout.id, reward, NotFound, "is not in its groups"),
        ("unknown", reward, NotFound, "is not in its groups"),
        (attempt.rollout.id, about, NotFound, f"'{call.id}', which is not a call of"),
        (attempt.rollout.id, structs.replace(reward, value=math.nan), Invalid, "must be finite"),
        (attempt.rollout.id, structs.replace(about, target=None), Invalid, "name a target"),
    ):
        own = StepReward(rollout=rollout, reward=given)
        with pytest.raises(error, match=message):
            await store.commit_step(kit.step(0, ["a"], rewards=[own]))
    assert (await store.run("run")).step == 0
    assert [row.rewards for row in await store.rollouts("run")] == [[Reward(value=1.0)]] * 2


async def settle_with_call(store, kit, group):
    await store.enqueue(kit.group(group))
    attempts = await claim(store)
    await store.add_transitions([kit.call(attempt, [1], [2]) for attempt in attempts])
    await store.finish([kit.good(attempt) for attempt in attempts])
    return attempts


async def test_a_step_discards_groups_for_good(store, kit):
    for group in ("a", "b", "c"):
        await settle(store, kit, group)
    await store.claim_groups("run", 1, 2)
    await store.commit_step(kit.step(0, ["a"], discarded=["b"]))
    counts = await store.counts("run")
    assert (counts.groups_settled, counts.groups_trained, counts.groups_discarded) == (1, 1, 1)
    assert (await store.open_run("run", {})).step == 1
    assert [group.id for group in await store.claim_groups("run", 2, 9, timeout=0)] == ["c"]
    with pytest.raises(Conflict, match="was discarded at step 0"):
        await store.commit_step(kit.step(1, ["b"], epoch=2))
    with pytest.raises(Conflict, match="discarded already"):
        await store.enqueue(kit.group("b", 2))


async def test_rollouts_know_the_step_that_trained_them(store, kit):
    for group in ("a", "b", "c"):
        await settle(store, kit, group, 2)
    await store.claim_groups("run", 1, 2)
    await store.commit_step(kit.step(0, ["a"], discarded=["b"]))
    await store.claim_groups("run", 1, 1)
    await store.commit_step(kit.step(1, ["c"]))
    rows = await store.rollouts("run")
    assert [row.trained for row in rows] == [0, 0, None, None, 1, 1]
    assert {row.step for row in rows} == {0}
    assert await store.rollouts("run", trained=1) == rows[4:]
    assert await store.rollouts("run", trained=0, group="c") == []
    assert (await store.trace("a/1")).rollout.trained == 0


async def test_a_new_owner_fences_the_old_and_gets_its_groups_back(store, kit):
    await settle(store, kit, "a")
    before = await store.claim_groups("run", 1, 1)
    waiting = asyncio.create_task(store.claim_groups("run", 1, 2))
    state = await store.open_run("run", {"seed": 2})
    assert (state.epoch, state.step, state.config) == (2, 0, {"seed": 2})
    async with asyncio.timeout(SOON):
        with pytest.raises(Fenced):
            await waiting
    with pytest.raises(Fenced):
        await store.commit_step(kit.step(0, ["a"]))
    assert await store.claim_groups("run", 2, 1) == before
    await store.commit_step(kit.step(0, ["a"], epoch=2))
    assert (await store.open_run("run", {})).step == 1


async def test_a_run_is_held_by_one_owner_until_its_lease_ends(store, clock):
    first = await store.open_run("run", {}, owner="one", lease=10.0)
    assert (first.owner, first.owned_until) == ("one", clock.now + 10.0)
    with pytest.raises(Conflict, match="live owner"):
        await store.open_run("run", {"x": 1}, owner="two", lease=10.0)
    assert await store.run("run") == first
    assert (await store.open_run("run", {}, owner="one", lease=10.0)).epoch == first.epoch + 1
    clock.now += 9.0
    assert await store.hold_run("run", "one", lease=10.0)
    assert not await store.hold_run("run", "two", lease=10.0)
    clock.now += 9.0
    with pytest.raises(Conflict):
        await store.open_run("run", {}, owner="two", lease=10.0, gone="three")
    taken = await store.open_run("run", {}, owner="two", lease=10.0, gone="one")
    assert (taken.owner, taken.epoch) == ("two", first.epoch + 2)
    assert not await store.hold_run("run", "one", lease=10.0)
    clock.now += 10.0
    assert (await store.open_run("run", {}, owner="three", lease=10.0)).owner == "three"
    assert await store.hold_run("run", "three", lease=0.0)
    assert (await store.run("run")).owned_until == 0.0
    await store.open_run("run", {}, owner="four", lease=10.0)
    clock.now -= 3600.0
    assert (await store.open_run("run", {}, owner="five", lease=10.0)).owner == "five"
    assert (await store.open_run("run", {})).owner == ""
    for lease in (0.0, -1.0, math.inf):
        with pytest.raises(Invalid):
            await store.open_run("run", {}, owner="six", lease=lease)
    with pytest.raises(Invalid):
        await store.hold_run("run", "six", lease=-1.0)


async def test_an_old_owner_writes_nothing_even_repeated(store, kit):
    version = PolicyVersion(run="run", policy="p", version=1, base_url="http://h/v1", model="m")
    await store.commit_step(kit.step(0, []))
    await store.publish(version, epoch=1)
    await store.open_run("run", {})
    assert await store.policies("run") == {}  # a new owner publishes anew
    for verb in (
        store.commit_step(kit.step(0, [])),
        store.enqueue(kit.group("old"), epoch=1),
        store.publish(version, epoch=1),
        store.log("run", 0, {"a": 1.0}, epoch=1),
    ):
        with pytest.raises(Fenced):
            await verb
    assert await store.policies("run") == {}
    assert [row.metrics for row in await store.steps("run")] == [{"reward": 0.5}]
    assert await store.rollouts("run") == []
    assert await store.enqueue(kit.group("new", 2), epoch=2) == 2
    assert await store.enqueue(kit.group("any")) == 1


async def test_log_merges(store):
    await store.log("run", 3, {"a": 1.0, "b": 2.0})
    await store.log("run", 3, {"b": 3.0, "c": math.inf})
    await store.log("run", 5, {})
    rows = await store.steps("run")
    assert [(row.step, row.committed) for row in rows] == [(3, False), (5, False)]
    assert rows[0].metrics == {"a": 1.0, "b": 3.0, "c": math.inf}
    assert [row.step for row in await store.steps("run", after=3)] == [5]


async def test_a_step_is_as_old_as_its_last_metrics_until_it_is_committed(store, kit, clock):
    await store.log("run", 0, {"time/build": 3.0})
    clock.now += 9
    await store.log("run", 0, {"eval/score": 0.5})
    (row,) = await store.steps("run")
    assert row.at == clock.now
    await store.commit_step(kit.step(0, []))
    committed = clock.now
    clock.now += 9
    await store.log("run", 0, {"late": 1.0})
    (row,) = await store.steps("run")
    assert row.at == committed


async def test_publish_keeps_the_last(store):
    for number in (1, 2):
        version = PolicyVersion(
            run="run", policy="p", version=number, base_url=f"http://h/{number}/v1", model="m"
        )
        await store.publish(version)
    assert await store.policies("run") == {"p": version}
    assert await store.policies("none") == {}


async def test_counts(store, kit):
    assert await store.counts("none") == Counts()
    await settle(store, kit, "a", 2)
    await store.enqueue(kit.group("b", 3))
    running, failed = await claim(store, 2)
    inexact = kit.call(running, [], [4], exact=False, logprobs=float32())
    await store.add_transitions([kit.call(running, [1], [2, 3]), inexact])
    await store.finish([kit.bad(failed)])
    assert await store.add_transitions([kit.call(failed, [1], [2, 3])]) == [False]
    await store.claim_groups("run", 1, 1)
    await store.commit_step(kit.step(0, ["a"]))
    await settle(store, kit, "0", 1)  # takes what is left of b
    assert await store.counts("run") == Counts(
        queued=1,
        running=1,
        succeeded=3,
        failed=1,
        groups_open=2,
        groups_trained=1,
        transitions=2,
        inexact=1,
        tokens=3,
    )


async def test_runs_and_rollouts_are_listed(store, kit):
    await store.open_run("second", {})
    assert await store.runs() == ["run", "second"]
    assert await store.run("third") is None
    await store.enqueue(kit.group("b", 2, step=1))
    await store.enqueue(kit.group("a", 1, purpose=Purpose.EVAL))
    ids = [row.id for row in await store.rollouts("run")]
    assert ids == ["a/0", "b/0", "b/1"]
    assert [row.id for row in await store.rollouts("run", purpose=Purpose.EVAL)] == ["a/0"]
    assert [row.id for row in await store.rollouts("run", step=1, limit=1)] == ["b/0"]
    assert [row.id for row in await store.rollouts("run", group="b")] == ["b/0", "b/1"]
    assert await store.rollouts("run", group="b", state=RolloutState.RUNNING) == []
    assert await store.trace("b/0") is None
    assert await store.trace("unknown") is None


# -- evidence --------------------------------------------------------------------------------------


async def test_a_limit_is_a_number_of_rollouts(store, kit):
    await store.enqueue(kit.group("a", 3))
    for limit in (0, 2, 9, None):
        n = 3 if limit is None else min(limit, 3)
        assert len(await store.rollouts("run", limit=limit)) == n
        assert len(await store.rollouts("run", group="a", limit=limit)) == n
    with pytest.raises(Invalid, match="limit"):
        await store.rollouts("run", limit=-1)


async def test_a_conversation_comes_back_exactly(store, kit):
    await store.enqueue(kit.group("a", 1))
    (attempt,) = await claim(store)
    user, tools = {"role": "user", "content": "2+2?"}, [{"type": "function", "name": "add"}]
    said = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    resent = {**said, "content": None}  # frameworks do not resend quite what they received
    result = {"role": "tool", "content": "4"}
    calls = [
        kit.call(attempt, [1, 2], [3, 4], messages=[user], answer=said, tools=tools),
        kit.call(attempt, [1, 2], [3, 4], messages=[user], answer=said, tools=tools, version=2),
        kit.call(attempt, [1, 2], [3, 4, 5], version=7, spans=[(0, 7), (1, 8), (2, 11)]),
        kit.call(attempt, [1, 2, 3, 4, 5], [6], messages=[user, said, result], tools=tools),
        kit.call(attempt, [9, 9], [6], messages=[user, resent, result], answer=said, role="critic"),
        kit.call(
            attempt,
            [],
            [],
            exact=False,
            messages=[user],
            span="00ff",
            finish="length",
            repeats="call-x",
            ignored=["metadata", "tools: web_search"],
            processors={"min_p": "0.1"},
        ),
    ]
    assert await store.add_transitions(calls[:3]) == [True] * 3
    assert await store.add_transitions(calls[2:]) == [True] * 4
    trace = await store.trace("a/0")
    assert trace.transitions == calls
    assert (await store.counts("run")).transitions == 6


async def test_calls_are_ordered_by_index_not_by_arrival(store, kit):
    await store.enqueue(kit.group("a", 1))
    (attempt,) = await claim(store)
    calls = [kit.call(attempt, [1], [2]), kit.call(attempt, [1, 2, 3], [4])]
    await asyncio.gather(*(store.add_transitions([call]) for call in reversed(calls)))
    assert (await store.trace("a/0")).transitions == calls


WRONG_CALLS = [
    ({"logprobs": float32()}, "0 log-probs for 2"),
    ({"logprobs": float32([-1.0, math.nan])}, "not finite"),
    ({"logprobs": float32([-1.0, -math.inf])}, "not finite"),
    ({"logprobs": [-1.0, -1.0]}, "made by agentrl.core.types.float32"),
    ({"prompt": float32([1.0])}, "made by agentrl.core.types.int32"),
    ({"prompt": int32([1, -1])}, "not a token id"),
    ({"completion": int32([-(2**31), 2])}, "not a token id"),
    ({"logprobs": float32([-1.0, 0.5])}, "must not be above 0"),
    ({"id": "é" * 257}, "longer than 512 bytes"),
    ({"started": math.nan}, "finite"),
    ({"started": -1.0}, "from 0"),
    ({"started": 1e30}, "from 0"),
    ({"seconds": 1e30}, "from 0"),
    ({"seconds": math.inf}, "finite"),
    ({"sampling": Sampling(temperature=math.nan)}, "finite"),
    ({"index": 2**70}, "cannot be stored"),
    ({"version": 2**70}, "cannot be stored"),
    ({"version": 7, "spans": [(0, 6), (1, 8)]}, "must begin with .0, 7."),
    ({"version": 7, "spans": [(0, 7), (0, 8)]}, "with increasing first"),
    ({"version": 7, "spans": [(0, 7), (1, 7)]}, "with increasing first"),
    ({"version": 7, "spans": [(0, 7), (2, 8)]}, "within its 2 tokens"),
    ({"role": "\ud800"}, "cannot be stored"),
    ({"messages": [{"content": "\ud800"}]}, "JSON"),
    ({"answer": {"x": object()}}, "JSON"),
]


async def test_a_wrong_call_is_refused_with_all_that_came_along(store, kit):
    await store.enqueue(kit.group("a", 1))
    (attempt,) = await claim(store)
    for wrong, why in WRONG_CALLS:
        bad = structs.replace(kit.call(attempt, [1], [2, 3]), **wrong)
        await refused(store.add_transitions([kit.call(attempt, [1], [2]), bad]), wrong, why)
        assert (await store.trace("a/0")).transitions == [], wrong
    rounded = kit.call(attempt, [1], [2], logprobs=float32([1e-6]))
    assert await store.add_transitions([rounded]) == [True]


async def test_an_id_means_one_thing(store, kit):
    await store.enqueue([*kit.group("a", 1), *kit.group("b", 1)])
    one, two = await claim(store, 2)
    await store.add_transitions([kit.call(one, [1], [2], id="same")])
    with pytest.raises(Conflict, match="an id of its own"):
        await store.add_transitions([kit.call(two, [3], [4]), kit.call(two, [1], [2], id="same")])
    assert (await store.trace("b/0")).transitions == []
    stolen = NewRollout(id="a/0", run="run", group="c", index=0, task={})
    with pytest.raises(Conflict, match="an id of its own"):
        await store.enqueue([*kit.group("c", 1), stolen])
    assert len(await store.rollouts("run")) == 2
    assert (await store.counts("run")).groups_open == 2


def test_token_ids_are_int32():
    for wrong in (2**31, -(2**31) - 1):
        with pytest.raises(OverflowError):
            int32([wrong])


async def test_an_impossible_reward_is_refused_and_nothing_written(store, kit):
    """Also one of which no mean can be made."""
    await store.enqueue(kit.group("a", 2))
    one, two = await claim(store, 2)
    large = r"between -1e\+15 and 1e\+15; scale it"
    wrong = dict.fromkeys((math.nan, math.inf, -math.inf), "must be finite")
    for value, why in (wrong | dict.fromkeys((1e308, -1e308, 1.1e15), large)).items():
        await refused(store.finish([kit.good(one), kit.good(two, value)]), value, why)
        assert (await store.counts("run")).running == 2, value
        assert (await store.trace("a/0")).rollout.rewards == [], value
    assert await store.finish([kit.good(one, 1e15)]) == [True]


async def test_rewards_of_every_scope(store, kit):
    await store.enqueue(kit.group("a", 1))
    (attempt,) = await claim(store)
    rewards = [
        Reward(value=1.0),
        Reward(value=0.5, name="style", scope=Scope.ROLE, target="critic", source="judge"),
        Reward(value=0.5, name="style", scope=Scope.ROLE, target="critic", source="judge"),
        Reward(value=-1.0, scope=Scope.TRANSITION, target="call-0", note="the date is missing"),
    ]
    await store.add_transitions([kit.call(attempt, [1], [2], id="call-0")])
    await store.finish([kit.good(attempt, rewards=rewards)])
    assert (await store.trace("a/0")).rollout.rewards == rewards
    with pytest.raises(StoreError, match="target"):
        await store.finish([kit.good(attempt, rewards=[Reward(value=1.0, scope=Scope.ROLE)])])


async def test_a_reward_is_about_a_call_of_its_own_attempt(store, kit):
    await store.enqueue(kit.group("a", 2))
    one, two = await claim(store, 2)
    mine, other = kit.call(one, [1], [2], exact=False), kit.call(two, [1], [2])
    await store.add_transitions([mine, other])

    def about(call):
        return kit.good(one, rewards=[Reward(value=1.0, scope=Scope.TRANSITION, target=call)])

    for wrong in (other.id, "none"):
        with pytest.raises(Invalid, match="no call"):
            await store.finish([about(wrong)])
    assert await store.finish([about(mine.id)]) == [True]
    assert await store.finish([about("none")]) == [False]  # it is over: kept, for inspection
    assert (await store.trace("a/0")).rollout.rewards == about(mine.id).rewards


async def test_spans_are_kept_even_late(store, kit):
    await store.enqueue(kit.group("a", 1))
    (attempt,) = await claim(store)
    early, late = kit.span(attempt, attributes={"n": [1]}), kit.span(attempt, ok=False, start=5)
    await store.add_spans([early])
    await store.add_spans([early])
    await store.finish([kit.bad(attempt)])
    await store.add_spans([late])
    assert (await store.trace("a/0")).spans == [early, late]


async def test_unknown_names_are_refused(store, kit):
    await store.enqueue(kit.group("a", 1))
    (attempt,) = await claim(store)
    stranger = type(attempt)(id="f" * 32, rollout=attempt.rollout, fence=1, lease_until=0.0)
    with pytest.raises(StoreError, match="no attempt"):
        await store.add_transitions([kit.call(stranger, [1], [2])])
    with pytest.raises(StoreError, match="no attempt"):
        await store.add_spans([kit.span(stranger)])
    with pytest.raises(StoreError, match="no attempt"):
        await store.finish([kit.good(attempt), kit.good(stranger)])
    assert (await store.rollouts("run"))[0].state is RolloutState.RUNNING
    with pytest.raises(StoreError, match="no group"):
        await store.settled("none")
    for verb in (
        store.enqueue(kit.group("b", 1, run="none")),
        store.log("none", 0, {}),
        store.claim_groups("none", 1, 1),
        store.commit_step(kit.step(0, [], run="none")),
    ):
        with pytest.raises(StoreError, match="no run 'none'"):
            await verb


async def test_a_group_keeps_its_run_and_purpose_and_is_closed_by_its_claim(store, kit):
    await settle(store, kit, "a")
    await store.open_run("other", {})
    with pytest.raises(StoreError, match="belongs to run 'run' for train"):
        await store.enqueue(kit.group("a", 2, purpose=Purpose.EVAL))
    with pytest.raises(StoreError, match="belongs to run 'run' for train"):
        await store.enqueue(kit.group("a", 2, run="other"))
    await store.claim_groups("run", 1, 1)
    with pytest.raises(StoreError, match="claimed already"):
        await store.enqueue(kit.group("a", 2))
    assert await store.enqueue(kit.group("a", 1)) == 0


WRONG_ROLLOUTS = [
    {"max_attempts": 0},
    {"timeout": 0.0},
    {"timeout": math.nan},
    {"task": {1: object()}},
    {"sampling": Sampling(top_p=math.inf)},
    {"priority": 2**70},
    {"branch": Branch(rollout="other", calls=0)},
    {"branch": Branch(rollout="other", calls=1, without=["planner"]), "seats": {"solver": "p"}},
    {"seats": {"planner": ""}},
    {"seats": {"": "policy"}},
]


async def test_a_wrong_rollout_is_refused(store, kit):
    for wrong in WRONG_ROLLOUTS:
        new = [*kit.group("a", 1), *kit.group("b", 1, **wrong)]
        await refused(store.enqueue(new), wrong, r"b/0|cannot be stored")
        assert await store.rollouts("run") == [], wrong


async def test_a_claim_of_nothing_or_for_no_time_is_refused(store):
    with pytest.raises(StoreError, match="n must be positive"):
        await claim(store, 0)
    wrong = dict.fromkeys((0, -1.0, math.nan, math.inf), "lease must be positive")
    for lease, why in (wrong | dict.fromkeys((MAX_LEASE + 1, 1e300), "by heartbeats")).items():
        await refused(claim(store, lease=lease), lease, why)
        await refused(store.heartbeat([], lease=lease), lease, why)
    assert await claim(store, lease=MAX_LEASE) == []


async def test_ids_have_a_longest(store, kit):
    """In bytes, and the longest ones fit into every index together."""
    long = "é" * 257
    await store.enqueue(kit.group("a", 1))
    (attempt,) = await claim(store)
    version = PolicyVersion(run="run", policy=long, version=1, base_url="http://x/v1", model="m")
    for row, verb in enumerate((
        store.open_run(long, {}),
        store.enqueue(kit.group(long, 1)),
        claim(store, claim_id=long),
        claim(store, runner=long),
        store.add_spans([kit.span(attempt, id=long)]),
        store.finish([kit.good(attempt, spans=[kit.span(attempt, id=long)])]),
        store.publish(version),
        store.log("run", 0, {long: 1.0}),
        store.commit_step(kit.step(0, [], metrics={long: 1.0})),
    )):  # fmt: skip
        await refused(verb, row, "longer than 512 bytes")
    run, group = "r" + random_text(510), "g" + random_text(509)
    await store.open_run(run, {})
    await store.enqueue(kit.group(group, 1, run=run))
    (attempt,) = await claim(store, run=run, claim_id=random_text(512), runner=random_text(512))
    await store.add_transitions([kit.call(attempt, [1], [2], id=random_text(512))])
    await store.finish([kit.good(attempt, spans=[kit.span(attempt, id=random_text(512))])])
    await store.log(run, 0, {random_text(512): 1.0})
    await store.publish(structs.replace(version, run=run, policy=random_text(512)))
    (group,) = await store.claim_groups(run, 1, 1)
    assert group.run == run


def random_text(size):
    """What no index can compress."""
    return "".join(random.choices(string.ascii_letters, k=size))


# -- change feed -----------------------------------------------------------------------------------


async def test_every_change_moves_the_cursor(store, kit):
    cursor = await store.cursor()

    async def moved():
        nonlocal cursor
        before, cursor = cursor, await store.cursor()
        return cursor > before

    await store.enqueue(kit.group("a", 2))
    assert await moved()
    one, two = await claim(store, 2)
    assert await moved()
    await store.heartbeat([one.id], lease=10)
    assert not await moved()
    await store.add_transitions([kit.call(one, [1], [2])])
    assert await moved()
    await store.add_spans([kit.span(one)])
    assert await moved()
    await store.finish([kit.good(one)])
    assert await moved()
    await store.cancel([two.rollout.id])
    assert await moved()
    await store.claim_groups("run", 1, 1)
    assert await moved()
    await store.commit_step(kit.step(0, ["a"]))
    assert await moved()
    await store.log("run", 0, {"a": 1.0})
    assert await moved()
    await store.open_run("run", {})
    assert await moved()


async def test_a_follower_resumes_from_any_cursor(store, opener, clock, kit):
    cursors = [await store.cursor()]
    for number in range(5):
        await store.enqueue(kit.group(str(number), 1))
        cursors.append(await store.cursor())
    assert cursors == sorted(set(cursors))
    other = opener(clock=clock)
    for cursor in [0, *cursors[:-1]]:
        assert await other.wait(cursor) == cursors[-1]
    waiting = asyncio.create_task(other.wait(cursors[-1]))
    await store.log("run", 0, {"a": 1.0})
    async with asyncio.timeout(SOON):
        assert await waiting > cursors[-1]


async def test_wait_returns_at_once_when_there_is_news(store, kit):
    cursor = await store.cursor()
    assert await store.wait(cursor - 1) == cursor
    assert await store.wait(cursor, timeout=0.01) == cursor


@pytest.mark.parametrize("same", [True, False])
async def test_waiters_wake_for_the_writes_of_this_and_other_stores(
    opener, store, kit, clock, same
):
    other = store if same else opener(clock=clock)
    await store.enqueue(kit.group("a", 1))
    (attempt,) = await claim(store)
    cursor = await store.cursor()
    waiting = [
        asyncio.create_task(verb)
        for verb in (
            other.wait(cursor),
            other.settled("a"),
            other.claim_groups("run", 1, 1),
            other.claim(1, runner="w", lease=10, timeout=SOON),
        )
    ]
    done, _ = await asyncio.wait(waiting, timeout=0.05)
    assert not done
    await store.finish([kit.good(attempt)])
    await store.enqueue(kit.group("b", 1))
    async with asyncio.timeout(SOON):
        newest, settled, groups, claimed = await asyncio.gather(*waiting)
    assert newest > cursor
    assert settled
    assert [group.id for group in groups] == ["a"]
    assert [a.rollout.id for a in claimed] == ["b/0"]


async def test_waiters_wake_when_a_lease_runs_out(opener, kit):
    store = opener()  # on the real clock
    await store.open_run("run", {})
    await store.enqueue(kit.group("a", 1, max_attempts=2))
    (first,) = await claim(store, lease=0.05)
    async with asyncio.timeout(SOON):
        (second,) = await claim(store, lease=0.05, timeout=SOON)
        assert (first.rollout.id, first.fence, second.fence) == (second.rollout.id, 1, 2)
        assert await store.settled("a")
        (group,) = await store.claim_groups("run", 1, 1)
    assert group.rollouts[0].failure.kind is ErrorKind.LOST_RUNNER


async def test_a_closed_store_says_so(opener):
    store = opener()
    await store.close()
    with pytest.raises(StoreError, match="closed"):
        await store.runs()
    with pytest.raises(StoreError, match="closed"):
        await store.open_run("run", {})
    await store.close()
