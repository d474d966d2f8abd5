"""What does capture cost? A fake upstream, the gateway and a load generator, one process each.

python -m tests.benchmarks.gateway --json

Every figure through the gateway stands beside the same requests sent directly to the upstream in
the same run. The upstream and the load generator are bare asyncio: they must cost little.
"""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.benchmarks.report import arguments, report

RUN = "bench"
CALLS = 8  # model calls of one attempt
SMALL, LARGE = (256, 128), (8192, 512)  # tokens of prompt and completion
SEATS = {"player_0": "policy", "player_1": "policy@000010"}  # each on a server of its own
PAIRS = 7  # of measurements with and without roles


# -- the upstream ----------------------------------------------------------------------------------


def answer(prompt: int, completion: int) -> bytes:
    """A whole HTTP response with the exact ids and log-probs that vLLM would send."""
    logprobs = [
        {
            "token": f" w{i}",
            "logprob": -0.0123456 * (i % 97),
            "bytes": [32, 119],
            "top_logprobs": [],
        }
        for i in range(completion)
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": " word" * completion},
        "logprobs": {"content": logprobs},
        "finish_reason": "stop",
        "token_ids": [(i * 7919) % 151_000 for i in range(completion)],
    }
    body = {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion",
        "created": 1_750_000_000,
        "model": "tiny",
        "choices": [choice],
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": 0},
        "prompt_token_ids": [(i * 104_729) % 151_000 for i in range(prompt)],
    }
    return _response(json.dumps(body, separators=(",", ":")).encode())


def _response(body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"x-policy-version: 1\r\n\r\n" + body


class Upstream(asyncio.Protocol):
    """Answers by the size of the completion that is asked for, after `delay` seconds if named."""

    answers: dict[bytes, bytes]
    transport: asyncio.Transport

    def __init__(self) -> None:
        self.buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        start = self.buffer[:end].lower().find(b"content-length:") + len(b"content-length:")
        size = int(self.buffer[start : self.buffer.find(b"\r\n", start)])
        if len(self.buffer) < end + 4 + size:
            return
        body = bytes(self.buffer[end + 4 :])
        self.buffer.clear()
        found = next(answer for mark, answer in self.answers.items() if mark in body)
        delay = 1.0 if b'"user":"slow"' in body else 0.0
        if delay:
            asyncio.get_running_loop().call_later(delay, self.transport.write, found)
        else:
            self.transport.write(found)


def serve(pipe: Connection) -> None:
    Upstream.answers = {
        f'"max_tokens":{completion}'.encode(): answer(prompt, completion)
        for prompt, completion in (SMALL, LARGE)
    }

    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Upstream, "127.0.0.1", 0, backlog=4096)
        pipe.send(server.sockets[0].getsockname()[1])
        await loop.run_in_executor(None, pipe.recv)

    asyncio.run(main())


# -- the gateway -----------------------------------------------------------------------------------


def gateway(pipe: Connection, folder: str, ports: Sequence[int], vision: str = "") -> None:
    """Obeys (verb, number): "attempts" makes and registers that many and sends their ids back;
    "seated" does so with two seats; "end" ends all of them; "memory" sends the resident bytes.
    vision: `policy.vision`."""
    import psutil

    from agentrl.core.config import RunConfig
    from agentrl.core.config.learning import PolicyConfig
    from agentrl.core.types import NewRollout, Outcome, PolicyVersion
    from agentrl.runners.gateway.server import Gateway
    from agentrl.runners.main import run_features
    from agentrl.store import open_store

    async def main() -> None:
        async with open_store(f"sqlite:///{Path(folder) / 'store.db'}") as store:
            await store.open_run(RUN, {})
            for name, port in zip(SEATS.values(), ports, strict=True):
                url = f"http://127.0.0.1:{port}/v1"
                await store.publish(
                    PolicyVersion(run=RUN, policy=name, version=1, base_url=url, model="tiny")
                )
            config = RunConfig(policy=PolicyConfig(vision=vision)) if vision else RunConfig()
            server = Gateway(store, RUN, features=run_features(store, config))
            server.start()
            pipe.send(int(server.base_url.split(":")[2].split("/")[0]))
            made, live = 0, []
            while (order := await asyncio.to_thread(pipe.recv)) is not None:
                verb, number = order
                if verb == "memory":
                    pipe.send(psutil.Process().memory_info().rss)
                elif verb == "cpu":
                    pipe.send(time.process_time())
                elif verb == "end":
                    for item in live:
                        server.unregister(item)
                    done = [Outcome(attempt=item.id, fence=item.attempt.fence) for item in live]
                    await store.finish(done)
                    live.clear()
                    pipe.send(None)
                else:
                    names = [f"r{made + i}" for i in range(number)]
                    made += number
                    seats = SEATS if verb == "seated" else {}
                    new = [
                        NewRollout(
                            id=n, run=RUN, group=n, index=0, task={}, timeout=3600.0, seats=seats
                        )
                        for n in names
                    ]
                    await store.enqueue(new)
                    claimed = await store.claim(number, runner="b", lease=3600.0, run=RUN)
                    live += [server.register(attempt) for attempt in claimed]
                    pipe.send([attempt.id for attempt in claimed])
            await asyncio.to_thread(server.close)

    asyncio.run(main())


