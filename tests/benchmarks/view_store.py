"""A store of 1.0 M calls, and how long the verbs behind the pages of a viewer take on it.

python -m tests.benchmarks.view_store --json [--quick] [--url postgresql://...] [--keep FILE]

The run has 4,000 steps of 12 groups of 8 rollouts, and an evaluation of 200 rollouts each 50 steps:
400,000 rollouts of 2 or 3 calls, of which each continues the one before. It is written by SQL, in
less than two minutes. `--url` copies it into an empty PostgreSQL database first; `http` times the
same verbs through a server in front of it. Times are of warm repeats with other arguments.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from agentrl.core.types import ErrorKind, Purpose, RolloutState
from agentrl.store import Store, open_store
from tests.benchmarks.report import arguments

STEPS, QUICK = 4000, 100
GROUPS, SIZE, EVERY, HELD_OUT = 12, 8, 50, 200  # groups of a step, rollouts of a group; evaluation
METRICS = 60
ALL_METRICS = [f"metric/{i:02}" for i in range(METRICS)]
SHOWN = [*ALL_METRICS[:7], "eval/score"]
TABLES = ("runs", "steps", "metrics", "groups", "rollouts", "attempts", "transitions", "rewards")
TABLES += ("credits", "events")
REPEATS = 20

FILL = """
pragma journal_mode = off;
pragma synchronous = off;
pragma cache_size = -400000;
begin;
create temp table steps_of as
with recursive n (i) as (select 0 union all select i + 1 from n where i + 1 < {steps})
select i as step from n;
insert into steps select 'run', step, 1, 1.7e9 + step, '{{}}' from steps_of;
with recursive names (i) as (select 0 union all select i + 1 from names where i + 1 < {metrics})
insert into metrics
select 'run', step, printf('metric/%02d', i), sin(step / 50.0 + i) from steps_of, names;
insert into metrics
select 'run', step, 'eval/score', step * 1.0 / {steps} from steps_of where step % {every} = 0;

create temp table groups_of (id text primary key, purpose text, step int, size int);
with recursive n (i) as (select 0 union all select i + 1 from n where i + 1 < {groups})
insert into groups_of
select printf('run/train/%07d', step * {groups} + i), 'train', step, {size} from steps_of, n;
insert into groups_of
select printf('run/eval/%06d', step), 'eval', step, {held_out} from steps_of
where step % {every} = 0;
insert into groups (id, run_id, purpose, step, state, pending, claimed_epoch, trained_step)
select
    id, 'run', purpose, step, iif(purpose = 'train', 'trained', 'settled'), 0, 1,
    iif(purpose = 'train', step, null)
from groups_of order by id;

with recursive n (i) as (select 0 union all select i + 1 from n where i + 1 < {held_out})
insert into rollouts (
    id, run_id, group_id, position, purpose, step, state, priority, max_attempts, timeout,
    attempts, attempt_id, seconds, error_kind, error_message, sampling, task, result
)
select
    printf('%s/%04d', id, i), 'run', id, i, purpose, step, 'succeeded', 0, 3, 60.0,
    1, null, 1.5, null, null, '{{}}', json_object('input', printf('task %d of %s', i, id)), '"done"'
from groups_of, n where i < size order by step, purpose, id, i;
update rollouts set attempt_id = printf('%032x', seq);
update rollouts set
    state = 'failed', error_kind = 'agent_error', error_message = 'KeyError: city',
    error_traceback = ''
where seq % 31 = 0;
insert into attempts (
    id, rollout_id, run_id, fence, state, runner, lease, lease_until, started_at, ended_at,
    error_kind, error_message, error_traceback
)
select
    attempt_id, id, 'run', 1, state, 'runner', 60.0, 0, 1.7e9 + seq, 1.7e9 + seq + 1.5,
    error_kind, error_message, error_traceback
from rollouts order by seq;
insert into rewards (attempt_id, late, position, scope, target, name, value, source)
select attempt_id, 0, 0, 'rollout', null, 'outcome', (seq * 7919 % 11) / 10.0, 'verifier'
from rollouts where state = 'succeeded' order by seq;
insert into rewards (attempt_id, late, position, scope, target, name, value, source)
select attempt_id, 0, 1, 'rollout', null, 'format', 1.0, 'verifier'
from rollouts where state = 'succeeded' and seq % 2 = 0 order by seq;

