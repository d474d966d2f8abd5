"""Claims and heartbeats of 200 runners through `agentrl store serve`, with 1,000,000 rollouts in
it.

A runner has 4 rollouts at a time, each of about 4 s; it claims the next as soon as one has ended,
by a call with an id of its own, and sends a heartbeat for all of them every 3 s. So the server gets
about 200 claims, 200 outcomes and 70 heartbeats a second, at moments that nobody has arranged. The
latencies are those of the client, whose 200 runners are tasks of one process. Half of the store's
rollouts wait in the queue, half are trained.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import psycopg

from agentrl.core.types import Outcome
from agentrl.store import Store, open_store
from tests.benchmarks import store_http
from tests.benchmarks import store_load as load
from tests.benchmarks.store import Figures

RUNNERS, SLOTS, SECONDS, BEAT = 200, 4, 4.0, 3.0
T = TypeVar("T")
Times = dict[str, list[float]]


def measure(quick: bool) -> Figures:
    """On SQLite."""
    size, seconds = (20_000, 4.0) if quick else (1_000_000, 20.0)
    with tempfile.TemporaryDirectory() as folder:
        path = load.filled(Path(folder) / "store.db", size)
        return asyncio.run(runners(str(path), seconds))


def on_postgres(quick: bool, url: str) -> Figures:
    """url: of an empty store. What filling it leaves to do is done before, as in a store that has
    held its rollouts for a while."""
    size, seconds = (20_000, 4.0) if quick else (1_000_000, 20.0)
    asyncio.run(_open_run(url))
    with psycopg.connect(url, autocommit=True) as conn:
        for statement in FILL.format(n=size, done=size // 8 * 4, text=load.text(40)).split(";"):
            conn.execute(statement.encode())
    figures = asyncio.run(runners(url, seconds))
    return {f"postgres_{name}": value for name, value in figures.items()}


async def runners(url: str, seconds: float, n: int = RUNNERS) -> Figures:
    times: Times = defaultdict(list)
    async with served(url) as store:
        end = time.monotonic() + seconds
        await asyncio.gather(*(runner(store, times, end) for _ in range(n)))
    figures: Figures = {"runners": n}
    for name, found in times.items():
        found.sort()
        figures[f"runners_{name}_p50_ms"] = round(1000 * found[len(found) // 2], 2)
        figures[f"runners_{name}_p99_ms"] = round(1000 * found[int(len(found) * 0.99)], 2)
        figures[f"runners_{name}s_per_s"] = round(len(found) / seconds, 1)
    return figures


@asynccontextmanager
async def served(url: str) -> AsyncIterator[Store]:
    with store_http.server("agentrl", "store", "serve", url, "--port", "0") as (port, _):
        async with open_store(f"http://127.0.0.1:{port}") as store:
            yield store


async def runner(store: Store, times: Times, end: float) -> None:
    """The first claims, which come from all at once as they would after a restart, do not count."""
    name, held, chance = uuid.uuid4().hex, set[str](), random.Random()
    seconds = [chance.uniform(0, SECONDS) for _ in range(SLOTS)]

    async def slot(first: float) -> None:
        await asyncio.sleep(first)
        while time.monotonic() < end:
            (attempt,) = await timed(
                times["claim"],
                store.claim(1, runner=name, lease=30, claim_id=uuid.uuid4().hex, timeout=20),
            )
            held.add(attempt.id)
            await asyncio.sleep(chance.uniform(0.5, 1.5) * SECONDS)
            outcome = Outcome(attempt=attempt.id, fence=attempt.fence)
            assert await timed(times["outcome"], store.finish([outcome])) == [True]
            held.discard(attempt.id)

    async def beat() -> None:
        await asyncio.sleep(chance.uniform(0, BEAT))
        while time.monotonic() < end:
            sent = sorted(held)
            alive = await timed(times["heartbeat"], store.heartbeat(sent, lease=30))
            assert held.isdisjoint(set(sent) - set(alive)), "a lease was lost"
            await asyncio.sleep(BEAT)

    await asyncio.gather(beat(), *map(slot, seconds))


async def timed(times: list[float], call: Awaitable[T]) -> T:
    started = time.perf_counter()
    result = await call
    times.append(time.perf_counter() - started)
    return result


async def _open_run(url: str) -> None:
    async with open_store(url) as store:
        await store.open_run("run", {})


FILL = """
create temp table numbers as
select i, 'name' || i as name, i < {done} as done, 'old/' || i / 4 as grp
from generate_series(0, {n} - 1) i;
insert into groups (id, run_id, purpose, step, state, pending, claimed_epoch, trained_step)
select grp, 'run', 'train', 0, case when done then 'trained' else 'open' end,
    case when done then 0 else 4 end, case when done then 1 end, case when done then 0 end
from numbers where i % 4 = 0;
insert into rollouts (id, run_id, group_id, position, purpose, step, state, priority, max_attempts,
    timeout, attempts, attempt_id, seconds, sampling, task)
select 'rollout-' || name, 'run', grp, i % 4, 'train', 0,
    case when done then 'succeeded' else 'queued' end, 0, 3, 60.0, case when done then 1 else 0 end,
    case when done then name end, 1.0, '{{}}', '{{"input":"{text}"}}'
from numbers order by i;
insert into attempts (id, rollout_id, run_id, fence, state, runner, lease_until, started_at,
    ended_at)
select name, 'rollout-' || name, 'run', 1, 'succeeded', 'bench', 1.0, 0.0, 1.0
from numbers where done;
update runs set succeeded = {done}, queued = {n} - {done}, groups_trained = {done} / 4,
    groups_open = ({n} - {done}) / 4;
vacuum (analyze);
checkpoint
"""
