"""What the sections of the store benchmark write, rollouts and model calls of realistic size, and
the server process through which some of them do."""

from __future__ import annotations

import asyncio
import itertools
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from agentrl.core.types import NewRollout, Transition, float32, int32
from agentrl.store import open_store

PROMPT, COMPLETION = 256, 128  # tokens
CHARACTERS = 4  # of text per token
WORDS = "the agent looks at the table and asks for the next row of the staff database "
NUMBERS = itertools.count()


def rollouts(name: str, n: int, group: int = 4) -> list[NewRollout]:
    """`n` rollouts of run `run` in groups of `group`."""
    return [
        NewRollout(
            id=f"{name}/{i}",
            run="run",
            group=f"{name}/{i // group}",
            index=i % group,
            task={"input": text(40), "answer": str(i)},
        )
        for i in range(n)
    ]


def calls(attempt: str, n: int, name: str = "") -> Iterator[Transition]:
    """`n` calls of an attempt that share no prefix, with the text the tokens stand for."""
    for index in range(n):
        number = next(NUMBERS)
        yield Transition(
            id=f"{attempt}-{name}{index}",
            attempt=attempt,
            index=index,
            prompt=int32(range(number, number + PROMPT)),
            completion=int32(range(COMPLETION)),
            logprobs=float32([-0.25] * COMPLETION),
            version=1,
            messages=[{"role": "user", "content": f"{number} {text(PROMPT)}"}],
            answer={"role": "assistant", "content": text(COMPLETION)},
        )


def text(tokens: int) -> str:
    """Text of about that many tokens."""
    size = tokens * CHARACTERS
    return (WORDS * (size // len(WORDS) + 1))[:size]


def filled(path: Path, n: int) -> Path:
    """A store of `n` rollouts in groups of four: half wait in the queue, the others were
    finished in one attempt each and their groups are trained. Written with SQL, in seconds."""

    async def open_run() -> None:
        async with open_store(str(path)) as store:
            await store.open_run("run", {})

    asyncio.run(open_run())
    done = n // 8 * 4
    conn = sqlite3.connect(path)
    conn.executescript(FILL.format(n=n, done=done, text=text(40)))
    conn.execute("pragma wal_checkpoint(truncate)")
    conn.close()
    return path


FILL = """
begin;
create temp table numbers as
with recursive count (i) as (select 0 union all select i + 1 from count where i < {n} - 1)
select i, printf('%032x', i * 7919) as name, i < {done} as done, printf('old/%07d', i / 4) as grp
from count;
insert into groups (id, run_id, purpose, step, state, pending, claimed_epoch, trained_step)
select grp, 'run', 'train', 0, iif(done, 'trained', 'open'), iif(done, 0, 4), iif(done, 1, null),
    iif(done, 0, null)
from numbers where i % 4 = 0;
insert into rollouts (id, run_id, group_id, position, purpose, step, state, priority, max_attempts,
    timeout, attempts, attempt_id, seconds, sampling, task)
select 'rollout-' || name, 'run', grp, i % 4, 'train', 0, iif(done, 'succeeded', 'queued'), 0, 3,
    60.0, done, iif(done, name, null), 1.0, '{{}}', '{{"input":"{text}"}}'
from numbers;
insert into attempts (id, rollout_id, run_id, fence, state, runner, lease_until, started_at,
    ended_at)
select name, 'rollout-' || name, 'run', 1, 'succeeded', 'bench', 1.0, 0.0, 1.0
from numbers where done;
update runs set succeeded = {done}, queued = {n} - {done}, groups_trained = {done} / 4,
    groups_open = ({n} - {done}) / 4;
commit;
"""


class Served:
    """`agentrl store serve` over a file, which is killed and started again on one port. `start`
    does not wait until it answers: callers repeat themselves."""

    def __init__(self, path: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, "-m", "agentrl", "store", "serve", path]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        command = [*self._command, "--port", str(self.port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def is_alive(self) -> bool:
        return self._process.poll() is None