# -- the load --------------------------------------------------------------------------------------


def request(attempt: str, prompt: int, completion: int, slow: bool, role: str = "") -> bytes:
    message = {"role": "user", "content": "word " * prompt}
    body: dict[str, Any] = {"model": "gpt", "messages": [message], "max_tokens": completion}
    body |= {"logprobs": True, "return_token_ids": True} if not attempt else {}
    body |= {"user": "slow"} if slow else {}
    raw = json.dumps(body, separators=(",", ":")).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    head += f"authorization: Bearer {attempt}\r\n"
    head += f"baggage: agentrl.role={role}\r\n" if role else ""
    head += f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


class Client(asyncio.Protocol):
    """Sends its requests one after the other and notes how long each took."""

    transport: asyncio.Transport

    def __init__(self, requests: Sequence[bytes]) -> None:
        self.requests, self.seconds = list(requests), list[float]()
        self.buffer, self.left = bytearray(), -1
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.next()

    def next(self) -> None:
        if len(self.seconds) == len(self.requests):
            self.transport.close()
            self.done.set_result(self.seconds)
            return
        self.started = time.perf_counter()
        self.transport.write(self.requests[len(self.seconds)])

    def data_received(self, data: bytes) -> None:
        if self.left < 0:
            self.buffer += data
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self.buffer[:end]).lower()
            if not head.startswith(b"http/1.1 200"):
                self.done.set_exception(RuntimeError(bytes(self.buffer[:500]).decode()))
                self.transport.abort()
                return
            start = head.index(b"content-length:") + len(b"content-length:")
            stop = head.find(b"\r\n", start)
            self.left = int(head[start : stop if stop > 0 else None]) - (len(self.buffer) - end - 4)
            self.buffer.clear()
        else:
            self.left -= len(data)
        if not self.left:
            self.left = -1
            self.seconds.append(time.perf_counter() - self.started)
            self.next()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(f"the connection was lost: {error}"))


