"""The policy server protocol. Requests are OpenAI's chat completions with vLLM's additions:

request   `return_token_ids: true`, `logprobs: true`
response  `prompt_token_ids`, `choices[].token_ids`, `choices[].logprobs.content[].logprob`
          (streamed: the same fields in the chunks), header `x-policy-version`
Log-probs are of the distribution at the request's temperature, before top-p and top-k (vLLM's are
after them); at temperature 0 they are those of the model itself.
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
    """Serves policies by name. Every response names the version of the policy that answered."""

    base_url: str  # ends in /v1
    model: str  # the policy that requests without a name get

    async def start(self) -> None:
        """Listen. Raises PolicyError when the port is taken."""
        ...

    def updating(self) -> AbstractAsyncContextManager[None]:
        """Within this context weights may change: calls in flight have ended, new ones wait."""
        ...

    async def publish(self, version: int, policy: str | None = None) -> None:
        """Serve the current weights of a policy, default `model`, as `version`; the others keep
        their versions. Call inside `updating`."""
        ...

    async def add(self, policy: str, version: int) -> None:
        """Also serve an adapter of this name that the model has been given since. Call inside
        `updating`. Raises PolicyError where adapters are not served by name."""
        ...

    async def remove(self, policy: str) -> None:
        """Stop serving a policy; later requests for it are refused. Call inside `updating`."""
        ...

    async def wait_for_failure(self) -> PolicyError:
        """Returns the reason once the server has failed for good; until then it waits."""
        ...

    async def close(self) -> None: ...


def advertised_url(base_url: str, host: str) -> str:
    """`base_url` with `host` in place of its host; unchanged where `host` is empty."""
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
    """What `work` returns. If a server fails for good, `work` is cancelled and PolicyError raised:
    what waits for an answer of the policy would wait for ever."""
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
