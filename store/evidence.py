"""Evidence: transitions, spans and rewards of attempts. SQLite verbs, called by the writer.

Always true: nothing is changed once written; what came from an attempt that was no longer live is
marked late; a transition's parents are earlier transitions of its own attempt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from sqlite3 import Connection
from typing import Any

from agentrl.errors import NotFound
from agentrl.store import queries, rows
from agentrl.store.tree import Node, deepest, digest
from agentrl.store.writer import Transaction
from agentrl.types import (
    AttemptState,
    Group,
    Outcome,
    Purpose,
    Reward,
    Rollout,
    RolloutState,
    Span,
    Trace,
    Transition,
)

SQL = queries.load("evidence")


def add_transitions(tx: Transaction, transitions: Sequence[Transition]) -> list[bool]:
    calls: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    kept = []
    for transition in transitions:
        run, late = _attempt(tx, transition.attempt)
        if _add_transition(tx, transition, late=late):
            tx.note(run, "attempt", transition.attempt)
            calls[run] += not late
            tokens[run] += 0 if late else len(transition.completion)
        else:
            late = bool(tx.conn.execute(SQL["known"], (transition.id,)).fetchone()["late"])
        kept.append(not late)
    for run in calls:
        tx.conn.execute(SQL["count"], {"calls": calls[run], "tokens": tokens[run], "run": run})
    return kept


def add_spans(tx: Transaction, spans: Sequence[Span]) -> None:
    found = {attempt: _attempt(tx, attempt) for attempt in {span.attempt for span in spans}}
    for attempt, (run, _) in found.items():
        tx.note(run, "attempt", attempt)
    _add_spans(tx, (rows.span_columns(span, late=found[span.attempt][1]) for span in spans))


def add_outcome(tx: Transaction, outcome: Outcome, *, late: bool) -> None:
    """Rewards and spans that end an attempt."""
    _add_spans(tx, (rows.span_columns(span, late=late) for span in outcome.spans))
    tx.conn.executemany(
        SQL["add_reward"],
        [
            (outcome.attempt, late, i, r.scope.value, r.target, r.name, r.value, r.source)
            for i, r in enumerate(outcome.rewards)
        ],
    )


# -- reading ---------------------------------------------------------------------------------------


def groups(conn: Connection, run: str, ids: Sequence[str]) -> list[Group]:
    """Groups with everything that training needs."""
    return [_group(conn, run, id) for id in ids]


def rollouts(
    conn: Connection,
    run: str,
    *,
    purpose: Purpose | None = None,
    step: int | None = None,
    group: str | None = None,
    state: RolloutState | None = None,
    limit: int | None = None,
    transitions: bool = False,
) -> list[Rollout]:
    filters = {
        "run": run,
        "purpose": None if purpose is None else purpose.value,
        "step": step,
        "group": group,
        "state": None if state is None else state.value,
        "limit": -1 if limit is None else limit,
    }
    query = SQL["rollouts"] if group is None else SQL["rollouts_of_group"]
    found = conn.execute(query, filters).fetchall()
    attempts = [row["attempt_id"] for row in found if row["attempt_id"] is not None]
    rewards = _rewards(conn, attempts)
    calls = _transitions(conn, attempts) if transitions else {}
    return [
        rows.rollout(row, rewards.get(row["attempt_id"], []), calls.get(row["attempt_id"], []))
        for row in found
    ]


def trace(conn: Connection, rollout: str) -> Trace | None:
    row = conn.execute(SQL["rollout"], (rollout,)).fetchone()
    if row is None or row["attempt_id"] is None:
        return None
    attempt = row["attempt_id"]
    return Trace(
        rollout=rows.rollout(row, _rewards(conn, [attempt]).get(attempt, []), []),
        attempt=attempt,
        transitions=_transitions(conn, [attempt]).get(attempt, []),
        spans=[rows.span(span) for span in conn.execute(SQL["spans"], (attempt,))],
    )


# -- parts -----------------------------------------------------------------------------------------


def _attempt(tx: Transaction, id: str) -> tuple[str, bool]:
    """Its run, and whether what it writes now is late."""
    row = tx.conn.execute(SQL["attempt"], (id,)).fetchone()
    if row is None:
        raise NotFound(f"There is no attempt {id!r} in this store.")
    live = row["state"] == AttemptState.RUNNING and row["lease_until"] > tx.now
    return row["run_id"], not live


def _add_transition(tx: Transaction, transition: Transition, *, late: bool) -> bool:
    """False if it was there already."""
    earlier = tx.conn.execute(SQL["earlier"], (transition.attempt,)).fetchall()
    columns = rows.transition_columns(transition)
    columns |= _token_columns(transition, earlier)
    columns |= _chat_columns(transition, columns["answer"], earlier)
    columns |= {"tools": _tools(tx.conn, transition, earlier), "late": late}
    return tx.conn.execute(SQL["add_transition"], columns).rowcount == 1


def _token_columns(transition: Transition, earlier: Sequence[Any]) -> dict[str, Any]:
    prompt = rows.blob(transition.prompt)
    whole = prompt + rows.blob(transition.completion)
    found = deepest(prompt, [Node(row["seq"], row["size"], row["digest"]) for row in earlier])
    parent = found[-1] if found else None  # of equal samples the latest was most likely chosen
    return {
        "parent": None if parent is None else parent.seq,
        "prompt": prompt if parent is None else prompt[parent.size :],
        "size": len(whole),
        "digest": digest(whole),
    }


def _chat_columns(
    transition: Transition, answer: str | None, earlier: Sequence[Any]
) -> dict[str, Any]:
    """Agents resend the conversation; only messages that no earlier call has are stored."""
    what = f"A message of transition {transition.id}"
    lines = [rows.dump(message, what) for message in transition.messages]
    chat = "".join(f"{line}\n" for line in lines).encode()
    nodes = [Node(row["seq"], row["chat_size"], row["chat_digest"]) for row in earlier]
    parent, shared = None, 0
    if found := deepest(chat, nodes):
        parent, shared = found[-1].seq, chat[: found[-1].size].count(b"\n")
        answers = {row["seq"]: row["answer_digest"] for row in earlier}
        said = digest(lines[shared].encode()) if shared < len(lines) else b""
        if heard := [node.seq for node in found if answers[node.seq] == said]:
            parent, shared = heard[-1], shared + 1
    return {
        "chat_parent": parent,
        "chat_shared": shared,
        "chat_size": len(chat),
        "chat_digest": digest(chat),
        "answer_digest": None if answer is None else digest(answer.encode()),
        "messages": f"[{','.join(lines[shared:])}]",
    }


def _tools(conn: Connection, transition: Transition, earlier: Sequence[Any]) -> bytes | None:
    """Tools are the same in most calls of a run: stored once, by content."""
    if not transition.tools:
        return None
    body = rows.dump(transition.tools, f"A tool of transition {transition.id}")
    name = digest(body.encode())
    if all(row["tools"] != name for row in earlier):
        conn.execute(SQL["add_payload"], (name, body))
    return name


def _add_spans(tx: Transaction, columns: Iterable[dict[str, Any]]) -> None:
    tx.conn.executemany(SQL["add_span"], columns)


def _group(conn: Connection, run: str, id: str) -> Group:
    members = rollouts(conn, run, group=id, transitions=True)
    return Group(id=id, run=run, step=members[0].step, rollouts=members)


def _rewards(conn: Connection, attempts: Sequence[str]) -> dict[str, list[Reward]]:
    found: dict[str, list[Reward]] = {}
    for row in conn.execute(SQL["rewards"], (rows.dump(attempts, "attempts"),)):
        found.setdefault(row["attempt_id"], []).append(rows.reward(row))
    return found


def _transitions(conn: Connection, attempts: Sequence[str]) -> dict[str, list[Transition]]:
    query = conn.execute(SQL["transitions"], (rows.dump(attempts, "attempts"),))
    return rows.transitions(query.fetchall())
