"""What a training returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from agentrl.errors import AgentRLError
from agentrl.types import StepRow


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The result of a run. Scores are mean held-out rewards; None: not evaluated."""

    before: float | None
    after: float | None
    before_sampled: float | None
    after_sampled: float | None
    seconds: float
    checkpoint: str | None
    store: str
    history: Sequence[StepRow] = field(default=(), repr=False)  # every step with its metrics

    def to_pandas(self) -> Any:
        """A DataFrame with a row per step and a column per metric, NaN where a step has none."""
        try:
            pandas: Any = import_module("pandas")
        except ImportError:
            raise AgentRLError(
                "to_pandas() needs pandas: pip install pandas; without it, `history` has the same"
            ) from None
        rows = [
            {"step": row.step, "committed": row.committed} | row.metrics for row in self.history
        ]
        frame = pandas.DataFrame(rows, columns=None if rows else ["step", "committed"])
        return frame.set_index("step")
