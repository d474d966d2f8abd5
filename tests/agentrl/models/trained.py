"""A run as training leaves it: a store and three checkpoints, of which the second is the best."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import msgspec

from agentrl.algorithms.train.checkpoint import save_checkpoint
from agentrl.core.config import resolve
from agentrl.store import open_store
from tests import factories

SCORES = {0: 0.2, 2: 0.9, 4: 0.7, 6: 0.8}  # held-out, by step


class Files:
    """A learner that saves the files of a model."""

    def __init__(self, model: Path) -> None:
        self.model = model

    def save(self, directory: Path) -> None:
        shutil.copytree(self.model, directory, dirs_exist_ok=True)

    def load(self, directory: Path) -> None: ...


def make(root: Path, model: Path, name: str = "mine", **policy: str) -> str:
    """A run in root/runs/<name>; returns the URL of its store. policy: more of its settings."""
    output = root / "runs" / name
    settings = {
        "name": name, "output": str(output), "root": str(root),
        "policy": {"model": str(model)} | policy,
        "steps": 6, "tasks": {"train": "train.jsonl", "heldout": "heldout.jsonl"},
        "verifier": {"path": "verifier.py:verify"}, "sampling": {"max_tokens": 8},
        "algorithm": {"preset": "rloo", "lr": 1e-5},
    }  # fmt: skip
    config = resolve(settings, source="test")

    async def fill() -> None:
        async with open_store(config.store) as store:
            state = await store.open_run(name, msgspec.to_builtins(config))
            for step in range(6):
                last = f"checkpoints/{step + 1:06d}" if step % 2 else None
                metrics = {"rollouts": 64.0, "reward/mean": step / 10}
                commit = factories.commit(
                    step, run=name, epoch=state.epoch, checkpoint=last, metrics=metrics
                )
                await store.commit_step(commit)
            for step, score in SCORES.items():
                ends = {"eval/score_low": score - 0.1, "eval/score_high": score + 0.1}
                await store.log(name, step, {"eval/score": score} | ends)

    folder = output / "checkpoints"
    folder.mkdir(parents=True)
    asyncio.run(fill())
    for steps in (2, 4, 6):
        save_checkpoint(folder / f"{steps:06d}", Files(model), {})
    (folder / "best").symlink_to("000002")
    return config.store
