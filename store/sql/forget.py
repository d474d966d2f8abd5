"""The verb that deletes rollouts with all that was made of them, called by the writer.

Invariant: afterwards no row of the store has a message, an answer or a note of these rollouts, but
for images to which nothing refers: a prune removes those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from agentrl.store import rows
from agentrl.store.records import Forgotten
from agentrl.store.sql import datasets, images, maintenance
from agentrl.store.sql.database import load_sql
from agentrl.store.sql.feed import GROUPS
from agentrl.store.sql.writer import Transaction
from agentrl.types import RolloutState

SQL = load_sql("forget")


def forget(tx: Transaction, rollouts: Sequence[str], *, dry_run: bool = False) -> Forgotten:
    """Delete rollouts, their branches, and the items, sides and judgements of them."""
    tx.conn.execute(maintenance.SQL["lock_payloads"])
    tx.conn.execute(datasets.SQL["lock_datasets"])
    family = tx.conn.execute(SQL["family"], _list("rollouts", rollouts)).fetchall()
    tx.conn.execute(maintenance.SQL["lock_groups"], _list("rollouts", [r["id"] for r in family]))
    free = [row for row in family if _is_free(row["state"], row["group_state"])]
    gone, left = [row["id"] for row in free], [row["id"] for row in family if row not in free]
    if dry_run:
        _, items = _items_of(tx, gone)
        return Forgotten(rollouts=len(gone), left=left, items=items)
    items = _forget_items(tx, gone)
    tx.conn.execute(SQL["delete_judgements"], _list("rollouts", gone))
    maintenance.delete_rows(tx, gone)
    _drop_groups(tx, [row["group_id"] for row in free])
    for run in sorted({row["run_id"] for row in free}):
        tx.add_event(run, "run", run, GROUPS)
    images.remove_unused(tx)
    return Forgotten(rollouts=len(gone), left=left, items=items)


def _is_free(state: str, group_state: str) -> bool:
    return RolloutState(state).terminal and group_state != "claimed"


def _forget_items(tx: Transaction, rollouts: Sequence[str]) -> dict[str, int]:
    """Delete the sides of rollouts, and items that have one; their versions get a new digest."""
    sides, touched = _items_of(tx, rollouts)
    tx.conn.execute(SQL["delete_items"], sides)
    for statement in ("delete_sides", "delete_side_images"):
        tx.conn.execute(datasets.SQL[statement])
    tx.conn.execute(SQL["delete_logprobs"], sides)
    for dataset in touched:
        name, _, version = dataset.rpartition("@")
        datasets.seal(tx.conn, {"name": name, "version": int(version)})
    return touched


def _items_of(tx: Transaction, rollouts: Sequence[str]) -> tuple[dict[str, str], dict[str, int]]:
    """The sides of rollouts, as a list for SQL, and the number of items with one, by data set."""
    found = tx.conn.execute(SQL["sides"], _list("rollouts", rollouts)).fetchall()
    sides = _list("sides", [row["digest"] for row in found])
    touched = tx.conn.execute(SQL["touched"], sides).fetchall()
    return sides, {f"{row['dataset']}@{row['version']}": row["n"] for row in touched}


def _drop_groups(tx: Transaction, groups: Sequence[str]) -> None:
    """Delete groups without rollouts that no step has."""
    counted = Counter[tuple[str, str]]()
    for row in tx.conn.execute(SQL["empty_groups"], _list("groups", groups)).fetchall():
        tx.conn.execute(SQL["delete_group"], (row["id"],))
        if row["purpose"] == "train":
            counted[row["run_id"], row["state"]] += 1
    for (run, state), n in counted.items():
        tx.add_counts(run, **{f"groups_{state}": -n})


def _list(name: str, ids: Sequence[str]) -> dict[str, str]:
    return {name: rows.to_json(sorted(set(ids)), name)}
