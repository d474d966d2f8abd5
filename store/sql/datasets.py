"""Verbs for data sets, judgements and cached log-probs, called by the writer.

Invariant: a committed version never changes, except that `forget` removes items; an item is in a
version only once; a side that refers to a rollout stays readable: `prune` keeps that rollout, and
before any other removal its calls are copied to the side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec.structs import asdict

from agentrl.core import types
from agentrl.core.errors import Conflict, Invalid, NotFound
from agentrl.store import rows
from agentrl.store.records import Dataset, Item, Judgement, Side
from agentrl.store.sql import traces
from agentrl.store.sql.database import NO_LIMIT, Connection, WritingConnection, load_sql
from agentrl.store.sql.writer import Transaction

SQL = load_sql("datasets")
ENCODE = msgspec.msgpack.Encoder(enc_hook=rows.array_to_bytes).encode
CALLS = msgspec.msgpack.Decoder(list[types.Transition], dec_hook=rows.array_from_bytes)


def draft_dataset(tx: Transaction, name: str, spec: dict[str, types.Json]) -> int:
    rows.check_id("The name of a data set", name)
    text = rows.to_json(spec, "The spec of a data set")
    tx.conn.execute(SQL["lock_datasets"])
    last = tx.conn.execute(SQL["last_version"], (name,)).fetchone()
    version = 1 if last is None else last["version"] + (last["digest"] is not None)
    key = {"name": name, "version": version}
    if last is not None and last["digest"] is None:
        if rows.from_json(last["spec"]) == rows.from_json(text):
            return version
        for statement in ("delete_items", "delete_dataset"):
            tx.conn.execute(SQL[statement], key)
        tx.conn.execute(SQL["delete_sides"])
        tx.conn.execute(SQL["delete_side_images"])
    tx.conn.execute(SQL["add_dataset"], {**key, "spec": text, "now": tx.now})
    return version


def check_items(items: Sequence[Item], sides: Sequence[Side]) -> None:
    """Raise Invalid for items and sides that are unusable for training."""
    for item in items:
        numbers = [item.label, item.margin, item.weight, *item.steps]
        if not all(math.isfinite(x) for x in numbers if x is not None) or item.weight < 0:
            raise Invalid(f"Item {item.position}: numbers must be finite, and the weight >= 0.")
        if (item.kind == "pair") is (item.rejected is None) or item.chosen == item.rejected:
            raise Invalid(f"Item {item.position}: a pair has two different sides, others have one.")
        if (item.kind == "label") is (item.label is None):
            raise Invalid(
                f"Item {item.position}: the kind 'label' needs a label, others have none."
            )
    for side in sides:
        for call in side.own:
            rows.check_transition(call)
        if side.rollout is None and not side.own:
            raise Invalid(f"Side {side.digest} has no calls: name its rollout or give them.")


def add_items(
    tx: Transaction, name: str, version: int, items: Sequence[Item], sides: Sequence[Side]
) -> None:
    tx.conn.execute(SQL["lock_datasets"])
    dataset = _dataset(tx.conn, name, version)
    if items and dataset.digest is not None:
        raise Conflict(f"Version {version} of data set {name!r} is complete: draft another one.")
    tx.conn.executemany(
        SQL["add_side"],
        [asdict(side) | {"own": ENCODE(side.own) if side.own else None} for side in sides],
    )
    for side in sides:
        _refer(tx.conn, side.digest, side.own)
    key = {"dataset": name, "version": version}
    columns = ({**asdict(i), **key, "id": i.id, "steps": rows.to_json(i.steps, "")} for i in items)
    tx.conn.executemany(SQL["add_item"], list(columns))


def copy_sides(conn: WritingConnection, rollouts: Sequence[str]) -> None:
    """Copy the calls of rollouts that will be removed to the sides that refer to them."""
    conn.execute(SQL["lock_datasets"])
    references = conn.execute(SQL["references"], (rows.to_json(rollouts, "Rollouts"),)).fetchall()
    for digest, calls in sides(conn, [row["digest"] for row in references]).items():
        conn.execute(SQL["own_side"], {"digest": digest, "own": ENCODE(calls)})
        _refer(conn, digest, calls)


def _refer(conn: WritingConnection, side: str, copied: Sequence[types.Transition]) -> None:
    """Add references from a side to the images of its copied calls."""
    traces.refer(conn, "side", side, {image for call in copied for image in call.images})


def commit_dataset(tx: Transaction, name: str, version: int) -> Dataset:
    key = {"name": name, "version": version}
    tx.conn.execute(SQL["lock_datasets"])
    if _dataset(tx.conn, name, version).digest is None:
        if lost := tx.conn.execute(SQL["lost_side"], key).fetchone():
            raise NotFound(f"Item {lost['id']} of data set {name!r} has a side that was not added.")
        seal(tx.conn, key)
    return _dataset(tx.conn, name, version)


def seal(conn: WritingConnection, key: Mapping[str, Any]) -> None:
    """Write the digest of a version's items. key: its name and version."""
    ids = "".join(row["id"] for row in conn.execute(SQL["ids"], key))
    digest = blake2b(ids.encode(), digest_size=16).hexdigest()
    conn.execute(SQL["commit_dataset"], {**key, "digest": digest})


