"""A real vLLM child process: its mistakes, its death, and a whole run on it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path

import aiohttp
import pytest
import torch

from agentrl.algorithms.engines.choice import vllm_server
from agentrl.algorithms.engines.vllm import VllmServer
from agentrl.algorithms.model import load_model
from agentrl.config import resolve
from agentrl.errors import PolicyError
from agentrl.store import open_store

psutil = pytest.importorskip("psutil")
pytestmark = [
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed: run `make test-engines`"
    ),
    pytest.mark.timeout(600),
]
ENGINE = {"kind": "vllm", "max_context": 512}


def server_of(model_dir: Path, output: Path) -> tuple[VllmServer, torch.nn.Module]:
    config = resolve({"output": str(output), "engine": ENGINE}, source="test")
    model, tokenizer = load_model(model_dir, device="cpu")
    return vllm_server(config, model, tokenizer), model


def offspring() -> list[int]:
    return [process.pid for process in psutil.Process().children(recursive=True)]


@pytest.fixture
async def started(
    wide_model_dir: Path, tmp_path: Path
) -> AsyncIterator[tuple[VllmServer, torch.nn.Module]]:
    before = set(offspring())
    server, model = server_of(wide_model_dir, tmp_path)
    await server.start()
    yield server, model
    await server.close()
    assert set(offspring()) <= before
    assert not list(tmp_path.glob("vllm/weights-*"))


async def version(server: VllmServer) -> str:
    body = {"model": server.model, "prompt": [5, 6, 7], "max_tokens": 1}
    url = f"{server.base_url}/completions"
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as reply:
        assert reply.status == 200
        return reply.headers["x-policy-version"]


async def test_it_survives_its_death_and_tells_wrong_weights(
    started: tuple[VllmServer, torch.nn.Module],
) -> None:
    server, model = started
    await server.publish(1)
    workers = [pid for pid in offspring() if "Worker" in psutil.Process(pid).name()]
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    await server.publish(2)  # waits for the next child, and checks its log-probs
    assert workers
    assert not set(workers) & set(offspring())
    assert await version(server) == "2"

    learned = server._score
    server._score = lambda tokens: [logprob - 0.5 for logprob in learned(tokens)]
    with pytest.raises(PolicyError, match=r"version 3: log-prob -.* against -.*tolerance 0\.001"):
        await server.publish(3)
    server._score = learned

    server._export = lambda directory: None  # nothing is written: what vLLM loads is not there
    with pytest.raises(PolicyError, match=r"vLLM: /collective_rpc: 500 "):
        await server.publish(4)


async def test_a_model_that_vllm_cannot_run_is_a_sentence(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Its attention has no kernel for heads of 16, which it notices at the first call only."""
    before = set(offspring())
    server, _ = server_of(tiny_model_dir, tmp_path)
    with pytest.raises(PolicyError, match=r"failed at its first call; it said: .*head_dim=16"):
        await server.start()
    assert set(offspring()) <= before


def test_a_langchain_agent_is_trained_with_grpo_on_vllm(
    run_folder: Path, wide_model_dir: Path
) -> None:
    """Log-probs of sampler and learner agree at every step, which nothing but exact tokens and the
    newest weights can do."""
    overrides = ["engine.kind=vllm", "engine.max_context=512", f"policy.model={wide_model_dir}"]
    small = ["steps=3", "algorithm.groups=2", "algorithm.group_size=4"]
    trained = subprocess.run(
        [sys.executable, "-m", "agentrl", "train", "run.toml", *small, *overrides],
        cwd=run_folder,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert trained.returncode == 0, trained.stdout + trained.stderr

    async def metrics() -> list[dict[str, float]]:
        async with open_store(f"sqlite:///{run_folder / 'out' / 'store.db'}") as store:
            return [row.metrics for row in await store.steps("tiny") if row.committed]

    steps = asyncio.run(metrics())
    assert len(steps) == 3
    for step in steps:
        assert step["rollouts"] == 8
        assert step["update/skipped"] == 0
        assert step["logprob_difference/max"] <= 1e-4
