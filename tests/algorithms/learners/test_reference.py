"""Frozen models beside the policy, and what keeps the policy near one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from agentrl.algorithms.learners import factory
from agentrl.algorithms.learners.auxiliary import REFERENCE, Reference, ValueModel, load_auxiliary
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.objective.core import kl_to_reference
from agentrl.algorithms.objective.values import value_terms
from agentrl.algorithms.presets import registry
from agentrl.core.errors import ConfigError, PolicyError
from agentrl.core.types import POLICY
from tests.algorithms.learners.test_learner import make_batch, psi_for
from tests.algorithms.worlds import EVERY_OUTPUT
from tests.factories import config

OWN = ("old", "sampler", "reference", "top_tokens", "entropy", "observations")


def learner_with(directory: Path, every: int = 0) -> TorchLearner:
    model, tokenizer = load_model(directory, device="cpu")
    frozen = load_auxiliary("reference.model", str(directory), model, tokenizer)
    return TorchLearner(
        model, tokenizer, threads=1, frozen={"reference": Reference(frozen, model, every)}
    )


def test_the_reference_stays_where_the_policy_began(tiny_model_dir: Path) -> None:
    learner, batch = learner_with(tiny_model_dir), make_batch()
    start = learner.logprobs(batch)
    assert learner.supplies == set(OWN)
    torch.testing.assert_close(learner.logprobs(batch, "reference"), start)
    learner.step(batch, psi_for(batch), lr=1e-2)
    learner.frozen["reference"].finish(0)
    assert torch.equal(learner.logprobs(batch, "reference"), start)
    assert not torch.equal(learner.logprobs(batch), start)
    with pytest.raises(PolicyError, match="the learner has no teacher"):
        learner.logprobs(batch, "teacher")


def test_a_reference_follows_the_policy_every_so_many_steps(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    learner, batch = learner_with(tiny_model_dir, every=2), make_batch()
    start = learner.logprobs(batch, "reference")
    for step in range(3):
        learner.step(batch, psi_for(batch), lr=1e-2)
        learner.frozen["reference"].finish(step)
        if step == 0:
            assert torch.equal(learner.logprobs(batch, "reference"), start)
        if step == 1:
            followed = learner.logprobs(batch, "reference")
            assert torch.equal(followed, learner.logprobs(batch))
    learner.save(tmp_path)
    resumed = learner_with(tiny_model_dir, every=2)
    resumed.load(tmp_path)
    assert torch.equal(resumed.logprobs(batch, "reference"), followed)
    assert torch.equal(resumed.logprobs(batch), learner.logprobs(batch))
    (tmp_path / REFERENCE).write_bytes(b"half")
    with pytest.raises(PolicyError, match=r"reference\.safetensors is missing or incomplete"):
        resumed.load(tmp_path)


def test_a_reference_that_stays_is_not_in_the_checkpoint(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    learner_with(tiny_model_dir).save(tmp_path)
    assert not (tmp_path / REFERENCE).exists()


def test_a_model_with_another_vocabulary_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    model, tokenizer = load_model(tiny_model_dir, device="cpu")
    other = tmp_path / "other"
    shutil.copytree(tiny_model_dir, other)
    changed = AutoTokenizer.from_pretrained(other)
    changed.add_tokens(["<new>"])
    changed.save_pretrained(other)
    with pytest.raises(PolicyError, match=r"teacher\.model = .*vocabulary"):
        load_auxiliary("teacher.model", str(other), model, tokenizer)
    with pytest.raises(PolicyError, match=r"^teacher\.model: model .*no such directory"):
        load_auxiliary("teacher.model", str(tmp_path / "no/such/one"), model, tokenizer)


def test_a_frozen_model_needs_no_chat_template(tiny_model_dir: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(tiny_model_dir, plain)
    (plain / "chat_template.jinja").unlink()
    model, tokenizer = load_model(tiny_model_dir, device="cpu")
    load_auxiliary("reference.model", str(plain), model, tokenizer)


def test_what_an_algorithm_does_not_read_is_not_loaded(tiny_model_dir: Path) -> None:
    model, tokenizer = load_model(tiny_model_dir, device="cpu")
    start = str(tiny_model_dir)
    settings = config(critic={"model": "copy"}, teacher={"model": start})
    grpo, ppo = registry.make("grpo", {}), registry.make("ppo", {"kl": 0.1}, supplies=EVERY_OUTPUT)
    assert factory.make_frozen_models(settings, grpo, model, tokenizer, start) == {}
    frozen = factory.make_frozen_models(settings, ppo, model, tokenizer, start)
    assert set(frozen) == {"reference"}
    assert not any(each.requires_grad for each in frozen["reference"].model.parameters())
    critic = factory.make_critic(settings, model, tokenizer, start)
    assert critic is not None
    assert critic.decoder is not None
    assert critic.decoder is not model.base_model
    shared = factory.make_critic(config(critic={"model": "shared"}), model, tokenizer, start)
    assert shared is not None
    assert (critic.lr, shared.lr) == (1e-5, 0.05 / model.config.hidden_size)
    assert factory.make_critic(config(), model, tokenizer, start) is None
    distill = registry.make("distill", {}, supplies=EVERY_OUTPUT)
    assert set(factory.make_frozen_models(settings, distill, model, tokenizer, start)) == {
        "teacher"
    }


def test_streams_are_those_that_the_run_file_configures() -> None:
    assert factory.available_outputs(config()) == set(OWN)
    everything = config(critic={"model": "shared"}, teacher={"model": "x"})
    assert factory.available_outputs(everything) == {*OWN, "teacher", "values"}
    with pytest.raises(ConfigError, match=r"set critic\.model"):
        registry.make("ppo", {}, supplies=factory.available_outputs(config()))


@pytest.mark.parametrize(
    ("preset", "sections", "message"),
    [
        ("grpo", {"critic": {"model": "shared"}}, "critic.model is set, .* reads no values"),
        ("grpo", {"critic": {"lr": 0.1}}, "critic.lr is set, and there is no critic.model"),
        ("grpo", {"reference": {"every": 3}}, "reference.every is set, .* no penalty towards"),
        ("grpo", {"teacher": {"model": "x"}}, "teacher.model is set, .* reads no teacher"),
        (
            "ppo+kl",
            {"critic": {"model": "shared"}, "reference": {"kl_horizon": 5}},
            "reference.kl_horizon is set, and there is no reference.target_kl",
        ),
    ],
)
def test_what_could_not_matter_is_refused(
    preset: str, sections: dict[str, object], message: str
) -> None:
    options = {"kl": 0.1} if preset == "ppo+kl" else {}
    algo = registry.make(preset.removesuffix("+kl"), options, supplies=EVERY_OUTPUT)
    with pytest.raises(ConfigError, match=message):
        factory.refuse_unused_settings(config(**sections), algo)


def test_the_reference_of_an_adapter_is_the_model_without_it(tiny_model_dir: Path) -> None:
    from agentrl.algorithms.model.lora import LoraAdapters

    model, tokenizer = load_model(tiny_model_dir, device="cpu")
    batch = make_batch()
    start = TorchLearner(model, tokenizer, threads=1).logprobs(batch)
    adapters = LoraAdapters(model)
    adapters.add(POLICY, rank=4, alpha=32.0)
    settings = config(policy={"lora": {"rank": 4}})
    algo = registry.make("ppo", {"kl": 0.1}, supplies=EVERY_OUTPUT)
    assert factory.make_frozen_models(settings, algo, model, tokenizer, str(tiny_model_dir)) == {}
    critic = ValueModel(model, lr=1e-2)
    learner = TorchLearner(model, tokenizer, adapters=adapters, critic=critic, threads=1)
    assert learner.supplies == {*OWN, "values"}
    for _ in range(2):
        terms = value_terms(start.double(), learner.values(batch), clip=0.2)
        learner.step(batch, psi_for(batch), lr=1e-2, critic=terms)
    assert learner.values(batch).any()
    assert not torch.allclose(learner.logprobs(batch), start)
    torch.testing.assert_close(learner.logprobs(batch, "reference"), start)
    follows = config(policy={"lora": {"rank": 4}}, reference={"every": 2})
    with pytest.raises(ConfigError, match=r"reference\.every is set, and the reference of an adap"):
        factory.refuse_unused_settings(follows, algo)


def test_settings_that_matter_pass() -> None:
    algo = registry.make("ppo", {"kl": 0.1}, supplies=EVERY_OUTPUT)
    sections = {
        "critic": {"model": "shared", "lr": 0.1},
        "reference": {"every": 3, "target_kl": 0.1, "kl_horizon": 5},
    }
    factory.refuse_unused_settings(config(**sections), algo)
    factory.refuse_unused_settings(config(), registry.make("grpo", {}))


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'critic\.modle'.*did you mean 'model'"):
        config(critic={"modle": "shared"})


def test_the_divergence_is_the_mean_of_sampler_minus_reference() -> None:
    import dataclasses

    batch = make_batch()
    reference = batch.sampler_logprobs.double() - torch.linspace(0, 1, batch.n_tokens).double()
    batch = dataclasses.replace(batch, reference=reference)
    assert kl_to_reference(batch) == pytest.approx(0.5)
