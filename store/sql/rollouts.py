"""Verbs of the queue: rollouts with their attempts, leases and groups, called by the writer.

Invariant: an attempt is live while its state is running and its lease has not expired; a rollout
has at most one live attempt, its last; `groups.pending` is the number of the group's rollouts that
are not terminal; a runner that holds a rollout with a number in `together` holds at most this many
rollouts.

An agent that ends its process also ends the other rollouts in it, and the cause is unknown. So if a
runner's leases expire, all its rollouts become suspects: this does not count as an attempt, and a
runner may claim only few of them at a time, until the culprit is alone in its runner. Only a
rollout that was alone has used up an attempt.
"""

from __future__ import annotations

import math
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from agentrl.core import types
from agentrl.core.errors import Conflict, Invalid, NotFound
from agentrl.store import rows
from agentrl.store.rows import digest
from agentrl.store.sql import runs, traces
from agentrl.store.sql.database import QUEUE, Connection, load_sql
from agentrl.store.sql.tree import AttemptCalls
from agentrl.store.sql.writer import Transaction

SQL = load_sql("rollouts")
SUSPECT_SHARE = 4  # a runner may hold a quarter of the rollouts that a suspect was lost with
CLOCK_SLACK = 5.0  # seconds by which the times of concurrent transactions may differ
CANCELLED = types.Failure(kind=types.ErrorKind.CANCELLED, message="The rollout was cancelled.")


def enqueue(
    tx: Transaction, rollouts: Sequence[types.NewRollout], *, epoch: int | None = None
) -> int:
    if epoch is not None:
        for run in dict.fromkeys(rollout.run for rollout in rollouts):
            runs.find_run(tx.conn, run, epoch)
    added: Counter[str] = Counter()
    groups = {rollout.group: rollout for rollout in rollouts}
    states = _open_groups(tx, groups)
    inserts = []
    for rollout in rollouts:
        first = groups[rollout.group]
        identity = (rollout.run, rollout.purpose, rollout.candidate)
        if identity != (first.run, first.purpose, first.candidate):
            raise Invalid(
                f"Group {rollout.group!r} mixes runs, purposes or candidates: give each its own."
            )
        inserts.append(
            (rollout, tx.conn.execute(SQL["enqueue"], rows.new_rollout_columns(rollout)))
        )
    for rollout, inserted in inserts:
        if inserted.rowcount:
            added[rollout.group] += 1
        else:
            _check_known(tx.conn, rollout)
    for group, new in added.items():
        tx.add_counts(groups[group].run, queued=new)
        _grow_group(tx, groups[group], states[group], new)
    return added.total()


def claim(
    tx: Transaction, n: int, *, runner: str, lease: float, run: str | None, claim_id: str | None
) -> list[types.Attempt] | None:
    """Claim rollouts; None if there are none. A repeat returns the attempts that are still live,
    possibly none."""
    previous = None
    if claim_id is not None:
        tx.conn.execute(SQL["lock_claim"], {"claim_id": claim_id})
        previous = tx.conn.ask(SQL["claimed"], (claim_id,))
    query = SQL["queued"] if run is None else SQL["queued_of_run"]
    queued = tx.conn.ask(query, {"n": n, "run": run})
    if previous is not None and (repeat := previous.fetchall()):
        return [
            _attempt(tx.conn, row, row["claimed_id"], row["fence"], row["lease_until"])
            for row in repeat
            if row["claimed_state"] == types.AttemptState.RUNNING and row["lease_until"] > tx.now
        ]
    held, limit = _load_and_limit(tx.conn, runner) if _leases(tx)["suspects"] else (0, math.inf)
    claimed, started, taken = list[types.Attempt](), list[rows.Columns](), list[rows.Columns]()
    for row in queued.fetchall():
        limit = min(limit, row["together"] or limit)
        if held + len(claimed) >= limit:
            break  # later rollouts wait too, otherwise this one might starve
        columns = {
            "attempt": uuid.uuid4().hex,
            "rollout": row["id"],
            "run": row["run_id"],
            "fence": row["attempts"] + 1,
            "runner": runner,
            "claim_id": claim_id,
            "lease": lease,
            "lease_until": tx.now + lease,
            "now": tx.now,
            "seq": row["seq"],
        }
        started.append(columns)
        if row["ran"] is not None:
            taken.append({"attempt": columns["attempt"], "before": row["attempt_id"]})
        else:
            tx.seen[columns["attempt"]] = AttemptCalls(row["run_id"])
        tx.add_counts(row["run_id"], queued=-1, running=1)
        tx.add_event(row["run_id"], "rollout", row["id"])
        until = tx.now + lease
        claimed.append(_attempt(tx.conn, row, columns["attempt"], columns["fence"], until))
    tx.conn.executemany(SQL["start_rollout"], started)
    tx.conn.executemany(SQL["start_attempt"], started)
    for statement in ("take_transitions", "take_spans", "take_rewards"):
        tx.conn.executemany(SQL[statement], taken)
    return claimed or None


