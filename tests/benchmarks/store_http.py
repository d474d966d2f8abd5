"""Rollouts a second that a served store records: `python -m tests.benchmarks.store_http --json`.

A lifecycle is enqueue, claim, 4 transitions of 256+128 tokens, reward and finish, each durable
before its reply, by 32 concurrent clients. One by one: seven requests. Batched: 16 lifecycles in
two requests of /v1/batch. Server and load are processes of their own; the load speaks raw HTTP over
sockets, so that the server is the limit, and `client_per_s` is the same with the real client.
Baselines of the same run: an empty starlette route, and the same store without HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.core.types import Attempt, NewRollout, Outcome, Reward, Transition, float32, int32
from agentrl.store import Store, open_store
from agentrl.store.http.client import call
from agentrl.store.http.keys import Keys
from agentrl.store.http.serve import listen
from agentrl.store.http.wire import ENCODE, MSGPACK, VERBS, BatchCall, BatchRequest
from tests.benchmarks.report import arguments, report

CLIENTS, BATCH, CALLS = 32, 16, 4
PROMPT, COMPLETION, LOGPROBS = int32(range(256)), int32(range(128)), float32([-0.5] * 128)
FACTORY = uvicorn.Config("", loop="auto").get_loop_factory()
numbers = itertools.count()


def rollouts(n: int, name: str) -> list[NewRollout]:
    ids = [f"{name}/{next(numbers)}" for _ in range(n)]
    return [NewRollout(id=id, run="run", group=id, index=0, task={"input": id}) for id in ids]


def transitions(attempt: Attempt) -> list[Transition]:
    """Four turns of which none continues another."""
    return [
        Transition(
            id=f"{attempt.id}-{index}",
            attempt=attempt.id,
            index=index,
            prompt=PROMPT,
            completion=COMPLETION,
            logprobs=LOGPROBS,
        )
        for index in range(CALLS)
    ]


def outcome(attempt: Attempt) -> Outcome:
    return Outcome(attempt=attempt.id, fence=attempt.fence, rewards=[Reward(value=1.0)])


# -- the cheap client ------------------------------------------------------------------------------


class Connection:
    """One kept-alive connection; a request is one write."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def post(self, path: str, body: bytes) -> bytes:
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {MSGPACK}\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        size = int(answer.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        got = await self._reader.readexactly(size)
        assert answer.startswith(b"HTTP/1.1 200"), (answer, got)
        return got

    async def verb(self, name: str, *args: Any, **kwargs: Any) -> Any:
        verb, arguments = call(name, *args, **kwargs)
        got = await self.post(f"/v1/{name}", ENCODE[MSGPACK](arguments))
        return verb.results[MSGPACK](got)

    async def batch(self, *calls: tuple[Any, Any]) -> list[Any]:
        made = [
            BatchCall(verb=verb.name, arguments=msgspec.Raw(ENCODE[MSGPACK](arguments)))
            for verb, arguments in calls
        ]
        got = msgspec.msgpack.decode(
            await self.post("/v1/batch", ENCODE[MSGPACK](BatchRequest(calls=made)))
        )
        assert not any("error" in answer for answer in got["results"]), got
        return [answer.get("result") for answer in got["results"]]


@contextlib.asynccontextmanager
async def connections(port: int) -> AsyncIterator[list[Connection]]:
    streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CLIENTS)]
    yield [Connection(*stream) for stream in streams]
    for _, writer in streams:
        writer.close()


async def one_by_one(connection: Connection, name: str) -> int:
    await connection.verb("enqueue", rollouts(1, name))
    for attempt in await connection.verb("claim", 1, runner=name, lease=600.0, run="run"):
        for transition in transitions(attempt):
            await connection.verb("add_transitions", [transition])
        assert await connection.verb("finish", [outcome(attempt)]) == [True]
    return 1


async def batched(connection: Connection, name: str) -> int:
    _, claimed = await connection.batch(
        call("enqueue", rollouts(BATCH, name)),
        call("claim", BATCH, runner=name, lease=600.0, run="run"),
    )
    attempts = msgspec.convert(claimed, VERBS["claim"].result)
    calls = [transition for attempt in attempts for transition in transitions(attempt)]
    await connection.batch(
        call("add_transitions", calls), call("finish", [outcome(attempt) for attempt in attempts])
    )
    return len(attempts)


async def with_client(store: Store, name: str) -> int:
    await store.enqueue(rollouts(1, name))
    for attempt in await store.claim(1, runner=name, lease=600.0, run="run"):
        for transition in transitions(attempt):
            await store.add_transitions([transition])
        await store.finish([outcome(attempt)])
    return 1


