"""Settings that load what a run has trained."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import LoraConfig, PolicyConfig, RunConfig, resolve
from agentrl.errors import ConfigError
from agentrl.evaluation.checkpoint import runs as evaluation
from agentrl.store import open_store
from tests.store import postgres_server


def adapter(directory: Path) -> Path:
    """A directory of an adapter of rank 8, as peft describes it."""
    directory.mkdir(parents=True, exist_ok=True)
    saved = {
        "base_model_name_or_path": "/base",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["v_proj", "q_proj"],
    }
    (directory / "adapter_config.json").write_text(json.dumps(saved))
    return directory


def test_an_adapter_is_evaluated_whatever_the_run_file_trains(tmp_path: Path) -> None:
    config = RunConfig(policy=PolicyConfig(build="policy.py:build"))
    policy = evaluation.policies_at(config, adapter(tmp_path))["policy"]
    assert (policy.model, policy.build) == ("/base", "")
    lora = LoraConfig(rank=8, alpha=16, targets=["q_proj", "v_proj"], adapter=str(tmp_path))
    assert policy.lora == lora


def test_a_checkpoint_is_found_by_its_name_and_others_are_listed(tmp_path: Path) -> None:
    config = resolve({"name": "r", "output": str(tmp_path)}, source="test")
    with pytest.raises(ConfigError, match=r"^best: no such checkpoint directory$"):
        evaluation.named(config, Path("best"))
    for name in ("000025.2", "best"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert evaluation.named(config, Path("best")) == tmp_path / "checkpoints/best"
    assert evaluation.named(config, tmp_path) == tmp_path  # any other model
    with pytest.raises(ConfigError, match=r"^9: no such .* are 000025\.2, best$"):
        evaluation.named(config, Path("9"))


def test_of_several_policies_those_that_learned_are_the_checkpoints(tmp_path: Path) -> None:
    members: dict[str, Any] = {"solver": {"roles": ["solver"], "lora": {"rank": 2}}}
    members["judge"] = {"roles": ["judge"], "frozen": True, "model": "m"}
    config = resolve({"policy": {"model": "base"}, "policies": members}, source="test")
    with pytest.raises(ConfigError, match=" has no policy 'solver'"):
        evaluation.policies_at(config, tmp_path)
    directory = adapter(tmp_path / "solver")
    found = evaluation.policies_at(config, tmp_path)["policies"]
    assert (found["solver"].model, found["solver"].lora["rank"]) == ("/base", 8)
    assert found["solver"].lora["adapter"] == str(directory)
    assert found["judge"] == config.policies["judge"]


def test_without_a_checkpoint_there_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    config = resolve({"name": "never", "output": str(tmp_path / "never")}, source="test")
    with pytest.raises(ConfigError, match="'never' has no checkpoint yet; train it"):
        evaluation.last_checkpoint(config)
    assert not (tmp_path / "never").exists()


async def test_the_last_checkpoint_is_found_by_a_store_with_options(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}?synchronous=full"
    async with open_store(url) as store:
        await store.open_run("run", {})
    config = resolve({"name": "run", "store": url}, source="test")
    with pytest.raises(ConfigError, match="has no checkpoint yet"):
        evaluation.last_checkpoint(config)


def test_before_the_first_run_a_database_has_no_checkpoint(server: postgres_server.Server) -> None:
    url = server.make()
    config = resolve({"name": "never", "store": url}, source="test")
    assert evaluation.find_checkpoint(config) is None
    asyncio.run(open_store(url).close())
    assert evaluation.find_checkpoint(config) is None
