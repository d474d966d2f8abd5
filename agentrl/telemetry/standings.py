"""Who of a self-play pool beats whom, and how strong each player is.

Read from the metrics of steps, which hold what the pool knew after each of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from agentrl.types import StepRow

RATE, ELO = "selfplay/win_rate/", "selfplay/elo/"


def standings(steps: Sequence[StepRow]) -> Table | None:
    """Row against column: the policy's win rate as the pool estimated it when the row's snapshot
    was taken, or in the last row in the end, and Elo ratings in the end. None: there is no pool."""
    known = {row.step + 1: row.metrics for row in steps if row.committed}
    last = known[max(known)] if known else {}
    pool = {_taken(key): last[key] for key in sorted(last) if key.startswith(ELO)}
    if not pool:
        return None
    table = Table(title="win rate of the row against the column", title_justify="left")
    for column in ("", *(f"@{taken}" for taken in pool), "Elo"):
        table.add_column(column, justify="right" if column else "left")
    for taken, rating in pool.items():
        table.add_row(f"@{taken}", *_rates(known.get(taken, {}), pool), f"{rating:.0f}")
    table.add_row("in the end", *_rates(last, pool), f"{last['selfplay/elo']:.0f}")
    return table


def _rates(metrics: dict[str, float], columns: dict[int, float]) -> list[str]:
    found = {_taken(key): value for key, value in metrics.items() if key.startswith(RATE)}
    return [f"{found[taken]:.0%}" if taken in found else "" for taken in columns]


def _taken(key: str) -> int:
    """The steps after which the snapshot of a metric was taken."""
    return int(key.rpartition("@")[2])
