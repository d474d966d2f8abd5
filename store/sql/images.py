"""Verbs of images, the files that messages name by their digests, called by the writer.

Invariant: an image is stored before a call that refers to it, and for as long as a rollout or a
side of a data set does. A prune removes the others, `IN_FLIGHT` seconds after they were last put,
as the call for which an image was put may not be stored yet.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from msgspec.structs import asdict

from agentrl import types
from agentrl.errors import NotFound
from agentrl.store import limits, rows
from agentrl.store.records import Pruned
from agentrl.store.sql import runs
from agentrl.store.sql.database import Connection, WritingConnection, load_sql
from agentrl.store.sql.writer import Transaction

SQL = load_sql("images")
IN_FLIGHT = 3600.0  # seconds; a longer call puts its images again when it is stored
REMOVED_AT_ONCE = 100  # images per transaction
ALL = 2**62  # as a limit


def prepare(images: Sequence[types.Image]) -> list[rows.Columns]:
    """Raise Invalid for an image that is not what its digest says. Outside the transaction, in
    which other writers wait."""
    for image in images:
        limits.check_image(image)
    return [asdict(image) for image in images]


def put_images(tx: Transaction, run: str, columns: Sequence[rows.Columns]) -> None:
    if run:
        runs.find_run(tx.conn, run)
    # Sorted, as two transactions that lock the same rows in another order block each other.
    for row in sorted(columns, key=lambda row: str(row["digest"])):
        tx.conn.execute(SQL["put_image"], row | {"now": tx.now})


def images(conn: Connection, run: str, digests: Sequence[str]) -> dict[str, types.Image]:
    limits.check_digests("An image", digests)
    found = conn.execute(SQL["images"], {"digests": rows.to_json(digests, "Digests")})
    return {row["digest"]: rows.record(types.Image, row, body=bytes(row["body"])) for row in found}


def refer(
    conn: WritingConnection,
    kind: Literal["rollout", "side"],
    owner: str,
    digests: Collection[str],
) -> None:
    """Let a side, or the rollout of the attempt `owner`, refer to images. Raises NotFound for one
    that is not stored."""
    if not digests:
        return
    columns = {"owner": owner, "digests": rows.to_json(sorted(digests), "Digests")}
    conn.execute(SQL[f"refer_{kind}"], columns)  # from here on no prune removes them
    stored = {row["digest"] for row in conn.execute(SQL["stored"], columns)}
    if lost := min(set(digests) - stored, default=""):
        raise NotFound(f"Image {lost} is not stored: put it before the calls that refer to it.")


def unused(conn: Connection, *, now: float, without: Sequence[str] = (), n: int = ALL) -> Pruned:
    """Count the images that a prune may remove together with the rollouts `without`."""
    found = _unused(conn, now, without, n)
    return Pruned(images=len(found), bytes=sum(found.values()))


def remove_unused(tx: Transaction) -> Pruned:
    """Remove some images to which nothing refers."""
    tx.conn.execute(SQL["lock_references"])
    found = _unused(tx.conn, tx.now, (), REMOVED_AT_ONCE)
    if found:
        digests = rows.to_json(list(found), "Digests")
        tx.conn.execute(SQL["delete_images"], {"digests": digests})
    return Pruned(images=len(found), bytes=sum(found.values()))


def _unused(conn: Connection, now: float, without: Sequence[str], n: int) -> dict[str, int]:
    """Map digests to bytes."""
    columns = {"before": now - IN_FLIGHT, "without": rows.to_json(without, "Rollouts"), "n": n}
    return {row["digest"]: row["bytes"] for row in conn.execute(SQL["unused"], columns)}
