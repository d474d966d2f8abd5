"""Said of a run without being asked: why its steps trained nothing, or that it did not improve."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.algorithms.why.record import read
from agentrl.algorithms.why.rules import missing_rewards, reasons
from agentrl.changes import not_improved
from agentrl.config import RunConfig
from agentrl.store.base import Store
from agentrl.types import StepRow


async def cause(store: Store, run: str, steps: int) -> str:
    """The most likely reason that the last `steps` steps trained nothing."""
    record, *_ = (await read(store, run, last=steps)).values()
    found, *_ = reasons(record) or [missing_rewards(record)]
    return f"{found.text.rstrip('. ')}. Look at {found.change}"


def verdict(config: RunConfig, steps: Sequence[StepRow]) -> str:
    """What shows that a finished run did not improve, and a command; empty if it did."""
    sentence = not_improved([row.metrics for row in steps]) if config.steps else ""
    return f"{sentence}; agentrl why {config.name}" if sentence else ""
