"""The front: what it makes of its children's ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl import trainer
from agentrl.config import LoraConfig, PolicyConfig
from agentrl.errors import TrainingError


class Mortal:
    """A runner that lives as long as the clock says, and is done after so many lives."""

    name, log = "runner-0", Path("runner-0.log")

    def __init__(self, life: float, lives: int) -> None:
        self.life, self.lives, self.now, self.started = life, lives, 0.0, 0

    def monotonic(self) -> float:
        return self.now

    async def start(self) -> None:
        self.started += 1
        if self.started > self.lives:
            raise KeyboardInterrupt

    async def wait(self) -> int:
        self.now += self.life
        return 1


@pytest.mark.parametrize(
    ("life", "ends", "started"),
    [(1.0, TrainingError, trainer.RESTARTS), (trainer.STEADY + 1.0, KeyboardInterrupt, 101)],
)
async def test_a_runner_is_given_up_only_when_it_dies_young(
    monkeypatch: pytest.MonkeyPatch, life: float, ends: type[BaseException], started: int
) -> None:
    child: Any = Mortal(life, lives=100)
    monkeypatch.setattr(trainer, "time", child)
    monkeypatch.setattr(trainer, "PAUSE", 0.0)
    with pytest.raises(ends):
        await trainer._keep_alive(child)
    assert child.started == started


def test_an_adapter_is_evaluated_whatever_the_run_file_trains(tmp_path: Path) -> None:
    saved = {
        "base_model_name_or_path": "/base",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["v_proj", "q_proj"],
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
    policy = trainer._policy_at(PolicyConfig(build="policy.py:build"), tmp_path)
    assert (policy.model, policy.build) == ("/base", "")
    lora = LoraConfig(rank=8, alpha=16, targets=["q_proj", "v_proj"], adapter=str(tmp_path))
    assert policy.lora == lora
