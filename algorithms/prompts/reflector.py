"""A call to the reflector: an upstream, or a policy of the run."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import aiohttp
import msgspec

from agentrl.config import RunConfig
from agentrl.errors import AgentRLError
from agentrl.store.base import Store
from agentrl.types import Json

TRIES = 6
TIMEOUT = aiohttp.ClientTimeout(total=600.0)  # seconds


async def ask_reflector(
    store: Store, config: RunConfig, body: dict[str, Json], max_tokens: int | None
) -> dict[str, Any]:
    """The reflector's chat completion. Raises AgentRLError, after some tries where waiting may
    help."""
    name = config.prompts.reflector
    upstream, headers = config.upstreams.get(name), {}
    if upstream is not None and upstream.text is not None:
        return {"choices": [{"message": {"content": upstream.text}}]}
    if upstream is not None:
        base_url, model = upstream.base_url, upstream.model or name
        if upstream.key_env:
            headers["authorization"] = f"Bearer {os.environ.get(upstream.key_env, '')}"
    else:
        served = (await store.policies(config.name))[name]
        base_url, model = served.base_url, served.model
    body |= {"model": model} | ({} if max_tokens is None else {"max_tokens": max_tokens})
    async with aiohttp.ClientSession(timeout=TIMEOUT, headers=headers) as session:
        for number in range(TRIES):
            try:
                async with session.post(f"{base_url}/chat/completions", json=body) as reply:
                    said = await reply.text()
                    if reply.status == 200:
                        return msgspec.json.decode(said, type=dict[str, Any])
                    why, wait = f"{reply.status} {said[:200]}", reply.headers.get("retry-after", "")
                    if reply.status < 500 and reply.status != 429:
                        break
            except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
                why, wait = f"{type(error).__name__} {error}", ""
            if number + 1 < TRIES:
                await asyncio.sleep(min(float(wait) if wait.isdigit() else 2.0**number, 60.0))
    raise AgentRLError(
        f"prompts.reflector = {name!r} does not answer: {why}; nothing is lost, the same command "
        "goes on from here"
    )
