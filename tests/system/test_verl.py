"""Whole runs on verl's workers: killed and continued, and with vLLM and a LangChain agent."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from agentrl.store import open_store
from tests.engines.program import environment
from tests.system.test_run import measured

psutil = pytest.importorskip("psutil")
LIMIT = 300  # seconds for one start; 30 on two idle cores
pytestmark = [
    pytest.mark.skipif(
        find_spec("verl") is None or find_spec("ray") is None,
        reason="verl is not installed: run `make test-engines`",
    ),
    pytest.mark.timeout(4 * LIMIT),
]
PROGRAM = Path(__file__).parent / "verl_run.py"
SHOWN = (
    *("loss", "grad_norm", "lr", "policy/entropy", "logprob_difference/mean"),
    *("critic/loss", "critic/value_mean", "reference/beta", "reference/drift"),
)


@pytest.fixture
def ray_folder() -> Iterator[str]:
    """Where Ray keeps its sockets, whose paths must be short; known to all its processes."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        yield folder
        for process in of(folder):
            process.kill()


def of(folder: str) -> list[psutil.Process]:
    """The processes of a Ray that works in this folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RAY_TMPDIR") == folder:
                found.append(process)
        except psutil.Error:
            continue
    return found


def start(folder: Path, model: Path, ray: str, *strike: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            str(Path(__file__).parent / "verl_run.py"),
            str(folder),
            str(model),
            *strike,
        ],
        env=environment(RAY_TMPDIR=ray),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def outcome(folder: Path) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Metrics of every step, and all tensors of the last checkpoint."""

    async def read() -> tuple[list[list[float]], str]:
        async with open_store(f"sqlite:///{folder / 'out' / 'store.db'}") as store:
            rows = [row for row in await store.steps("steady") if row.committed]
            state = await store.run("steady")
        assert state is not None
        assert state.checkpoint is not None
        losses = [[row.metrics[name] for name in SHOWN] for row in rows]
        return losses, str(folder / "out" / state.checkpoint)

    losses, checkpoint = asyncio.run(read())
    folder = Path(checkpoint)
    return losses, {
        f"{file.relative_to(folder)}/{name}": tensor
        for file in folder.rglob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def test_killed_and_continued_a_run_ends_where_it_would_have_ended(
    tiny_model_dir: Path, tmp_path: Path, ray_folder: str
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    uninterrupted = start(whole, tiny_model_dir, ray_folder)
    assert uninterrupted.returncode == 0, uninterrupted.stderr[-2000:]
    gone(ray_folder)

    killed = start(broken, tiny_model_dir, ray_folder, "driver:optimizer:3")
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    gone(ray_folder)

    failed = start(broken, tiny_model_dir, ray_folder, "worker:update:2")
    assert failed.returncode == 1
    said = failed.stderr.splitlines()[-1]
    assert said.startswith("TrainingError: a worker of verl died in '"), failed.stderr
    assert said.endswith("; the same command goes on after the last committed step")
    gone(ray_folder)

    continued = start(broken, tiny_model_dir, ray_folder)
    assert continued.returncode == 0, continued.stderr[-2000:]
    (losses, tensors), (expected, right) = outcome(broken), outcome(whole)
    assert len(losses) == 3
    assert losses == expected
    assert tensors.keys() == right.keys()
    assert {name.partition("/")[0] for name in tensors} > {"critic", "reference.safetensors"}
    assert not [name for name, tensor in tensors.items() if not torch.equal(tensor, right[name])]


def gone(folder: str) -> None:
    """Nothing of Ray is left; it may take a moment to notice that its driver was killed."""
    until = time.monotonic() + 180
    while left := of(folder):
        assert time.monotonic() < until, [process.cmdline() for process in left]
        psutil.wait_procs(left, timeout=1.0)


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_langchain_agent_is_trained_with_grpo_on_verl_and_vllm(
    run_folder: Path, wide_model_dir: Path, ray_folder: str
) -> None:
    """Log-probs of sampler and learner agree at every step: what FSDP2 workers learned is what vLLM
    serves."""
    settings = [
        *(
            "steps=2",
            "algorithm.groups=2",
            "algorithm.group_size=4",
            f"policy.model={wide_model_dir}",
        ),
        *("engine.kind=vllm", "engine.max_context=512"),
        *("learner.kind=verl", "learner.verl.gpus_per_node=2", "learner.verl.attention=sdpa"),
    ]
    trained = subprocess.run(
        [sys.executable, "-m", "agentrl", "train", "run.toml", *settings],
        cwd=run_folder,
        env=environment(RAY_TMPDIR=ray_folder),
        capture_output=True,
        text=True,
        timeout=2 * LIMIT,
        check=False,
    )
    assert trained.returncode == 0, trained.stdout + trained.stderr
    gone(ray_folder)

    steps = measured(run_folder)
    assert len(steps) == 2
    for step in steps:
        assert step["rollouts"] == 8
        assert step["update/skipped"] == 0
        assert step["logprob_difference/max"] <= 1e-4
        assert step["policy/entropy"] > 0
