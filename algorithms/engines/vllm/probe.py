"""What vLLM servers that somebody else started can do, and whether weights can be sent to them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from agentrl.algorithms.engines.vllm.process import OLDEST, is_old
from agentrl.algorithms.engines.vllm.serving import MEMORY
from agentrl.algorithms.engines.vllm.weight_sync import INIT, LOAD
from agentrl.errors import PolicyError

ENGINES = {
    "MemoryEngine": MEMORY,
    "IPCWeightTransferEngine": "ipc",
    "NCCLWeightTransferEngine": "nccl",
}
NAMED = re.compile(rb"Invalid init_info for (\w+)")


@dataclass(frozen=True, slots=True)
class ServerCapabilities:
    """What all of them can do."""

    name: str  # of the model, as calls name it
    adapters: bool  # can be loaded by name
    backend: str  # of vLLM's weight transfer, the same everywhere; empty: none


async def probe(http: aiohttp.ClientSession, urls: Sequence[str]) -> ServerCapabilities:
    """Raises PolicyError for servers that cannot be published to, or differ in what they serve."""
    found = [await _probe(http, url) for url in urls]
    names = [each.name for each in found]
    if len(set(names)) != 1:
        raise PolicyError(
            f"engine.vllm.urls: they serve different models ({', '.join(names)}); start them "
            "with the same --served-model-name"
        )
    backends = {each.backend for each in found}
    return ServerCapabilities(
        names[0],
        all(each.adapters for each in found),
        backends.pop() if len(backends) == 1 else "",
    )


async def _probe(http: aiohttp.ClientSession, url: str) -> ServerCapabilities:
    version = (await _ask(http, "GET", f"{url}/version"))[1]["version"]
    if is_old(version):
        oldest = ".".join(map(str, OLDEST))
        raise PolicyError(f"vLLM at {url} is {version}; start {oldest} or newer there")
    if (await _ask(http, "GET", f"{url}/is_paused"))[0] != 200:
        raise PolicyError(
            f"vLLM at {url} takes no new weights; start it with VLLM_SERVER_DEV_MODE=1 "
            "in its environment, on an address that only this machine reaches"
        )
    status, models = await _ask(http, "GET", f"{url}/v1/models")
    if status != 200:
        raise PolicyError(
            f"vLLM at {url} refused /v1/models ({status}); set engine.vllm.key_env to "
            "the environment variable with its API key"
        )
    name = next(card["id"] for card in models["data"] if not card.get("parent"))
    loads = (await _ask(http, "POST", f"{url}{LOAD}", {}))[0] != 404
    return ServerCapabilities(name, loads, await _backend(http, url))


async def _backend(http: aiohttp.ClientSession, url: str) -> str:
    """The engine of a server's weight transfer, as its refusal of what no engine takes names it:
    where vLLM tells its settings (/server_info) it first describes the machine, for minutes."""
    try:
        nothing = {"init_info": {"agentrl": None}}
        async with http.post(f"{url}{INIT}", json=nothing) as reply:
            named = NAMED.search(await reply.read())
    except (TimeoutError, aiohttp.ClientError) as error:
        raise PolicyError(f"vLLM at {url}: {INIT}: {type(error).__name__}: {error}") from None
    return ENGINES.get(named[1].decode(), "") if named else ""


async def _ask(
    http: aiohttp.ClientSession, method: str, url: str, body: Any = None
) -> tuple[int, Any]:
    """Status, and what a 200 says."""
    try:
        async with http.request(method, url, json=body) as reply:
            text = await reply.read()
            return reply.status, msgspec.json.decode(text) if reply.status == 200 else None
    except (TimeoutError, aiohttp.ClientError, msgspec.DecodeError) as error:
        raise PolicyError(
            f"engine.vllm.urls: {url} gave no answer of vLLM's ({type(error).__name__}: "
            f"{error}); correct the URL"
        ) from None
