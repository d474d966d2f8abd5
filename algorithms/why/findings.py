"""What `agentrl view` shows of a run: whether it learned, and the reasons if not."""

from __future__ import annotations

from typing import Any

from agentrl.algorithms.why.record import read
from agentrl.algorithms.why.rules import learned, reasons
from agentrl.store.base import Store


async def findings(store: Store, run: str) -> list[dict[str, Any]]:
    """For each trained policy its `name`, number of `steps`, whether it `improved`, and `reasons`
    (text, change), likeliest first. Raises NotFound for an unknown run."""
    found = await read(store, run)
    return [
        {
            "name": name if len(found) > 1 else "",
            "steps": len(record.steps),
            "improved": bool(learned(record)),
            "reasons": [(reason.text, reason.change) for reason in reasons(record)],
        }
        for name, record in found.items()
    ]
