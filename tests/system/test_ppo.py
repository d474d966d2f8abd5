"""PPO from the command line: critic, reference and adaptive penalty, stopped and continued."""

from __future__ import annotations

from pathlib import Path

from tests.system.test_run import agentrl, read

PPO = [
    "algorithm.preset=ppo",
    "algorithm.options.kl=0.1",
    "algorithm.groups=2",
    "algorithm.group_size=4",
    "algorithm.minibatches=2",
    "critic.lr=0.001",
    "reference.target_kl=0.001",
    "reference.kl_horizon=100",
    "reference.every=2",
]


def test_ppo_trains_and_continues(run_folder: Path) -> None:
    for steps in (1, 2):
        options = [*PPO, "critic.model=copy", f"steps={steps}"]
        trained = agentrl(run_folder, "train", "run.toml", *options)
        assert trained.returncode == 0, trained.stderr
    rows = read(run_folder, lambda store: store.steps("tiny"))
    first, second = (row.metrics for row in rows if row.committed)
    assert first["critic/value_mean"] == 0.0  # a fresh head
    assert second["critic/value_mean"] != 0.0
    assert first["critic/loss"] > 0.0
    assert first["reference/beta"] == 0.1
    # Adapted after the first step, saved, and taken up by the second process.
    assert 0.08 <= second["reference/beta"] < 0.12
    assert second["reference/beta"] != 0.1
    (checkpoint,) = (run_folder / "out" / "checkpoints").glob("000002*")
    assert (checkpoint / "critic" / "critic.safetensors").is_file()
    assert (checkpoint / "reference.safetensors").is_file()
