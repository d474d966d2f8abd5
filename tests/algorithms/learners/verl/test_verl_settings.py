from __future__ import annotations

import pickle
import socket
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from agentrl import trainer
from agentrl.algorithms.data.batch import Batch, TokenRow
from agentrl.algorithms.learners.base import LossCoefficients, StepReport
from agentrl.algorithms.learners.verl import settings as verl_settings
from agentrl.algorithms.learners.verl.learner import VerlLearner
from agentrl.algorithms.learners.verl.settings import (
    check,
    check_installed,
    describe_settings,
    settings,
)
from agentrl.algorithms.learners.verl.shards import deal_rows
from agentrl.cli.main import cli
from agentrl.core.config import RunConfig, load, resolve
from agentrl.core.errors import ConfigError
from agentrl.doctor import machine
from tests.algorithms.train.test_update import Recorder, group, updater


class Sending(Recorder):
    """Sends psi to another process, itself cannot be sent."""

    def step(self, batch: Batch, psi: LossCoefficients, **rest: Any) -> StepReport:
        return super().step(batch, pickle.loads(pickle.dumps(psi)), **rest)

    def __reduce__(self) -> str:
        raise TypeError("a learner cannot be sent")


def config_of(**sections: Any) -> RunConfig:
    learner = {"kind": "verl"} | sections.pop("learner", {})
    return resolve({"learner": learner, **sections}, source="test")


def row(length: int) -> TokenRow:
    return TokenRow(
        tokens=torch.arange(length),
        actions=torch.tensor([length - 1]),
        logprobs=torch.zeros(1),
        temperature=torch.ones(1),
        transition=torch.zeros(1, dtype=torch.int64),
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 5, 8])
def test_every_row_is_dealt_once_and_every_rank_gets_as_many(ranks: int, count: int) -> None:
    hands = deal_rows([row(length + 2) for length in range(count)], ranks)
    assert len(hands) == ranks
    assert len({len(hand) for hand in hands}) == 1
    assert sorted(i for hand in hands for i in hand if i >= 0) == list(range(count))
    assert sum(i < 0 for hand in hands for i in hand) == -count % ranks


def test_ranks_get_about_as_many_tokens() -> None:
    rows = [row(2 + 3 * number) for number in range(64)]
    tokens = [sum(len(rows[i].tokens) for i in hand) for hand in deal_rows(rows, 4)]
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
        ({"critic": {"model": "shared"}}, "critic.model = 'shared'"),
        ({"learner": {"packing": "trie"}}, "learner.packing = 'trie'"),
    ],
)
def test_what_verl_cannot_follow_is_refused(sections: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: .*learner.kind = 'torch'"):
        settings(config_of(**sections), "somewhere")


@pytest.mark.parametrize("key", [{"optimizer": "adamw8bit"}, {"fp32_head": True}, {"threads": 2}])
def test_verl_has_no_settings_of_the_other_learner(key: dict[str, Any]) -> None:
    message = f"learner.{next(iter(key))} is for learner.kind = 'torch', and it is 'verl'"
    with pytest.raises(ConfigError, match=message):
        config_of(learner=key)
    resolve({"learner": key}, source="test")


def test_a_critic_is_a_model_with_an_optimizer_of_its_own(tmp_path: Path) -> None:
    assert settings(config_of(), "somewhere")["critic"] == {}
    tables = {"critic": {"model": "copy"}, "algorithm": {"weight_decay": 0.3}}
    copy = settings(config_of(**tables), "somewhere")["critic"]
    assert copy["model"]["path"] == "somewhere"
    assert (copy["optimizer"]["lr"], copy["optimizer"]["weight_decay"]) == (1e-5, 0.3)
    other = config_of(root=str(tmp_path), critic={"model": "own", "lr": 1e-3})
    (tmp_path / "own").mkdir()
    found = settings(other, "somewhere")["critic"]
    assert found["model"]["path"] == str(tmp_path / "own")
    assert found["optimizer"]["lr"] == 1e-3


def test_an_adapter_is_that_of_the_run_file() -> None:
    lora = {"rank": 4, "alpha": 8.0, "targets": ["q_proj"]}
    found = settings(config_of(policy={"lora": lora}, critic={"model": "copy"}), "somewhere")
    asked = {"lora_rank": 4, "lora_alpha": 8.0, "target_modules": ["q_proj"]}
    assert asked.items() <= found["model"].items()
    assert not asked.keys() & found["critic"]["model"].keys()
    plain = settings(config_of(), "somewhere")
    assert not asked.keys() & plain["model"].keys()


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("127.0.0.1:1", r"RAY_ADDRESS = '127\.0\.0\.1:1': Ray cannot be reached there"),
        ("ray://head:10001", r"not behind Ray's client; run agentrl there and give HOST:PORT"),
    ],
)
def test_a_ray_that_does_not_answer_is_noticed_first(
    monkeypatch: pytest.MonkeyPatch, address: str, sentence: str
) -> None:
    monkeypatch.setattr(verl_settings, "check_installed", lambda: None)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=sentence):
        check(config_of())


