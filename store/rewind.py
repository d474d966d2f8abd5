"""Taking committed steps back. A verb, called by the writer.

Always true: what a step made true goes as a whole, in one transaction: its groups are settled
again, its credit, the rewards that it gave and its metrics are gone; what runners brought stays.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from agentrl.errors import Conflict, Invalid
from agentrl.store import maintenance, rollouts, runs
from agentrl.store.database import load_sql
from agentrl.store.feed import GROUPS
from agentrl.store.writer import Transaction
from agentrl.types import RolloutState

SQL = load_sql("rewind")


def rewind(tx: Transaction, run: str, epoch: int, step: int, checkpoint: str | None) -> None:
    row = runs.find_owned_run(tx.conn, run, epoch)
    if step < 0:
        raise Invalid(f"step is a number of committed steps, not {step}.")
    if step > row["step"]:
        raise Conflict(
            f"Run {run!r} has {row['step']} committed steps: it cannot go back to {step}."
        )
    columns = {"run": run, "step": step}
    if step < row["step"]:
        _forget_steps(tx, columns)
        _release_groups(tx, columns)
        _forget_evaluations(tx, columns)
    tx.conn.execute(SQL["rewind_run"], {**columns, "checkpoint": checkpoint})
    tx.add_event(run, "run", run, GROUPS)


def _forget_steps(tx: Transaction, columns: dict[str, Any]) -> None:
    """The evaluation of the weights that the run goes back to stays."""
    found = tx.conn.execute(runs.SQL["step"], (columns["run"], columns["step"])).fetchone()
    measured = msgspec.json.decode(found["record"])["metrics"]
    keys = [(columns["run"], columns["step"], name) for name in measured]
    tx.conn.executemany(SQL["delete_metric"], keys)
    for statement in ("delete_metrics", "delete_steps", "reopen_step"):
        tx.conn.execute(SQL[statement], columns)


def _release_groups(tx: Transaction, columns: dict[str, Any]) -> None:
    """They can be claimed again. Of what is pruned nothing is left to train: it is asked for
    again."""
    run, change = columns["run"], Counter[str]()
    tx.conn.execute(SQL["delete_credits"], columns)
    tx.conn.execute(SQL["delete_given"], columns)
    tx.conn.execute(runs.SQL["release_groups"], (run,))  # those of later steps come after them
    for row in tx.conn.execute(SQL["taken"], columns).fetchall():
        tx.conn.execute(SQL["settle_group" if row["kept"] else "delete_group"], (row["id"],))
        change[f"groups_{row['state']}"] -= 1
        change["groups_settled"] += bool(row["kept"])
        tx.add_event(run, "group", row["id"], GROUPS)
    tx.add_counts(run, **change)


def _forget_evaluations(tx: Transaction, columns: dict[str, Any]) -> None:
    """Of weights that will be others. Who still plays one learns that it is cancelled."""
    found = tx.conn.execute(SQL["evaluations"], columns).fetchall()
    rollouts.cancel(tx, [row["id"] for row in found])
    tx.settle_groups()
    ended = [row["id"] for row in found if row["state"] != RolloutState.RUNNING]
    maintenance.remove(tx, ended)
