"""Images are stored once, before the calls that refer to them, and not longer than these."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agentrl.core.errors import NotFound
from agentrl.core.types import Image, NewRollout, Purpose, int32
from agentrl.store import open_store, rows
from agentrl.store.records import Item, Side, digest_of
from agentrl.store.sql.traces import IN_FLIGHT
from agentrl.store.urls import backend_of
from tests.store.conftest import refused

AGES = 10 * IN_FLIGHT


def image(body: bytes, **more: Any) -> Image:
    digest = sha256(body).hexdigest()
    base: dict[str, Any] = {"media_type": "image/png", "width": 3, "height": 2}
    return Image(**{"digest": digest, "body": body} | base | more)


RED, BLUE = image(b"red" * 1000), image(bytes(range(256)), width=1, height=2**20)


@pytest.fixture
async def attempt(store, kit):
    await store.enqueue(kit.group("g"))
    (claimed,) = await store.claim(1, runner="test", lease=10.0)
    return claimed


async def train(store, kit, attempt, step=0):
    """Train the attempt's group, so that a prune may remove it."""
    await store.finish([kit.good(attempt)])
    group = attempt.rollout.group
    await store.claim_groups("run", 1, 1)
    await store.commit_step(kit.step(step, [group]))


async def test_an_image_is_stored_once_and_read_as_it_was_put(store):
    await store.put_images("run", [RED, BLUE])
    await store.put_images("run", [replace(RED, media_type="image/gif", width=9)])  # kept as it is
    assert await store.images("run", [BLUE.digest, RED.digest, "0" * 64]) == {
        RED.digest: RED,
        BLUE.digest: BLUE,
    }
    assert (await store.stats()).rows["images"] == 2
    assert await store.images("run", []) == {}


async def test_an_image_is_put_for_a_run_or_a_data_set(store):
    with pytest.raises(NotFound):
        await store.put_images("nobody", [RED])
    assert await store.images("run", [RED.digest]) == {}
    await store.put_images("", [RED])
    assert await store.images("", [RED.digest]) == {RED.digest: RED}


async def test_a_search_finds_what_has_images(store, kit, attempt):
    await store.put_images("run", [RED])
    shown = kit.call(attempt, [1, 9, 9], [2], role="eyes", images=(RED.digest,))
    await store.add_transitions([shown])
    await store.enqueue(kit.group("h"))
    (other,) = await store.claim(1, runner="test", lease=10.0)
    await store.add_transitions([kit.call(other, [1], [2], role="eyes")])

    async def found(**wanted: Any) -> set[str]:
        return {row.id for row in (await store.search("run", **wanted)).rows}

    first, second = attempt.rollout.id, other.rollout.id
    assert await found(images=True) == await found(images=True, role="eyes") == {first}
    assert await found() == await found(role="eyes") == {first, second}
    assert await found(images=True, role="other") == set()


WRONG_IMAGES = [
    {"digest": "f" * 64},
    {"digest": RED.digest.upper()},
    {"digest": ""},
    {"body": b"other"},
    {"width": 0},
    {"height": 2**31},
    {"media_type": "x" * 600},
]


async def test_an_image_is_what_its_digest_says(store, kit, attempt):
    for wrong in WRONG_IMAGES:
        await refused(store.put_images("run", [BLUE, replace(RED, **wrong)]), wrong, "mage")
        assert await store.images("run", [RED.digest, BLUE.digest]) == {}, wrong
    call = kit.call(attempt, [1], [2], images=("cat",))
    await refused(store.add_transitions([call]), "cat", "sha256")


async def test_a_call_names_its_images_in_order(store, kit, attempt):
    await store.put_images("run", [RED, BLUE])
    seen = (BLUE.digest, RED.digest, BLUE.digest)
    calls = [kit.call(attempt, [1], [2], images=seen[:n]) for n in range(4)]
    assert await store.add_transitions(calls) == [True] * 4
    trace = await store.trace("g/0")
    assert [call.images for call in trace.transitions] == [seen[:n] for n in range(4)]
    await store.finish([kit.good(attempt)])
    (group,) = await store.claim_groups("run", 1, 1)
    assert group.rollouts[0].transitions[3].images == seen