def test_a_ray_that_answers_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl_settings, "check_installed", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        for address in ("", "auto", f"127.0.0.1:{port}"):
            monkeypatch.setenv("RAY_ADDRESS", address)
            check(config_of())


def test_the_doctor_misses_flash_attention_where_verl_uses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentrl.core.config.infrastructure.find_spec", lambda name: None)
    found = machine.packages(config_of())
    cure = "set learner.verl.attention=sdpa, or install flash-attn"
    assert found == ("fail", f"no flash attention; {cure}")
    for other in (config_of(learner={"verl": {"attention": "sdpa"}}), RunConfig()):
        assert machine.packages(other)[0] == "ok"


def test_the_doctor_shows_versions_of_learners_and_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("verl", "ray", "vllm", "torch", "numpy")
    installed = [SimpleNamespace(name=name, version="1") for name in names]
    monkeypatch.setattr(machine, "distributions", lambda: installed)
    _, sentence = machine.packages(RunConfig())
    assert sentence.split(", ")[1:] == ["ray 1", "torch 1", "verl 1", "vllm 1"]


def test_the_front_refuses_before_it_starts_anything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(verl_settings, "find_spec", lambda name: None)
    (tmp_path / "tasks.jsonl").write_text('{"input": 1}\n')
    config = config_of(
        root=str(tmp_path), tasks={"train": "tasks.jsonl"}, policy={"model": "somewhere"}
    )
    with pytest.raises(ConfigError, match=r"verl is not installed: pip install .*\[verl\]'"):
        trainer.check(config)


def test_options_are_verls_own_over_those_of_the_run_file() -> None:
    options = {
        "engine": {"ulysses_sequence_parallel_size": 2, "forward_prefetch": True},
        "model": {"override_config": {"attention_dropout": 0.0}, "use_liger": True},
        "optimizer": {"betas": [0.8, 0.9]},
    }
    verl = {"gpus_per_node": 4, "options": options}
    found = settings(config_of(critic={"model": "copy"}, learner={"verl": verl}), "somewhere")
    assert found["engine"]["ulysses_sequence_parallel_size"] == 2
    assert found["engine"]["forward_prefetch"] is True
    assert found["engine"]["max_token_len_per_gpu"] == 4096
    for model in (found["model"], found["critic"]["model"]):
        assert model["use_liger"] is True
        asked = {"attn_implementation": "flash_attention_2", "attention_dropout": 0.0}
        assert model["override_config"] == asked
    assert found["optimizer"]["betas"] == found["critic"]["optimizer"]["betas"] == [0.8, 0.9]
    assert found["critic"]["optimizer"]["lr"] != found["optimizer"]["lr"]


@pytest.mark.parametrize(
    ("part", "option", "sentence"),
    [
        ("engine", {"max_token_len_per_gpu": 9}, "agentrl; set learner.token_budget"),
        ("engine", {"strategy": "veomni"}, "agentrl trains with 'fsdp2' and 'megatron'"),
        ("engine", {"use_dynamic_bsz": False}, "its learner depends on the value"),
        ("optimizer", {"lr": 1.0}, "set algorithm.lr"),
        ("engine", {"ulysses_sequence_parallel_size": 3}, "must divide the 2 GPUs"),
    ],
)
def test_options_that_are_not_for_verl_to_decide_are_refused(
    part: str, option: dict[str, Any], sentence: str
) -> None:
    verl = {"gpus_per_node": 2, "options": {part: option}}
    with pytest.raises(ConfigError, match=rf"learner\.verl\.options\.{part}.*{sentence}"):
        settings(config_of(learner={"verl": verl}), "somewhere")
    padded = {"attention": "sdpa", "gpus_per_node": 2}
    shared = {"engine": {"ulysses_sequence_parallel_size": 2}}
    with pytest.raises(ConfigError, match="attention = 'flash_attention_2'"):
        settings(config_of(learner={"verl": padded | {"options": shared}}), "somewhere")
    with pytest.raises(ConfigError, match="options"):
        config_of(learner={"verl": {"options": {"rollout": {}}}})