with n (i) as (values (0), (1), (2))
insert into transitions (
    seq, id, attempt_id, position, late, parent, size, digest, chat_parent, chat_shared, chat_size,
    chat_digest, answer_digest, role, policy, version, finish, exact, started_at, seconds, sampling,
    prompt, completion, logprobs, messages, answer
)
select
    seq * 3 + i, printf('%032x-%d', seq, i), attempt_id, i, 0,
    iif(i, seq * 3 + i - 1, null), (i + 1) * 416, zeroblob(16),
    iif(i, seq * 3 + i - 1, null), i * 2, (i + 1) * 500, zeroblob(16), zeroblob(16),
    iif(seq % 2, 'solver', 'critic'), 'policy', step, 'stop', 1, 1.7e9 + seq, 0.5, '{{}}',
    zeroblob(320), zeroblob(96), zeroblob(96),
    json_array(json_object(
        'role', 'user', 'content',
        printf('question %d of task %d: {text}{text}{text}%s', i, seq, iif(seq % 50, '', ' Porto'))
    )),
    json_object('role', 'assistant', 'content', printf('answer %d of %d: {text}', i, seq))
from rollouts, n where i < 2 + seq % 2 order by seq, i;
insert into credits
select
    t.seq, 'policy', r.step, zeroblob(4), zeroblob(4), zeroblob(4), zeroblob(4), zeroblob(96)
from rollouts r cross join transitions t
where r.purpose = 'train' and t.seq between r.seq * 3 and r.seq * 3 + 2 order by r.seq, t.seq;
update runs set
    step = {steps},
    transitions = (select count(*) from transitions),
    tokens = 24 * (select count(*) from transitions),
    succeeded = (select count(*) from rollouts where state = 'succeeded'),
    failed = (select count(*) from rollouts where state = 'failed'),
    groups_trained = (select count(*) from groups where purpose = 'train');
