"""What a training returns."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from agentrl.errors import AgentRLError
from agentrl.results import TrainingResult
from agentrl.types import StepRow


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
