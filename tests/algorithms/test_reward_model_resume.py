"""A run with a reward model that is interrupted and started again."""

from __future__ import annotations

import asyncio
from pathlib import Path

from msgspec.structs import replace

from agentrl.core.config import RunConfig, resolve
from agentrl.explain import explain_rollout
from agentrl.store import open_store
from tests.system.steady import break_off, config, finish


def judging(folder: Path, model: Path) -> RunConfig:
    """Calls are rewarded by a model of the run file, which refers to the policy of the start."""
    settings = config(folder, model)
    streams = {"outcome": {}, "hunch": {"scope": "transition"}}
    algorithm = replace(settings.algorithm, preset="streams", options={"streams": streams})
    hunch = {"kind": "implicit", "model": str(model), "scope": "transition"}
    models = resolve({"reward_models": {"hunch": hunch}}, source="test").reward_models
    return replace(settings, algorithm=algorithm, reward_models=models, steps=3)


def test_rewards_of_a_model_are_in_the_store_once_and_explained(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    whole, broken = folders = tmp_path / "whole", tmp_path / "broken"
    for folder in folders:
        folder.mkdir()
    finish(judging(whole, tiny_model_dir))
    settings = judging(broken, tiny_model_dir)
    break_off(settings, "optimizer", "checkpoint", "commit", number=1)
    finish(settings)
    for folder in folders:
        asyncio.run(check_rewards(f"sqlite:///{folder / 'out' / 'store.db'}"))


async def check_rewards(url: str) -> None:
    async with open_store(url) as store:
        rollouts = await store.rollouts("steady")
    assert len(rollouts) == 3 * 2 * 4
    for rollout in rollouts:
        made = [(row.name, row.source) for row in rollout.rewards]
        assert made == [("outcome", "verifier"), *[("hunch", "model:hunch")] * 2]
        lines = await explain_rollout(url, rollout.id, tokens=False)
        assert sum(line.startswith("  transition:hunch of ") for line in lines) == 2
        assert not any("the step used advantage" in line for line in lines)
