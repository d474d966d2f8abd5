"""Settings that load what a run has trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl import trainer
from agentrl.config import LoraConfig, PolicyConfig, RunConfig, resolve
from agentrl.errors import ConfigError
from agentrl.evaluation import core as evaluation
from agentrl.evaluation.checkpoint import score
from agentrl.evaluation.plans import play
from agentrl.store import open_store
from tests.spine import of_part


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


def test_tasks_are_those_held_out_or_else_those_of_training(tmp_path: Path) -> None:
    for name in ("train", "heldout"):
        rows = [json.dumps({"input": f"{name} {number}"}) for number in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    both = {name: f"{name}.jsonl" for name in ("train", "heldout")}

    def inputs(tasks: dict[str, str], limit: int = 0) -> list[object]:
        config = resolve({"root": str(tmp_path), "tasks": tasks}, source="test")
        return [task["input"] for task in play.tasks_of(config, limit)]

    assert inputs(both) == ["heldout 0", "heldout 1", "heldout 2"]
    assert inputs({"train": both["train"]}, 2) == ["train 0", "train 1"]
    with pytest.raises(ConfigError, match="there is nothing to play"):
        inputs({})


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


def test_what_is_scored_is_named_by_its_step(tmp_path: Path) -> None:
    config = RunConfig(policy=PolicyConfig(model="base"))
    after = score.scored_line(config, tmp_path / "000020.3")
    assert after.startswith("scoring the policy after step 20: ")
    named = score.scored_line(config, tmp_path / "mine")
    assert named == f"scoring the policy: {tmp_path / 'mine'}"
    assert score.scored_line(config, None) == "scoring the policy before training: base"


def test_without_a_checkpoint_there_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    config = resolve({"name": "never", "output": str(tmp_path / "never")}, source="test")
    with pytest.raises(ConfigError, match="'never' has no checkpoint yet; train it"):
        evaluation.last_checkpoint(config)
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("named", "used"),
    [
        ("", "sqlite:///{folder}/store.db"),
        ("sqlite:///other.db", "sqlite:///other.db"),
        of_part("postgresql://me:hush@host/db", "postgresql://me@host/db"),
    ],
)
def test_a_store_that_is_named_is_used_and_its_password_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, used: str
) -> None:
    monkeypatch.setenv("PGPASSWORD", "")
    made: dict[str, Any] = {"output": str(tmp_path / "out"), "roles": {"agent": "far"}}
    made |= {"upstreams": {"far": {"base_url": "http://127.0.0.1:1/v1"}}, "policy": {"model": ""}}
    config = resolve(made | ({"store": named} if named else {}), source="test")
    seen = list[RunConfig]()

    async def front(config: RunConfig, **_: Any) -> None:
        seen.append(config)
        raise ConfigError("enough")

    monkeypatch.setattr(trainer, "check", lambda config: None)
    monkeypatch.setattr(trainer, "front", front)
    with pytest.raises(ConfigError, match="enough"):
        score.evaluate(config, None, None)
    assert seen[0].store == used.format(folder=seen[0].output)


async def test_the_last_checkpoint_is_found_by_a_store_with_options(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}?synchronous=full"
    async with open_store(url) as store:
        await store.open_run("run", {})
    config = resolve({"name": "run", "store": url}, source="test")
    with pytest.raises(ConfigError, match="has no checkpoint yet"):
        evaluation.last_checkpoint(config)
