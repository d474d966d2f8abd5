"""Supervised fine-tuning before a run's first step."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
import torch

from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.model.packing import forward_logprobs, pack_rows
from agentrl.algorithms.model.tiny import rows_of
from agentrl.algorithms.train.load_policies import load_policies
from agentrl.config import RunConfig, resolve
from agentrl.errors import ConfigError, TrainingError
from agentrl.evaluation.core import evaluation_run

SHOWN = [
    {
        "messages": [
            {"role": "user", "content": "Where is Ada?"},
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "query", "arguments": '{"sql": "SELECT"}'}}],
            },
            {"role": "tool", "content": place},
            {"role": "assistant", "content": place},
        ],
        "tools": [{"type": "function", "function": {"name": "query", "parameters": {}}}],
    }
    for place in ("Oslo", "Lima", "Cairo")
]


def settings(model: Path, tmp_path: Path, **changed: object) -> RunConfig:
    (tmp_path / "shown.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(SHOWN))
    warmup = {"data": "shown.jsonl", "steps": 30, "batch": 2, "lr": 1e-2}
    given = {"root": str(tmp_path), "output": str(tmp_path / "run"), "learner": {"threads": 1}}
    return resolve(
        {**given, "policy": {"model": str(model)}, "warmup": warmup, **changed}, source="test"
    )


def loss_of(directory: str) -> float:
    """Nats per token that the assistant writes in the demonstrations, by transformers alone."""
    model, tokenizer = load_model(directory)
    messages = [[*one["messages"]] for one in SHOWN]
    for one in messages:
        call = {"name": "query", "arguments": {"sql": "SELECT"}}
        one[1] = {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}
    (pack,) = pack_rows(rows_of(tokenizer, messages, SHOWN[0]["tools"]), "rows", 10**5)
    with torch.no_grad():
        return -float(forward_logprobs(model, pack).mean())


def test_a_run_begins_with_a_policy_that_imitates(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = settings(tiny_model_dir, tmp_path)
    (loaded,) = load_policies(config)
    assert loaded.built
    assert loaded.source == config.model_path() == str(tmp_path / "run/warmup")
    assert loss_of(loaded.source) < 0.3 * loss_of(str(tiny_model_dir))
    (again,) = load_policies(config)  # made once
    assert not again.built
    weights = Path(loaded.source, "model.safetensors").read_bytes()
    shutil.rmtree(loaded.source)  # a start that was killed makes the same
    load_policies(config)
    assert Path(loaded.source, "model.safetensors").read_bytes() == weights


def test_a_checkpoint_is_not_warmed_up_again(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = settings(tiny_model_dir, tmp_path)
    own = evaluation_run(config, "eval", tiny_model_dir)
    assert load_policies(own)[0].source == str(tiny_model_dir)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"warmup": {"steps": 3}}, "no effect without `data`"),
        ({"policy": {"model": "m", "lora": {"rank": 4}}}, "trains all weights"),
    ],
)
def test_a_warm_up_without_effect_is_refused(
    tmp_path: Path, changed: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(Path("m"), tmp_path, **changed)


def test_what_cannot_be_imitated_is_named(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = settings(tiny_model_dir, tmp_path)
    (tmp_path / "shown.jsonl").write_text('{"input": "no messages"}\n')
    with pytest.raises(ConfigError, match=r"warmup.data: .*shown.jsonl:1 has no 'messages'"):
        load_policies(config)
    (tmp_path / "shown.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    with pytest.raises(TrainingError, match="marks no assistant tokens"):
        load_policies(config)
    assert not (tmp_path / "run/warmup").exists()
