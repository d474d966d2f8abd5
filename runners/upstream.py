"""The hop to the policy server: one connection pool without a limit, retries within the attempt.

A call is repeated on connection errors, 429 and 5xx as long as nothing of its answer reached the
agent, each time on the route as it is then: the policy server may be restarting elsewhere.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

import aiohttp
from multidict import CIMultiDict

from agentrl.runners.attribution import Live
from agentrl.runners.routing import Router
from agentrl.types import PolicyVersion

T = TypeVar("T")
BACKOFF = 0.05  # seconds before the first repetition; doubles
LONGEST = 1.0  # seconds between repetitions
TRIES = 6  # for failures that waiting does not mend
TRANSIENT = frozenset({429, 502, 503, 504})
CONNECT = 5.0  # seconds to establish a connection

# Between the agent and us, or between us and the server; everything else passes through.
HOP = {"authorization", "connection", "content-length", "content-encoding", "accept-encoding"}
HOP |= {"date", "host", "keep-alive", "proxy-authorization", "server", "te", "trailer"}
HOP |= {"transfer-encoding", "upgrade", "x-policy-version"}


class UpstreamError(Exception):
    """The policy server failed a call. `status` and `body` are its own words, if it had any."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        body: bytes = b"",
        retry_after: float = 0.0,
        transient: bool = True,
        final: bool = False,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.body = message, status, body
        self.retry_after = retry_after
        self.transient = transient  # waiting may mend it
        self.final = final  # it must not be repeated


class Upstream:
    """Posts calls to the server that a router names. Lives on one event loop."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            headers={"accept-encoding": "identity"},  # compressing a local hop is a loss
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT),
            read_bufsize=2**20,
        )

    async def close(self) -> None:
        await self.session.close()

    async def retry(
        self, live: Live, model: str, key: int, once: Callable[[PolicyVersion], Awaitable[T]]
    ) -> T:
        """The first success of `once`. `live` carries the failure of call `key` until then.

        Raises the last UpstreamError when trying again is of no use or the attempt ran out."""
        wait, tries = BACKOFF, 0
        while True:
            tries += 1
            if not self.router.policies:
                live.failures[key] = "no policy server is known for this run yet"
            try:
                value = await once(await self.router.route(model))
            except UpstreamError as error:
                live.failures[key] = error.message
                pause = max(error.retry_after, wait * random.uniform(0.5, 1.0))
                useless = tries >= TRIES and not error.transient
                if error.final or useless or pause >= live.left:
                    raise
                wait = min(2 * wait, LONGEST)
                await asyncio.sleep(pause)
            else:
                live.failures.pop(key, None)
                return value

    @asynccontextmanager
    async def post(
        self, url: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The server's answer, of any status that is an answer.

        Raises UpstreamError for 429, 5xx and a connection that cannot be made or breaks."""
        try:
            async with self.session.post(url, data=body, headers=headers) as answer:
                if answer.status == 429 or answer.status >= 500:
                    raise await _refusal(url, answer)
                yield answer
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UpstreamError(
                f"the policy server at {url} is unreachable ({type(error).__name__}: {error})"
            ) from error


async def _refusal(url: str, answer: aiohttp.ClientResponse) -> UpstreamError:
    body = await answer.read()
    text = body[:500].decode(errors="replace")
    after = answer.headers.get("retry-after", "")
    return UpstreamError(
        f"the policy server at {url} answered {answer.status}: {text}",
        status=answer.status,
        body=body,
        retry_after=float(after) if after.isdigit() else 0.0,
        transient=answer.status in TRANSIENT,
    )


def forwarded(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """The headers that concern both ends."""
    return CIMultiDict((k, v) for k, v in headers.items() if k.lower() not in HOP)


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Server-sent events of a stream, each with its closing blank line, of any length."""
    rest = b""
    async for chunk in chunks:
        rest += chunk.replace(b"\r\n", b"\n")
        *whole, rest = rest.split(b"\n\n")
        for event in whole:
            yield event + b"\n\n"
    if rest.strip():
        yield rest
