"""Candidates and reflections in every store."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from agentrl.algorithms.prompt_search import (
    Candidate,
    Reflection,
    add_reflection,
    candidates_of,
    put_candidates,
    reflections_of,
)
from agentrl.core.errors import NotFound
from agentrl.core.types import PromptText
from tests.store.conftest import (
    clock,
    empty_database,
    kit,
    one_database,
    opener,
    server_clock,
    store,
    url,
)

__all__ = [
    "clock",
    "empty_database",
    "kit",
    "one_database",
    "opener",
    "server_clock",
    "store",
    "url",
]


async def test_the_texts_of_a_candidate_stay(store, kit):
    text = PromptText(component="s", role="solver", seed="a", text="b \u00e9", tool="look")
    base = {"run": "run", "step": 0, "parents": [], "texts": [text]}
    first = Candidate(id="c", state="proposed", **base)
    second = Candidate(id="d", state="rejected", **base | {"parents": ["c"], "reflection": "n"})
    await put_candidates(store, "run", [first, second])
    await put_candidates(store, "run", [replace(first, state="accepted", parents=["other"])])
    assert await candidates_of(store, "run") == [replace(first, state="accepted"), second]
    await store.enqueue(kit.group("a", 1, candidate="c"))
    (attempt,) = await store.claim(1, runner="r", lease=9.0)
    assert attempt.prompts == [text]
    with pytest.raises(NotFound):
        await put_candidates(store, "unknown", [first])
    assert await candidates_of(store, "unknown") == []


async def test_reflections_are_kept_in_order_and_once(store):
    made = [
        Reflection(id=f"n/{i}", run="run", step=i, question="why?", answer="so", seconds=0.5)
        for i in (1, 0)
    ]
    for one in (*made, replace(made[0], answer="again")):
        await add_reflection(store, one)
    await add_reflection(store, replace(made[0], id="n/2", answer="half \ud800\0"))
    *others, last = await reflections_of(store, "run")
    assert (others, last.answer) == (made, "half ??")
    with pytest.raises(NotFound):
        await add_reflection(store, replace(made[0], run="unknown"))
