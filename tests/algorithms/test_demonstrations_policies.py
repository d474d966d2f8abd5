"""The warm-up of several policies: each imitates the conversations of its roles."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from agentrl.algorithms.train.load_policies import load_policies
from agentrl.core.config import RunConfig, resolve
from agentrl.core.config.derived import initial_lora, warmup_folder
from agentrl.core.errors import ConfigError


def talk(role: str, said: str) -> dict[str, object]:
    asked = {"role": "user", "content": "a"}
    return {"role": role, "messages": [asked, {"role": "assistant", "content": said}]}


def settings(model: Path, folder: Path, rows: list[dict[str, object]]) -> RunConfig:
    (folder / "shown.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(rows))
    given = {
        "root": str(folder), "output": str(folder / "run"), "learner": {"threads": 1},
        "policy": {"model": str(model), "lora": {"rank": 4}},
        "policies": {"one": {"roles": ["a", "b"]}, "two": {"roles": ["c"]}},
        "warmup": {"data": "shown.jsonl", "steps": 4, "batch": 1, "lr": 1e-2},
    }  # fmt: skip
    return resolve(given, source="test")


def test_each_policy_has_an_adapter_of_its_own(tiny_model_dir: Path, tmp_path: Path) -> None:
    rows = [talk("a", "b"), talk("b", "b"), talk("c", "a")]
    config = settings(tiny_model_dir, tmp_path, rows)
    (loaded,) = load_policies(config)
    assert loaded.policies == ["one", "two"]
    made = [warmup_folder(config, name) for name in ("one", "two")]
    weights = [(folder / "adapter_model.safetensors").read_bytes() for folder in made]
    assert weights[0] != weights[1]
    assert [initial_lora(config, name).adapter for name in ("one", "two")] == [*map(str, made)]
    assert load_policies(config)[0].built is False  # it is not done again


def test_a_policy_without_conversations_starts_as_it_is(
    tiny_model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(tiny_model_dir, tmp_path, [talk("a", "b")])
    load_policies(config)
    assert warmup_folder(config, "one").is_dir()
    assert not warmup_folder(config, "two").exists()
    assert "no conversation is of ['c']" in caplog.text


def test_a_conversation_of_nobody_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    row = {"messages": talk("a", "b")["messages"]}
    config = settings(tiny_model_dir, tmp_path, [row])
    with pytest.raises(ConfigError, match="conversation 1 has no `role`"):
        load_policies(config)
