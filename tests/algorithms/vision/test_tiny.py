"""Tiny models that are warmed up by imitation see the pictures of the conversations."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path
from typing import Any

from PIL import Image

from agentrl.algorithms.model.load import load_model
from agentrl.tiny.vision import imitator
from tests.algorithms.vision.looks import encoded, eyes_of

COLOURS = {"red": (200, 60, 60), "green": (60, 180, 60)}


def conversation(name: str, number: int) -> list[dict[str, Any]]:
    """A tool shows a colour, and the assistant names it."""
    shade = tuple(x + number for x in COLOURS[name])
    png = encoded(Image.new("RGB", (28, 28), shade), "PNG")
    url = f"data:image/png;base64,{b64encode(png).decode()}"
    shown = {"role": "tool", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    return [{"role": "user", "content": "look"}, shown, {"role": "assistant", "content": name}]


def test_what_it_says_depends_on_what_it_sees(tmp_path: Path) -> None:
    """Blind, it could not be better than log(2) for the colour and 0 for the end: 0.35 a token."""
    shown = [conversation(name, number) for name in COLOURS for number in range(10)]
    text = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hi"}]
    assert imitator(tmp_path, [*shown, text], seed=0, steps=60, lr=3e-3) < 0.1
    model, tokenizer = load_model(str(tmp_path))
    assert eyes_of(model).processor.size["shortest_edge"] == 28
    assert tokenizer.convert_tokens_to_ids("<image>") == model.config.image_token_id