def heartbeat(tx: Transaction, attempts: Sequence[str], *, lease: float) -> list[str]:
    """Extend leases and return the live attempts; adds no event, because no reader waits for
    one."""
    rows.check_lease(lease)
    columns = {
        "attempts": rows.to_json(attempts, "Attempts"),
        "lease": lease,
        "until": tx.now + lease,
        "now": tx.now,
    }
    live = {row["id"] for row in tx.conn.execute(SQL["heartbeat"], columns).fetchall()}
    return [attempt for attempt in attempts if attempt in live]


def finish(tx: Transaction, outcomes: Sequence[types.Outcome]) -> list[bool]:
    tx.known.take(outcome.attempt for outcome in outcomes)  # calls after the end are rare
    named = [tx.conn.ask(SQL["attempt"], (outcome.attempt,)) for outcome in outcomes]
    accepted, finished = [], set()
    for outcome, result in zip(outcomes, named, strict=True):
        if outcome.attempt in finished:  # read again: an earlier outcome has changed it
            result = tx.conn.execute(SQL["attempt"], (outcome.attempt,))
        finished.add(outcome.attempt)
        accepted.append(_finish(tx, outcome, result.fetchone()))
    return accepted


def cancel(tx: Transaction, rollouts: Sequence[str]) -> int:
    cancelled = 0
    for rollout in rollouts:
        row = tx.conn.execute(SQL["cancellable"], (rollout,)).fetchone()
        if row is None:
            continue
        previous = types.RolloutState(row["state"])
        if previous is types.RolloutState.RUNNING:
            _end_attempt(tx, row, types.AttemptState.CANCELLED, CANCELLED)
        _end_rollout(tx, row, types.RolloutState.CANCELLED, CANCELLED, previous=previous)
        cancelled += 1
    return cancelled


def expire_leases(tx: Transaction) -> bool:
    """Requeue or fail rollouts with expired leases; return whether there were any. If the clock was
    set back, shorten older leases to their full length from now."""
    if tx.leases is not None:  # already done in this transaction, whose time is constant
        return False
    leases = _leases(tx)
    if leases["ends"] is None:
        return False
    if leases["heard"] > tx.now + CLOCK_SLACK:
        tx.conn.execute(SQL["shorten"], {"now": tx.now, "slack": CLOCK_SLACK})
    if leases["ends"] > tx.now:
        return False
    tx.conn.execute(SQL["lock_expiry"])
    overdue = tx.conn.execute(SQL["expired"], (tx.now,)).fetchall()
    held = {
        runner: _count_suspects(tx.conn, runner)
        for runner in sorted({r["runner"] for r in overdue})
    }
    for row in overdue:
        _expire_attempt(tx, row, max(held[row["runner"]], row["known"] or 0))
    tx.leases = tx.conn.execute(SQL["leases"]).fetchone()
    return bool(overdue)


def next_expiry(tx: Transaction) -> float | None:
    """Return the seconds until the earliest lease expires, None without leases."""
    until = tx.conn.execute(SQL["leases"]).fetchone()["ends"]
    return None if until is None else max(0.0, float(until) - tx.now)


def claims(conn: Connection, attempts: Sequence[str]) -> dict[str, tuple[str, str | None]]:
    claim_rows = conn.execute(SQL["claims"], (rows.to_json(attempts, "Attempts"),))
    return {row["id"]: (row["run_id"], row["claim_id"]) for row in claim_rows}


def owner(conn: Connection, *, rollout: str | None = None, group: str | None = None) -> str | None:
    """Return the run of a rollout or group; None if the id is unknown."""
    row = conn.execute(SQL["owner"], {"rollout": rollout, "group": group}).fetchone()
    return None if row is None else str(row["run_id"])


