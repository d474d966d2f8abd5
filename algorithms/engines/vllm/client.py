"""Control requests to vLLM servers, and the detection of their capabilities."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import msgspec

from agentrl.algorithms.engines.vllm.process import OLDEST, is_old
from agentrl.algorithms.engines.vllm.serving import HOLD, INIT, LOAD, MEMORY, LostError, VllmHost
from agentrl.algorithms.engines.vllm.spans import SPANS
from agentrl.errors import PolicyError
from agentrl.types import Json

ENGINES = {
    "MemoryEngine": MEMORY,
    "IPCWeightTransferEngine": "ipc",
    "NCCLWeightTransferEngine": "nccl",
}
INVALID_INIT_INFO = re.compile(rb"Invalid init_info for (\w+)")


@dataclass(frozen=True, slots=True)
class VllmClient:
    """Sends control requests to all up-to-date servers of a host, or to one."""

    host: VllmHost
    timeout: float  # seconds
    server: str = ""

    @property
    def urls(self) -> Sequence[str]:
        return (self.server,) if self.server else self.host.servers

    def only(self, server: str) -> VllmClient:
        """A client of one server, up to date or not."""
        return replace(self, server=server)

    async def post(self, path: str, body: Json = None, *, missing: bool = False) -> list[Any]:
        """Send to each server; returns the decoded responses. missing: 404 is allowed.

        Raises PolicyError for a rejection or a time-out, LostError if a server may be dying."""
        return await self._request("POST", path, body, missing)

    async def ask(self, url: str, method: str, path: str, body: Json = None) -> Any:
        """Send to one server; returns its decoded response. Raises as `post` does."""
        return (await self.only(url)._request(method, path, body, False))[0]

    async def _request(self, method: str, path: str, body: Json, missing: bool) -> list[Any]:
        try:
            async with asyncio.timeout(self.timeout):
                replies = await self.host.request(method, path, body, self.server)
        except TimeoutError:
            what = "calls in flight did not end" if path == HOLD else "no answer"
            raise PolicyError(
                f"vLLM: {path}: {what} within {self.timeout:g} s (engine.vllm.timeout)"
            ) from None
        for status, answer in replies:
            if status != 200 and not (missing and status == 404):
                reason = f"{path}: {status} {answer[:300].decode(errors='replace')}"
                if status >= 500:  # an error of its own, or its engine is dying
                    raise LostError(reason)
                raise PolicyError(f"vLLM refused {reason}; {self.host.failure_reason()}")
        return [
            msgspec.json.decode(answer) if answer[:1] in (b"{", b"[") else None
            for _, answer in replies
        ]


@dataclass(frozen=True, slots=True)
class ServerCapabilities:
    """The common capabilities of all servers."""

    name: str  # the model's name in calls
    adapters: bool  # whether adapters can be loaded by name
    spans: bool  # whether calls that span an update name the version of each token
    backend: str  # vLLM's weight-transfer backend; empty: none, or not the same everywhere


async def probe(http: aiohttp.ClientSession, urls: Sequence[str]) -> ServerCapabilities:
    """Detect the capabilities. Raises PolicyError for different models, or no weight updates."""
    servers = [await _probe(http, url) for url in urls]
    names = [each.name for each in servers]
    if len(set(names)) != 1:
        raise PolicyError(
            f"engine.vllm.urls: they serve different models ({', '.join(names)}); start them "
            "with the same --served-model-name"
        )
    backends = {each.backend for each in servers}
    return ServerCapabilities(
        names[0],
        all(each.adapters for each in servers),
        all(each.spans for each in servers),
        backends.pop() if len(backends) == 1 else "",
    )


async def _probe(http: aiohttp.ClientSession, url: str) -> ServerCapabilities:
    version = (await _ask(http, "GET", f"{url}/version"))[1]["version"]
    if is_old(version):
        oldest = ".".join(map(str, OLDEST))
        raise PolicyError(f"vLLM at {url} is {version}; start {oldest} or newer there")
    if (await _ask(http, "GET", f"{url}/is_paused"))[0] != 200:
        raise PolicyError(
            f"vLLM at {url} accepts no new weights; start it with VLLM_SERVER_DEV_MODE=1 "
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
    spans = (await _ask(http, "GET", f"{url}{SPANS}"))[0] == 200
    return ServerCapabilities(name, loads, spans, await _backend(http, url))


async def _backend(http: aiohttp.ClientSession, url: str) -> str:
    """The weight-transfer backend of a server, from its error message for an invalid request:
    /server_info has it too, but takes minutes to describe the machine first."""
    try:
        nothing = {"init_info": {"agentrl": None}}
        async with http.post(f"{url}{INIT}", json=nothing) as reply:
            named = INVALID_INIT_INFO.search(await reply.read())
    except (TimeoutError, aiohttp.ClientError) as error:
        raise PolicyError(f"vLLM at {url}: {INIT}: {type(error).__name__}: {error}") from None
    return ENGINES.get(named[1].decode(), "") if named else ""


async def _ask(
    http: aiohttp.ClientSession, method: str, url: str, body: Any = None
) -> tuple[int, Any]:
    """Status, and the decoded body of a 200. Raises PolicyError if the answer is not vLLM's."""
    try:
        async with http.request(method, url, json=body) as reply:
            text = await reply.read()
            return reply.status, msgspec.json.decode(text) if reply.status == 200 else None
    except (TimeoutError, aiohttp.ClientError, msgspec.DecodeError) as error:
        raise PolicyError(
            f"engine.vllm.urls: {url} does not answer as vLLM does ({type(error).__name__}: "
            f"{error}); correct the URL"
        ) from None
