"""Requests to vLLM servers: those of who has the key, the comparison of what they serve with the
learner's weights, and what servers that somebody else started can do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isnan
from typing import Any

import aiohttp
import msgspec

from agentrl.algorithms.engines.vllm.child import KEY_HEADER, SERVER_HEADER
from agentrl.algorithms.engines.vllm.process import OLDEST, is_old
from agentrl.algorithms.engines.vllm.serving import HOLD, MEMORY, TrainedModel, VllmHost
from agentrl.algorithms.engines.vllm.weight_sync import INIT, LOAD, LostError, VllmServers
from agentrl.errors import PolicyError
from agentrl.types import Json

COMPLETIONS = "/v1/completions"
ENGINES = {
    "MemoryEngine": MEMORY,
    "IPCWeightTransferEngine": "ipc",
    "NCCLWeightTransferEngine": "nccl",
}
NAMED = re.compile(rb"Invalid init_info for (\w+)")


@dataclass(frozen=True, slots=True)
class VllmClient:
    """Asks all servers of a host that are up to date, or one."""

    host: VllmHost
    timeout: float  # seconds
    server: str = ""

    @property
    def urls(self) -> Sequence[str]:
        return (self.server,) if self.server else self.host.servers

    def only(self, server: str) -> VllmClient:
        """The same for one server, up to date or not."""
        return replace(self, server=server)

    async def post(self, path: str, body: Json = None, *, missing: bool = False) -> list[Any]:
        """What each server answered; missing: 404 is an answer too.

        Raises PolicyError for a refusal and for silence, LostError where it may be dying."""
        return await self._request("POST", path, body, missing)

    async def ask(self, url: str, method: str, path: str, body: Json = None) -> Any:
        """What one server answered."""
        return (await self.only(url)._request(method, path, body, False))[0]

    async def _request(self, method: str, path: str, body: Json, missing: bool) -> list[Any]:
        headers = {KEY_HEADER: self.host.key}
        if self.server:
            headers[SERVER_HEADER] = self.server
        # A new connection each: updates block this loop for longer than vLLM keeps idle ones.
        limit = aiohttp.ClientTimeout(total=self.timeout)
        async with aiohttp.ClientSession(headers=headers, timeout=limit) as session:
            try:
                url = self.host.url + path
                async with session.request(method, url, json=body) as reply:
                    answer = await reply.read()
            except TimeoutError:
                what = "calls in flight did not end" if path == HOLD else "no answer"
                raise PolicyError(
                    f"vLLM: {path}: {what} within {self.timeout:g} s (engine.vllm.timeout)"
                ) from None
            except aiohttp.ClientError as error:
                raise LostError(f"{path}: {error}") from None
        if reply.status != 200 and not (missing and reply.status == 404):
            words = f"{path}: {reply.status} {answer[:300].decode(errors='replace')}"
            if reply.status >= 500:  # of its own, or because its engine is dying
                raise LostError(words)
            raise PolicyError(f"vLLM refused {words}; {self.host.failure_reason()}")
        answers = msgspec.json.decode(answer) if answer[:1] in (b"{", b"[") else None
        return answers if isinstance(answers, list) else [answers]


async def check_logprobs(
    servers: VllmServers,
    learned: TrainedModel,
    name: str,
    policy: str,
    version: int,
    tolerance: float,
) -> None:
    """Raises PolicyError where log-probs of the probe differ.

    name: of the policy in calls; policy: in the learner."""
    probe = list(learned.probe)
    body = {"model": name, "prompt": probe, "max_tokens": 1, "prompt_logprobs": 0}
    answers = await servers.post(COMPLETIONS, body | {"temperature": 1.0})
    scored = learned.score(policy, probe)
    for answer in answers:
        served = _prompt_logprobs(answer["choices"][0]["prompt_logprobs"][1:])
        gaps = [abs(a - b) for a, b in zip(served, scored, strict=True)]
        worst = max(range(len(gaps)), key=lambda i: inf if isnan(gaps[i]) else gaps[i])
        if not gaps[worst] <= tolerance:
            raise PolicyError(
                f"vLLM serves other weights than the learner's after publishing version "
                f"{version}: log-prob {served[worst]:.6f} against {scored[worst]:.6f}, tolerance "
                f"{tolerance:g} (engine.vllm.tolerance)"
            )


async def check_temperature(
    servers: VllmServers, learned: TrainedModel, name: str, policy: str, tolerance: float
) -> None:
    """Raises PolicyError where log-probs are not of what is sampled from."""
    probe = list(learned.probe)
    body = {"model": name, "prompt": probe, "max_tokens": 8, "temperature": 2.0, "seed": 0}
    body |= {"logprobs": 0, "return_token_ids": True, "ignore_eos": True}
    for answer in await servers.post(COMPLETIONS, body):
        choice = answer["choices"][0]
        tokens, served = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        colder = learned.score(policy, probe + tokens)[-len(tokens) :]
        if all(abs(a - b) <= tolerance for a, b in zip(served, colder, strict=True)):
            raise PolicyError(
                "vLLM tells log-probs of another distribution than it samples from; start it "
                "with --logprobs-mode processed_logprobs"
            )


def _prompt_logprobs(rows: Sequence[dict[str, Any]]) -> list[float]:
    return [next(iter(row.values()))["logprob"] for row in rows]


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
