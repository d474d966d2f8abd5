"""Reads for user interfaces: curves, pages of groups and rollouts, and searches.

Invariant: the cost of a query depends on the size of its result, not on the size of the store.
Pagination is by key, so new rows cause neither repeated nor missing ones; a search ends when its
time budget is spent and returns a cursor to continue from.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain

from agentrl.core import types
from agentrl.core.errors import Invalid
from agentrl.store import rows
from agentrl.store.records import AttemptRow, Found, GroupRow, RolloutRow
from agentrl.store.sql import traces
from agentrl.store.sql.database import NO_LIMIT, Connection, Statement, joined, load_sql

SQL = load_sql("browse")
FIRST_CHUNK, MAX_CHUNK = 125, 2000  # rollouts that a search examines per statement
MAX_SEARCH_SECONDS = 10.0  # seconds
Range = tuple[float | None, float | None]


def metric_names(conn: Connection, run: str) -> list[str]:
    return [row["name"] for row in conn.execute(SQL["metric_names"], {"run": run})]


def series(
    conn: Connection, run: str, names: Sequence[str], after: int = -1, points: int = 400
) -> dict[str, list[tuple[int, float]]]:
    if points < 2:
        raise Invalid(f"points must be at least 2, not {points}.")
    last = conn.execute(SQL["last_step"], (run,)).fetchone()["step"]
    last = after if last is None else last
    stride = max(1, math.ceil((last - after) / (points - 1)))
    columns = {"run": run, "first": after + 1, "last": last, "stride": stride}
    curves = {}
    for name in names:
        points_of = conn.execute(SQL["series"], {**columns, "name": name})
        curves[name] = [
            (row["step"], math.nan if row["value"] is None else row["value"]) for row in points_of
        ]
    return curves


def groups(
    conn: Connection,
    run: str,
    *,
    purpose: types.Purpose | None = None,
    step: int | None = None,
    trained: int | None = None,
    state: str | None = None,
    before: str | None = None,
    limit: int = 50,
) -> list[GroupRow]:
    rows.check_positive("limit", limit)
    of_step = step is not None or trained is not None
    if purpose is None and not of_step:  # the index sorts the groups of each purpose
        by_purpose = [
            groups(conn, run, purpose=single, state=state, before=before, limit=limit)
            for single in types.Purpose
        ]
        return sorted(chain(*by_purpose), key=lambda group: group.id, reverse=True)[:limit]
    name = None if purpose is None else purpose.value
    filters = {
        "purpose": None if of_step else name,
        "of_purpose": name if of_step else None,
        "step": step,
        "trained": trained,
        "state": state,
        "before": before,
    }
    conditions = [SQL[f"group_{name}"] for name, value in filters.items() if value is not None]
    query = joined(SQL["groups"], *conditions, SQL["group_members"])
    by_id: dict[str, GroupRow] = {}
    for row in conn.execute(query, {**filters, "run": run, "limit": limit}):
        group = by_id.get(row["id"])
        if group is None:
            group = by_id[row["id"]] = rows.record(
                GroupRow,
                row,
                purpose=types.Purpose(row["purpose"]),
                rollouts=[],
                states=[],
                outcomes=[],
            )
        if row["rollout"] is not None:
            group.rollouts.append(row["rollout"])
            group.states.append(types.RolloutState(row["rollout_state"]))
            group.outcomes.append(row["outcome"])
    return list(by_id.values())


def search(
    conn: Connection,
    run: str,
    *,
    rewards: Mapping[str, Range] | None = None,
    state: types.RolloutState | None = None,
    error: types.ErrorKind | None = None,
    purpose: types.Purpose | None = None,
    role: str | None = None,
    policy: str | None = None,
    version: int | None = None,
    steps: Range | None = None,
    text: str | None = None,
    images: bool = False,
    before: str | None = None,
    limit: int = 50,
    budget: float = 0.3,
) -> Found:
    rows.check_positive("limit", limit)
    if not 0 < budget <= MAX_SEARCH_SECONDS:
        raise Invalid(f"budget must be in (0, {MAX_SEARCH_SECONDS:g}] seconds, not {budget}.")
    if error is not None and state is None:  # the state is indexed
        cancelled = error is types.ErrorKind.CANCELLED
        state = types.RolloutState.CANCELLED if cancelled else types.RolloutState.FAILED
    filters = {
        "purpose": None if purpose is None else purpose.value,
        "state": None if state is None else state.value,
        "error": None if error is None else error.value,
    }
    calls = {"role": role, "policy": policy, "version": version, "images": images or None}
    wanted = [SQL[f"with_{name}"] for name, value in filters.items() if value is not None]
    columns = {**filters, **calls, **_end(steps, before), "run": run, "limit": limit}
    for i, (name, (low, high)) in enumerate((rewards or {}).items()):
        wanted.append(Statement(SQL["with_reward"].replace("_0", f"_{i}")))
        columns[f"name_{i}"] = name
        columns[f"low_{i}"] = -math.inf if low is None else low
        columns[f"high_{i}"] = math.inf if high is None else high
    if of_call := [SQL[f"call_{name}"] for name, value in calls.items() if value is not None]:
        wanted += [SQL["with_call"], *of_call, SQL["call_end"]]
    if text:
        wanted.append(SQL["with_text"])
        columns |= {"words": text, "text": rows.to_json(text, "text")[1:-1]}
    chunk = [SQL["chunk"]]
    if columns["first"] is not None:
        chunk.append(SQL["chunk_from"])
    if state is not None and state is not types.RolloutState.SUCCEEDED:
        chunk.append(SQL["chunk_state"])
    chunk.append(SQL["chunk_size"])
    end_of = joined(*chunk, SQL["chunk_end"])
    matches = joined(*chunk, SQL["search"], *wanted, SQL["newest_first"])
    return _search(conn, end_of, matches, columns, budget)


def attempts(conn: Connection, rollout: str, *, limit: int | None = None) -> list[AttemptRow]:
    selected = traces.some_calls(0, limit)
    attempt_rows = conn.execute(SQL["attempts"], (rollout,)).fetchall()
    ids = [row["id"] for row in attempt_rows]
    calls_given = traces.call_rows(conn, ids)
    calls, late_calls = (
        rows.transitions(calls_given, late=late, selected=selected) for late in (False, True)
    )
    numbers = Counter((row["attempt_id"], bool(row["late"])) for row in calls_given)
    rewards, late_rewards = traces.rewards(conn, ids), traces.rewards(conn, ids, late=True)
    return [
        rows.record(
            AttemptRow,
            row,
            state=types.AttemptState(row["state"]),
            failure=rows.failure(row),
            transitions=calls.get(row["id"], []),
            calls=numbers[row["id"], False],
            rewards=rewards.get(row["id"], []),
            spans=traces.spans(conn, row["id"]),
            late_transitions=late_calls.get(row["id"], []),
            late_calls=numbers[row["id"], True],
            late_rewards=late_rewards.get(row["id"], []),
        )
        for row in attempt_rows
    ]


# -- parts -----------------------------------------------------------------------------------------


def _search(
    conn: Connection, end_of: Statement, matches: Statement, columns: rows.Columns, budget: float
) -> Found:
    """Search chunk by chunk; chunks start small, so that large rollouts do not exceed the
    budget."""
    since, size = time.monotonic(), FIRST_CHUNK
    matching: list[rows.Row] = []
    looked, cursor = 0, None
    while True:
        columns["size"] = size
        end = conn.execute(end_of, columns).fetchone()
        if end is None:
            break
        remaining = {**columns, "limit": columns["limit"] - len(matching)}
        matching += conn.execute(matches, remaining).fetchall()
        looked += end["number"]
        full = len(matching) == columns["limit"]
        last = matching[-1] if full else end
        columns |= {"step": last["step"], "seq": last["seq"]}
        if full or time.monotonic() - since >= budget:
            cursor = f"{last['step']}.{last['seq']}"
            break
        size = min(2 * size, MAX_CHUNK)
    rewards = traces.rewards(conn, [row["attempt_id"] for row in matching if row["attempt_id"]])
    return Found(
        [_row(row, rewards.get(row["attempt_id"], [])) for row in matching], cursor, looked
    )


def _end(steps: Range | None, before: str | None) -> rows.Columns:
    """Return the start of a search, its newest step or the cursor `before`, and its `first`
    step."""
    first, last = steps or (None, None)
    if before is None:
        return {"first": first, "step": NO_LIMIT if last is None else last + 1, "seq": 0}
    if not re.fullmatch(r"-?\d{1,18}\.\d{1,18}", before):
        raise Invalid(f"before must be the cursor of a previous page, not {before!r}.")
    step, _, seq = before.partition(".")
    return {"first": first, "step": int(step), "seq": int(seq)}


def _row(row: rows.Row, rewards: list[types.Reward]) -> RolloutRow:
    return rows.record(
        RolloutRow,
        row,
        purpose=types.Purpose(row["purpose"]),
        state=types.RolloutState(row["state"]),
        error=None if row["error_kind"] is None else types.ErrorKind(row["error_kind"]),
        rewards=rewards,
    )
