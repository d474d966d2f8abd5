"""Calls with images, and what is stored of them."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import httpx

from tests.runners.conftest import Bench
from tests.runners.gateway.images.pictures import picture, url

RED, BLUE = picture(size=(8, 6)), picture("JPEG", (12, 4))
DIGESTS = {body: sha256(body).hexdigest() for body in (RED, BLUE)}
TEXT = {"type": "text", "text": "what is this?"}


def shown(body: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(body), **more}}


def named(body: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"image:{DIGESTS[body]}", **more}}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


async def ask(bench: Bench, *bodies: Any, path: str = "/chat/completions") -> list[Any]:
    """The answers to calls of one attempt, and then its stored calls."""
    active = bench.gateway.register(await bench.attempt())
    headers = {"authorization": f"Bearer {active.key}"}
    async with httpx.AsyncClient(base_url=bench.gateway.base_url, headers=headers) as http:
        answers: list[Any] = [await http.post(path, json={"model": "m"} | body) for body in bodies]
    trace = await bench.store.trace(active.attempt.rollout.id)
    assert trace is not None
    return [*answers, trace.transitions, active]


async def stored(bench: Bench) -> int:
    return (await bench.store.stats()).rows["images"]
