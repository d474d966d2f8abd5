"""What the console and the report show of self-play: the games of a step, and a pool's ratings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rich.table import Table

from agentrl.types import StepRow

WIN_RATE, ELO, FIRST = "selfplay/win_rate/", "selfplay/elo/", "@000000"
RETURN = "reward/role:outcome/"  # of a seat
SEAT = re.compile(rf"{RETURN}(.+)/mean")


def game_figures(metrics: Mapping[str, float]) -> dict[str, str]:
    """Label -> text about the games of a step: mean return of each seat with its standard
    deviation, calls and illegal moves per game, and win rates against the first policy and the
    whole pool. Empty without self-play."""
    if "selfplay/games" not in metrics:
        return {}
    seats = sorted(seat[1] for name in metrics if (seat := SEAT.fullmatch(name)))
    found = {
        seat: f"{metrics[f'{RETURN}{seat}/mean']:.3f} ± {metrics[f'{RETURN}{seat}/std']:.3f}"
        for seat in seats
    }
    found["calls a game"] = f"{metrics.get('calls', 0.0) / max(metrics['rollouts'], 1.0):.1f}"
    if (invalid := metrics.get("reward/role:invalid/mean")) is not None:
        found["illegal moves"] = f"{abs(invalid) * len(seats):.2f}"
    first = [x for name, x in metrics.items() if name.startswith(WIN_RATE) and FIRST in name]
    pool = [metrics[name] for name in ("selfplay/win_rate",) if name in metrics]
    known = {"against the first": first, "against the pool": pool}
    return found | {label: f"{x:.0%}" for label, values in known.items() for x in values}


def win_rate_table(steps: Sequence[StepRow]) -> Table | None:
    """A table of the win rates of each snapshot of a self-play pool (row) against the others
    (column), estimated when the snapshot was taken, and of final Elo ratings; None without a
    pool."""
    known = {row.step + 1: row.metrics for row in steps if row.committed}
    last = known[max(known)] if known else {}
    pool = {_taken(key): last[key] for key in sorted(last) if key.startswith(ELO)}
    if not pool:
        return None
    columns = (f"@{taken}" for taken in pool)
    table = Table("", title="win rate of the row against the column", title_justify="left")
    for column in (*columns, "Elo"):
        table.add_column(column, justify="right")
    for taken, rating in pool.items():
        table.add_row(f"@{taken}", *_rates(known.get(taken, {}), pool), f"{rating:.0f}")
    table.add_row("in the end", *_rates(last, pool), f"{last['selfplay/elo']:.0f}")
    return table


def _rates(metrics: dict[str, float], columns: dict[int, float]) -> list[str]:
    found = {_taken(key): value for key, value in metrics.items() if key.startswith(WIN_RATE)}
    return [f"{found[taken]:.0%}" if taken in found else "" for taken in columns]


def _taken(key: str) -> int:
    """The number of steps after which a metric's snapshot was taken."""
    return int(key.rpartition("@")[2])