class Ranks:
    """Four workers; each answers with its number and what it was given."""

    ranks = 4

    def each(self, verb: str, *arguments: list[Any]) -> list[Any]:
        return list(zip(range(self.ranks), *arguments, strict=True))


def test_ranks_that_share_rows_get_the_same_and_answer_once() -> None:
    learner: Any = object.__new__(VerlLearner)
    learner.workers = Ranks()
    # Two ranks share the rows of each shard; or they have the ends of two pipelines.
    for layout, answering in (
        ([(0, True), (0, False), (1, True), (1, False)], [0, 2]),
        ([(0, False), (1, False), (0, True), (1, True)], [2, 3]),
    ):
        learner.layout = layout
        assert learner._each("step", ["first", "second"], 0.1) == [
            (answering[0], "first", 0.1),
            (answering[1], "second", 0.1),
        ]


def test_megatron_is_configured_by_verls_own_names() -> None:
    options = {"engine": {"strategy": "megatron", "tensor_model_parallel_size": 4}}
    verl = {"gpus_per_node": 8, "options": options}
    policy = {"dtype": "bfloat16"}
    found = settings(config_of(policy=policy, learner={"verl": verl}), "somewhere")
    engine = {"strategy": "megatron", "dtype": "bfloat16", "tensor_model_parallel_size": 4}
    assert engine.items() <= found["engine"].items()
    assert not found["engine"].keys() & {"model_dtype", "mixed_precision"}
    betas = {"adam_beta1": 0.9, "adam_beta2": 0.95}
    assert found["optimizer"]["override_optimizer_config"] == betas


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"critic": {"model": "copy"}}, "critic.model"),
        ({"policy": {"lora": {"rank": 4}}}, "policy.lora.rank"),
        ({"reference": {"every": 1}}, "reference.every"),
        ({"learner": {"gradient_checkpointing": True}}, "learner.gradient_checkpointing"),
        ({"algorithm": {"max_kl": 0.1}}, "algorithm.max_kl"),
    ],
)
def test_what_megatron_does_not_do_is_refused(sections: dict[str, Any], key: str) -> None:
    verl = {"options": {"engine": {"strategy": "megatron"}}}
    learner = sections.get("learner", {}) | {"verl": verl}
    with pytest.raises(ConfigError, match=f"^{key}: .*megatron"):
        settings(config_of(**(sections | {"learner": learner})), "somewhere")


@pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed")
@pytest.mark.filterwarnings("ignore")  # of verl, for engines that are not installed
@pytest.mark.parametrize(
    ("part", "option"),
    [
        ("engine", {"forward_prefetsch": True}),
        ("engine", {"micro_batch_size_per_gpu": {}, "fsdp_sizes": 2}),
        ("model", {"liger": True}),
    ],
)
def test_verl_refuses_what_it_does_not_know(part: str, option: dict[str, Any]) -> None:
    from agentrl.algorithms.learners.verl.worker import check_options

    verl = {"attention": "sdpa", "options": {part: option}}
    with pytest.raises(ConfigError, match=r"in learner\.verl\.options"):
        check_options(settings(config_of(learner={"verl": verl}), "somewhere"))


def test_placement_without_verl_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"learner\.verl\.nodes is for learner\.kind = 'verl'"):
        resolve({"learner": {"verl": {"nodes": 2}}}, source="test")


def test_dry_run_prints_what_verl_is_configured_with(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[learner]\nkind = "verl"\n[learner.verl]\ngpus_per_node = 4\n')
    printed = CliRunner().invoke(cli, ["train", str(file), "--dry-run"]).output
    assert printed.endswith(describe_settings(load(file)))
    assert "# ray.gpus_per_node = 4\n" in printed
    assert '# engine.strategy = "fsdp2"\n' in printed
    file.write_text(printed)
    assert load(file).learner.verl.gpus_per_node == 4


@pytest.mark.skipif(find_spec("verl") is not None, reason="verl is installed")
def test_a_missing_verl_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"pip install .*\[verl\]'"):
        check_installed()


@pytest.mark.parametrize(
    ("version", "known"),
    [("0.8.3", False), ("0.9.0", True), ("0.10.dev0", True), ("0.11.0", False)],
)
def test_only_known_releases_of_verl_are_used(
    monkeypatch: pytest.MonkeyPatch, version: str, known: bool
) -> None:
    module = verl_settings.__name__
    monkeypatch.setattr(f"{module}.find_spec", lambda name: object())
    monkeypatch.setattr(f"{module}.importlib.metadata.version", lambda name: version)
    if known:
        check_installed()
    else:
        with pytest.raises(ConfigError, match=rf"verl {version} is not supported"):
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
