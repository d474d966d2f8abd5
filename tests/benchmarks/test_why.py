"""The runs of known fate: how many there are of each, and how they are counted."""

from __future__ import annotations

from collections import Counter

from tests.benchmarks.why import summary
from tests.benchmarks.why_runs import SAID, fates, held_out_fates


def test_each_fate_has_several_runs_that_are_not_the_same() -> None:
    kinds = Counter(fate.kind for fate in fates())
    assert len(fates()) == 40
    assert kinds.keys() == SAID.keys()
    assert min(kinds.values()) >= 2
    assert len(held_out_fates()) == 10
    places = [fate.place for fate in (*fates(), *held_out_fates())]
    assert len({*places}) == 50


def test_a_reason_for_a_run_that_learned_is_a_false_alarm() -> None:
    learned = {"kind": "learned", "right": True, "learned": True, "alarms": []}
    failing = learned | {"alarms": ["rollouts fail: 20%"]}
    alarm = learned | {"alarms": ["entropy is gone"]}
    unsaid = learned | {"right": False, "learned": False}
    wrongly = {"kind": "flat", "right": False, "learned": True, "alarms": []}
    found = summary([learned, failing, alarm, unsaid, wrongly])
    assert found == {
        "runs": 5, "right": 3, "learned": 4, "wrong_alarms": 2, "wrongly_learned": 1,
    }  # fmt: skip
