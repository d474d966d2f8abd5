"""How long a publish takes and how many calls are answered, by the policy servers side by side.

python tests/benchmarks/engines.py --model DIRECTORY --kinds embedded vllm adapter --json
python tests/benchmarks/engines.py --demo --kinds embedded vllm

The model must be one that both serve: vLLM's attention on a CPU takes heads of 32 and larger. Calls
are 32 at a time, of 16 tokens; a publish is `updating` and `publish` while nobody calls, and the
median of ten. `adapter` is vLLM with the weights of a LoRA adapter alone. `--demo` counts rollouts
per second in steps of the demo, with a model of the same size and half as many, wider heads.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import aiohttp
from transformers.utils.logging import disable_progress_bar

from agentrl.algorithms.adapters import Adapters
from agentrl.algorithms.engines.base import PolicyServer
from agentrl.algorithms.engines.choice import policy_server
from agentrl.algorithms.model import load_model
from agentrl.config import resolve
from agentrl.store import open_store
from agentrl.types import POLICY

DEMO = Path(__file__).parents[2] / "examples" / "staff"
STEPS = 5
CALLERS, CALLS, PUBLISHES = 32, 512, 10


async def measure(kind: str, model_dir: str, folder: Path) -> dict[str, float]:
    config = resolve(
        {
            "output": str(folder / kind),
            "engine": {"kind": "vllm" if kind == "adapter" else kind, "max_context": 512},
        },
        source="benchmark",
    )
    model, tokenizer = load_model(model_dir, device="cpu")
    adapters = None
    if kind == "adapter":
        adapters = Adapters(model)
        adapters.add(POLICY, rank=8, alpha=16.0)
    server = policy_server(config, model, tokenizer, adapters)
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


def demo(kind: str, folder: Path) -> dict[str, float]:
    """Rollouts per second of the steps after the first, which has the agents' imports in it."""
    copy = folder / "staff"
    if not copy.exists():
        shutil.copytree(DEMO, copy, ignore=shutil.ignore_patterns("__pycache__", "runs"))
        code = (copy / "policy.py").read_text()
        for name, heads, fewer in (("attention_heads", 4, 2), ("key_value_heads", 2, 1)):
            wide = code.replace(f"num_{name}={heads}", f"num_{name}={fewer}")
            assert wide != code
            code = wide
        (copy / "policy.py").write_text(code)
    output = folder / f"demo-{kind}"
    chosen = [f"output={output}", f"steps={STEPS}", "eval.tasks=8", "eval.every=0"]
    chosen += [f"policy.model={copy / 'policy'}", f"engine.kind={kind}", "engine.max_context=512"]
    command = [sys.executable, "-m", "agentrl", "train", str(copy / "run.toml"), *chosen]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return asyncio.run(pace(output))


async def pace(output: Path) -> dict[str, float]:
    async with open_store(f"sqlite:///{output / 'store.db'}") as store:
        (name,) = await store.runs()
        rows = [row.metrics for row in await store.steps(name) if "time/rollouts" in row.metrics]
    seconds = sum(row["time/rollouts"] for row in rows[1:])
    return {
        "rollouts_per_s": sum(row["rollouts"] for row in rows[1:]) / seconds,
        "update_s": sum(row["time/update"] for row in rows[1:]) / len(rows[1:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--model")
    asked.add_argument("--demo", action="store_true")
    parser.add_argument("--kinds", nargs="+", default=["embedded", "vllm"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        results = {
            kind: demo(kind, Path(folder))
            if options.demo
            else asyncio.run(measure(kind, options.model, Path(folder)))
            for kind in options.kinds
        }
    if options.json:
        print(json.dumps(results, indent=2))
        return
    for kind, figures in results.items():
        print(kind, *(f"{name} {value:.1f}" for name, value in figures.items()), sep="  ")


if __name__ == "__main__":
    main()
