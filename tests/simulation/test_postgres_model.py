"""The simulation's model of PostgreSQL against the real server: a transaction that the database
aborts leaves nothing, is run again, and its verb takes effect once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from agentrl.store import open_store
from agentrl.store.sql.database import Statement
from agentrl.store.sql.store import SqlStore
from tests.simulation.loop import SimulatedLoop
from tests.simulation.system import System, installed
from tests.store.postgres_server import Server, binaries, running

RUNS = ("a", "b")
UPDATE = Statement("update runs set queued = queued + 1 where id = ?")
History = dict[str, Any]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    if binaries() is None:
        pytest.skip("PostgreSQL is not installed")
    with running() as server:
        yield server


class Counted:
    """A verb that counts rows of two runs, one after the other, and how often it was run."""

    def __init__(self, first: str, second: str, between: Any = lambda: None) -> None:
        self.runs, self.between, self.executed = (first, second), between, 0

    def __call__(self, tx: Any) -> str:
        self.executed += 1
        first, second = self.runs
        tx.conn.execute(UPDATE, (first,)).rowcount  # noqa: B018 - waits for the lock
        if self.executed == 1:
            self.between()
        tx.conn.execute(UPDATE, (second,)).rowcount  # noqa: B018
        return first


def history(answers: list[str], verbs: list[Counted], counts: list[int]) -> History:
    repeated = sum(verb.executed for verb in verbs) > len(verbs)
    return {"answers": answers, "repeated": repeated, "counts": counts}


async def of_server(url: str) -> History:
    """Two writers lock the same rows in opposite orders: the server aborts one of them."""
    barrier = threading.Barrier(2, timeout=20)
    verbs = [Counted("a", "b", barrier.wait), Counted("b", "a", barrier.wait)]
    async with open_store(url) as first_store, open_store(url) as second_store:
        for run in RUNS:
            await first_store.open_run(run, {})
        writers = [cast(SqlStore, store)._writer for store in (first_store, second_store)]
        answers = await asyncio.gather(*map(lambda w, v: w.post(v), writers, verbs))
        counts = [(await first_store.counts(run)).queued for run in RUNS]
    return {
        "answers": answers,
        "repeated": sum(v.executed for v in verbs) > len(verbs),
        "counts": counts,
    }


def of_model(folder: Path) -> History:
    """The same in the simulation, where a fault aborts the transaction of the second."""
    loop = SimulatedLoop(0)
    system = System(loop)
    system.retries = True
    process = system.new_process("writer")
    verbs, result = [Counted("a", "b"), Counted("b", "a")], History()

    def abort(process: Any) -> None:
        if verbs[1].executed == 1:
            system.statement = lambda process: None
            raise system.aborted()

    async def work() -> None:
        async with open_store(f"sqlite:///{folder}/store.db") as store:
            for run in RUNS:
                await store.open_run(run, {})
            writer = cast(SqlStore, store)._writer
            first = await writer.post(verbs[0])
            system.statement = abort
            answers = [first, await writer.post(verbs[1])]
            counts = [(await store.counts(run)).queued for run in RUNS]
        result.update(
            answers=answers, repeated=sum(v.executed for v in verbs) > len(verbs), counts=counts
        )

    with installed(system):
        task = process.start(work())
        loop.run(task.done)
        task.result()
    loop.close()
    return result


async def test_an_aborted_transaction_is_run_again(server: Server) -> None:
    url = server.make()
    real = await of_server(url)
    assert real == {"answers": ["a", "b"], "repeated": True, "counts": [2, 2]}


def test_the_model_does_what_the_server_does(tmp_path: Path) -> None:
    assert of_model(tmp_path) == {"answers": ["a", "b"], "repeated": True, "counts": [2, 2]}
