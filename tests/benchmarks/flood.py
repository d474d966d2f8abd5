"""Do servers answer others while one client floods them?

python -m tests.benchmarks.flood --json [--only connections|engine|gateway] [--connections 10000]

`connections`: one thread opens half-open connections of a store's server as fast as it can; another
process asks `/healthz` by a new connection, again and again, from the first of them to ten seconds
after the last.

`engine` and `gateway`: a rollout sends one tool result of `--megabytes` to the embedded engine with
a context of 32,768 tokens, or to a gateway with a scripted endpoint behind it, while another
rollout makes short calls one after the other. The stall is its slowest call from the first byte to
a second after the answer, less the median of a second before; memory is the server's peak.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import multiprocessing
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import Event, Pipe, Process
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event as EventType
from pathlib import Path

import psutil

from tests.benchmarks.report import arguments, report

HALF = b"POST /v1/cursor HTTP/1.1\r\nhost: localhost\r\n"
CONTEXT = 32_768  # tokens, of the engine
WHOLE = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"


def ask(port: int, done: EventType, to: Connection) -> None:
    """Sends the seconds of every request, infinity for one that was not answered."""
    seconds = []
    while not done.is_set():
        began = time.perf_counter()
        answered = False
        address = ("127.0.0.1", port)
        with (
            contextlib.suppress(OSError),
            socket.create_connection(address, timeout=10) as connection,
        ):
            connection.sendall(WHOLE)
            answered = connection.recv(4096).startswith(b"HTTP/1.1 200")
        seconds.append(time.perf_counter() - began if answered else float("inf"))
        time.sleep(0.02)
    to.send(seconds)


def flood(port: int, pid: int, connections: int) -> dict[str, float]:
    done, (receive, send) = Event(), Pipe(duplex=False)
    asking = Process(target=ask, args=(port, done, send))
    asking.start()
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        for _ in range(connections):
            connection = socket.create_connection(("127.0.0.1", port), timeout=30)
            stack.enter_context(connection).sendall(HALF)
        poured = time.perf_counter() - began
        time.sleep(10)
        memory = psutil.Process(pid).memory_info().rss / 2**20
    done.set()
    seconds = sorted(receive.recv())
    asking.join()
    return {
        "connections": connections,
        "poured_in_s": round(poured, 2),
        "requests": len(seconds),
        "healthz_p99_s": round(seconds[int(0.99 * (len(seconds) - 1))], 3),
        "healthz_max_s": round(seconds[-1], 3),
        "rss_mb": round(memory, 1),
    }


# -- one large body --------------------------------------------------------------------------------


def engine(pipe: Connection, folder: str) -> None:
    """Serve the tiny model; send the port and what a call's Authorization says."""
    from agentrl.algorithms.engines.embedded.server import EmbeddedServer
    from agentrl.algorithms.model.load import load_model
    from tests.tiny_models import qwen2

    async def main() -> None:
        saved = qwen2(Path(folder), seed=0, max_position_embeddings=CONTEXT)
        model, tokenizer = load_model(saved, device="cpu")
        server = EmbeddedServer(model, tokenizer, max_context=CONTEXT, threads=1)
        await server.start()
        pipe.send((int(server.base_url.split(":")[2].split("/")[0]), ["none", "none"]))
        await asyncio.to_thread(pipe.recv)
        await server.close()

    asyncio.run(main())


def gateway(pipe: Connection, folder: str) -> None:
    """As `engine`, of a gateway whose policy is a fixed text."""
    from agentrl.core.config import UpstreamConfig
    from agentrl.core.types import NewRollout
    from agentrl.runners.gateway.server import Gateway
    from agentrl.store import open_store

    async def main() -> None:
        async with open_store(f"sqlite:///{folder}/store.db") as store:
            await store.open_run("flood", {})
            fixed = {"fixed": UpstreamConfig(text="four")}
            server = Gateway(store, "flood", upstreams=fixed, roles={"*": "fixed"}, remote=True)
            server.start()
            rows = [
                NewRollout(id=n, run="flood", group=n, index=0, task={}, timeout=3600.0)
                for n in ("large", "small")
            ]
            await store.enqueue(rows)
            claimed = await store.claim(2, runner="flood", lease=3600.0, run="flood")
            live = [server.register(attempt) for attempt in claimed]
            pipe.send((server.port, [one.id for one in live]))
            await asyncio.to_thread(pipe.recv)
            await asyncio.to_thread(server.close)

    asyncio.run(main())


def post(port: int, key: str, body: bytes) -> int:
    """The status of a chat completion."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    connection.request("POST", "/v1/chat/completions", body, headers)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


def chat_body(text: str) -> bytes:
    call = {"id": "1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Read it."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": text},
    ]
    return json.dumps({"model": "policy", "messages": messages, "max_tokens": 2}).encode()


def send_large(pipe: Connection, port: int, key: str, megabytes: float) -> None:
    """In a process of its own, which makes the body before it is told to send it."""
    body = chat_body("Ada was born in 1815;\n" * int(megabytes * 2**20 / 22))
    pipe.send(None)
    pipe.recv()
    began = time.perf_counter()
    status = post(port, key, body)
    pipe.send((status, time.perf_counter() - began))


def peak(pid: int) -> float:
    """Largest resident memory of a process until now, in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def stall(server: Callable[[Connection, str], None], megabytes: float) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    (ours, theirs), (told, tell) = context.Pipe(), context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        served = context.Process(target=server, args=(theirs, folder))
        served.start()
        port, (large, small) = ours.recv()
        sender = context.Process(target=send_large, args=(tell, port, large, megabytes))
        sender.start()
        told.recv()
        calls: list[tuple[float, float]] = []  # time of the answer, seconds
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                began = time.perf_counter()
                assert post(port, small, chat_body("1815")) == 200
                calls.append((time.perf_counter(), time.perf_counter() - began))
                time.sleep(0.005)

        asking = threading.Thread(target=ask)
        asking.start()
        time.sleep(3)
        before, began = peak(served.pid or 0), time.perf_counter()
        told.send(None)
        status, seconds = told.recv()
        time.sleep(1)
        stop.set()
        asking.join()
        after = peak(served.pid or 0)
        ours.send(None)
        served.join()
        sender.join()
    usual = statistics.median(s for at, s in calls if began - 1 < at < began)
    slowest = max(s for at, s in calls if at > began)
    return {
        "status": status,
        "answer_s": round(seconds, 2),
        "median_ms": round(usual * 1000, 1),
        "stall_ms": round((slowest - usual) * 1000),
        "peak_mb": round(after),
        "peak_ratio": round(after / before, 2),
    }


def connections(count: int) -> dict[str, float]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "keys").write_text("admin:flood-secret\n")
        command = [
            sys.executable,
            "-m",
            "agentrl",
            "store",
            "serve",
            f"sqlite:///{folder}/store.db",
        ]
        command += ["--port", "0", "--keys", f"{folder}/keys"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            port = int(server.stdout.readline().strip().rpartition(":")[2])
            result = flood(port, server.pid, count)
            server.terminate()
    return result


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=("connections", "engine", "gateway"))
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--megabytes", type=float, default=50.0)
    options = parser.parse_args()
    result = {} if options.only not in (None, "connections") else connections(options.connections)
    for server in (engine, gateway):
        if options.only in (None, server.__name__):
            found = stall(server, options.megabytes)
            result |= {f"{server.__name__}_{name}": figure for name, figure in found.items()}
    report(result, as_json=options.json)


if __name__ == "__main__":
    main()
