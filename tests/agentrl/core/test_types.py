"""What a training returns."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import pytest

from agentrl.core.errors import AgentRLError
from agentrl.core.types import (
    ErrorKind,
    StepRow,
    TrainingResult,
    are_shares,
    fix_hint,
    gain_text,
    score_text,
)


def test_the_history_is_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [StepRow("r", 0, {"loss": 2.0}, committed=True, at=0.0)]
    rows += [StepRow("r", 1, {"eval/score": 0.5}, committed=False, at=0.0)]
    result = TrainingResult(None, 0.5, None, None, 1.0, None, "sqlite:///s.db", rows)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(AgentRLError, match=r"pip install pandas; without it, `history`"):
        result.to_pandas()
    made: Any = ModuleType("pandas")

    class DataFrame:
        def __init__(self, rows: list[dict[str, Any]], columns: object) -> None:
            self.rows = rows

        def set_index(self, name: str) -> list[Any]:
            return [name, self.rows]

    made.DataFrame = DataFrame
    monkeypatch.setitem(sys.modules, "pandas", made)
    first, second = ({"step": 0, "committed": True}, {"step": 1, "committed": False})
    assert result.to_pandas() == ["step", [first | {"loss": 2.0}, second | {"eval/score": 0.5}]]


# -- whether scores are percentages, and how they are written --------------------------------------


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


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ErrorKind.AGENT, ErrorKind.MODEL])
def test_a_prompt_that_is_too_long_is_not_cured_by_another_agent_or_server(kind: ErrorKind) -> None:
    assert "engine.max_context" in fix_hint(kind, "the model's context is 512 tokens")
    assert "engine.max_context" not in fix_hint(kind, "KeyError: 'context'")
