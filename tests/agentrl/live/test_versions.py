"""From which versions the learner's weights come, and which versions are served."""

from __future__ import annotations

from math import inf

from agentrl.live.documents import Event, EventKind, Lanes, Told, Version
from agentrl.live.versions import Lineage, Reset, pending, wanted_of


def version(number: int) -> Version:
    return Version(version=number, step=number, path="", offered=float(number))


def event(kind: EventKind, number: int, lanes: Lanes) -> Event:
    return Event(time=0.0, kind=kind, version=number, lanes=lanes, why="")


def test_lag_counts_updates_on_the_way_to_the_learner() -> None:
    plain = Lineage()
    assert [plain.lag(at, 5) for at in (5, 3, 0)] == [0, 2, 5]
    assert plain.lag(6, 5) == inf
    # After 5 updates the learner went on from version 2, after 7 from version 6.
    back = Lineage([Reset(5, 2), Reset(7, 6)])
    assert back.lag(8, 9) == 1
    assert back.lag(6, 9) == 2
    assert back.lag(7, 9) == inf  # it was found bad
    assert back.lag(2, 9) == 3  # 2 -> 6 -> 8 -> 9
    assert back.lag(1, 9) == 4
    assert [back.lag(at, 9) for at in (3, 4, 5)] == [inf, inf, inf]
    first = Lineage([Reset(5, 2), Reset(7, 0)])
    assert first.lag(0, 8) == 1
    assert first.lag(2, 8) == inf


def test_lineage_comes_back_from_a_checkpoint() -> None:
    kept, read = Lineage([Reset(5, 2)], decided=3), Lineage()
    read.restore(kept.dump())
    assert read == kept


def test_an_offered_version_is_served_until_something_is_decided_of_it() -> None:
    lanes, both = Lanes(serving=0), {0: version(0), 3: version(3)}
    known = Told(versions=both, events=[event("first", 0, lanes)])
    assert pending(known) == {3}
    assert wanted_of(known) == {0, 3}
    dropped = Told(versions=both, events=[*known.events, event("dropped", 3, lanes)])
    assert pending(dropped) == set()
    assert wanted_of(dropped) == {0}
    before = Lanes(serving=3, previous=0)
    promoted = Told(versions=both, events=[*known.events, event("promoted", 3, before)])
    assert wanted_of(promoted) == {0, 3}
