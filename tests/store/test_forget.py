"""`Store.forget`: rollouts and what was made of them are deleted."""

from __future__ import annotations

from agentrl.core.types import Branch, float32
from agentrl.store.records import Forgotten, Item, Judgement, Side, digest_of

SECRET = {"role": "user", "content": "my card is CANARY"}


async def played(store, kit, group, **more):
    await store.enqueue(kit.group(group, **more))
    (attempt,) = await store.claim(1, runner="test", lease=9.0)
    call = kit.call(
        attempt, [1], [2], messages=[{**SECRET, "group": group}], answer=SECRET, exact=False,
        logprobs=float32(),
    )  # fmt: skip
    await store.add_transitions([call])
    return attempt, call


async def ended(store, kit, group, **more):
    attempt, call = await played(store, kit, group, **more)
    await store.finish([kit.good(attempt)])
    return f"{group}/0", call


async def mined(store, name, **calls):
    """A data set with one item for each rollout."""
    await store.draft_dataset(name, {})
    sides = [Side(digest=digest_of([call]), rollout=f"{group}/0") for group, call in calls.items()]
    items = [
        Item(position=i, kind="label", chosen=side.digest, label=1.0)
        for i, side in enumerate(sides)
    ]
    await store.add_items(name, 1, items, sides)
    return await store.commit_dataset(name, 1), [side.digest for side in sides]


async def test_a_session_goes_with_its_items_judgements_and_branches(store, kit):
    """Trained or not; what others said stays."""
    one, a = await ended(store, kit, "a")
    two, b = await ended(store, kit, "b")
    made, (digest, kept) = await mined(store, "good", a=a, b=b)
    await store.add_logprobs("model", {digest: float32([-1.0]), kept: float32([-2.0])})
    asked = [Judgement(id=id, subject=id, judge="j", verdict=1, raw="CANARY") for id in (one, two)]
    await store.add_judgements(asked)
    await ended(store, kit, "c", branch=Branch(rollout=one, calls=1))
    groups = await store.claim_groups("run", 1, 3)
    assert (await store.forget([one])).left == [one, "c/0"]  # a step has it now
    await store.commit_step(kit.step(0, ["b", "c"], discarded=["a"]))
    assert [group.id for group in groups] == ["a", "b", "c"]
    whole = Forgotten(rollouts=2, items={"good@1": 1})
    assert await store.forget([one, "unknown"], dry_run=True) == whole
    assert await store.forget([one, "unknown"]) == whole
    assert [row.id for row in await store.rollouts("run")] == [two]
    assert list(await store.sides([digest, kept])) == [kept]
    assert list(await store.logprobs("model", [digest, kept])) == [kept]
    assert await store.judgement(one) is None
    assert await store.judgement(two) is not None
    (left,) = await store.datasets("good")
    assert (left.items, left.digest != made.digest) == (1, True)
    assert await store.forget([one]) == Forgotten()


async def test_a_session_that_no_step_has_leaves_no_group_behind(store, kit):
    one, _ = await ended(store, kit, "a")
    await ended(store, kit, "b")
    assert (await store.counts("run")).groups_settled == 2
    assert (await store.forget([one])).rollouts == 1
    assert (await store.counts("run")).groups_settled == 1
    assert [g.id for g in await store.claim_groups("run", 1, 2, timeout=0)] == ["b"]
    await ended(store, kit, "a")  # the same name later is another session


async def test_what_runs_is_cancelled_before_it_is_deleted(store, kit):
    await played(store, kit, "a")
    assert (await store.forget(["a/0"])).left == ["a/0"]
    await store.cancel(["a/0"])
    assert (await store.forget(["a/0"])).left == []
    assert await store.rollouts("run") == []
    assert (await store.counts("run")).groups_open == 0


async def test_rollouts_are_found_by_the_state_of_their_group(store, kit):
    for name in "abc":
        await ended(store, kit, name)
    await store.claim_groups("run", 1, 2)
    await store.commit_step(kit.step(0, ["a"], discarded=["b"]))
    for state, group in (("trained", "a"), ("discarded", "b"), ("settled", "c")):
        assert [row.group for row in await store.rollouts("run", group_state=state)] == [group]
    assert await store.rollouts("other", group_state="settled") == []
