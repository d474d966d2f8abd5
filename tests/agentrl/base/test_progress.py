from __future__ import annotations

import logging
import threading

import pytest

from agentrl.base import progress

log = logging.getLogger("agentrl.test")


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found = list[str]()
    monkeypatch.setattr(progress, "log_phase", lambda log, line: found.append(line))
    return found


def test_long_work_says_how_much_is_left_and_short_work_nothing(lines: list[str]) -> None:
    now = 0.0
    report = progress.steps_left(log, "imitating", 100, clock=lambda: now)
    for step in range(100):
        now = 0.2 * step
        report(step)
    assert lines == [
        "imitating: 25% done, about 15 s left",
        "imitating: 50% done, about 10 s left",
        "imitating: 75% done, about 5 s left",
    ]
    lines.clear()
    report = progress.steps_left(log, "imitating", 100, clock=lambda: now)
    for step in range(100):
        now += 0.04
        report(step)
    assert lines == []


def test_work_of_unknown_length_says_that_it_goes_on(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = threading.Event()

    def phase(log: logging.Logger, line: str) -> None:
        lines.append(line)
        said.set()

    monkeypatch.setattr(progress, "log_phase", phase)
    with progress.still_at(log, "building the model", interval=0.01):
        assert said.wait(20)
    assert lines[0] == "building the model: 0 s so far"
    assert not [one for one in threading.enumerate() if one.name == "progress"]
