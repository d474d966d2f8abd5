"""A checkpoint is scored in a run's own store and folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl import trainer
from agentrl.base import folder_lock
from agentrl.config import PolicyConfig, RunConfig, resolve
from agentrl.errors import ConfigError
from agentrl.evaluation.checkpoint import score
from agentrl.store import open_store
from agentrl.types import NewRollout, Purpose


def test_what_is_scored_is_named_by_its_step(tmp_path: Path) -> None:
    config = RunConfig(policy=PolicyConfig(model="base"))
    after = score.scored_line(config, tmp_path / "000020.3")
    assert after.startswith("scoring the policy after step 20: ")
    named = score.scored_line(config, tmp_path / "mine")
    assert named == f"scoring the policy: {tmp_path / 'mine'}"
    assert score.scored_line(config, None) == "scoring the policy before training: base"


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

    async def front(config: RunConfig, **_: Any) -> None:
        seen.append(config)
        raise ConfigError("enough")

    monkeypatch.setattr(trainer, "check", lambda config: None)
    monkeypatch.setattr(trainer, "front", front)
    with pytest.raises(ConfigError, match="enough"):
        score.evaluate(config, None, None)
    assert seen[0].store == used.format(folder=seen[0].output)


def test_the_checkpoint_of_a_run_that_goes_on_is_held_while_it_is_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that the store named first was pruned before it could be held."""
    newest = iter(["000004", "000005"])
    (tmp_path / "checkpoints" / "000005").mkdir(parents=True)
    where = tmp_path / "checkpoints"
    monkeypatch.setattr(score, "find_checkpoint", lambda config: where / next(newest))
    config = resolve({"output": str(tmp_path), "policy": {"model": "m"}}, source="test")
    with score._held(config, None) as held:
        assert held == where / "000005"
        with folder_lock.deleting(where / "000005") as unread:
            assert not unread
    with folder_lock.deleting(where / "000005") as unread:
        assert unread


def test_a_checkpoint_that_is_pruned_again_and_again_is_an_error_with_a_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score, "find_checkpoint", lambda config: tmp_path / "gone")
    config = resolve({"output": str(tmp_path), "policy": {"model": "m"}}, source="test")
    with pytest.raises(ConfigError, match="raise keep_checkpoints"), score._held(config, None):
        pytest.fail("held")


@pytest.mark.parametrize("began", [False, True])
async def test_an_evaluation_that_failed_to_start_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, began: bool
) -> None:
    config = resolve({"output": str(tmp_path / "eval"), "steps": 0}, source="test")

    async def front(config: RunConfig, **_: Any) -> None:
        Path(config.output).mkdir()
        async with open_store(config.store) as store:
            await store.open_run(config.name, {})
            row = NewRollout("a", config.name, "g", 0, {}, Purpose.EVAL)
            await store.enqueue([row])
            if began:
                await store.claim(1, runner="r", lease=60.0)
        raise ConfigError("enough")

    monkeypatch.setattr(trainer, "front", front)
    with pytest.raises(ConfigError, match="enough"):
        await score._score(config, 20)
    assert Path(config.output).exists() is began
