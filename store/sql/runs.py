"""Verbs of runs, called by the writer.

Takeover, training steps, served policy versions, documents, and calls that may be repeated.

Invariant: `runs.step` is the number of committed steps; a group is trained by one step; a claimed
group belongs to the current epoch; the counters of a run include pruned rows.

Documents are the JSON values kept with a run. A rollout may name a document of kind `candidate`;
its `texts` are sent with the attempts. A repeated call is executed only once, with the same reply.
Most verbs, including claims, are idempotent by the ids of their rows. For the others the caller
gives the call an id, and the reply is stored under this id in the transaction of the call, so that
all processes of a server, and later ones, know it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from agentrl.core import types
from agentrl.core.errors import Conflict, Fenced, Invalid, NotFound
from agentrl.core.types import Json, PromptText
from agentrl.store import rows
from agentrl.store.rows import digest
from agentrl.store.sql.database import GROUPS, NO_LIMIT, Connection, WritingConnection, load_sql
from agentrl.store.sql.writer import Transaction, WriteVerb

SQL = load_sql("runs")
LEASE_SLACK = 60.0  # seconds by which leases of owners may differ


def open_run(
    tx: Transaction,
    run: str,
    config: dict[str, types.Json],
    *,
    owner: str = "",
    lease: float = 0.0,
    gone: str = "",
) -> types.RunState:
    if owner:
        rows.check_lease(lease)
    text, until = rows.to_json(config, "The run's configuration"), tx.now + lease
    columns = {"run": run, "now": tx.now, "config": text, "owner": owner}
    # A later end of a lease than `limit` was set before the clock was set back.
    columns |= {"until": until if owner else 0.0, "gone": gone, "limit": until + LEASE_SLACK}
    row = tx.conn.execute(SQL["open_run"], columns).fetchone()
    if row is None:
        raise Conflict(f"Run {run!r} has a live owner: stop it first, or name it as `gone`.")
    tx.conn.execute(SQL["release_groups"], (run,))
    tx.conn.execute(SQL["forget_policies"], (run,))  # the fenced owner served them
    tx.add_event(run, "run", run, GROUPS)  # wakes a fenced owner waiting for groups
    return _state(row)


def hold_run(tx: Transaction, run: str, owner: str, *, lease: float) -> bool:
    if lease:
        rows.check_lease(lease)
    until = tx.now + lease if lease else 0.0
    columns = {"run": run, "owner": owner, "until": until}
    return tx.conn.execute(SQL["hold_run"], columns).fetchone() is not None


def prepare(commit: types.StepCommit) -> tuple[list[rows.Columns], str]:
    """Compute outside the transaction, in which other writers wait: the columns of the credit, and
    the commit as canonical text, which identifies a repeat. In it digests replace credit and
    rewards, which have their own tables, and empty lists are omitted. Raises Invalid for invalid
    credit and rewards."""
    rows.check_commit(commit)
    credits = [rows.credit_columns(credit) for credit in commit.credits]
    record = {name: value for name, value in msgspec.structs.asdict(commit).items() if value != []}
    record["groups"] = commit.groups
    if credits:
        record["credits"] = digest(msgspec.msgpack.encode(credits)).hex()
    if commit.rewards:
        record["rewards"] = digest(msgspec.msgpack.encode(commit.rewards)).hex()
    return credits, msgspec.json.encode(record, order="sorted").decode()


def commit_step(
    tx: Transaction, commit: types.StepCommit, credits: Sequence[rows.Columns], record: str
) -> None:
    """Commit a step with the `credits` and the `record` of `prepare`."""
    row = find_run(tx.conn, commit.run, commit.epoch)
    committed = tx.conn.execute(SQL["step"], (commit.run, commit.step)).fetchone()
    if committed is not None and committed["record"] == record:
        return
    if commit.step != row["step"]:
        raise Conflict(
            f"Run {commit.run!r}: step {commit.step} cannot be committed, the next one is "
            f"{row['step']}."
        )
    for group in commit.groups:
        _mark_group(tx, group, commit, "trained")
    for group in commit.discarded:
        _mark_group(tx, group, commit, "discarded")
    if credits or commit.rewards:
        groups = {"run": commit.run, "groups": rows.to_json(commit.groups, "Groups")}
        calls = {row["id"]: row for row in tx.conn.execute(SQL["calls"], groups)}
        _add_credits(tx.conn, commit, credits, calls)
        _add_rewards(tx.conn, commit, calls, groups)
    columns = {"run": commit.run, "step": commit.step, "now": tx.now, "record": record}
    tx.conn.execute(SQL["commit_step"], columns)
    tx.conn.execute(SQL["advance_run"], {"run": commit.run, "checkpoint": commit.checkpoint})
    _set_metrics(tx.conn, commit.run, commit.step, commit.metrics)
    tx.add_event(commit.run, "step", str(commit.step))


def claim_groups(
    tx: Transaction,
    run: str,
    epoch: int,
    n: int,
    *,
    ordered: bool,
    groups: Sequence[str] | None,
    last: bool,
) -> list[str] | None:
    """Claim groups and return their ids; None if fewer than `n` are settled, unless it is the
    `last` try."""
    find_run(tx.conn, run, epoch)
    columns: dict[str, Any] = {"run": run, "n": n}
    if groups is None:
        claimed, settled, columns["until"] = "claimed_groups", "settled_groups", None
    else:
        claimed, settled = "claimed_of", "settled_of"
        columns["groups"] = rows.to_json(groups, "Groups")
    held = [row["id"] for row in tx.conn.execute(SQL[claimed], columns)]
    if ordered:  # ignores groups after an open one
        first = tx.conn.execute(SQL["last_of_first_groups"], columns)
        columns["until"] = first.fetchone()["id"]
    columns["n"] = n - len(held)
    more = tx.conn.execute(SQL[settled], columns).fetchall()
    if len(held) + len(more) < n and not last:
        return None
    for row in more:
        tx.conn.execute(SQL["claim_group"], {"epoch": epoch, "group": row["id"]})
        tx.add_event(run, "group", row["id"])
    return sorted([*held, *(row["id"] for row in more)])


def publish(tx: Transaction, version: types.PolicyVersion, *, epoch: int | None = None) -> None:
    rows.check_id("The name of a policy", version.policy)
    find_run(tx.conn, version.run, epoch)
    tx.conn.execute(SQL["publish"], msgspec.structs.asdict(version))
    tx.add_event(version.run, "policy", version.policy)


def log(
    tx: Transaction, run: str, step: int, metrics: dict[str, float], *, epoch: int | None = None
) -> None:
    rows.check_ids("A metric's name", metrics)
    find_run(tx.conn, run, epoch)
    tx.conn.execute(SQL["log_step"], {"run": run, "step": step, "now": tx.now})
    _set_metrics(tx.conn, run, step, metrics)
    tx.add_event(run, "step", str(step))


def find_run(conn: Connection, run: str, epoch: int | None = None) -> Any:
    """Return the run's row, locked if `epoch` is given. Raises NotFound for an unknown run, Fenced
    if `epoch` is not the current one."""
    statement = SQL["run"] if epoch is None else SQL["lock_run"]
    row = conn.execute(statement, (run,)).fetchone()
    if row is None:
        raise NotFound(f"There is no run {run!r} in this store: open it first.")
    if epoch not in (None, row["epoch"]):
        raise Fenced(
            f"Run {run!r} was taken over by another process (epoch {row['epoch']}, this is "
            f"{epoch}): stop this one."
        )
    return row


# -- reading ---------------------------------------------------------------------------------------


def state(conn: Connection, run: str) -> types.RunState | None:
    row = conn.execute(SQL["run"], (run,)).fetchone()
    return None if row is None else _state(row)


def names(conn: Connection) -> list[str]:
    return [row["id"] for row in conn.execute(SQL["runs"])]


def steps(
    conn: Connection, run: str, *, after: int = -1, limit: int | None = None
) -> list[types.StepRow]:
    if limit is not None and limit < 0:
        raise Invalid(f"limit is a number of steps, not {limit}.")
    columns = {"run": run, "after": after, "limit": NO_LIMIT if limit is None else limit}
    step_rows = conn.execute(SQL["steps"], columns).fetchall()
    metrics: dict[int, dict[str, float]] = {row["step"]: {} for row in step_rows}
    last = step_rows[-1]["step"] if step_rows else after
    for row in conn.execute(SQL["metrics"], {**columns, "last": last}):
        value = math.nan if row["value"] is None else row["value"]
        metrics.setdefault(row["step"], {})[row["name"]] = value
    return [
        rows.record(
            types.StepRow,
            row,
            run=run,
            metrics=metrics[row["step"]],
            committed=bool(row["committed"]),
        )
        for row in step_rows
    ]


def policies(conn: Connection, run: str) -> dict[str, types.PolicyVersion]:
    policy_rows = conn.execute(SQL["policies"], (run,))
    return {row["policy"]: rows.record(types.PolicyVersion, row) for row in policy_rows}


def counts(conn: Connection, run: str) -> types.Counts:
    row = conn.execute(SQL["run"], (run,)).fetchone()
    return types.Counts() if row is None else rows.record(types.Counts, row)


# -- parts -----------------------------------------------------------------------------------------


def _state(row: Any) -> types.RunState:
    return rows.record(types.RunState, row, run=row["id"], config=rows.from_json(row["config"]))


def _add_credits(
    conn: WritingConnection,
    commit: types.StepCommit,
    credits: Sequence[rows.Columns],
    calls: Mapping[str, Any],
) -> None:
    if lost := next((row["id"] for row in credits if row["id"] not in calls), None):
        raise NotFound(
            f"Step {commit.step} of run {commit.run!r} has credit for call {lost!r}, which "
            "is not in its groups."
        )
    step, seq = commit.step, {id: call["seq"] for id, call in calls.items()}
    columns = ({**row, "transition": seq[row["id"]], "step": step} for row in credits)
    conn.executemany(SQL["add_credit"], columns)


def _add_rewards(
    conn: WritingConnection,
    commit: types.StepCommit,
    calls: Mapping[str, Any],
    groups: Mapping[str, str],
) -> None:
    """Add the commit's rewards after those of each rollout's attempt."""
    by_rollout: dict[str, list[types.Reward]] = {}
    for row in commit.rewards:
        by_rollout.setdefault(row.rollout, []).append(row.reward)
    members = {row["id"]: row for row in conn.execute(SQL["members"], groups)}
    owners = {call: row["rollout_id"] for call, row in calls.items()}
    for rollout, rewards in by_rollout.items():
        where = f"Step {commit.step} of run {commit.run!r} has a reward for"
        if rollout not in members:
            raise NotFound(f"{where} {rollout!r}, which is not in its groups.")
        targets = (r.target for r in rewards if r.scope is types.Scope.TRANSITION)
        if foreign := next((call for call in targets if owners.get(str(call)) != rollout), None):
            raise NotFound(f"{where} call {foreign!r}, which is not a call of {rollout!r}.")
        attempt, first = members[rollout]["attempt_id"], members[rollout]["rewards"]
        columns = (
            rows.reward_columns(reward, attempt, first + i, step=commit.step)
            for i, reward in enumerate(rewards)
        )
        conn.executemany(SQL["add_reward"], columns)


def _mark_group(
    tx: Transaction, group: str, commit: types.StepCommit, state: Literal["trained", "discarded"]
) -> None:
    row = tx.conn.execute(SQL["group"], (group,)).fetchone()
    if row is None or row["run_id"] != commit.run:
        raise NotFound(f"Run {commit.run!r} has no group {group!r} to commit.")
    if row["state"] != "claimed" or row["claimed_epoch"] != commit.epoch:
        taken = row["state"] in ("trained", "discarded")
        why = "was {state} at step {trained_step}" if taken else "is {state}"
        raise Conflict(
            f"Step {commit.step} cannot train group {group!r}: it {why.format(**dict(row))}, "
            f"not claimed by epoch {commit.epoch}."
        )
    tx.conn.execute(SQL["take_group"], {"step": commit.step, "group": group, "state": state})
    tx.add_counts(commit.run, groups_settled=-1, **{f"groups_{state}": 1})
    tx.add_event(commit.run, "group", group)


def _set_metrics(conn: WritingConnection, run: str, step: int, metrics: dict[str, float]) -> None:
    conn.executemany(SQL["set_metric"], [(run, step, *metric) for metric in metrics.items()])


DOCUMENTS = load_sql("documents")


CANDIDATE = "candidate"


class _Candidate(msgspec.Struct):
    texts: list[PromptText]


def put_documents(
    tx: Transaction, run: str, kind: str, documents: Mapping[str, Json], *, replace: bool = False
) -> None:
    rows.check_ids("The kind or key of a document", (kind, *documents))
    find_run(tx.conn, run)
    for key, value in documents.items():
        if kind == CANDIDATE:
            _check_texts(key, value)
        text = rows.to_json(value, f"The {kind} {key!r}")
        columns = {"run": run, "kind": kind, "key": key, "value": text, "replace": replace}
        tx.conn.execute(DOCUMENTS["put_document"], columns)
        tx.add_event(run, kind, key)


def documents(conn: Connection, run: str, kind: str, *, after: str = "") -> dict[str, Json]:
    document_rows = conn.execute(DOCUMENTS["documents"], (run, kind, after))
    return {row["key"]: rows.from_json(row["value"]) for row in document_rows}


def texts(conn: Connection, run: str, candidate: str) -> list[PromptText]:
    """Return the texts of a candidate. Raises NotFound if the run does not have it."""
    row = conn.execute(DOCUMENTS["document"], (run, CANDIDATE, candidate)).fetchone()
    if row is None:
        raise NotFound(f"Run {run!r} has no candidate {candidate!r}: add it first.")
    return msgspec.json.decode(row["value"], type=_Candidate).texts


def _check_texts(candidate: str, value: Json) -> None:
    try:
        msgspec.convert(value, _Candidate)
    except msgspec.ValidationError as error:
        raise Invalid(f"The texts of candidate {candidate!r} cannot be used: {error}.") from error


REQUESTS = load_sql("requests")
REPLIES_KEPT = 86_400.0  # seconds for which replies are stored
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class IdempotentCall:
    """`id`: chosen by the caller. `digest`: hash of the arguments; if it differs, the id was used
    for another call."""

    id: str
    digest: str


CURRENT: ContextVar[IdempotentCall | None] = ContextVar("request", default=None)


def answer_once(verb: WriteVerb[T], reply: type[T]) -> WriteVerb[T]:
    """Wrap a verb to execute it only once for the current request, if there is one: a repeat gets
    the stored reply. Raises Conflict if the request's id was used with other arguments."""
    request = CURRENT.get()
    if request is None:
        return verb

    def execute(tx: Transaction) -> T:
        tx.conn.execute(REQUESTS["lock_request"], {"id": request.id})
        stored = tx.conn.execute(REQUESTS["request"], (request.id,)).fetchone()
        if stored is None:
            result = verb(tx)
            tx.conn.execute(REQUESTS["forget_requests"], (tx.now - REPLIES_KEPT,))
            text = msgspec.json.encode(result).decode()
            columns = {"id": request.id, "digest": request.digest, "reply": text, "at": tx.now}
            tx.conn.execute(REQUESTS["add_request"], columns)
            return result
        if stored["digest"] != request.digest:
            raise Conflict("This idempotency-key was used for a call with other arguments.")
        return msgspec.json.decode(stored["reply"], type=reply)

    return execute
