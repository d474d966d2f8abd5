"""An adapter merged with its base."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.model.lora import fingerprint
from agentrl.core.errors import PolicyError
from agentrl.models.export import export_merged
from tests.algorithms.model.test_lora import adapted, base, logits, make

__all__ = ["base"]


def test_export_merged_makes_a_directory_that_loads_without_peft(
    base: Path, tmp_path: Path
) -> None:
    adapters = make(base)
    adapters.save("solver", tmp_path / "adapter")
    export_merged(tmp_path / "adapter", tmp_path / "merged")
    model, tokenizer = load_model(tmp_path / "merged", device="cpu")
    torch.testing.assert_close(logits(model), adapted(adapters, "solver"), rtol=0, atol=1e-5)
    assert tokenizer.chat_template
    assert fingerprint(model) != adapters.fingerprint
    with pytest.raises(PolicyError, match="exists already"):
        export_merged(tmp_path / "adapter", tmp_path / "merged")
    moved = base.rename(tmp_path / "moved")
    try:
        export_merged(tmp_path / "adapter", tmp_path / "again", base=str(moved))
    finally:
        moved.rename(base)
    assert fingerprint(load_model(tmp_path / "again", device="cpu")[0]) == fingerprint(model)
