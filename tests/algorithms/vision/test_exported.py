"""A policy that sees, taken out of a run: its card says how to load it, and that works."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from agentrl.algorithms.model.lora import LoraAdapters
from agentrl.algorithms.train.checkpoint import save_checkpoint
from agentrl.cli.main import cli
from agentrl.tiny import vision
from tests.agentrl.models import trained
from tests.algorithms.vision.looks import WORDS, png


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "adapter"])
def test_an_exported_model_is_loaded_as_its_card_says(
    lora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = vision.make("llava", WORDS)
    vision.save(model, tokenizer, tmp_path / "policy")
    trained.make(tmp_path, tmp_path / "policy")
    monkeypatch.chdir(tmp_path)
    taken = ["--run", "mine"]
    if lora:
        adapter = tmp_path / "adapter"
        vision.save(model, tokenizer, adapter)
        (adapter / "model.safetensors").unlink()
        model.name_or_path = str(tmp_path / "policy")
        adapters = LoraAdapters(model)
        adapters.add("policy", rank=2, alpha=4.0)
        adapters.save("policy", adapter)
        save_checkpoint(tmp_path / "loose" / "000001", trained.Files(adapter), {})
        taken = [str(tmp_path / "loose" / "000001")]
    command = ["export", "model", "--to", "out", *taken]
    CliRunner().invoke(cli, command, catch_exceptions=False)
    text = (tmp_path / "out" / "README.md").read_text()
    code = re.search("```python\n(.*?)```", text, re.S)
    assert code
    assert "AutoModelForImageTextToText" in code[1]
    found: dict[str, object] = {}
    exec(code[1], found)
    images = found["images"]
    from PIL import Image

    (tmp_path / "a.png").write_bytes(png(1))
    pixels = images(Image.open(tmp_path / "a.png"), return_tensors="pt")  # type: ignore[operator]
    assert pixels["pixel_values"].shape[-1] == vision.SIDE
    assert "peft" in sys.modules or not lora
