"""How long a publish takes and how many calls are answered, by the policy servers side by side.

python tests/benchmarks/engines.py --model DIRECTORY --kinds embedded vllm --json

The model must be one that both serve: vLLM's attention on a CPU takes heads of 32 and larger. Calls
are 32 at a time, of 16 tokens; a publish is `updating` and `publish` while nobody calls, and the
median of ten.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from statistics import median

import aiohttp
from transformers.utils.logging import disable_progress_bar

from agentrl.algorithms.engines.base import PolicyServer
from agentrl.algorithms.engines.choice import policy_server
from agentrl.algorithms.model import load_model
from agentrl.config import resolve

CALLERS, CALLS, PUBLISHES = 32, 512, 10


async def measure(kind: str, model_dir: str, folder: Path) -> dict[str, float]:
    config = resolve(
        {"output": str(folder / kind), "engine": {"kind": kind, "max_context": 512}},
        source="benchmark",
    )
    model, tokenizer = load_model(model_dir, device="cpu")
    server = policy_server(config, model, tokenizer)
    started = time.monotonic()
    await server.start()
    try:
        up = time.monotonic() - started
        await calls(server, CALLERS)  # what is only slow at first
        rate = await calls(server, CALLS)
        seconds = [await publish(server, version) for version in range(PUBLISHES)]
    finally:
        await server.close()
    return {
        "start_s": up,
        "calls_per_s": rate,
        "publish_ms": 1000 * median(seconds),
        "publish_ms_max": 1000 * max(seconds),
    }


async def calls(server: PolicyServer, count: int) -> float:
    """Calls per second."""
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": "What is the team of Ada Berg?"}],
        "max_tokens": 16,
        "logprobs": True,
        "return_token_ids": True,
    }
    numbers = iter(range(count))
    limits = aiohttp.TCPConnector(limit=CALLERS)
    async with aiohttp.ClientSession(connector=limits, raise_for_status=True) as http:

        async def caller() -> None:
            for _ in numbers:
                async with http.post(f"{server.base_url}/chat/completions", json=body) as reply:
                    await reply.read()

        started = time.monotonic()
        await asyncio.gather(*(caller() for _ in range(CALLERS)))
        return count / (time.monotonic() - started)


async def publish(server: PolicyServer, version: int) -> float:
    started = time.monotonic()
    async with server.updating():
        await server.publish(version)
    return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--kinds", nargs="+", default=["embedded", "vllm"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        results = {
            kind: asyncio.run(measure(kind, options.model, Path(folder))) for kind in options.kinds
        }
    if options.json:
        print(json.dumps(results, indent=2))
        return
    for kind, figures in results.items():
        print(kind, *(f"{name} {value:.1f}" for name, value in figures.items()), sep="  ")


if __name__ == "__main__":
    main()