def load(pipe: Connection) -> None:
    """Obeys (port, requests by client): sends back (seconds, latencies)."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        while (order := await loop.run_in_executor(None, pipe.recv)) is not None:
            port, work = order
            started = time.perf_counter()

            def client(requests: list[bytes]) -> Callable[[], Client]:
                return lambda: Client(requests)

            made = [
                loop.create_connection(client(requests), "127.0.0.1", port) for requests in work
            ]
            clients = [protocol for _, protocol in await asyncio.gather(*made)]
            latencies = await asyncio.gather(*(client.done for client in clients))
            pipe.send((time.perf_counter() - started, [x for each in latencies for x in each]))

    asyncio.run(main())


# -- the figures -----------------------------------------------------------------------------------


class Bench:
    """The three processes."""

    def __init__(self, folder: str, vision: str = "") -> None:
        self.context = multiprocessing.get_context("spawn")
        self.children: list[Any] = []
        self.upstreams = [self.start(serve) for _ in SEATS]
        self.upstream_port, *others = [upstream.recv() for upstream in self.upstreams]
        self.gateway = self.start(gateway, folder, [self.upstream_port, *others], vision)
        self.gateway_port = self.gateway.recv()
        self.load = self.start(load)

    def start(self, target: Callable[..., None], *arguments: Any) -> Connection:
        ours, theirs = self.context.Pipe()
        child = self.context.Process(target=target, args=(theirs, *arguments), daemon=True)
        child.start()
        self.children.append(child)
        return ours

    def close(self) -> None:
        for pipe in (self.load, self.gateway, *self.upstreams):
            pipe.send(None)
        for child in self.children:
            child.join(10)

    def ask(self, verb: str, number: int = 0) -> Any:
        self.gateway.send((verb, number))
        return self.gateway.recv()

    def send(self, port: int, work: list[list[bytes]]) -> tuple[float, list[float]]:
        self.load.send((port, work))
        seconds, latencies = self.load.recv()
        return seconds, latencies

    def direct(self, clients: int, calls: int, size: tuple[int, int], slow: bool = False) -> Any:
        one = request("", *size, slow)
        return self.send(self.upstream_port, [[one] * calls] * clients)

    def through(
        self,
        clients: int,
        calls: int,
        size: tuple[int, int],
        slow: bool = False,
        roles: Sequence[str] = ("",),
    ) -> Any:
        """As many attempts as there are clients, or more: none makes over `CALLS` calls. With
        several roles, calls are made by each in turn, and by the rollout's seats."""
        need = math.ceil(calls / CALLS)
        ids = self.ask("seated" if len(roles) > 1 else "attempts", clients * need)
        work = []
        for i in range(clients):
            mine = ids[i * need : (i + 1) * need]
            work.append(
                [
                    request(mine[j // CALLS], *size, slow, roles[j % len(roles)])
                    for j in range(calls)
                ]
            )
        found = self.send(self.gateway_port, work)
        self.ask("end")
        return found


def figures(bench: Bench, *, seconds: float, attempts: int) -> dict[str, float]:
    """`seconds`: about how long each rate is measured."""
    result: dict[str, float] = {}
    for name, size, guess in (("256/128", SMALL, 1000), ("8192/512", LARGE, 250)):
        calls = max(4, int(guess * seconds / 32))
        for kind, measure in (("direct", bench.direct), ("gateway", bench.through)):
            measure(32, 2, size)
            before = bench.ask("cpu")
            runs = [measure(32, calls, size) for _ in range(3)]
            cpu = (bench.ask("cpu") - before) / (3 * 32 * calls)
            took, latencies = min(runs)
            result[f"{kind} {name} requests/s"] = len(latencies) / took
            result[f"{kind} {name} p99 ms"] = 1000 * statistics.quantiles(latencies, n=100)[98]
            if kind == "gateway":
                result[f"{kind} {name} cpu ms"] = 1000 * cpu
        result[f"{name} of direct"] = (
            result[f"gateway {name} requests/s"] / result[f"direct {name} requests/s"]
        )
    alone = {}
    for kind, measure in (("direct", bench.direct), ("gateway", bench.through)):
        runs = [statistics.median(measure(1, 300, SMALL)[1]) for _ in range(3)]
        alone[kind] = result[f"{kind} alone p50 ms"] = 1000 * min(runs)
    result["added p50 ms"] = alone["gateway"] - alone["direct"]
    result |= seats(bench, max(CALLS, int(1000 * seconds / 64)))
    for kind, measure in (("direct", bench.direct), ("gateway", bench.through)):
        result[f"{kind} 400 at once s"] = min(measure(400, 1, SMALL, True)[0] for _ in range(3))
    return result | memory(bench, attempts)


def seats(bench: Bench, calls: int) -> dict[str, float]:
    """What roles cost: two that are played by seats on two servers, against one agent on one. The
    rates of pairs measured one after the other, in turn first; their median ratio and its
    quartiles, and the gateway's processor time for a call."""
    ratios, spent = [], {"one role": list[float](), "two seats": list[float]()}
    kinds = {"one role": ("",), "two seats": tuple(SEATS)}
    for pair in range(PAIRS + 1):
        rates = {}
        for kind in sorted(kinds, reverse=bool(pair % 2)):
            before = bench.ask("cpu")
            took, latencies = bench.through(16, calls, SMALL, roles=kinds[kind])
            rates[kind] = len(latencies) / took
            if pair:  # the first warms both up
                spent[kind].append((bench.ask("cpu") - before) / len(latencies))
        if pair:
            ratios.append(rates["two seats"] / rates["one role"])
    low, middle, high = statistics.quantiles(ratios, n=4)
    cpu = {f"{kind} cpu ms": 1000 * statistics.median(each) for kind, each in spent.items()}
    ratio = {"two seats of one role": middle, "two seats low": low, "two seats high": high}
    return ratio | cpu


def memory(bench: Bench, attempts: int) -> dict[str, float]:
    """Resident MiB after the first tenth of the attempts and after the last."""
    first, each = 0.0, max(attempts // 500, 1)
    for done in range(0, attempts, 50 * each):
        bench.through(50, each * CALLS, SMALL)
        if not done:
            first = bench.ask("memory")
    last = bench.ask("memory")
    megabyte = 2**20
    return {
        "attempts": attempts,
        "memory first MiB": first / megabyte,
        "memory last MiB": last / megabyte,
        "memory growth MiB": (last - first) / megabyte,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each rate, about")
    parser.add_argument("--attempts", type=int, default=10_000, help="for the memory figure")
    parser.add_argument("--seats", action="store_true", help="only what roles cost")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(folder)
        try:
            if options.seats:
                result = seats(bench, max(CALLS, int(1000 * options.seconds / 64)))
            else:
                result = figures(bench, seconds=options.seconds, attempts=options.attempts)
        finally:
            bench.close()
    report(result, as_json=options.json)


if __name__ == "__main__":
    main()
