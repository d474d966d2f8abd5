"""A gateway whose policy sees images, in front of the scripted model server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version

from agentrl.config import RunConfig
from agentrl.config.agents import ImagesConfig
from agentrl.config.learning import PolicyConfig
from agentrl.runners.executors.environment import environment
from agentrl.runners.features import run_features
from agentrl.runners.gateway.features import Feature
from agentrl.runners.gateway.server import Gateway
from agentrl.vision.classes import OLDEST
from tests.runners.conftest import RUN, Bench, impatient, model, store

__all__ = ["impatient", "model", "store"]
Opened = Callable[..., contextlib.AbstractAsyncContextManager[Bench]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Older versions of transformers have no policies that look, and say so."""
    if Version(transformers.__version__) >= Version(OLDEST):
        return
    for item in items:
        if item.path.parent == Path(__file__).parent and "too_old" not in item.name:
            item.add_marker(pytest.mark.skip(reason=f"the extra `vision` needs {OLDEST}"))


def seeing(**images: int) -> RunConfig:
    return RunConfig(policy=PolicyConfig(vision="frozen"), images=ImagesConfig(**images))


@pytest.fixture
def opened(store: Any, model: Any) -> Opened:
    """Opens a gateway with these settings. embedded: whether the policy server is this library's,
    which the scripted one then plays."""

    @contextlib.asynccontextmanager
    async def bench(
        config: RunConfig | None = None,
        *,
        embedded: bool = False,
        more: Sequence[Feature] = (),
        **settings: Any,
    ) -> AsyncIterator[Bench]:
        features = [*run_features(store, config or seeing()), *more]
        for feature in features:
            if sight := getattr(feature, "_sight", None):
                sight._digests = embedded
        gateway = Gateway(store, RUN, features=features, **settings)
        made = Bench(store, model, gateway)
        await made.move(model)
        gateway.start()
        try:
            with environment(gateway.base_url):
                yield made
        finally:
            await asyncio.to_thread(gateway.close)

    return bench


@pytest.fixture
async def bench(opened: Opened) -> AsyncIterator[Bench]:
    async with opened() as made:
        yield made
