"""Verbs for prompt searches: candidates and reflections, called by the writer.

Invariant: the texts of a candidate never change; its scores are the rewards of its rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import asdict

from agentrl.errors import NotFound
from agentrl.store import limits, rows
from agentrl.store.records import Candidate, Reflection
from agentrl.store.sql import runs
from agentrl.store.sql.database import Connection, load_sql
from agentrl.store.sql.writer import Transaction
from agentrl.types import PromptText

SQL = load_sql("prompts")


def put_candidates(tx: Transaction, candidates: Sequence[Candidate]) -> None:
    for candidate in candidates:
        limits.check_id("The id of a candidate", candidate.id)
        runs.find_run(tx.conn, candidate.run)
        lists = {
            name: rows.to_json(getattr(candidate, name), name) for name in ("parents", "texts")
        }
        tx.conn.execute(SQL["put_candidate"], asdict(candidate) | lists)
        tx.add_event(candidate.run, "candidate", candidate.id)


def add_reflection(tx: Transaction, reflection: Reflection) -> None:
    limits.check_id("The id of a reflection", reflection.id)
    runs.find_run(tx.conn, reflection.run)
    texts = {k: rows.storable_text(getattr(reflection, k)) for k in ("question", "answer")}
    tx.conn.execute(SQL["add_reflection"], asdict(reflection) | texts)
    tx.add_event(reflection.run, "reflection", reflection.id)


# -- reading ---------------------------------------------------------------------------------------


def texts(conn: Connection, run: str, candidate: str) -> list[PromptText]:
    """Return the texts of a candidate. Raises NotFound if the run does not have it."""
    row = conn.execute(SQL["candidate"], (run, candidate)).fetchone()
    if row is None:
        raise NotFound(f"Run {run!r} has no candidate {candidate!r}: add it first.")
    return msgspec.json.decode(row["texts"], type=list[PromptText])


def candidates(conn: Connection, run: str) -> list[Candidate]:
    return [
        rows.record(
            Candidate,
            row,
            parents=rows.from_json(row["parents"]),
            texts=msgspec.json.decode(row["texts"], type=list[PromptText]),
        )
        for row in conn.execute(SQL["candidates"], (run,))
    ]


def reflections(conn: Connection, run: str) -> list[Reflection]:
    return [rows.record(Reflection, row) for row in conn.execute(SQL["reflections"], (run,))]
