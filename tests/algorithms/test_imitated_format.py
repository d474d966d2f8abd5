"""The loss of a tiny model is said, and when it is too high for the format of its answers."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from agentrl.core.processes import PHASE
from agentrl.tiny.models import imitator

WORDS = ["Oslo", "Lima", "Cairo", "Delhi"]


@pytest.mark.parametrize(("steps", "level"), [(2, logging.WARNING), (80, PHASE)])
def test_the_loss_is_said_and_when_the_format_is_not_learned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, steps: int, level: int
) -> None:
    """The second half of an answer is open, the first is not: only that counts."""
    answers = [f"The answer is {word}." for word in WORDS]
    shown = [
        [{"role": "user", "content": "say"}, {"role": "assistant", "content": answer}]
        for answer in answers * 8
    ]
    with caplog.at_level(PHASE, "agentrl.algorithm"):
        loss = imitator(tmp_path, shown, seed=0, steps=steps)
    (record,) = caplog.records
    said = f"the tiny model imitates {len(shown)} conversations with a loss of {loss:.3f} per token"
    assert record.levelno == level
    assert record.getMessage().startswith(said)
    assert ("too high" in record.getMessage()) == (level == logging.WARNING)