async def test_no_call_is_stored_without_its_images(store, kit, attempt):
    await store.put_images("run", [RED])
    good = kit.call(attempt, [1], [2], images=(RED.digest,))
    lost = kit.call(attempt, [1], [3], images=(RED.digest, BLUE.digest))
    with pytest.raises(NotFound, match=BLUE.digest):
        await store.add_transitions([good, lost])
    assert (await store.trace("g/0")).transitions == []
    await store.put_images("run", [BLUE])
    assert await store.add_transitions([good, lost]) == [True, True]
    assert await store.add_transitions([good, lost]) == [True, True]
    assert len((await store.trace("g/0")).transitions) == 2


async def test_a_prune_removes_images_with_the_last_call_that_refers_to_them(store, kit, clock):
    await store.put_images("run", [RED, BLUE])
    for step in range(2):
        await store.enqueue(kit.group(f"g{step}", step=step))
        (attempt,) = await store.claim(1, runner="test", lease=10.0)
        images = (RED.digest, BLUE.digest) if step == 0 else (RED.digest,)
        await store.add_transitions([kit.call(attempt, [1], [2], images=images)])
        await train(store, kit, attempt, step)
    clock.now += AGES
    asked = await store.prune(keep_last=1, dry_run=True)
    assert len(await store.images("run", [RED.digest, BLUE.digest])) == 2
    done = await store.prune(keep_last=1)
    assert done == asked
    assert (done.rollouts, done.images) == (1, 1)
    assert done.bytes >= len(BLUE.body)
    assert await store.images("run", [RED.digest, BLUE.digest]) == {RED.digest: RED}
    assert (await store.prune(keep_last=0)).images == 1
    assert await store.images("run", [RED.digest]) == {}


async def test_an_image_whose_call_may_be_in_flight_is_kept(store, kit, attempt, clock):
    await store.put_images("run", [RED, BLUE])
    clock.now += IN_FLIGHT - 1
    await store.put_images("run", [BLUE])  # by another call
    assert (await store.prune(keep_last=0)).images == 0
    clock.now += 2
    assert (await store.prune(keep_last=0)).images == 1
    assert [*await store.images("run", [RED.digest, BLUE.digest])] == [BLUE.digest]
    await store.heartbeat([attempt.id], lease=10.0)
    with pytest.raises(NotFound):  # the gateway puts it again
        await store.add_transitions([kit.call(attempt, [1], [2], images=(RED.digest,))])


