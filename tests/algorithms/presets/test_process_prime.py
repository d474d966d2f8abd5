"""PRIME from the command line: a reward model that learns, stopped and continued."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.test_run import agentrl, read

VERIFIER = "def verify(task, result):\n    return float(len(result) % 7) / 6\n"


def test_its_reward_model_trains_and_continues(run_folder: Path) -> None:
    """It begins as the policy, which no model of its own is named for."""
    (run_folder / "verifier.py").write_text(VERIFIER)
    table = {"kind": "implicit", "scope": "transition", "lr": 0.001}
    options = [f"reward_models.process.{key}={value}" for key, value in table.items()]
    options += [
        "algorithm.preset=prime",
        "algorithm.groups=2",
        "algorithm.group_size=4",
        "eval.tasks=1",
    ]
    for steps in (1, 2):
        trained = agentrl(run_folder, "train", "run.toml", *options, f"steps={steps}")
        assert trained.returncode == 0, trained.stderr
    rows = read(run_folder, lambda store: store.steps("tiny"))
    first, second = (row.metrics for row in rows if row.committed)
    assert first["reward/transition:process/std"] == 0.0  # it begins as its reference
    assert first["reward_models/process/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert second["reward/transition:process/std"] > 0.0  # saved, and taken up again
    (checkpoint,) = (run_folder / "out" / "checkpoints").glob("000002*")
    assert (checkpoint / "reward_models" / "process" / "optimizer.safetensors").is_file()
