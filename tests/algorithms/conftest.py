"""Models that tests of several folders load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.benchmarks.model_classes import small_config
from tests.tiny_models import VOCABULARY, save


@pytest.fixture(scope="session")
def tiny_moe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts (Qwen3) with random weights."""
    torch.manual_seed(0)
    config = small_config("qwen3_moe")
    config.vocab_size, config.max_position_embeddings = VOCABULARY, 512
    return save(AutoModelForCausalLM.from_config(config), tmp_path_factory.mktemp("moe"))
