"""Evaluations of one run that begin in the same second do not share a folder."""

from __future__ import annotations

import time

import pytest

from agentrl.evaluation.checkpoint.score import evaluation_name


def test_evaluations_of_one_second_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-000000")
    first, second = evaluation_name("mine"), evaluation_name("mine")
    assert first != second
    assert first.startswith("mine-eval-20260101-000000-")
