"""A store of every backend, a clock that moves by hand, and short ways to make records."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psycopg
import pytest

from agentrl.core.errors import Invalid
from agentrl.core.types import (
    Attempt,
    ErrorKind,
    Failure,
    NewRollout,
    Outcome,
    Reward,
    Span,
    StepCommit,
    Transition,
    float32,
    int32,
)
from agentrl.store import Store, open_store


@dataclass
class Clock:
    now: float = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Kit:
    """Makes records with unique ids."""

    numbers: Any = field(default_factory=itertools.count)

    def group(self, group: str, n: int = 1, **more: Any) -> list[NewRollout]:
        base = {"run": "run", "task": {"input": group}, "group": group, **more}
        return [NewRollout(id=f"{group}/{i}", index=i, **base) for i in range(n)]

    def call(
        self, attempt: Attempt, prompt: list[int], completion: list[int], **more: Any
    ) -> Transition:
        number = next(self.numbers)
        base: dict[str, Any] = {
            "id": f"call-{number}",
            "index": number,
            "logprobs": float32([-0.5] * len(completion)),
        }
        return Transition(
            attempt=attempt.id,
            prompt=int32(prompt),
            completion=int32(completion),
            **{**base, **more},
        )

    def span(self, attempt: Attempt, **more: Any) -> Span:
        base: dict[str, Any] = {"id": f"{next(self.numbers):016x}", "start": 1, "end": 9}
        return Span(attempt=attempt.id, parent=None, name="tool", kind="tool", **{**base, **more})

    def good(self, attempt: Attempt, value: float = 1.0, **more: Any) -> Outcome:
        rewards = [Reward(value=value)]
        base = {"attempt": attempt.id, "fence": attempt.fence, "rewards": rewards}
        return Outcome(**{**base, **more})

    def bad(self, attempt: Attempt, *, retry: bool = False) -> Outcome:
        failure = Failure(kind=ErrorKind.AGENT, message="boom", traceback="line 1")
        return Outcome(attempt=attempt.id, fence=attempt.fence, failure=failure, retry=retry)

    def step(self, step: int, groups: list[str], epoch: int = 1, **more: Any) -> StepCommit:
        base: dict[str, Any] = {
            "run": "run",
            "versions": {"policy": step + 1},
            "checkpoint": f"step-{step}",
            "metrics": {"reward": 0.5},
        }
        return StepCommit(epoch=epoch, step=step, groups=groups, **{**base, **more})


Opener = Callable[..., Store]
DATABASES = ["sqlite", "postgres"]
BACKENDS = [*DATABASES, "http"]
QUERIES = [  # of claims, each with the index without which it would slow down
    ("queued", "rollouts_queue"),
    ("queued_of_run", "rollouts_queue_of_run"),
    ("expired", "attempts_by_lease"),
    ("leases", "attempts_by_lease"),
    ("leases", "rollouts_suspect"),
    ("claimed", "attempts_by_claim"),
]


async def refused(verb: Awaitable[object], row: object, why: str = "") -> None:
    """The verb is refused as invalid; a row of a table that is accepted names itself."""
    (answer,) = await asyncio.gather(verb, return_exceptions=True)
    assert isinstance(answer, Invalid), (row, answer)
    assert re.search(why, str(answer)), (row, answer)


@pytest.fixture
def kit() -> Kit:
    return Kit()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def serving() -> Callable[..., contextlib.AbstractContextManager[str]]:
    """Serves a store over HTTP from a thread of its own; gives the address."""
    return _serving


@contextlib.contextmanager
def _serving(url: str, keys: str = "", *, largest: int = 2**26, **options: Any) -> Iterator[str]:
    from agentrl.store.http.keys import Keys
    from agentrl.store.http.serve import AsgiServer, listen, serve
    from agentrl.store.http.server import StoreApp

    known = Keys.parse(keys, "keys") if keys else Keys()
    servers: SimpleQueue[AsgiServer] = SimpleQueue()

    async def main() -> None:
        async with open_store(url, **options) as store:
            await serve(StoreApp(store, known, largest=largest), listening, servers.put)

    with listen("127.0.0.1", 0, known) as listening:
        thread = threading.Thread(target=asyncio.run, args=(main(),))
        thread.start()
        server = servers.get(timeout=10)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@dataclass
class ServerClock:
    """Of a served store: the clock with which the test opened it."""

    clock: Callable[[], float] = time.time

    def __call__(self) -> float:
        return self.clock()


@pytest.fixture
def server_clock() -> ServerClock:
    return ServerClock()


EMPTY = """
do $$ declare name text; filled boolean;
begin
    for name in select tablename from pg_tables
        where schemaname = 'public' and tablename <> '_agentrl_migrations'
    loop
        execute format('select exists (select from %I)', name) into filled;
        if filled then execute format('truncate %I restart identity cascade', name); end if;
    end loop;
end $$
"""


@pytest.fixture(scope="session")
def one_database(postgres: Callable[[], str]) -> str:
    """Of an empty store, for test after test: to make one takes longer than most of them."""
    return postgres()


@pytest.fixture
def empty_database(one_database: str) -> Iterator[str]:
    yield one_database
    with psycopg.connect(one_database, autocommit=True) as conn:
        conn.execute("set lock_timeout = '10s'")  # of a test that left something behind
        conn.execute(EMPTY)


@pytest.fixture(params=BACKENDS)
def url(request: pytest.FixtureRequest, tmp_path: Path, server_clock: ServerClock) -> Iterator[str]:
    """Where an empty store of each backend is, or is made."""
    file = f"sqlite:///{tmp_path / 'store.db'}"
    if request.param == "sqlite":
        yield file
    elif request.param == "postgres":
        yield request.getfixturevalue("empty_database")
    else:
        with _serving(file, clock=server_clock) as address:
            yield address


@pytest.fixture
async def opener(url: str, server_clock: ServerClock) -> AsyncIterator[Opener]:
    """Opens the one store of the test any number of times."""
    opened: list[Store] = []

    def open_(**options: Any) -> Store:
        server_clock.clock = options.get("clock") or time.time
        opened.append(open_store(url, **options))
        return opened[-1]

    yield open_
    for store in opened:
        await store.close()


@pytest.fixture
async def store(opener: Opener, clock: Clock) -> Store:
    """With one run, named `run`, opened once."""
    store = opener(clock=clock)
    await store.open_run("run", {"seed": 1})
    return store
