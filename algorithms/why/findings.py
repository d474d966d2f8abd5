"""What `agentrl view` shows of a run: whether it learned, and the reasons if not."""

from __future__ import annotations

from typing import Any

from agentrl.algorithms.why.record import read
from agentrl.algorithms.why.rules import learned, opening, reasons
from agentrl.store.base import Store


async def findings(store: Store, run: str) -> list[dict[str, Any]]:
    """For each trained policy its `name`, number of `steps`, whether it `improved`, `said`: that in
    a sentence, and `reasons` (text, change), likeliest first. Raises NotFound for an unknown
    run."""
    records, found = await read(store, run), []
    for name, record in records.items():
        why = reasons(record)
        found.append(
            {
                "name": name if len(records) > 1 else "",
                "steps": len(record.steps),
                "improved": bool(learned(record)),
                "said": opening(record, why),
                "reasons": [(reason.text, reason.change) for reason in why],
            }
        )
    return found
