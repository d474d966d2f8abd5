"""A real vLLM child of a policy that looks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from agentrl.algorithms.engines.vllm.server import VllmServer, vllm_server
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.model.lora import LoraAdapters
from agentrl.core.config import resolve
from agentrl.core.types import POLICY
from agentrl.tiny import vision
from tests.algorithms.vision.looks import WORDS, eyes_of, png
from tests.algorithms.vision.test_serving import ask, gap, image, text, user

# A model of each class: trained as a whole, as an adapter, and while calls run.
WAYS = {"llava": "drained", "qwen2_5_vl": "adapter", "qwen3_vl": "in_flight"}
WIDE = 128  # the heads of a narrower model are too small for vLLM on a CPU


@dataclass
class Served:
    server: VllmServer
    model: Any
    http: httpx.AsyncClient
    adapters: LoraAdapters | None
    version: int = 0

    async def change(self) -> None:
        """Other weights, also of a trained tower, as the next version."""
        adapters, whole = self.adapters, self.model.parameters()
        weights = adapters.parameters(POLICY).values() if adapters else whole
        with torch.no_grad():
            for weight in weights:
                weight.add_(0.02 * torch.randn_like(weight))
        if adapters is None:
            eyes_of(self.model).learned.forget()
        self.version += 1
        await self.server.publish(self.version)

    async def gaps(self, calls: int = 24) -> list[float]:
        """Largest differences of log-probs from the learner's, of calls with two images each; of
        those that sampled no placeholder, which the class would take for one of an image."""
        answers = await asyncio.gather(*map(self._look, range(calls)))
        found, id = list[float](), self.model.config.image_token_id
        for answer, shown in answers:
            sizes = sum(eyes_of(self.model).catalogue.add(body).size for body in shown)
            assert answer["prompt_token_ids"].count(id) == sizes
            if id not in answer["choices"][0]["token_ids"]:
                using = self.adapters.using(POLICY) if self.adapters else nullcontext()
                with using:
                    found.append(gap(self.model, answer, shown))
        return found

    async def _look(self, number: int) -> tuple[dict[str, Any], list[bytes]]:
        shown = [png(number), png(number + 3, 30 + number, 40)]
        messages: list[Any] = [
            user(text("look "), image(shown[0]), text("what is this")),
            {"role": "assistant", "content": "red"},
            user(image(shown[1])),
        ]
        named = {"model": self.server.model, "max_tokens": 6, "seed": number}
        return await ask(self.http, messages, **named), shown


def settings(kind: str, folder: Path) -> dict[str, Any]:
    policy: dict[str, Any] = {"model": str(folder / "model"), "vision": "trained"}
    engine = {"kind": "vllm", "max_context": 512}
    found: dict[str, Any] = {"output": str(folder), "engine": engine, "policy": policy}
    if WAYS[kind] == "adapter":
        policy |= {"vision": "frozen", "lora": {"rank": 4}}
    if WAYS[kind] == "in_flight":
        found["algorithm"] = {"async_sampling": "in_flight", "max_staleness": 2}
    return found


@asynccontextmanager
async def serving(kind: Any, folder: Path) -> AsyncIterator[Served]:
    vision.save(*vision.make(kind, WORDS, most=28 * 56, hidden=WIDE), folder / "model")
    config = resolve(settings(kind, folder), source="test")
    model, tokenizer = load_model(folder / "model", device="cpu", config=config)
    adapters = None
    if WAYS[kind] == "adapter":
        adapters = LoraAdapters(model)
        adapters.add(POLICY, rank=4, alpha=8.0)
    server = vllm_server(config, model, tokenizer, adapters)
    await server.start()
    try:
        address = server.base_url.removesuffix("/v1")
        async with httpx.AsyncClient(base_url=address, timeout=60) as http:
            yield Served(server, model, http, adapters)
    finally:
        await server.close()
