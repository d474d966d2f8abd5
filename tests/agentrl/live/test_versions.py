"""From which versions the learner's weights come, and which versions are served."""

from __future__ import annotations

from math import inf

from agentrl.live.documents import Event, Lanes, Told, Version
from agentrl.live.versions import Lineage, Reset, is_bad, pending, wanted_of


def version(number: int) -> Version:
    return Version(version=number, step=number, path="", offered=float(number))


def event(kind: str, number: int, **evidence: object) -> Event:
    return Event(time=0.0, kind=kind, version=number, serving=0, why="", evidence=evidence)


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
    known = Told(lanes=Lanes(serving=0), versions={0: version(0), 3: version(3)})
    assert pending(known) == {3}
    assert wanted_of(known) == {0, 3}
    dropped = Told(lanes=known.lanes, versions=known.versions, events=[event("dropped", 3)])
    assert pending(dropped) == set()
    assert wanted_of(dropped) == {0}
    both = Told(lanes=Lanes(serving=3, candidate=0), versions=known.versions)
    assert wanted_of(both) == {0, 3}


def test_which_decisions_send_the_learner_back() -> None:
    assert is_bad(event("taken back", 3))
    assert is_bad(event("rolled back", 3))
    assert is_bad(event("dropped", 3, worse=True))
    assert not is_bad(event("dropped", 3))
    assert not is_bad(event("promoted", 3))