def failures(conn: Connection, run: str) -> list[types.FailureCount]:
    by_kind: dict[str, types.FailureCount] = {}
    for row in conn.execute(SQL["failures"], {"run": run}):
        last = types.FailureCount(
            kind=types.ErrorKind(row["kind"]),
            attempts=row["attempts"],
            rollout=row["rollout_id"],
            message=row["error_message"],
        )
        by_kind.setdefault(row["kind"], last)  # several rows if attempts failed at the same time
    return list(by_kind.values())


def settled(conn: Connection, group: str) -> bool:
    row = conn.execute(SQL["pending"], (group,)).fetchone()
    if row is None:
        raise NotFound(f"There is no group {group!r} in this store: enqueue its rollouts first.")
    return bool(row["pending"] == 0)


# -- parts -----------------------------------------------------------------------------------------


def _attempt(conn: Connection, row: Any, id: str, fence: int, until: float) -> types.Attempt:
    texts = runs.texts(conn, row["run_id"], row["candidate"]) if row["candidate"] else []
    return rows.attempt(row, id, fence, until, texts)


def _leases(tx: Transaction) -> Any:
    """Return a summary of all leases at the time of this transaction's first query."""
    if tx.leases is None:
        tx.leases = tx.conn.execute(SQL["leases"]).fetchone()
    return tx.leases


def _load_and_limit(conn: Connection, runner: str) -> tuple[int, float]:
    """Return how many rollouts a runner holds, and how many it may hold because of suspects among
    them; needed only while the store has suspects."""
    row = conn.execute(SQL["held"], (runner,)).fetchone()
    return row["held"], row["most"] or math.inf


def _count_suspects(conn: Connection, runner: str) -> int:
    """Return how many rollouts a lost runner held; also stored for its attempts whose leases expire
    later."""
    held: int = conn.execute(SQL["held"], (runner,)).fetchone()["held"]
    if held > 1:
        conn.execute(SQL["suspect"], {"runner": runner, "together": held})
    return held


