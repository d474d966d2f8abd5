"""An adapter and its base as one model."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from agentrl.algorithms.lora.adapters import LoraAdapters, base_of
from agentrl.algorithms.model.inputs import inputs_of
from agentrl.algorithms.model.load import load_model
from agentrl.base.files import atomic_directory
from agentrl.errors import PolicyError


def export_merged(adapter: Path, directory: Path, *, base: str = "") -> None:
    """Write an adapter merged with its base, and the tokenizer, to a new Hugging Face directory in
    float32.

    base: model to use instead of the one that the adapter names. Raises PolicyError and writes
    nothing if base and adapter do not match or `directory` exists."""
    if directory.exists():
        raise PolicyError(f"{directory} exists already; give the name of a new directory")
    model, tokenizer = load_model(base or base_of(adapter), device="cpu")
    adapters = LoraAdapters(model)
    adapters.open("merged", adapter)
    with atomic_directory(directory) as partial:
        adapters.merge("merged", partial)
        if inputs := inputs_of(model):
            inputs.save(partial)
        own = adapter / "tokenizer_config.json"  # a run may have given it another chat template
        (AutoTokenizer.from_pretrained(adapter) if own.is_file() else tokenizer).save_pretrained(
            partial
        )
