"""The fraction of rules that an answer follows, and for each role a text about its mistakes."""

from statistics import fmean
from typing import Any

from world import checks, feedback

from agentrl import Reward
from agentrl.core.types import Scope, Trace


def verify(task: dict[str, Any], result: str, trace: Trace) -> list[Reward]:
    kept = checks(task, result)
    rows = [Reward(value=fmean(kept.values()))]
    for call in trace.transitions:
        note = feedback(call.role, kept, str((call.answer or {}).get("content")))
        value = float(note == "fine.")
        row = Reward(value=value, name="clean", scope=Scope.ROLE, target=call.role, note=note)
        rows.append(row)
    return rows
