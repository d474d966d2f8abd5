"""Whether scores are percentages, and how they are written."""

from __future__ import annotations

import math

import pytest

from agentrl.scores import are_shares, gain_text, score_text


@pytest.mark.parametrize(
    ("rows", "outcomes", "expected"),
    [
        ([], [], True),
        ([{"eval/score": 0.211, "reward/mean": 0.5, "reward/std": 0.5}], [math.nan], True),
        ([{"eval/score": math.nan, "reward/mean": math.nan}], [], True),
        ([{"eval/score": 1.5}], [], False),
        ([{"eval/sampled_low": -0.1}], [], False),
        ([{"eval/score_missing": 7.0}], [], True),
        ([{"reward/mean": 0.5, "reward/std": 0.9}], [], False),  # of returns of -1 and 1
        ([{"eval/score": 0.5}], [-1.0], False),
    ],
)
def test_percentages_are_for_what_lies_in_0_to_1(
    rows: list[dict[str, float]], outcomes: list[float], expected: bool
) -> None:
    assert are_shares(rows, outcomes) == expected


def test_scores_in_words() -> None:
    assert (score_text(0.211, True), score_text(0.211, False)) == ("21.1%", "0.211")
    assert (score_text(math.nan, True), gain_text(-0.05, True)) == ("-", "-5.0 points")
    assert [score_text(x, True) for x in (0.0, 0.0004, 0.0006)] == ["0.0%", "0.04%", "0.1%"]
    assert gain_text(0.05, False) == "+0.050"