def add_judgements(tx: Transaction, judgements: Sequence[Judgement]) -> None:
    rows.check_ids("The id of a judgement", (judgement.id for judgement in judgements))
    columns = [asdict(j) | {"verdict": rows.to_json(j.verdict, "A verdict")} for j in judgements]
    tx.conn.executemany(SQL["add_judgement"], [row | {"now": tx.now} for row in columns])


def add_logprobs(tx: Transaction, model: str, logprobs: Mapping[str, types.Float32]) -> None:
    columns = [(model, side, rows.to_blob(values)) for side, values in logprobs.items()]
    tx.conn.executemany(SQL["add_logprobs"], columns)


# -- reading ---------------------------------------------------------------------------------------


def datasets(conn: Connection, name: str | None = None) -> list[Dataset]:
    return [
        rows.record(Dataset, row, spec=rows.from_json(row["spec"]))
        for row in conn.execute(SQL["datasets"], {"name": name})
    ]


def items(
    conn: Connection,
    name: str,
    version: int,
    *,
    split: str | None = None,
    after: int = -1,
    limit: int | None = None,
) -> list[Item]:
    _dataset(conn, name, version)
    filters = {"name": name, "version": version, "split": split, "after": after}
    item_rows = conn.execute(
        SQL["items"], {**filters, "limit": NO_LIMIT if limit is None else limit}
    )
    return [rows.record(Item, row, steps=rows.from_json(row["steps"])) for row in item_rows]


def sides(conn: Connection, digests: Sequence[str]) -> dict[str, list[types.Transition]]:
    side_rows = conn.execute(SQL["sides"], (rows.to_json(digests, "Digests"),)).fetchall()
    stored = calls(conn, [row["rollout_id"] for row in side_rows if row["own"] is None])

    def side(row: Any) -> list[types.Transition]:
        if row["own"] is not None:
            return CALLS.decode(row["own"])
        count, first = row["calls"], row["first_call"]
        return stored[row["rollout_id"]][first : None if count is None else first + count]

    readable = (row for row in side_rows if row["own"] is not None or row["rollout_id"] in stored)
    return {row["digest"]: side(row) for row in readable}


def calls(conn: Connection, rollouts: Sequence[str]) -> dict[str, list[types.Transition]]:
    query = conn.execute(SQL["attempts"], (rows.to_json(rollouts, "Rollouts"),))
    attempts = {row["id"]: row["attempt_id"] for row in query if row["attempt_id"]}
    by_attempt = traces.transitions(conn, list(attempts.values()))
    return {rollout: by_attempt.get(attempt, []) for rollout, attempt in attempts.items()}


def judgement(conn: Connection, id: str) -> Judgement | None:
    row = conn.execute(SQL["judgement"], (id,)).fetchone()
    return (
        None if row is None else rows.record(Judgement, row, verdict=rows.from_json(row["verdict"]))
    )


def logprobs(conn: Connection, model: str, sides: Sequence[str]) -> dict[str, types.Float32]:
    parameters = {"model": model, "sides": rows.to_json(sides, "Sides")}
    cached = conn.execute(SQL["logprobs"], parameters)
    return {row["side"]: rows.from_blob("f", row["logprobs"]) for row in cached}


def _dataset(conn: Connection, name: str, version: int) -> Dataset:
    versions = [dataset for dataset in datasets(conn, name) if dataset.version == version]
    if not versions:
        raise NotFound(f"There is no version {version} of a data set {name!r} in this store.")
    return versions[0]
