"""Runs: owners, training steps, served policy versions. SQLite verbs, called by the writer.

Always true: `runs.step` is the number of committed steps; a group is trained by one step; a
claimed group belongs to the present epoch; the counters of a run are what counting would give.
"""

from __future__ import annotations

import math
from sqlite3 import Connection
from typing import Any

import msgspec

from agentrl.errors import Conflict, Fenced, NotFound
from agentrl.store import queries, rows
from agentrl.store.feed import GROUPS
from agentrl.store.writer import Transaction
from agentrl.types import Counts, Json, PolicyVersion, RunState, StepCommit, StepRow

SQL = queries.load("runs")


def open_run(tx: Transaction, run: str, config: dict[str, Json]) -> RunState:
    columns = {"run": run, "now": tx.now, "config": rows.dump(config, "The run's configuration")}
    row = tx.conn.execute(SQL["open_run"], columns).fetchone()
    tx.conn.execute(SQL["release_groups"], (run,))
    tx.conn.execute(SQL["forget_policies"], (run,))  # they were served by the fenced owner
    tx.note(run, "run", run, GROUPS)  # the fenced owner, if it waits for groups, must learn it
    return _state(row)


def commit_step(tx: Transaction, commit: StepCommit) -> None:
    row = owned(tx.conn, commit.run, commit.epoch)
    record = _record(commit)
    done = tx.conn.execute(SQL["step"], (commit.run, commit.step)).fetchone()
    if done is not None and done["record"] == record:
        return
    if commit.step != row["step"]:
        raise Conflict(
            f"Run {commit.run!r}: step {commit.step} cannot be committed, the next one is "
            f"{row['step']}."
        )
    for group in commit.groups:
        _train(tx, group, commit)
    step = {"run": commit.run, "step": commit.step, "now": tx.now, "record": record}
    tx.conn.execute(SQL["commit_step"], step)
    advance = {"run": commit.run, "checkpoint": commit.checkpoint}
    tx.conn.execute(SQL["advance_run"], advance)
    _set_metrics(tx.conn, commit.run, commit.step, commit.metrics)
    tx.note(commit.run, "step", str(commit.step))


def claim_groups(tx: Transaction, run: str, epoch: int, n: int, *, last: bool) -> list[str] | None:
    """Ids, or none where fewer than `n` are settled and it is not the `last` look."""
    owned(tx.conn, run, epoch)
    held = [row["id"] for row in tx.conn.execute(SQL["claimed_groups"], (run, n))]
    more = tx.conn.execute(SQL["settled_groups"], (run, n - len(held))).fetchall()
    if len(held) + len(more) < n and not last:
        return None
    for row in more:
        tx.conn.execute(SQL["claim_group"], {"epoch": epoch, "group": row["id"]})
        tx.note(run, "group", row["id"])
    return sorted([*held, *(row["id"] for row in more)])


def publish(tx: Transaction, version: PolicyVersion, *, epoch: int | None) -> None:
    _admit(tx.conn, version.run, epoch)
    tx.conn.execute(SQL["publish"], msgspec.structs.asdict(version))
    tx.note(version.run, "policy", version.policy)


def log(
    tx: Transaction, run: str, step: int, metrics: dict[str, float], *, epoch: int | None
) -> None:
    _admit(tx.conn, run, epoch)
    tx.conn.execute(SQL["log_step"], {"run": run, "step": step, "now": tx.now})
    _set_metrics(tx.conn, run, step, metrics)
    tx.note(run, "step", str(step))


def known(conn: Connection, run: str) -> Any:
    """The run's row. Raises StoreError if there is no such run."""
    row = conn.execute(SQL["run"], (run,)).fetchone()
    if row is None:
        raise NotFound(f"There is no run {run!r} in this store: open it first.")
    return row


def _admit(conn: Connection, run: str, epoch: int | None) -> None:
    if epoch is None:
        known(conn, run)
    else:
        owned(conn, run, epoch)


def owned(conn: Connection, run: str, epoch: int) -> Any:
    """The run's row. Raises Fenced if `epoch` is not the present one."""
    row = known(conn, run)
    if row["epoch"] != epoch:
        raise Fenced(
            f"Run {run!r} was taken over by another process (epoch {row['epoch']}, this is "
            f"{epoch}): stop this one."
        )
    return row


# -- reading ---------------------------------------------------------------------------------------


def state(conn: Connection, run: str) -> RunState | None:
    row = conn.execute(SQL["run"], (run,)).fetchone()
    return None if row is None else _state(row)


def names(conn: Connection) -> list[str]:
    return [row["id"] for row in conn.execute(SQL["runs"])]


def steps(conn: Connection, run: str, after: int) -> list[StepRow]:
    metrics: dict[int, dict[str, float]] = {}
    for row in conn.execute(SQL["metrics"], (run, after)):
        value = math.nan if row["value"] is None else row["value"]
        metrics.setdefault(row["step"], {})[row["name"]] = value
    return [
        StepRow(
            run=run,
            step=row["step"],
            metrics=metrics.get(row["step"], {}),
            committed=bool(row["committed"]),
            at=row["at"],
        )
        for row in conn.execute(SQL["steps"], (run, after))
    ]


def policies(conn: Connection, run: str) -> dict[str, PolicyVersion]:
    return {
        row["policy"]: PolicyVersion(
            run=run,
            policy=row["policy"],
            version=row["version"],
            base_url=row["base_url"],
            model=row["model"],
        )
        for row in conn.execute(SQL["policies"], (run,))
    }


def counts(conn: Connection, run: str) -> Counts:
    row = conn.execute(SQL["run"], (run,)).fetchone()
    if row is None:
        return Counts()
    return Counts(**{name: row[name] for name in Counts.__struct_fields__})


# -- parts -----------------------------------------------------------------------------------------


def _state(row: Any) -> RunState:
    return RunState(
        run=row["id"],
        epoch=row["epoch"],
        step=row["step"],
        checkpoint=row["checkpoint"],
        config=rows.load(row["config"]),
    )


def _record(commit: StepCommit) -> str:
    """All of a commit in one canonical text, by which a repeat is recognised."""
    return msgspec.json.encode(commit, order="sorted").decode()


def _train(tx: Transaction, group: str, commit: StepCommit) -> None:
    row = tx.conn.execute(SQL["group"], (group,)).fetchone()
    if row is None or row["run_id"] != commit.run:
        raise NotFound(f"Run {commit.run!r} has no group {group!r} to commit.")
    if row["state"] != "claimed" or row["claimed_epoch"] != commit.epoch:
        why = "was trained at step {trained_step}" if row["state"] == "trained" else "is {state}"
        raise Conflict(
            f"Step {commit.step} cannot train group {group!r}: it {why.format(**dict(row))}, "
            f"not claimed by epoch {commit.epoch}."
        )
    tx.conn.execute(SQL["train_group"], {"step": commit.step, "group": group})
    tx.count(commit.run, groups_settled=-1, groups_trained=1)
    tx.note(commit.run, "group", group)


def _set_metrics(conn: Connection, run: str, step: int, metrics: dict[str, float]) -> None:
    values = [(run, step, name, value) for name, value in metrics.items()]
    conn.executemany(SQL["set_metric"], values)
