"""Verbs of documents, the JSON values kept with a run, called by the writer.

A rollout may name one of kind `candidate`, whose `texts` travel with its attempts.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agentrl.errors import Invalid, NotFound
from agentrl.store import limits, rows
from agentrl.store.sql import runs
from agentrl.store.sql.database import Connection, load_sql
from agentrl.store.sql.writer import Transaction
from agentrl.types import Json, PromptText

SQL = load_sql("documents")


CANDIDATE = "candidate"


class _Candidate(msgspec.Struct):
    texts: list[PromptText]


def put_documents(
    tx: Transaction, run: str, kind: str, documents: Mapping[str, Json], *, replace: bool = False
) -> None:
    limits.check_ids("The kind or key of a document", (kind, *documents))
    runs.find_run(tx.conn, run)
    for key, value in documents.items():
        if kind == CANDIDATE:
            _check_texts(key, value)
        text = rows.to_json(value, f"The {kind} {key!r}")
        columns = {"run": run, "kind": kind, "key": key, "value": text, "replace": replace}
        tx.conn.execute(SQL["put_document"], columns)
        tx.add_event(run, kind, key)


def documents(conn: Connection, run: str, kind: str, *, after: str = "") -> dict[str, Json]:
    found = conn.execute(SQL["documents"], (run, kind, after))
    return {row["key"]: rows.from_json(row["value"]) for row in found}


def texts(conn: Connection, run: str, candidate: str) -> list[PromptText]:
    """Return the texts of a candidate. Raises NotFound if the run does not have it."""
    row = conn.execute(SQL["document"], (run, CANDIDATE, candidate)).fetchone()
    if row is None:
        raise NotFound(f"Run {run!r} has no candidate {candidate!r}: add it first.")
    return msgspec.json.decode(row["value"], type=_Candidate).texts


def _check_texts(candidate: str, value: Json) -> None:
    try:
        msgspec.convert(value, _Candidate)
    except msgspec.ValidationError as error:
        raise Invalid(f"The texts of candidate {candidate!r} cannot be used: {error}.") from error
