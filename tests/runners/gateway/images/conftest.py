"""A gateway whose policy sees images, in front of the scripted model server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from agentrl.core.config import RunConfig
from agentrl.core.config.learning import PolicyConfig
from agentrl.runners.executors.command import environment
from agentrl.runners.gateway.features import Feature
from agentrl.runners.gateway.server import Gateway
from agentrl.runners.main import run_features
from tests.runners.conftest import RUN, Bench

Opened = Callable[..., contextlib.AbstractAsyncContextManager[Bench]]


def seeing() -> RunConfig:
    return RunConfig(policy=PolicyConfig(vision="frozen"))


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
            if image_policy := getattr(feature, "_image_policy", None):
                image_policy._digests = embedded
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
