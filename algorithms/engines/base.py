"""The policy server protocol. The wire is OpenAI's chat completions with vLLM's additions:

request   `return_token_ids: true`, `logprobs: true`
response  `prompt_token_ids`, `choices[].token_ids`, `choices[].logprobs.content[].logprob`
          (streamed: the same fields in the chunks), header `x-policy-version`
Log-probs are those of the distribution sampled from at the request's temperature (before top-p
and top-k; vLLM tells those after them); at temperature 0 those of the model itself.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol


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

    async def close(self) -> None: ...
