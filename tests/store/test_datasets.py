"""Data sets, judgements and cached log-probs, in every store."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from agentrl.core.errors import Conflict, NotFound
from agentrl.core.types import Purpose, float32
from agentrl.store.records import Item, Judgement, Side, digest_of
from tests import factories
from tests.store.conftest import refused


def side_of(*tokens: int) -> Side:
    """A side of one call of its own."""
    call = factories.call(
        f"own-{tokens}",
        tokens[:-1],
        tokens[-1:],
        attempt="own",
        messages=[{"role": "user", "content": "hi"}],
    )
    return Side(digest=digest_of([call]), own=[call])


A, B, C = side_of(1, 2), side_of(1, 3), side_of(1, 4)
PAIR = Item(position=0, kind="pair", chosen=A.digest, rejected=B.digest, margin=0.5, source="x")


async def make(store, items, sides, spec=None):
    version = await store.draft_dataset("pairs", spec or {})
    await store.add_items("pairs", version, items, sides)
    return await store.commit_dataset("pairs", version)


async def test_a_version_holds_each_item_once_and_never_changes(store):
    again = replace(PAIR, position=7)
    label = Item(position=8, kind="label", chosen=C.digest, label=0.0, split="test")
    made = await make(store, [PAIR, again, label], [A, B, C, A])
    assert (made.version, made.items) == (1, 2)
    assert await store.items("pairs", 1) == [PAIR, label]
    assert await store.items("pairs", 1, split="test") == [label]
    assert await store.items("pairs", 1, after=0, limit=1) == [label]
    assert await store.sides([A.digest, "unknown"]) == {A.digest: A.own}
    with pytest.raises(Conflict, match="draft another"):
        await store.add_items("pairs", 1, [label], [])
    assert await store.commit_dataset("pairs", 1) == made


async def test_the_same_items_have_the_same_digest_in_any_store(store):
    label = Item(position=3, kind="label", chosen=C.digest, label=1.0)
    first = await make(store, [PAIR, label], [A, B, C])
    again = await make(store, [PAIR, replace(label, position=1)], [A, B, C])
    other = await make(store, [PAIR], [])
    assert first.digest == again.digest == "8fdd0bd836f327d51a54f0872763fd01" != other.digest
    assert [one.version for one in await store.datasets("pairs")] == [1, 2, 3]


async def test_a_draft_goes_on_with_the_same_spec_and_starts_afresh_with_another(store):
    assert await store.draft_dataset("pairs", {"how": "all"}) == 1
    await store.add_items("pairs", 1, [PAIR], [A, B])
    assert await store.draft_dataset("pairs", {"how": "all"}) == 1
    assert [one.items for one in await store.datasets()] == [1]
    assert await store.draft_dataset("pairs", {"how": "extremes"}) == 1
    assert await store.items("pairs", 1) == []
    assert await store.sides([A.digest]) == {}


async def test_items_are_right_and_of_versions_and_sides_there(store):
    with pytest.raises(NotFound, match="no version 1"):
        await store.add_items("pairs", 1, [PAIR], [A, B])
    await store.draft_dataset("pairs", {})
    for wrong in (
        {"rejected": None}, {"rejected": A.digest}, {"kind": "label"}, {"label": 1.0},
        {"weight": -1.0}, {"margin": float("inf")},
    ):  # fmt: skip
        items = [replace(PAIR, **wrong)]
        await refused(store.add_items("pairs", 1, items, [A, B]), wrong, "Item 0")
    with pytest.raises(NotFound, match="has a side that was not added"):
        await make(store, [PAIR], [A])


async def played(store, kit, group, **more):
    """A rollout of two calls that is trained."""
    await store.enqueue(kit.group(group, **more))
    (attempt,) = await store.claim(1, runner="test", lease=9.0)
    calls = [
        kit.call(attempt, [1], [2], index=0, logprobs=float32([-0.5])),
        kit.call(attempt, [1, 2, 3], [4], index=1, logprobs=float32([-0.5])),
    ]
    await store.add_transitions(calls)
    await store.finish([kit.good(attempt)])
    return f"{group}/0", calls


async def test_a_side_refers_to_calls_of_a_rollout_and_keeps_them_from_a_prune(store, kit):
    kept, calls = await played(store, kit, "a")
    await played(store, kit, "b")
    await store.claim_groups("run", 1, 2)
    await store.commit_step(kit.step(0, ["a", "b"]))
    last = Side(digest=digest_of(calls[1:]), rollout=kept, first=1)
    one = Side(digest=digest_of(calls[:1]), rollout=kept, calls=1)
    item = Item(position=0, kind="pair", chosen=last.digest, rejected=one.digest)
    await make(store, [item], [last, one])
    assert await store.sides([last.digest, one.digest]) == {
        last.digest: calls[1:],
        one.digest: calls[:1],
    }
    assert await store.calls([kept, "unknown"]) == {kept: calls}
    await store.prune(keep_last=0)
    assert [row.id for row in await store.rollouts("run")] == [kept]
    copies = [replace(last, own=calls[1:]), replace(one, own=calls[:1])]
    await store.add_items("pairs", 1, [], copies)
    await store.prune(keep_last=0)
    assert await store.rollouts("run") == []
    assert (await store.sides([last.digest]))[last.digest] == calls[1:]


async def test_a_side_survives_its_evaluation(store, kit):
    """Which is removed when its step is rolled back."""
    await store.enqueue(kit.group("t"))
    await store.finish([kit.good((await store.claim(1, runner="test", lease=9.0))[0])])
    await store.claim_groups("run", 1, 1)
    await store.commit_step(kit.step(0, ["t"]))
    seen, calls = await played(store, kit, "e", purpose=Purpose.EVAL, step=1)
    last = Side(digest=digest_of(calls[1:]), rollout=seen, first=1)
    label = Item(position=0, kind="label", chosen=last.digest, label=1.0)
    await make(store, [label], [last])
    await store.rewind("run", 1, 0, None)
    assert await store.calls([seen]) == {}
    assert await store.sides([last.digest]) == {last.digest: calls[1:]}


async def test_a_side_of_a_rollout_that_is_not_there_is_left_out(store):
    lost = Side(digest="lost", rollout="nobody")
    await make(store, [PAIR], [A, B, lost])
    assert await store.sides(["lost", A.digest]) == {A.digest: A.own}


async def test_a_judge_is_asked_once(store):
    said = Judgement(
        id="k", subject="a/0 a/1", judge="gpt", verdict={"best": 1}, reason="why", cost=0.01
    )
    await store.add_judgements([said, replace(said, id="l", verdict=None)])
    await store.add_judgements([replace(said, verdict={"best": 2})])
    assert await store.judgement("k") == said
    assert (await store.judgement("l")).verdict is None
    assert await store.judgement("m") is None


async def test_logprobs_are_kept_by_model_and_side(store):
    await store.add_logprobs("m", {A.digest: float32([-1.5, -0.25]), B.digest: float32([])})
    await store.add_logprobs("m", {A.digest: float32([0.0])})
    found = await store.logprobs("m", [A.digest, B.digest, C.digest])
    assert found == {A.digest: float32([-1.5, -0.25]), B.digest: float32([])}
    assert await store.logprobs("other", [A.digest]) == {}
