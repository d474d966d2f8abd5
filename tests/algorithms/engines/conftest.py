"""A running policy server on the tiny model, and a way to make that model say what a test needs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.algorithms.engines.embedded.server import EmbeddedServer
from agentrl.algorithms.model.load import load_model
from agentrl.core.types import Sampling


@pytest.fixture
async def server(tiny_model_dir: Path) -> AsyncIterator[EmbeddedServer]:
    """A started server; `network` and `tokenizer` are what it serves."""
    model, tokenizer = load_model(tiny_model_dir, device="cpu")
    server = EmbeddedServer(
        model, tokenizer, max_batch=16, defaults=Sampling(max_tokens=16, temperature=0.0)
    )
    server.network, server.tokenizer = model, tokenizer  # type: ignore[attr-defined]
    await server.start()
    yield server
    await server.close()


@pytest.fixture
def say(server: Any) -> Callable[[str], None]:
    """Makes every later completion read as given, ended by end-of-sequence."""
    script: list[int] = []
    start: list[int] = []

    def hook(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        if script:
            n = kwargs["plan"].last.numel()
            positions = kwargs["position_ids"][0, -n:]
            start[:] = start or [int(positions[0])]
            for row, position in enumerate(positions.tolist(), output.logits.shape[1] - n):
                wanted = script[min(position - start[0], len(script) - 1)]
                output.logits[0, row] = torch.zeros_like(output.logits[0, row])
                output.logits[0, row, wanted] = 30.0
        return output

    server.network.register_forward_hook(hook, with_kwargs=True)

    def say(text: str) -> None:
        start.clear()
        script[:] = [*server.tokenizer(text)["input_ids"], server.tokenizer.eos_token_id]

    return say