async def with_client_batched(store: Store, name: str) -> int:
    await store.enqueue(rollouts(BATCH, name))
    attempts = await store.claim(BATCH, runner=name, lease=600.0, run="run")
    await store.add_transitions([t for attempt in attempts for t in transitions(attempt)])
    await store.finish([outcome(attempt) for attempt in attempts])
    return len(attempts)


async def empty(connection: Connection, _: str) -> int:
    await connection.post("/", b"{}")
    return 1


# -- measuring -------------------------------------------------------------------------------------


async def rate(work: Any, targets: list[Any], seconds: float, process: psutil.Process) -> dict:
    """Units of work per second of all targets at once, the CPU shares of both sides, and how large
    the server is by then: it records 4 transitions per lifecycle and must not grow with them."""
    end = time.monotonic() + seconds

    async def client(target: Any, name: str) -> int:
        done = 0
        while time.monotonic() < end:
            done += await work(target, name)
        return done

    started, cpu, mine = time.monotonic(), _cpu(process), time.process_time()
    names = [f"{work.__name__}-{next(numbers)}" for _ in targets]
    done = sum(await asyncio.gather(*map(client, targets, names)))
    wall = time.monotonic() - started
    return {
        "done": done,
        "per_s": round(done / wall, 1),
        "server_cpu": round((_cpu(process) - cpu) / wall, 2),
        "load_cpu": round((time.process_time() - mine) / wall, 2),
        "server_mb": round(process.memory_info().rss / 2**20, 1),  # at the end
    }


def _cpu(process: psutil.Process) -> float:
    used = process.cpu_times()
    return float(used.user + used.system)


@contextlib.contextmanager
def server(*command: str) -> Iterator[tuple[int, psutil.Process]]:
    """A server process that prints its address; gives its port."""
    with subprocess.Popen(
        [sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            yield int(line.rpartition(":")[2]), psutil.Process(process.pid)
        finally:
            process.terminate()


async def over_http(folder: Path, seconds: float) -> dict[str, Any]:
    url = f"sqlite:///{folder / 'http.db'}"
    with server("agentrl", "store", "serve", url, "--port", "0") as (port, process):
        async with open_store(f"http://127.0.0.1:{port}") as store, connections(port) as opened:
            await store.open_run("run", {})
            await rate(one_by_one, opened, seconds / 4, process)  # warm
            found = {
                "one_by_one": await rate(one_by_one, opened, seconds, process),
                "batched": await rate(batched, opened, seconds, process),
                "client": await rate(with_client, [store] * CLIENTS, seconds, process),
                "client_batched": await rate(
                    with_client_batched, [store] * CLIENTS, seconds, process
                ),
            }
            counts = await store.counts("run")
            assert counts.succeeded >= sum(part["done"] for part in found.values())
            assert counts.transitions == CALLS * counts.succeeded
            assert counts.tokens == counts.transitions * len(COMPLETION)
            assert not counts.queued + counts.running + counts.failed
            return found


async def direct(folder: Path, seconds: float) -> dict[str, Any]:
    async with open_store(f"sqlite:///{folder / 'direct.db'}") as store:
        await store.open_run("run", {})
        stores, here = [store] * CLIENTS, psutil.Process()
        return {
            "direct": await rate(with_client, stores, seconds, here),
            "direct_batched": await rate(with_client_batched, stores, seconds, here),
        }


async def nothing(seconds: float) -> dict[str, Any]:
    with server("tests.benchmarks.store_http", "--empty") as (port, process):
        async with connections(port) as opened:
            return {"empty_route": await rate(empty, opened, seconds, process)}


def measure(quick: bool = False) -> dict[str, Any]:
    """Figures by section, each `per_s` with the CPU shares (1.0: one core) of server and load."""
    seconds = 2.0 if quick else 6.0
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=FACTORY) as runner:
        found = runner.run(nothing(seconds / 2))
        found |= runner.run(direct(Path(folder), seconds))
        found |= runner.run(over_http(Path(folder), seconds))
    return {
        "lifecycles_per_s": found["batched"]["per_s"],
        "lifecycles_per_s_one_by_one": found["one_by_one"]["per_s"],
        **found,
    }


def serve_empty() -> None:
    async def page(request: Request) -> Response:
        await request.body()
        return Response(b"{}")

    app = Starlette(routes=[Route("/", page, methods=["POST"])])
    config = uvicorn.Config(app, log_level="warning", access_log=False)
    listening = listen("127.0.0.1", 0, Keys())
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    uvicorn.Server(config).run([listening])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="short runs")
    parser.add_argument("--empty", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.empty:
        serve_empty()
        return
    result = measure(options.quick)
    report(result, as_json=options.json)


if __name__ == "__main__":
    main()
