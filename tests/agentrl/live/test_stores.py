"""A live run whose processes meet in another store than a file, and one that trains an adapter."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from agentrl.live.records import Lanes
from agentrl.store.base import Store
from tests.agentrl.live.shop import (
    free_port,
    half,
    label,
    listening,
    move,
    offered,
    running,
    seated,
    talk,
)

KEY = "0123456789abcdef0123456789abcdef"


async def learns(store: Store, client: AsyncOpenAI) -> None:
    """Four sessions are trained, and the version that they make answers the next ones."""
    for number in range(4):
        await talk(client, f"s{number}")
    await label(store, 4, half)
    await offered(store, 1)
    await move(store, Lanes(serving=0, candidate=1, share=1.0), kind="candidate", version=1)
    await seated(store, client, 1)


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[str]:
    """A store over HTTP, until the end; gives its URL with a key."""
    port = free_port()
    with (folder / "store.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "agentrl", "store", "serve", f"sqlite:///{folder}/served.db",
            "--port", str(port), stdout=log, stderr=log,
            env=os.environ | {"AGENTRL_STORE_KEYS": f"admin:{KEY}"},
        )  # fmt: skip

    try:
        await listening(process, port, folder / "store.log")
        yield f"http://{KEY}@127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_an_adapter_is_trained_and_served_over_http(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Its versions are adapters of one model, also after the algorithm process was killed."""
    async with served(tmp_path) as url:
        settings = (f"store={url}", "policy.lora.rank=4")
        async with running(tmp_path, tiny_model_dir, *settings) as (shop, store, client):
            await learns(store, client)
            assert KEY not in (tmp_path / "runs/shop/run.json").read_text()
            folder = tmp_path / "runs/shop/versions/policy-1"
            assert (folder / "adapter_config.json").exists()
            assert not (folder / "model.safetensors").exists()
            await shop.pid("algorithm", other=await shop.kill("algorithm"))
            await talk(client, "after")
            await seated(store, client, 1)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["postgresql", "http"])
async def test_two_halves_meet_in_a_store(
    tmp_path: Path, tiny_model_dir: Path, kind: str, postgres: Callable[[], str]
) -> None:
    """Each has a folder of its own, as on two machines."""
    folders = {name: tmp_path / name for name in ("training", "gateway")}
    for folder in folders.values():
        folder.mkdir()
    async with AsyncExitStack() as closing:
        if kind == "http":
            url = await closing.enter_async_context(served(tmp_path))
        else:
            url = postgres()
        halves = [
            await closing.enter_async_context(
                running(folder, tiny_model_dir, f"store={url}", "--only", name)
            )
            for name, folder in folders.items()
        ]
        shop, store, client = halves[1]
        assert shop.process is not None
        await listening(shop.process, shop.port, shop.folder / "front.log")
        await learns(store, client)
        assert not (folders["gateway"] / "runs/shop/checkpoints").exists()
