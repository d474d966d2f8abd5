"""How long a publish takes and how many calls are answered, by the policy servers side by side.

python tests/benchmarks/engines.py --model DIRECTORY --kinds embedded vllm reload adapter --json
python tests/benchmarks/engines.py --model DIRECTORY --kinds vllm --urls http://127.0.0.1:8000
python tests/benchmarks/engines.py --demo --kinds embedded vllm

The model must be one that both serve: vLLM's attention on a CPU takes heads of 32 and larger.
Calls are 32 at a time, of 16 tokens; a publish is `updating` and `publish` of other weights while
nobody calls, and the median of 20, as is each of its parts: hold (calls in flight end), take (the
learner's weights are copied or written), send (vLLM has them), reset (of its prefix cache), check
(of its log-probs). `vllm` sends all weights through memory, `reload` by a checkpoint, `adapter`
those of a LoRA adapter alone. With `--urls`, of servers that run already, there is no child.
`--demo` counts rollouts per second in steps of the demo, with a model of the same size and half as
many, wider heads.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from agentrl.algorithms.engines.base import PolicyServer
from agentrl.algorithms.engines.vllm.server import VllmServer
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.model.lora import LoraAdapters
from agentrl.algorithms.train.serving import policy_server
from agentrl.core.config import resolve
from agentrl.core.types import POLICY
from agentrl.store import open_store
from tests.benchmarks.report import arguments, report

DEMO = Path(__file__).parents[2] / "examples" / "staff"
STEPS = 5
CALLERS, CALLS, PUBLISHES = 32, 512, 20
KINDS = "embedded", "vllm", "reload", "adapter"


async def measure(
    kind: str, model_dir: str, folder: Path, calls_made: int, urls: list[str]
) -> dict[str, float]:
    engine: dict[str, Any] = {"kind": kind, "max_context": 512}
    if kind != "embedded":
        sync = "reload" if kind == "reload" else "auto"
        engine |= {"kind": "vllm", "vllm": {"urls": urls, "sync": sync}}
    config = resolve({"output": str(folder / kind), "engine": engine}, source="benchmark")
    model, tokenizer = load_model(model_dir, device="cpu")
    adapters = None
    if kind == "adapter":
        adapters = LoraAdapters(model)
        adapters.add(POLICY, rank=8, alpha=16.0)
    trained = adapters.parameters(POLICY).values() if adapters else model.parameters()
    first = [(weight, weight.detach().clone()) for weight in trained]
    server = policy_server(config, model, tokenizer, adapters)
    started = time.monotonic()
    await server.start()
    try:
        up = time.monotonic() - started
        await calls(server, CALLERS)  # what is only slow at first
        rate = await calls(server, calls_made)
        publishes = [await publish(server, version, first) for version in range(PUBLISHES)]
    finally:
        await server.close()
    parts = {
        f"publish_{part}_ms": 1000 * median(p[part] for p in publishes) for part in publishes[0]
    }
    return {"start_s": up, "calls_per_s": rate, **parts}


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


async def publish(
    server: PolicyServer, version: int, first: list[tuple[Tensor, Tensor]]
) -> dict[str, float]:
    """Seconds, of all and of its parts."""
    with torch.no_grad():
        for weight, value in first:
            weight.copy_(value + 0.02 * torch.randn_like(value))
    started = time.monotonic()
    async with server.updating():
        await server.publish(version)
    taken = {"all": time.monotonic() - started}
    return taken | (server.delivery.seconds if isinstance(server, VllmServer) else {})


def demo(kind: str, folder: Path) -> dict[str, float]:
    """Rollouts per second of the steps after the first, which has the agents' imports in it."""
    copy = folder / "staff"
    if not copy.exists():
        shutil.copytree(DEMO, copy, ignore=shutil.ignore_patterns("__pycache__", "runs"))
        code = (copy / "policy.py").read_text()
        wide = code.replace("tools=TOOLS)", "tools=TOOLS, heads=2)")
        assert wide != code
        (copy / "policy.py").write_text(wide)
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
    parser = arguments(__doc__)
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--model")
    asked.add_argument("--demo", action="store_true")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["embedded", "vllm"])
    parser.add_argument("--urls", nargs="+", default=[])
    parser.add_argument("--calls", type=int, default=CALLS)
    options = parser.parse_args()
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        results = {
            kind: demo(kind, Path(folder))
            if options.demo
            else asyncio.run(
                measure(kind, options.model, Path(folder), options.calls, options.urls)
            )
            for kind in options.kinds
        }
    report(results, as_json=options.json)


if __name__ == "__main__":
    main()
