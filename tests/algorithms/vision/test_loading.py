"""Which models become policies that look, and what is said of the others."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from agentrl.algorithms import estimate
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.model.lora import LoraAdapters
from agentrl.algorithms.model.scaled import inputs_of
from agentrl.algorithms.vision import inputs
from agentrl.core.errors import ConfigError, PolicyError
from agentrl.tiny import vision
from agentrl.tiny.models import make_model, word_tokenizer
from tests import factories
from tests.algorithms.vision.looks import KINDS, WORDS, eyes_of


def view(**policy: Any) -> Any:
    return factories.config(policy={"model": "m"} | policy)


@pytest.fixture(scope="module", params=KINDS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    vision.save(*vision.make(request.param, WORDS), folder)
    return folder


def test_the_tower_is_loaded_and_frozen_unless_it_learns(saved: Path) -> None:
    for setting, learns in (("", False), ("frozen", False), ("trained", True)):
        model, _ = load_model(saved, device="cpu", config=view(vision=setting))
        eyes = eyes_of(model)
        assert eyes.trained is learns
        weights = [p.requires_grad for part in eyes.kind.towers for p in part.parameters()]
        assert any(weights) is learns
        assert all(p.requires_grad for p in model.model.language_model.parameters())


def test_memory_is_estimated_before_it_is_loaded(saved: Path) -> None:
    lines = list(estimate.describe(view(model=str(saved)), str(saved)))
    assert lines[0].startswith("memory: at most")


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    vision.save(*vision.make("llava", WORDS), folder)
    return folder


@pytest.mark.parametrize(
    ("words", "tables"),
    [
        ("policy.vision = 'trained': an adapter", {"policy": {"lora": {"rank": 2}}}),
        ("learner.kind = 'verl'", {"learner": {"kind": "verl"}}),
        ("engine.kind = 'mine.py:serve'", {"engine": {"kind": "mine.py:serve"}}),
        ("learner.liger_kernel", {"learner": {"liger_kernel": True}}),
        ("critic.model", {"critic": {"model": "shared"}}),
        ("policy.quantize", {"policy": {"quantize": "4bit", "lora": {"rank": 2}}}),
    ],
)
def test_settings_that_cannot_look_are_refused(
    words: str, tables: dict[str, Any], llava: Path
) -> None:
    own = {"model": "m", "vision": "trained"} | tables.get("policy", {})
    config = factories.config(**tables | {"policy": own})
    with pytest.raises(ConfigError, match=words):
        load_model(llava, device="cpu", config=config)


def test_a_model_without_its_image_processor_is_refused(saved: Path, tmp_path: Path) -> None:
    for file in saved.iterdir():
        if file.name != "preprocessor_config.json":
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(PolicyError, match=r"preprocessor_config\.json"):
        load_model(tmp_path, device="cpu")


def test_an_older_transformers_is_refused(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs.transformers, "__version__", "5.9.0")
    with pytest.raises(PolicyError, match=r"need transformers 5\.10 or newer, not 5\.9\.0; pip"):
        load_model(saved, device="cpu")


def test_a_tiny_model_is_refused_where_transformers_is_too_old(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(inputs.transformers, "__version__", "5.9.0")
    said = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "a cat"}]
    for build in (
        lambda: vision.make("llava", WORDS),
        lambda: vision.imitator(tmp_path, [said], seed=0),
    ):
        with pytest.raises(PolicyError, match=r"a tiny llava: .* need transformers 5\.10 or newer"):
            build()


def test_a_model_of_text_has_nothing_to_look_with(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(WORDS)
    make_model(tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, _ = load_model(tmp_path, device="cpu", config=view())
    assert inputs_of(model) is None
    with pytest.raises(PolicyError, match=r"policy.vision = 'frozen': .* has no vision tower"):
        load_model(tmp_path, device="cpu", config=view(vision="frozen"))


def gemma3(text: dict[str, Any]) -> Any:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
    config = hf.Gemma3Config(text_config=text | {"head_dim": 8}, vision_config=vision,
                             mm_tokens_per_image=4, image_token_index=5)  # fmt: skip
    return hf.Gemma3ForConditionalGeneration(config)


def qwen3_5(text: dict[str, Any]) -> Any:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
              "out_hidden_size": 16, "patch_size": 7}  # fmt: skip
    text |= {"head_dim": 8, "linear_num_value_heads": 2, "linear_num_key_heads": 2,
             "linear_key_head_dim": 8, "linear_value_head_dim": 8}  # fmt: skip
    config = hf.Qwen3_5Config(text_config=text, vision_config=vision)
    return hf.Qwen3_5ForConditionalGeneration(config)


def paligemma(text: dict[str, Any]) -> Any:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
              "projection_dim": 16}  # fmt: skip
    config = hf.PaliGemmaConfig(
        text_config=text | {"model_type": "gemma", "head_dim": 8}, vision_config=vision,
        projection_dim=16, image_token_index=5,
    )  # fmt: skip
    return hf.PaliGemmaForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("build", "why"),
    [(gemma3, "in both directions"), (qwen3_5, "linear attention"), (paligemma, "both directions")],
)
def test_other_classes_are_refused_by_name(
    build: Any, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As models of text alone they train as ever, and it is said that nothing is seen."""
    tokenizer = word_tokenizer(WORDS)
    model = build(
        {"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 16,
         "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
         "max_position_embeddings": 64}
    )  # fmt: skip
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(PolicyError, match=f"{why}.*llava, qwen2_5_vl or qwen3_vl") as refusal:
        load_model(tmp_path, device="cpu", config=view(vision="frozen"))
    assert repr(model.config.model_type) in str(refusal.value)
    if build is paligemma:
        with pytest.raises(PolicyError, match=why):
            load_model(tmp_path, device="cpu", config=view())
        return
    with caplog.at_level(logging.WARNING):
        text, _ = load_model(tmp_path, device="cpu", config=view())
    assert inputs_of(text) is None
    adapters = LoraAdapters(text)
    adapters.add("policy", rank=2, alpha=4)
    assert adapters.parameters("policy")
    assert not any("vision" in name or "visual" in name for name in adapters.parameters("policy"))
    assert any("Only its text is trained" in message for message in caplog.messages)
