from __future__ import annotations

import pickle
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from agentrl.algorithms.batch import Batch, Row
from agentrl.algorithms.learners.base import Psi, StepReport
from agentrl.algorithms.learners.verl import check_installed, dealt
from agentrl.algorithms.learners.verl_settings import described, settings
from agentrl.cli import cli
from agentrl.config import RunConfig, load, resolve
from agentrl.errors import ConfigError
from tests.algorithms.test_update import Recorder, group, updater


class Sending(Recorder):
    """Sends psi to another process, itself cannot be sent."""

    def step(self, batch: Batch, psi: Psi, **rest: Any) -> StepReport:
        return super().step(batch, pickle.loads(pickle.dumps(psi)), **rest)

    def __reduce__(self) -> str:
        raise TypeError("a learner cannot be sent")


def config_of(**sections: Any) -> RunConfig:
    learner = {"kind": "verl"} | sections.pop("learner", {})
    return resolve({"learner": learner, **sections}, source="test")


def row(length: int) -> Row:
    return Row(
        tokens=torch.arange(length),
        actions=torch.tensor([length - 1]),
        logprobs=torch.zeros(1),
        temperature=torch.ones(1),
        transition=torch.zeros(1, dtype=torch.int64),
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 5, 8])
def test_every_row_is_dealt_once_and_every_rank_gets_as_many(ranks: int, count: int) -> None:
    hands = dealt([row(length + 2) for length in range(count)], ranks)
    assert len(hands) == ranks
    assert len({len(hand) for hand in hands}) == 1
    assert sorted(i for hand in hands for i in hand if i >= 0) == list(range(count))
    assert sum(i < 0 for hand in hands for i in hand) == -count % ranks


def test_ranks_get_about_as_many_tokens() -> None:
    rows = [row(2 + 3 * number) for number in range(64)]
    tokens = [sum(len(rows[i].tokens) for i in hand) for hand in dealt(rows, 4)]
    assert max(tokens) - min(tokens) <= len(rows[-1].tokens)


def test_settings_are_those_of_the_run_file() -> None:
    found = settings(
        config_of(
            policy={"dtype": "bfloat16"},
            learner={"token_budget": 512, "verl": {"nodes": 2, "gpus_per_node": 8}},
            algorithm={"weight_decay": 0.1, "max_grad_norm": 0.5},
        ),
        "somewhere",
    )
    assert (found["ray"]["nodes"], found["ray"]["gpus_per_node"]) == (2, 8)
    assert found["model"]["path"] == "somewhere"
    assert found["model"]["use_remove_padding"]
    assert found["engine"]["mixed_precision"]["param_dtype"] == "bf16"
    assert found["engine"]["max_token_len_per_gpu"] == 512
    assert found["optimizer"]["weight_decay"] == 0.1
    assert found["optimizer"]["clip_grad"] == 0.5


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"policy": {"lora": {"rank": 4}}}, "policy.lora.rank"),
        ({"critic": {"model": "copy"}}, "critic.model"),
        ({"reference": {"every": 3}}, "reference.every"),
        ({"learner": {"optimizer": "adamw8bit"}}, "learner.optimizer"),
        ({"learner": {"fp32_head": True}}, "learner.fp32_head"),
        ({"learner": {"threads": 2}}, "learner.threads"),
    ],
)
def test_what_verl_cannot_follow_is_refused(sections: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: .*learner.kind = 'torch'"):
        settings(config_of(**sections), "somewhere")


def test_placement_without_verl_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"learner\.verl\.nodes is for learner\.kind = 'verl'"):
        resolve({"learner": {"verl": {"nodes": 2}}}, source="test")


def test_dry_run_prints_what_verl_is_configured_with(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[learner]\nkind = "verl"\n[learner.verl]\ngpus_per_node = 4\n')
    printed = CliRunner().invoke(cli, ["train", str(file), "--dry-run"]).output
    assert printed.endswith(described(load(file)))
    assert "# ray.gpus_per_node = 4\n" in printed
    assert '# engine.strategy = "fsdp2"\n' in printed
    file.write_text(printed)
    assert load(file).learner.verl.gpus_per_node == 4


@pytest.mark.skipif(find_spec("verl") is not None, reason="verl is installed")
def test_a_missing_verl_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'agentrl\[verl\]'"):
        check_installed()


@pytest.mark.parametrize(
    ("version", "known"),
    [("0.8.3", False), ("0.9.0", True), ("0.10.dev0", True), ("0.11.0", False)],
)
def test_only_known_releases_of_verl_are_used(
    monkeypatch: pytest.MonkeyPatch, version: str, known: bool
) -> None:
    module = "agentrl.algorithms.learners.verl"
    monkeypatch.setattr(f"{module}.find_spec", lambda name: object())
    monkeypatch.setattr(f"{module}.importlib.metadata.version", lambda name: version)
    if known:
        check_installed()
    else:
        with pytest.raises(ConfigError, match=rf"verl {version} is not one that is known"):
            check_installed()


def test_psi_can_be_sent_to_other_processes() -> None:
    """Without the learner, whose workers are not to be sent along."""
    groups = [group("a", 1.0, 0.0), group("b", 0.0, 1.0)]
    here, there = Recorder(shift=0.1), Sending(shift=0.1)
    for learner in (here, there):
        updater(learner, epochs=2).update(0, groups)
    assert len(there.coefficients) == 2
    for mine, theirs in zip(here.coefficients, there.coefficients, strict=True):
        assert torch.equal(mine, theirs)
