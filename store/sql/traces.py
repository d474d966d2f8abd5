"""Verbs of traces, called by the writer: calls, spans, rewards and images of attempts.

Invariant: rows are immutable; rows of an attempt that was no longer live are marked late; the
parents of a call are earlier calls of the same attempt.

Images are the files that messages name by their digests. Invariant: an image is stored before any
call that refers to it, and kept as long as a rollout or a side of a data set refers to it. A prune
removes other images `IN_FLIGHT` seconds after they were last stored, because the call that needs an
image may not be stored yet.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from msgspec.structs import asdict, replace

from agentrl.core import types
from agentrl.core.errors import Invalid, NotFound
from agentrl.store import rows
from agentrl.store.records import CallRow, Pruned
from agentrl.store.rows import digest
from agentrl.store.sql import runs
from agentrl.store.sql.database import (
    NO_LIMIT,
    Connection,
    Cursor,
    WritingConnection,
    joined,
    load_sql,
)
from agentrl.store.sql.tree import PreparedTransition, TokenTree
from agentrl.store.sql.writer import Transaction

SQL = load_sql("traces")
RUNNING = types.AttemptState.RUNNING
FIRST_GIVEN = 2**29  # lowest position of rewards of `add_rewards`


def prepare(call: types.Transition) -> PreparedTransition:
    """Validate and encode a call. Raises Invalid if it cannot be stored or trained on."""
    rows.check_transition(call)
    columns, prompt = rows.transition_columns(call), rows.to_blob(call.prompt)
    of_call, answer = f"of call {call.id}", columns["answer"]
    lines = [rows.to_json(message, f"A message {of_call}") for message in call.messages]
    chat = "".join(f"{line}\n" for line in lines).encode()
    tools = rows.to_json(call.tools, f"A tool {of_call}") if call.tools else None
    tokens = prompt + columns["completion"]
    columns |= {
        "size": len(tokens),
        "digest": digest(tokens),
        "chat_size": len(chat),
        "chat_digest": digest(chat),
        "answer_digest": None if answer is None else digest(answer.encode()),
        "tools": None if tools is None else digest(tools.encode()),
    }
    return PreparedTransition(columns, prompt, lines, chat, tools, call.images)


def add_transitions(tx: Transaction, calls: Sequence[PreparedTransition]) -> list[bool]:
    """Add calls; return for each whether it counts, that is, is not late. A call that is stored
    already is not added again, and the result is that of the first time."""
    attempts = sorted({call.attempt for call in calls})
    remembered, ids = tx.known.take(attempts), [call.columns["id"] for call in calls]
    unknown = [attempt for attempt in attempts if attempt not in remembered]
    attempt_rows = _ask_for(tx, attempts) if unknown or tx.conn.shared else None
    tree = TokenTree(tx.conn, attempts, ids, remembered, tx.time_if_known)
    run_and_late = {attempt: (remembered[attempt].run, False) for attempt in remembered}
    if unknown and attempt_rows is not None:
        run_and_late |= _live_or_late(tx, unknown, attempt_rows)
    changed = set()
    for call in calls:
        run, late = run_and_late[call.attempt]
        if not tree.has(call):
            tree.add(call, late=late)
            changed.add(call.attempt)
            if not late:
                _count(tx, run, call)
    tree.write()
    _refer(tx, tree, calls)  # after the payloads, because a prune locks both in this order
    for attempt in attempts:
        run, late = run_and_late[attempt]
        if attempt in changed:
            tx.add_event(run, "attempt", attempt)
        if not late:  # cached once the transaction has committed
            tree.calls[attempt].run = run
            tx.seen[attempt] = tree.calls[attempt]
    return [not tree.is_late(call) for call in calls]


def _refer(tx: Transaction, tree: TokenTree, calls: Sequence[PreparedTransition]) -> None:
    """Add references from rollouts to the images of their calls."""
    used: dict[str, set[str]] = {}
    for call in calls:
        if call.images:
            used.setdefault(call.attempt, set()).update(call.images)
    for attempt, digests in sorted(used.items()):
        referred = tree.calls[attempt].images
        refer(tx.conn, "rollout", attempt, digests - referred)
        referred |= digests


def _count(tx: Transaction, run: str, call: PreparedTransition) -> None:
    """Add a call to the counters of its run; a call that repeats another one has no tokens of its
    own."""
    columns = call.columns
    # From bytes of int32.
    tokens = 0 if columns["repeats"] is not None else len(columns["completion"]) // 4
    tx.add_counts(run, transitions=1, inexact=int(not columns["exact"]), tokens=tokens)


def add_spans(tx: Transaction, spans: Sequence[types.Span]) -> None:
    attempts = sorted({span.attempt for span in spans})
    run_and_late = _live_or_late(tx, attempts, _ask_for(tx, attempts))
    for attempt, (run, _) in run_and_late.items():
        tx.add_event(run, "attempt", attempt)
    columns = [rows.span_columns(span, late=run_and_late[span.attempt][1]) for span in spans]
    tx.conn.executemany(SQL["add_span"], columns)


def add_outcome(tx: Transaction, outcome: types.Outcome, *, late: bool) -> None:
    """Add the rewards and spans of an outcome. Raises Invalid for a reward of a call that the
    attempt does not have, unless it is `late`: then it is stored for inspection."""
    if not late:
        _check_targets(tx.conn, outcome)
    spans = [rows.span_columns(span, late=late) for span in outcome.spans]
    tx.conn.executemany(SQL["add_span"], spans)
    rewards = [
        rows.reward_columns(reward, outcome.attempt, i, late=late)
        for i, reward in enumerate(outcome.rewards)
    ]
    tx.conn.executemany(SQL["add_reward"], rewards)


def add_rewards(tx: Transaction, rewards: Sequence[types.StepReward]) -> None:
    """Add rewards at positions after those of outcomes and steps, determined by a hash of scope,
    target, name and source, so that a repeat replaces the earlier one."""
    for step_reward in rewards:
        reward, rollout = step_reward.reward, step_reward.rollout
        row = tx.conn.execute(SQL["rollout"], (rollout,)).fetchone()
        if row is None or row["attempt_id"] is None:
            raise NotFound(f"Rollout {rollout!r} is unknown or was never claimed.")
        outcome = types.Outcome(attempt=row["attempt_id"], fence=0, rewards=[reward])
        rows.check_outcome(outcome)
        _check_targets(tx.conn, outcome)
        key = repr((reward.scope, reward.target, reward.name, reward.source)).encode()
        position = FIRST_GIVEN + int.from_bytes(digest(key)[:4]) % FIRST_GIVEN
        columns = rows.reward_columns(reward, outcome.attempt, position)
        tx.conn.execute(SQL["give_reward"], columns)
        tx.add_event(row["run_id"], "attempt", outcome.attempt)


# -- reading ---------------------------------------------------------------------------------------


def groups(conn: Connection, run: str, ids: Sequence[str]) -> list[types.Group]:
    """Load groups with rollouts, rewards and calls, for training."""
    loaded = []
    for id in ids:
        members = rollouts(conn, run, group=id)
        calls = transitions(conn, [member.attempt for member in members if member.attempt])
        complete = [
            replace(member, transitions=calls.get(member.attempt or "", [])) for member in members
        ]
        loaded.append(types.Group(id=id, run=run, step=members[0].step, rollouts=complete))
    return loaded


def rollouts(
    conn: Connection,
    run: str,
    *,
    purpose: types.Purpose | None = None,
    step: int | None = None,
    group: str | None = None,
    state: types.RolloutState | None = None,
    trained: int | None = None,
    group_state: str | None = None,
    after: str | None = None,
    limit: int | None = None,
) -> list[types.Rollout]:
    if limit is not None and limit < 0:
        raise Invalid(f"limit is a number of rollouts, not {limit}.")
    filters = {
        "purpose": None if purpose is None else purpose.value,
        "step": step,
        "group": group,
        "state": None if state is None else state.value,
        "trained": trained,
        "group_state": group_state,
        "after": after,
    }
    conditions = [SQL[f"rollouts_{name}"] for name, value in filters.items() if value is not None]
    unsuccessful = state not in (None, types.RolloutState.SUCCEEDED)
    if unsuccessful:
        conditions.append(SQL["rollouts_unsuccessful"])
    few = group is None and (step, trained, group_state, unsuccessful) != (None, None, None, False)
    if after is not None and conn.execute(SQL["rollout"], (after,)).fetchone() is None:
        raise NotFound(f"Rollout {after!r} no longer exists: start again with the first page.")
    query = joined(
        SQL["rollouts"],
        *conditions,
        SQL["rollouts_few_sorted" if few else "rollouts_sorted"],
        *([] if limit is None else [SQL["rollouts_limit"]]),
    )
    rollout_rows = conn.execute(query, {**filters, "run": run, "limit": limit}).fetchall()
    rewards_by_attempt = rewards(
        conn, [row["attempt_id"] for row in rollout_rows if row["attempt_id"]]
    )
    return [
        rows.rollout(row, rewards_by_attempt.get(row["attempt_id"], [])) for row in rollout_rows
    ]


def trace(
    conn: Connection, rollout: str, *, first: int = 0, limit: int | None = None
) -> types.Trace | None:
    selected = some_calls(first, limit)
    row = conn.execute(SQL["rollout"], (rollout,)).fetchone()
    if row is None or row["attempt_id"] is None:
        return None
    attempt = row["attempt_id"]
    return types.Trace(
        rollout=rows.rollout(row, rewards(conn, [attempt]).get(attempt, [])),
        attempt=attempt,
        transitions=rows.transitions(call_rows(conn, [attempt]), selected=selected).get(
            attempt, []
        ),
        spans=spans(conn, attempt),
    )


def outline(conn: Connection, rollout: str) -> list[CallRow]:
    return rows.outline(conn.execute(SQL["outline"], (rollout,)).fetchall())


def some_calls(first: int, limit: int | None) -> slice:
    """The calls from position `first`, at most `limit`. Raises Invalid for a negative number."""
    if first < 0 or (limit is not None and limit < 0):
        raise Invalid(f"first and limit are numbers of calls, not {first} and {limit}.")
    return slice(first, None if limit is None else first + limit)


def credits(conn: Connection, rollout: str) -> list[types.Credit]:
    return [rows.credit(row) for row in conn.execute(SQL["credits"], (rollout,))]


def rewards(
    conn: Connection, attempts: Sequence[str], *, late: bool = False
) -> dict[str, list[types.Reward]]:
    """Load rewards by attempt: either the regular or the late ones."""
    by_attempt: dict[str, list[types.Reward]] = {}
    columns = {"attempts": rows.to_json(attempts, "attempts"), "late": late}
    for row in conn.execute(SQL["rewards"], columns):
        by_attempt.setdefault(row["attempt_id"], []).append(rows.reward(row))
    return by_attempt


def transitions(
    conn: Connection, attempts: Sequence[str], *, late: bool = False
) -> dict[str, list[types.Transition]]:
    """Load calls by attempt: either the regular or the late ones."""
    return rows.transitions(call_rows(conn, attempts), late=late)


def call_rows(conn: Connection, attempts: Sequence[str]) -> Sequence[rows.Row]:
    """The rows of the regular and the late calls of attempts, in order of arrival."""
    query = conn.execute(SQL["transitions"], (rows.to_json(attempts, "attempts"),))
    return query.fetchall()


def spans(conn: Connection, attempt: str) -> list[types.Span]:
    return [rows.span(span) for span in conn.execute(SQL["spans"], (attempt,))]


# -- parts -----------------------------------------------------------------------------------------


def _ask_for(tx: Transaction, attempts: Sequence[str]) -> Cursor:
    """Ask for the rows of attempts. On PostgreSQL this also locks them until the transaction ends;
    on SQLite the whole file is locked since its `begin immediate`."""
    return tx.conn.ask(SQL["attempts"], {"attempts": rows.to_json(attempts, "Attempts")})


def _live_or_late(
    tx: Transaction, attempts: Sequence[str], attempt_rows: Cursor
) -> dict[str, tuple[str, bool]]:
    """Map each attempt to its run and whether writes to it are late now.

    A write does not need a fence, because an attempt's id implies it: each claim creates a new
    attempt with the next fence, after the previous attempt has ended or its lease has expired."""
    stored, now = {row["id"]: row for row in attempt_rows.fetchall()}, tx.now
    if lost := [id for id in attempts if id not in stored]:
        raise NotFound(f"There is no attempt {lost[0]!r} in this store.")
    in_order = ((id, stored[id]) for id in attempts)  # the order of their events
    return {
        id: (row["run_id"], row["state"] != RUNNING or row["lease_until"] <= now)
        for id, row in in_order
    }


def _check_targets(conn: Connection, outcome: types.Outcome) -> None:
    for id in {
        reward.target for reward in outcome.rewards if reward.scope is types.Scope.TRANSITION
    }:
        row = conn.execute(SQL["known"], (id,)).fetchone()
        if row is None or row["attempt_id"] != outcome.attempt:
            raise Invalid(
                f"Attempt {outcome.attempt} has no call {id!r}, the target of a reward: name "
                "one of its own."
            )


IMAGES = load_sql("images")
IN_FLIGHT = 3600.0  # seconds; a longer call puts its images again when it is stored
REMOVED_AT_ONCE = 100  # images per transaction


def prepare_images(images: Sequence[types.Image]) -> list[rows.Columns]:
    """Raise Invalid for an image that does not match its digest. Runs outside of the transaction,
    during which other writers wait."""
    for image in images:
        rows.check_image(image)
    return [asdict(image) for image in images]


def put_images(tx: Transaction, run: str, columns: Sequence[rows.Columns]) -> None:
    if run:
        runs.find_run(tx.conn, run)
    # Sorted, because two transactions that lock the same rows in different orders would deadlock.
    for row in sorted(columns, key=lambda row: str(row["digest"])):
        tx.conn.execute(IMAGES["put_image"], row | {"now": tx.now})


def images(conn: Connection, run: str, digests: Sequence[str]) -> dict[str, types.Image]:
    rows.check_digests("An image", digests)
    image_rows = conn.execute(IMAGES["images"], {"digests": rows.to_json(digests, "Digests")})
    return {
        row["digest"]: rows.record(types.Image, row, body=bytes(row["body"])) for row in image_rows
    }


def refer(
    conn: WritingConnection,
    kind: Literal["rollout", "side"],
    owner: str,
    digests: Collection[str],
) -> None:
    """Add references to images from a side, or from the rollout of the attempt `owner`. Raises
    NotFound for an image that is not stored."""
    if not digests:
        return
    columns = {"owner": owner, "digests": rows.to_json(sorted(digests), "Digests")}
    conn.execute(IMAGES[f"refer_{kind}"], columns)  # from here on a prune cannot remove them
    stored = {row["digest"] for row in conn.execute(IMAGES["stored"], columns)}
    if lost := min(set(digests) - stored, default=""):
        raise NotFound(f"Image {lost} is not stored: put it before the calls that refer to it.")


def unused(
    conn: Connection, *, now: float, without: Sequence[str] = (), n: int = NO_LIMIT
) -> Pruned:
    """Count the images that a prune may remove together with the rollouts `without`."""
    sizes = _unused(conn, now, without, n)
    return Pruned(images=len(sizes), bytes=sum(sizes.values()))


def remove_unused(tx: Transaction) -> Pruned:
    """Remove some unreferenced images."""
    tx.conn.execute(IMAGES["lock_references"])
    sizes = _unused(tx.conn, tx.now, (), REMOVED_AT_ONCE)
    if sizes:
        digests = rows.to_json(list(sizes), "Digests")
        tx.conn.execute(IMAGES["delete_images"], {"digests": digests})
    return Pruned(images=len(sizes), bytes=sum(sizes.values()))


def _unused(conn: Connection, now: float, without: Sequence[str], n: int) -> dict[str, int]:
    """Map digests to bytes."""
    columns = {"before": now - IN_FLIGHT, "without": rows.to_json(without, "Rollouts"), "n": n}
    return {row["digest"]: row["bytes"] for row in conn.execute(IMAGES["unused"], columns)}
