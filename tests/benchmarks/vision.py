"""What do images cost? In the store, and on the way through the gateway.

python -m tests.benchmarks.vision --json

An agent sends a screenshot of 1280 x 800 pixels, a file of about 250 kB, in each call; Qwen2.5-VL
reads 1,260 placeholders. `bytes_per_call`: bytes of the store file per call of a conversation of
ten turns that shows all its screenshots in every call, without the images' own files;
`full_bytes_per_call`: with data URLs in the messages. `capture_ms`: median milliseconds that a
screenshot adds to a call through the gateway, less those that it adds to the same call sent
directly to the upstream; `capture_cpu_ms`: CPU of the gateway's process that it adds. Calls with
and without a screenshot alternate. `vllm_logprob_error_<class>`: largest difference in nats between
the log-probs of a real vLLM on the CPU, after two updates of the weights, and those of the class's
forward pass with pixel values; left out where vLLM is not installed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sqlite3
import statistics
import struct
import sys
import tempfile
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agentrl.store import open_store
from agentrl.types import Image, NewRollout, Transition, float32, int32
from tests.benchmarks.gateway import CALLS, RUN, SMALL, Bench
from tests.benchmarks.store_load import text

WIDTH, HEIGHT, BYTES, SPREAD, PLACEHOLDERS = 1280, 800, 250_000, 20_000, 1260
CONVERSATIONS, TURNS = 4, 10
COMPLETION, QUESTION = 128, 64  # tokens of each turn
PAIRS = 64  # of calls with and without a screenshot
Figures = dict[str, float]


def screenshot(number: int) -> bytes:
    """A file of about `BYTES` with a PNG's chunks. Nobody here decodes its pixels."""
    chance = random.Random(number)
    noise = chance.randbytes(BYTES + chance.randrange(-SPREAD, SPREAD))
    header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", noise), (b"IEND", b""))
    chunks = (struct.pack(">I", len(data)) + kind + data + bytes(4) for kind, data in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def data_url(body: bytes) -> str:
    return f"data:image/png;base64,{b64encode(body).decode()}"


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


# -- the store -------------------------------------------------------------------------------------


def conversation(attempt: str, bodies: list[bytes], *, full: bool) -> Iterator[Transition]:
    """Calls of an agent that shows a new screenshot in each. full: with data URLs."""
    prompt, messages, digests = list(range(200)), list[Any](), list[str]()
    for turn, body in enumerate(bodies):
        digests.append(sha256(body).hexdigest())
        prompt += [151_655] * PLACEHOLDERS + [turn * 100 + i for i in range(QUESTION)]
        shown = part(data_url(body) if full else f"image:{digests[-1]}")
        words = {"type": "text", "text": f"{turn} {text(QUESTION)}"}
        messages.append({"role": "user", "content": [shown, words]})
        answer = {"role": "assistant", "content": f"{turn} {text(COMPLETION)}"}
        said = [turn * 1000 + i for i in range(COMPLETION)]
        yield Transition(
            id=f"{attempt}-{turn}",
            attempt=attempt,
            index=turn,
            prompt=int32(prompt),
            completion=int32(said),
            logprobs=float32([-0.1 * (i % 9) for i in range(COMPLETION)]),
            messages=list(messages),
            answer=answer,
            images=() if full else tuple(digests),
        )
        prompt += said
        messages.append(answer)


def bytes_per_call(*, full: bool) -> float:
    bodies = [[screenshot(c * TURNS + t) for t in range(TURNS)] for c in range(CONVERSATIONS)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "store.db")
        asyncio.run(_fill(path, bodies, full=full))
        with sqlite3.connect(path) as conn:
            conn.execute("vacuum")
        conn.close()
        size = path.stat().st_size
        asyncio.run(_fill(empty := Path(folder, "empty.db"), [], full=full))
        size -= empty.stat().st_size
    images = 0 if full else sum(len(body) for some in bodies for body in some)
    return (size - images) / (CONVERSATIONS * TURNS)


async def _fill(path: Path, bodies: list[list[bytes]], *, full: bool) -> None:
    async with open_store(f"sqlite:///{path}") as store:
        await store.open_run(RUN, {})
        for number, some in enumerate(bodies):
            name = f"r{number}"
            await store.enqueue([NewRollout(id=name, run=RUN, group=name, index=0, task={})])
            (attempt,) = await store.claim(1, runner="b", lease=600.0)
            for body, call in zip(some, conversation(attempt.id, some, full=full), strict=True):
                if not full:
                    digest = sha256(body).hexdigest()
                    await store.put_images(RUN, [Image(digest, "image/png", WIDTH, HEIGHT, body)])
                await store.add_transitions([call])


# -- the gateway -----------------------------------------------------------------------------------


def request(attempt: str, body: bytes | None) -> bytes:
    prompt, completion = SMALL
    said: list[Any] = [{"type": "text", "text": "word " * prompt}]
    said += [] if body is None else [part(data_url(body))]
    asked: dict[str, Any] = {"model": "gpt", "messages": [{"role": "user", "content": said}]}
    asked |= {"max_tokens": completion}
    asked |= {} if attempt else {"logprobs": True, "return_token_ids": True}
    raw = json.dumps(asked, separators=(",", ":")).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    head += f"authorization: Bearer {attempt}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


def added(bench: Bench, port: int, ids: list[str]) -> float:
    """Seconds that a screenshot adds to a call."""
    work = []
    for pair in range(PAIRS):
        attempt = ids[2 * pair // CALLS] if ids else ""
        work += [request(attempt, None), request(attempt, screenshot(pair))]
    _, seconds = bench.send(port, [work])
    warm = len(seconds) // 8 * 2
    return statistics.median(seconds[warm + 1 :: 2]) - statistics.median(seconds[warm::2])


def gateway_figures() -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(folder, "frozen")
        try:
            ids = bench.ask("attempts", 2 * PAIRS // CALLS)
            through = added(bench, bench.gateway_port, ids)
            direct = added(bench, bench.upstream_port, [])
            bench.ask("end")
            cpu = {}
            for shown in (False, True):
                ids = bench.ask("attempts", PAIRS // CALLS)
                bodies = [screenshot(1000 + i) if shown else None for i in range(PAIRS)]
                work = [request(ids[i // CALLS], body) for i, body in enumerate(bodies)]
                before = bench.ask("cpu")
                bench.send(bench.gateway_port, [work])
                cpu[shown] = (bench.ask("cpu") - before) / PAIRS
                bench.ask("end")
        finally:
            bench.close()
    return {
        "capture_ms": 1000 * (through - direct),
        "direct_ms": 1000 * direct,
        "capture_cpu_ms": 1000 * (cpu[True] - cpu[False]),
    }


# -- vLLM ------------------------------------------------------------------------------------------


def vllm_figures() -> Figures:
    if find_spec("vllm") is None:
        print(
            "vllm_logprob_error: skipped, because vLLM is not installed here; run `make "
            "test-engines`, and this with .venv-engines/bin/python",
            file=sys.stderr,
        )
        return {}
    from tests.agentrl.vision.on_vllm import WAYS

    found = {f"vllm_logprob_error_{kind}": asyncio.run(_vllm_error(kind)) for kind in WAYS}
    return found | {"vllm_logprob_error": max(found.values())}


async def _vllm_error(kind: str) -> float:
    from tests.agentrl.vision.on_vllm import serving

    with tempfile.TemporaryDirectory() as folder:
        async with serving(kind, Path(folder)) as served:
            gaps = await served.gaps()
            for _ in range(2):
                await served.change()
                gaps += await served.gaps()
    return max(gaps)


def figures() -> Figures:
    return {
        "bytes_per_call": bytes_per_call(full=False),
        "full_bytes_per_call": bytes_per_call(full=True),
        **gateway_figures(),
        **vllm_figures(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    found = figures()
    if parser.parse_args().json:
        print(json.dumps({name: float(f"{value:.4g}") for name, value in found.items()}))
        return
    for name, value in found.items():
        print(f"{name:<32} {value:>12.4g}")


if __name__ == "__main__":
    main()
