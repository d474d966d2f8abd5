"""What a process knows of attempts without asking: other processes may know more."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from agentrl.core.types import int32
from agentrl.store.sql import tree
from agentrl.store.sql.tree import AttemptCalls, KnownAttempts
from tests.store.conftest import DATABASES

pytestmark = pytest.mark.parametrize("url", DATABASES, indirect=True)


def stored(conn) -> list[tuple[str, str | None, bytes]]:
    """Of each call its parent and the tokens that are stored of its prompt."""
    found = conn.execute(
        "select c.id, p.id as parent, c.prompt from transitions c "
        "left join transitions p on p.seq = c.parent order by c.seq"
    ).fetchall()
    return [(row["id"], row["parent"], bytes(row["prompt"])) for row in found]


def tokens(*ids: int) -> bytes:
    return int32(ids).tobytes()


async def test_a_call_continues_that_of_another_process(store, opener, kit, clock) -> None:
    other = opener(clock=clock)
    await store.enqueue(kit.group("a", 1))
    (attempt,) = await store.claim(1, runner="r", lease=60)

    def call(id: str, prompt: Sequence[int]):
        return kit.call(attempt, list(prompt), [0], id=id)

    assert await store.add_transitions([call("one", [1])]) == [True]
    assert await other.add_transitions([call("two", [1, 0, 2])]) == [True]
    assert await store.add_transitions([call("three", [1, 0, 2, 0, 3])]) == [True]
    assert await other.add_transitions([call("four", [1, 0, 2, 0, 3, 0])]) == [True]
    assert await store.add_transitions([call("two", [1, 0, 2])]) == [True]  # a repeat
    assert await store._readers.read(stored) == [
        ("one", None, tokens(1)),
        ("two", "one", tokens(2)),
        ("three", "two", tokens(3)),
        ("four", "three", tokens()),
    ]
    assert (await store.counts("run")).transitions == 4


async def test_what_was_undone_is_not_known(store, kit) -> None:
    """A refused verb in its group does not take a call with it, and its own are not stored."""
    await store.enqueue(kit.group("a", 1))
    (attempt,) = await store.claim(1, runner="r", lease=60)
    bad = kit.call(attempt, [1], [2], id="bad", role="\ud800")
    with pytest.raises(Exception, match="cannot be stored"):
        await store.add_transitions([kit.call(attempt, [1], [2], id="one"), bad])
    assert await store.add_transitions([kit.call(attempt, [1, 2, 3], [4], id="two")]) == [True]
    assert await store._readers.read(stored) == [("two", None, tokens(1, 2, 3))]


def test_the_oldest_is_forgotten(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "MAX_CALLS_CACHED", 7)
    known = KnownAttempts()
    for id in ("a", "b", "c"):
        known.keep({id: AttemptCalls("run", {f"{id}{i}": False for i in range(2)})})
    known.keep({"b": AttemptCalls("run", {"b0": False})})  # again, and smaller
    assert known.take("abc").keys() == {"b", "c"}
    assert not known.take("abc")
    known.keep({id: AttemptCalls("run") for id in "defghij"})
    assert known.take("defghij").keys() == set("defghij")