commit;
pragma journal_mode = wal;
"""
TEXT = "the agent looks at the table and asks for the next row of the staff database "


def fill(path: Path, *, quick: bool = False) -> int:
    """Writes the store to a new file; returns the number of calls."""

    async def open_run() -> None:
        async with open_store(str(path)) as store:
            await store.open_run("run", {"name": "run"})

    asyncio.run(open_run())
    with closing(sqlite3.connect(path, isolation_level=None)) as conn:
        sizes = {"groups": GROUPS, "size": SIZE, "every": EVERY, "held_out": HELD_OUT}
        steps = QUICK if quick else STEPS
        conn.executescript(FILL.format(steps=steps, metrics=METRICS, text=TEXT, **sizes))
        return int(conn.execute("select count(*) from transitions").fetchone()[0])


def copy_to_postgres(path: Path, url: str) -> None:
    """Into an empty database, table by table."""
    import psycopg

    async def create() -> None:
        async with open_store(url):
            pass

    asyncio.run(create())
    with closing(sqlite3.connect(path)) as source, psycopg.connect(url) as target:
        for table in TABLES:
            names = [row[1] for row in source.execute(f"pragma table_info({table})")]
            columns = ", ".join(names)
            with target.cursor().copy(f"copy {table} ({columns}) from stdin") as out:
                for row in source.execute(f"select {columns} from {table}"):
                    out.write_row(row)
        target.commit()
        target.autocommit = True
        target.execute("vacuum analyze")


async def pages(store: Store, repeats: int) -> dict[str, list[float]]:
    """Seconds of what each page reads, with other arguments each time."""
    last = (await store.run("run")).step  # type: ignore[union-attr]
    found: dict[str, list[float]] = {}

    async def timed(name: str, *reads: Awaitable[Any]) -> None:
        since = time.perf_counter()
        for read in reads:
            await read
        found.setdefault(name, []).append(time.perf_counter() - since)

    for i in range(repeats):
        step = last - 1 - i * 7 % last
        group = f"run/train/{step * GROUPS:07d}"
        rollout = f"{group}/0003"
        held_out = f"run/eval/{step // EVERY * EVERY:06d}"
        await timed(
            "run",
            store.counts("run"),
            store.metric_names("run"),
            store.series("run", SHOWN),
            store.groups("run", limit=20),
        )
        await timed("series, all", store.series("run", ALL_METRICS))
        await timed("groups", store.groups("run", purpose=Purpose.TRAIN))
        await timed("groups, deep", store.groups("run", before=group))
        await timed("groups, eval", store.groups("run", purpose=Purpose.EVAL, limit=20))
        await timed(
            "step",
            store.steps("run", after=step - 1, limit=1),
            store.groups("run", trained=step),
        )
        await timed("group of 8", store.rollouts("run", group=group))
        await timed("group of 200", store.rollouts("run", group=held_out))
        await timed("rollouts of a step", store.rollouts("run", step=step))
        await timed("rollouts, deep", store.rollouts("run", after=rollout, limit=50))
        await timed(
            "failed rollouts",
            store.rollouts("run", state=RolloutState.FAILED, step=step, limit=50),
        )
        await timed(
            "rollout",
            store.trace(rollout),
            store.credits(rollout),
            store.rollouts("run", group=group),
        )
        await timed("attempts", store.attempts(rollout))
    return found


async def searches(store: Store, repeats: int) -> dict[str, list[float]]:
    """Seconds of searches that find much, little and nothing."""
    wanted: dict[str, dict[str, Any]] = {
        "outcome >= 0.5": {"rewards": {"outcome": (0.5, None)}},
        "outcome, nothing": {"rewards": {"outcome": (2.0, None)}},
        "failed": {"state": RolloutState.FAILED},
        "cancelled, nothing": {"state": RolloutState.CANCELLED},
        "error": {"error": ErrorKind.AGENT},
        "error, nothing": {"error": ErrorKind.TIMEOUT},
        "role, nothing": {"role": "nobody"},
        "version": {"version": 7},
        "steps": {"steps": (10, 20)},
        "text, frequent": {"text": "Porto"},
        "text, nothing": {"text": "zebra42"},
    }
    found: dict[str, list[float]] = {}
    for name, filters in wanted.items():
        cursor = None
        for _ in range(repeats):
            since = time.perf_counter()
            page = await store.search("run", **filters, before=cursor)
            found.setdefault(name, []).append(time.perf_counter() - since)
            cursor = page.cursor
    return found


def milliseconds(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {
        name: {
            "p50": round(1000 * statistics.median(values), 1),
            "p95": round(1000 * sorted(values)[int(0.95 * (len(values) - 1))], 1),
        }
        for name, values in times.items()
    }


async def timed_verbs(url: str, repeats: int) -> dict[str, Any]:
    async with open_store(url, readonly=True) as store:
        await pages(store, 1)
        page, search = await pages(store, repeats), await searches(store, max(3, repeats // 4))
    page_ms, search_ms = milliseconds(page), milliseconds(search)
    return {
        "page_p95_ms": max(times["p95"] for times in page_ms.values()),
        "search_ms": max(times["p95"] for times in search_ms.values()),
        "pages": page_ms,
        "searches": search_ms,
    }


@contextlib.contextmanager
def served(url: str) -> Iterator[str]:
    command = [sys.executable, "-m", "agentrl", "store", "serve", url, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().rpartition(" ")[2].strip()
        finally:
            process.terminate()


def measure(file: Path, url: str | None, *, quick: bool) -> dict[str, Any]:
    repeats, since = 3 if quick else REPEATS, time.monotonic()
    made = fill(file, quick=quick) if not file.exists() else 0
    result: dict[str, Any] = {"calls": made, "fill_s": round(time.monotonic() - since, 1)}
    result["mb"] = file.stat().st_size // 10**6
    result["sqlite"] = asyncio.run(timed_verbs(f"sqlite:///{file}", repeats))
    with served(f"sqlite:///{file}") as address:
        result["http"] = asyncio.run(timed_verbs(address, repeats))
    if url is not None:
        copy_to_postgres(file, url)
        result["postgres"] = asyncio.run(timed_verbs(url, repeats))
    return result


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="a store of 10,000 rollouts")
    parser.add_argument("--url", help="an empty PostgreSQL database, to time that too")
    parser.add_argument("--keep", type=Path, help="make the store here, or use the one that is")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = (options.keep or Path(folder, "store.db")).absolute()
        result = measure(file, options.url, quick=options.quick)
    print(json.dumps(result, indent=None if options.json else 1))


if __name__ == "__main__":
    main()