async def test_many_unused_images_are_removed(store, clock):
    await store.put_images("run", [image(bytes([n % 256, n // 256])) for n in range(250)])
    clock.now += AGES
    assert (await store.prune(older_than=0)).images == 250
    assert (await store.stats()).rows["images"] == 0


async def test_a_rewind_keeps_images_of_its_groups(store, kit, attempt, clock):
    await store.put_images("run", [RED])
    await store.add_transitions([kit.call(attempt, [1], [2], images=(RED.digest,))])
    await train(store, kit, attempt)
    await store.rewind("run", 1, 0, None)
    clock.now += AGES
    await store.prune(keep_last=0)
    assert await store.images("run", [RED.digest]) == {RED.digest: RED}


async def test_a_trace_that_moves_to_another_attempt_keeps_its_images(store, kit, attempt, clock):
    await store.put_images("run", [RED])
    await store.add_transitions([kit.call(attempt, [1], [2], images=(RED.digest,))])
    await store.finish([replace(kit.good(attempt, rewards=[]), ran=True)])
    clock.now += AGES  # its runner is dead
    (again,) = await store.claim(1, runner="other", lease=10.0)
    await train(store, kit, again)
    assert (await store.prune(older_than=AGES)).images == 0
    assert (await store.trace("g/0")).transitions[0].images == (RED.digest,)
    assert (await store.prune(keep_last=0)).images == 1


async def test_a_side_keeps_the_images_of_its_calls(store, kit, attempt, clock):
    call = kit.call(attempt, [1], [2], images=(RED.digest,))
    side = Side(digest=digest_of([call]), own=[call])
    item = Item(position=0, kind="label", chosen=side.digest, label=1.0)
    version = await store.draft_dataset("d", {})
    with pytest.raises(NotFound, match=RED.digest):
        await store.add_items("d", version, [item], [side])
    await store.put_images("run", [RED])
    await store.add_items("d", version, [item], [side])
    clock.now += AGES
    assert (await store.prune(keep_last=0)).images == 0
    assert (await store.sides([side.digest]))[side.digest][0].images == (RED.digest,)
    await store.draft_dataset("d", {"other": 1})  # empties the unfinished version
    assert (await store.prune(keep_last=0)).images == 1


async def test_a_removed_rollout_leaves_its_images_to_the_side_that_copies_its_calls(
    store, kit, clock
):
    await store.put_images("run", [RED])
    new = NewRollout(id="e/0", run="run", group="e", index=0, task={}, purpose=Purpose.EVAL, step=1)
    epoch = (await store.open_run("run", {})).epoch
    await store.enqueue([*kit.group("g"), new])
    for attempt in await store.claim(2, runner="test", lease=10.0):
        call = kit.call(attempt, [1], [2], images=(RED.digest,))
        await store.add_transitions([call])
        await store.finish([kit.good(attempt)])
    side = Side(digest=digest_of([call]), rollout="e/0")
    item = Item(position=0, kind="label", chosen=side.digest, label=1.0)
    version = await store.draft_dataset("d", {})
    await store.add_items("d", version, [item], [side])
    await store.claim_groups("run", epoch, 1)
    await store.commit_step(kit.step(0, ["g"], epoch=epoch))
    await store.rewind("run", epoch, 0, None)  # removes the evaluation of step 1
    assert await store.trace("e/0") is None
    clock.now += AGES
    assert (await store.prune(keep_last=0)).images == 0
    assert (await store.sides([side.digest]))[side.digest][0].images == (RED.digest,)


async def test_placeholders_are_stored_as_their_number(store, kit):
    await store.put_images("run", [RED])
    sizes = (1, 3, 4, 1260)
    await store.enqueue(kit.group("g", len(sizes)))
    attempts = await store.claim(len(sizes), runner="test", lease=10.0)
    for size, attempt in zip(sizes, attempts, strict=True):
        run = [9] * size
        prompts = [[5, *run, 6], [5, *run, 6, 1, *run], run, [5, *run, *[9] * 9]]
        calls = [kit.call(attempt, prompt, [9, 9], images=(RED.digest,)) for prompt in prompts]
        calls += [kit.call(attempt, [*prompts[0], 9, 9, 9, 9, 9, 7, 7], [1], images=(RED.digest,))]
        calls += [kit.call(attempt, [5, *run], [1])]
        for call in calls:
            await store.add_transitions([call])
        stored = (await store.trace(attempt.rollout.id)).transitions
        assert [call.prompt for call in stored] == [call.prompt for call in calls], size
        assert [call.completion for call in stored] == [call.completion for call in calls], size


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(1, 9)), max_size=9))
def test_runs_of_tokens(runs):
    data = rows.to_blob(int32(token for token, size in runs for _ in range(size)))
    assert rows.without_runs(rows.with_runs(data)) == data
    assert len(rows.with_runs(data)) <= len(data)


def test_a_run_is_short():
    assert len(rows.with_runs(rows.to_blob(int32([3] * 1260)))) == 8


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)  # a database has its own backups
async def test_a_backup_has_the_images(store, kit, attempt, url, tmp_path):
    await store.put_images("run", [RED])
    await store.add_transitions([kit.call(attempt, [1], [2], images=(RED.digest,))])
    backend_of(url).backup(url, tmp_path / "copy.db")
    async with open_store(str(tmp_path / "copy.db")) as copy:
        (call,) = (await copy.trace("g/0")).transitions
        assert await copy.images("run", call.images) == {RED.digest: RED}
