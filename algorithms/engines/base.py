"""The policy server protocol. The wire is OpenAI's chat completions with vLLM's additions:

request   `return_token_ids: true`, `logprobs: true`
response  `prompt_token_ids`, `choices[].token_ids`, `choices[].logprobs.content[].logprob`
          (streamed: the same fields in the chunks), header `x-policy-version`
Log-probs are those of the distribution sampled from at the request's temperature (before top-p
and top-k; vLLM tells those after them); at temperature 0 those of the model itself.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from agentrl.errors import PolicyError

T = TypeVar("T")
VERSION_HEADER = "x-policy-version"  # of every answer


class PolicyServer(Protocol):
    """Owns the serving of policies, by their names. Every answer carries the version of its own."""

    base_url: str  # ends in /v1
    model: str  # the policy that requests without a name get

    async def start(self) -> None:
        """Listen. Raises PolicyError when the port is taken."""
        ...

    def updating(self) -> AbstractAsyncContextManager[None]:
        """While inside, weights may change: calls in flight have finished, new ones are held."""
        ...

    async def publish(self, version: int, policy: str | None = None) -> None:
        """From now on serve a policy's current weights, default those of `model`, as `version`;
        other policies keep theirs. Call inside `updating`."""
        ...

    async def add(self, policy: str, version: int) -> None:
        """Also serve an adapter of this name that the model has been given since. Call inside
        `updating`. Raises PolicyError where adapters are not served by name."""
        ...

    async def remove(self, policy: str) -> None:
        """Serve such a policy no more; calls that still name it are refused. Call inside
        `updating`."""
        ...

    async def wait_for_failure(self) -> PolicyError:
        """Returns why, once no call will ever be answered again; as long as they may, it waits."""
        ...

    async def close(self) -> None: ...


def advertised_url(base_url: str, host: str) -> str:
    """The URL by which others call a server that listens at `base_url`; no host: the same."""
    if not host:
        return base_url
    parts = urlsplit(base_url)
    name = f"[{host}]" if ":" in host else host
    return parts._replace(netloc=f"{name}:{parts.port}").geturl()


def port_taken(host: str, port: int, error: OSError) -> PolicyError:
    """The error of a policy server that cannot listen."""
    reason = os.strerror(error.errno) if error.errno else error
    return PolicyError(
        f"policy server: cannot listen on {host}:{port}: {reason}; set engine.port to a free port, "
        "or to 0 for any"
    )


async def run_unless_failed(work: Coroutine[Any, Any, T], servers: Sequence[PolicyServer]) -> T:
    """What `work` returns. Cancels it, and raises PolicyError, once a server is given up: whoever
    waits for what a policy says would wait for ever."""
    doing = asyncio.ensure_future(work)
    watching = [asyncio.ensure_future(server.wait_for_failure()) for server in servers]
    try:
        await asyncio.wait([doing, *watching], return_when=asyncio.FIRST_COMPLETED)
        for watch in watching:
            if watch.done() and not doing.done():
                raise watch.result()
        return await doing
    finally:
        for task in (doing, *watching):
            task.cancel()
        await asyncio.gather(doing, *watching, return_exceptions=True)