def _expire_attempt(tx: Transaction, row: Any, together: int) -> None:
    """End an attempt whose lease expired while its runner held `together` rollouts."""
    runner = f"The runner of attempt {row['attempts']} of {row['max_attempts']}"
    max_together = max(1, min(together, row["together"] or together) // SUSPECT_SHARE)
    if together > 1:
        message = (
            f"{runner} stopped responding while running {together} rollouts: this one is "
            f"tried again among at most {max_together}, and this does not count as an attempt."
        )
    else:
        message = (
            f"{runner} stopped responding while running rollout {row['id']} alone: probably its "
            "agent ends or blocks the process, or runs out of memory. Fix it, or set "
            'runner.executor = "pool", which protects the runner.'
        )
    kind = types.ErrorKind.LOST_RUNNER
    if together <= 1 and row["scoring"]:  # the agent had ended, and will not run again
        kind = types.ErrorKind.VERIFIER
        message = (
            f"{runner} stopped responding while scoring rollout {row['id']} alone: "
            "probably the verifier ends or blocks the process, or runs out of memory. Fix it, or "
            "let it run what may do so in a process of its own."
        )
    lost = types.Failure(kind=kind, message=message)
    _end_attempt(tx, row, types.AttemptState.EXPIRED, lost)
    if together > 1:
        _requeue(tx, row, "requeue_free", together=max_together)
    elif row["attempts"] < row["max_attempts"]:
        _requeue(tx, row, "requeue", together=max_together)
    else:
        _end_rollout(tx, row, types.RolloutState.FAILED, lost)


def _open_groups(tx: Transaction, members: Mapping[str, types.NewRollout]) -> dict[str, str]:
    """Create missing groups and return the state of each. `members`: one rollout of each group."""
    for run in {member.run for member in members.values()}:
        runs.find_run(tx.conn, run)
    queries = []
    for group, member in members.items():
        columns = {"group": group, "run": member.run, "step": member.step}
        created = tx.conn.execute(SQL["open_group"], {**columns, "purpose": member.purpose.value})
        queries.append((member, created, tx.conn.ask(SQL["group"], (group,))))
    states = {}
    for member, created, group_row in queries:
        if created.rowcount and member.purpose is types.Purpose.TRAIN:
            tx.add_counts(member.run, groups_open=1)
        if member.candidate is not None:
            runs.texts(tx.conn, member.run, member.candidate)
        row = group_row.fetchone()
        if (row["run_id"], row["purpose"]) != (member.run, member.purpose.value):
            raise Conflict(
                f"Group {member.group!r} belongs to run {row['run_id']!r} for {row['purpose']}: "
                "choose another name."
            )
        states[member.group] = row["state"]
    return states


def _check_known(conn: Connection, rollout: types.NewRollout) -> None:
    group = conn.execute(SQL["group_of"], (rollout.id,)).fetchone()["group_id"]
    if group != rollout.group:
        raise Conflict(
            f"Rollout {rollout.id!r} belongs to group {group!r}, not to {rollout.group!r}: give "
            "each rollout an id of its own."
        )


def _grow_group(tx: Transaction, member: types.NewRollout, state: str, new: int) -> None:
    if state == "settled" and member.purpose is types.Purpose.TRAIN:
        tx.add_counts(member.run, groups_open=1, groups_settled=-1)
    if state in ("claimed", "trained", "discarded"):
        raise Conflict(f"Group {member.group!r} is {state} already: use a new group.")
    tx.conn.execute(SQL["grow_group"], {"new": new, "group": member.group})
    tx.add_event(member.run, "group", member.group, QUEUE)


def _finish(tx: Transaction, outcome: types.Outcome, row: Any) -> bool:
    if row is None:
        raise NotFound(f"There is no attempt {outcome.attempt!r} in this store.")
    result = rows.to_json(outcome.result, f"The result of attempt {outcome.attempt}")
    mark = digest(msgspec.json.encode(outcome))
    if row["outcome"] == mark:
        return True
    live = (
        row["state"] == types.AttemptState.RUNNING
        and row["lease_until"] > tx.now
        and row["fence"] == outcome.fence
    )
    if outcome.ran is not None and live:
        ran = rows.to_json(outcome.ran, f"The run of attempt {outcome.attempt}")
        tx.conn.execute(SQL["keep_run"], {"ran": ran, "id": row["id"]})
    traces.add_outcome(tx, outcome, late=not live)
    if not live:
        tx.add_event(row["run_id"], "attempt", outcome.attempt)
        return False
    if outcome.ran is not None:
        return True
    failed = outcome.failure is not None
    state = types.AttemptState.FAILED if failed else types.AttemptState.SUCCEEDED
    _end_attempt(tx, row, state, outcome.failure, mark)
    lost = outcome.failure is not None and outcome.failure.kind is types.ErrorKind.LOST_RUNNER
    if outcome.retry and lost:
        # Returned by a stopping runner: does not count as an attempt.
        _requeue(tx, row, "requeue_free", together=row["together"])
    elif outcome.retry and row["attempts"] < row["max_attempts"]:
        if outcome.failure is None or outcome.failure.kind is not types.ErrorKind.VERIFIER:
            # The rollout runs again.
            tx.conn.execute(SQL["keep_run"], {"ran": None, "id": row["id"]})
        _requeue(tx, row)
    else:
        final = types.RolloutState.FAILED if failed else types.RolloutState.SUCCEEDED
        _end_rollout(tx, row, final, outcome.failure, result)
    return True


def _requeue(
    tx: Transaction, row: Any, statement: str = "requeue", *, together: int | None = None
) -> None:
    tx.conn.execute(SQL[statement], {"id": row["id"], "together": together})
    tx.add_counts(row["run_id"], running=-1, queued=1)
    tx.add_event(row["run_id"], "rollout", row["id"], QUEUE)


def _end_attempt(
    tx: Transaction,
    row: Any,
    state: types.AttemptState,
    failure: types.Failure | None,
    outcome: bytes | None = None,
) -> None:
    columns = {"attempt": row["attempt"], "state": state.value, "now": tx.now, "outcome": outcome}
    tx.conn.execute(SQL["end_attempt"], {**columns, **rows.failure_columns(failure)})


def _end_rollout(
    tx: Transaction,
    row: Any,
    state: types.RolloutState,
    failure: types.Failure | None,
    result: str | None = None,
    *,
    previous: types.RolloutState = types.RolloutState.RUNNING,
) -> None:
    columns = {
        "id": row["id"],
        "state": state.value,
        "result": result,
        "seconds": max(0.0, tx.now - (row["started_at"] or tx.now)),  # clocks can go back
    }
    tx.conn.execute(SQL["end_rollout"], {**columns, **rows.failure_columns(failure)})
    # If it was a suspect, its runner may claim more now.
    tx.add_event(row["run_id"], "rollout", row["id"], QUEUE if row["together"] else 0)
    tx.add_counts(row["run_id"], **{previous.value: -1, state.value: 1})
    tx.ended[row["run_id"], row["group_id"]] += 1
