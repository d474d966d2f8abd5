"""Many processes, one store: PostgreSQL, and SQLite behind `agentrl store serve`.

Transitions are written one by one by 8 processes, each waiting for its own; a lifecycle is that of
`store_http`, sent to a server in front of PostgreSQL by 32 clients, batched and one by one.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from agentrl.store import open_store
from tests.benchmarks import store_http, store_runners
from tests.benchmarks.store import Figures
from tests.benchmarks.store_transitions import processes

numbers = itertools.count()


def measure(quick: bool, postgres: str) -> Figures:
    """postgres: URL of a database in which schemas may be made."""
    n, repeats, seconds = (640, 1, 1.0) if quick else (16_000, 3, 6.0)
    written, served = [], []
    for _ in range(repeats):
        with empty_schema(postgres) as url:
            written.append(n / processes(url, n, 1))
        with tempfile.TemporaryDirectory() as folder, serving(f"{folder}/store.db") as port:
            served.append(n / processes(f"http://127.0.0.1:{port}", n, 1))
    with psycopg.connect(postgres) as conn:
        settings = ("fsync", "synchronous_commit")
        shown: Figures = {}
        for name in settings:
            (value,) = conn.execute(f"show {name}".encode()).fetchone() or ("",)
            shown[f"postgres_{name}"] = str(value)
    figures: Figures = {
        "postgres_transitions_per_s": max(written), "served_transitions_per_s": max(served)
    } | shown  # fmt: skip
    with empty_schema(postgres) as url:
        figures |= asyncio.run(lifecycles(url, seconds))
    with empty_schema(postgres) as url:
        figures |= store_runners.on_postgres(quick, url)
    return figures


@contextmanager
def empty_schema(url: str) -> Iterator[str]:
    name = f"bench_{os.getpid()}_{next(numbers)}"
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(f"create schema {name}".encode())
        yield f"{url}{'&' if '?' in url else '?'}options=-csearch_path%3D{name}"
        conn.execute(f"drop schema {name} cascade".encode())


@contextmanager
def serving(url: str) -> Iterator[int]:
    with store_http.server("agentrl", "store", "serve", url, "--port", "0") as (port, _):
        yield port


async def lifecycles(url: str, seconds: float) -> Figures:
    with store_http.server("agentrl", "store", "serve", url, "--port", "0") as (port, process):
        async with (
            open_store(f"http://127.0.0.1:{port}") as store,
            store_http.connections(port) as opened,
        ):
            await store.open_run("run", {})
            await store_http.rate(store_http.one_by_one, opened, seconds / 4, process)  # warm
            alone = await store_http.rate(store_http.one_by_one, opened, seconds, process)
            batched = await store_http.rate(store_http.batched, opened, seconds, process)
    return {
        "postgres_lifecycles_per_s": batched["per_s"],
        "postgres_lifecycles_per_s_one_by_one": alone["per_s"],
        "postgres_server_cpu": batched["server_cpu"],
    }
