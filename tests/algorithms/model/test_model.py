from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl.algorithms.model.load import load_model
from agentrl.core.errors import PolicyError
from tests.benchmarks import model_classes


@pytest.fixture
def checkpoint(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def test_a_checkpoint_loads_ready_to_sample(tiny_model_dir: Path) -> None:
    model, tokenizer = load_model(tiny_model_dir, "bfloat16", "cpu")
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert tokenizer.chat_template


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"nowhere.*no such directory"):
        load_model(tmp_path / "nowhere")


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"no config\.json"):
        load_model(tmp_path)


def test_a_tokenizer_without_chat_template_is_refused(checkpoint: Path) -> None:
    (checkpoint / "chat_template.jinja").unlink()
    with pytest.raises(PolicyError, match="no chat template"):
        load_model(checkpoint)


def test_unreadable_weights_are_refused(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(PolicyError, match="cannot be loaded"):
        load_model(checkpoint)


def test_missing_weights_are_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(PolicyError, match="cannot be loaded"):
        load_model(checkpoint)


def test_a_hub_name_that_cannot_be_had_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PolicyError, match="cannot be loaded") as error:
        load_model("nobody/nothing")
    assert "\n" not in str(error.value)


def test_a_checkpoint_without_some_of_its_weights_is_refused(
    checkpoint: Path, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    """transformers would draw them at random."""

    def without(directory: Path, name: str) -> Path:
        weights = load_file(directory / "model.safetensors")
        del weights[name]
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    norm = "model.layers.1.post_attention_layernorm.weight"
    with pytest.raises(PolicyError, match=rf"1 of its weights are missing, such as {norm}"):
        load_model(without(checkpoint, norm))
    untied = Path(shutil.copytree(tiny_llama_dir, tmp_path / "untied"))
    with pytest.raises(PolicyError, match=r"such as lm_head\.weight"):
        load_model(without(untied, "lm_head.weight"))
    load_model(untied, head=False)
    with pytest.raises(PolicyError, match=r"such as model\.embed_tokens\.weight"):
        load_model(without(untied, "model.embed_tokens.weight"), head=False)


def test_a_decoder_that_cannot_be_reloaded_is_refused(tmp_path: Path) -> None:
    """Of Mllama transformers loads a decoder, and none from what `save_pretrained` writes of it."""
    model_classes.save("mllama", tmp_path)
    with pytest.raises(PolicyError, match="could not load what would be saved"):
        load_model(tmp_path, device="cpu", template=False)
