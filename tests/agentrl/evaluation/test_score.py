"""A checkpoint is scored in a run's own store and folder."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from agentrl import evaluation, trainer
from agentrl.core import files
from agentrl.core.config import LoraConfig, PolicyConfig, RunConfig, resolve
from agentrl.core.errors import ConfigError
from agentrl.core.types import NewRollout, Purpose
from agentrl.evaluation import evaluation_name
from agentrl.store import open_store
from tests.store import postgres_server


def test_what_is_scored_is_named_by_its_step(tmp_path: Path) -> None:
    config = RunConfig(policy=PolicyConfig(model="base"))
    after = evaluation.scored_line(config, tmp_path / "000020.3")
    assert after.startswith("scoring the policy after step 20: ")
    named = evaluation.scored_line(config, tmp_path / "mine")
    assert named == f"scoring the policy: {tmp_path / 'mine'}"
    assert evaluation.scored_line(config, None) == "scoring the policy before training: base"


@pytest.mark.parametrize(
    ("named", "used"),
    [
        ("", "sqlite:///{folder}/store.db"),
        ("sqlite:///other.db", "sqlite:///other.db"),
        ("postgresql://me:hush@host/db", "postgresql://me@host/db"),
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

    async def launch(config: RunConfig, **_: Any) -> None:
        seen.append(config)
        raise ConfigError("enough")

    monkeypatch.setattr(trainer, "check", lambda config: None)
    monkeypatch.setattr(trainer, "launch", launch)
    with pytest.raises(ConfigError, match="enough"):
        evaluation.evaluate(config, None, None)
    assert seen[0].store == used.format(folder=seen[0].output)


def test_the_checkpoint_of_a_run_that_goes_on_is_held_while_it_is_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that the store named first was pruned before it could be held."""
    newest = iter(["000004", "000005"])
    (tmp_path / "checkpoints" / "000005").mkdir(parents=True)
    where = tmp_path / "checkpoints"
    monkeypatch.setattr(evaluation, "find_checkpoint", lambda config: where / next(newest))
    config = resolve({"output": str(tmp_path), "policy": {"model": "m"}}, source="test")
    with evaluation._held(config, None) as held:
        assert held == where / "000005"
        with files.deleting(where / "000005") as unread:
            assert not unread
    with files.deleting(where / "000005") as unread:
        assert unread


def test_a_checkpoint_that_is_pruned_again_and_again_is_an_error_with_a_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "find_checkpoint", lambda config: tmp_path / "gone")
    config = resolve({"output": str(tmp_path), "policy": {"model": "m"}}, source="test")
    with pytest.raises(ConfigError, match="raise keep_checkpoints"), evaluation._held(config, None):
        pytest.fail("held")


@pytest.mark.parametrize("began", [False, True])
async def test_an_evaluation_that_failed_to_start_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, began: bool
) -> None:
    config = resolve({"output": str(tmp_path / "eval"), "steps": 0}, source="test")

    async def launch(config: RunConfig, **_: Any) -> None:
        Path(config.output).mkdir()
        async with open_store(config.store) as store:
            await store.open_run(config.name, {})
            row = NewRollout("a", config.name, "g", 0, {}, Purpose.EVAL)
            await store.enqueue([row])
            if began:
                await store.claim(1, runner="r", lease=60.0)
        raise ConfigError("enough")

    monkeypatch.setattr(trainer, "launch", launch)
    with pytest.raises(ConfigError, match="enough"):
        await evaluation._score(config, 20)
    assert Path(config.output).exists() is began


# -- settings that load what a run has trained -----------------------------------------------------


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


# -- evaluations of one run that begin in the same second do not share a folder --------------------


def test_evaluations_of_one_second_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-000000")
    first, second = evaluation_name("mine"), evaluation_name("mine")
    assert first != second
    assert first.startswith("mine-eval-20260101-000000-")
