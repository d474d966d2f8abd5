from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentrl.algorithms.engines.embedded.server import EmbeddedServer
from agentrl.algorithms.model.load import load_model
from tests.runners.conftest import store as store


@pytest.fixture
async def server(tiny_model_dir: Path) -> AsyncIterator[EmbeddedServer]:
    model, tokenizer = load_model(str(tiny_model_dir), device="cpu")
    server = EmbeddedServer(model, tokenizer, max_batch=16)
    await server.start()
    yield server
    await server.close()
