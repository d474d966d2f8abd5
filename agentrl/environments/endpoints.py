"""The model API of the rollout in which code runs, for clients that cannot find it themselves."""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from urllib.parse import quote
from weakref import WeakKeyDictionary

import httpx
import msgspec

from agentrl.errors import AgentError, PolicyError
from agentrl.runners.tracing import attempt_log, roles

TRACE = re.compile("00-([0-9a-f]{32})-")  # of an agent's own process, in TRACEPARENT
OUTSIDE = (
    "agentrl.endpoint() is of the rollout in which it is called, and this is none: call it inside"
    " the agent (not when its module is imported, and not in a server or thread that outlives a"
    " rollout), and pass its url and key on"
)
_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible API that belongs to one attempt: calls through it are recorded in this
    attempt from any client, thread, server or other process, while the attempt runs."""

    url: str  # ends in /v1
    key: str
    model: str = "policy"
    others: tuple[str, ...] | None = None  # the only roles besides the policy's; None: any

    def role(self, name: str) -> Endpoint:
        """The endpoint whose calls have the role `name`, such as "user" or "judge"."""
        if not name:
            raise ValueError("a role needs a name")
        if self.others is not None and name not in (roles.DEFAULT, *self.others):
            raise AgentError(
                f"the environment asks models in the role {name!r}, which its `roles` do not name,"
                " so the run file could not say who answers; add it there"
            )
        start = re.sub(r"(/a/[^/]+)(/[^/]+)?/v1$", r"\1", self.url)
        return replace(self, url=f"{start}/{quote(name, safe='')}/v1")

    async def chat(
        self, messages: list[dict[str, Any]], tools: Any = None, **sampling: Any
    ) -> dict[str, Any]:
        """The assistant's message. sampling: more of the request's body. Raises PolicyError."""
        loop = asyncio.get_running_loop()
        if (client := _clients.get(loop)) is None:
            client = _clients[loop] = httpx.AsyncClient(**_settings())
        try:
            return _read(await client.post(**self._request(messages, tools, sampling)))
        except httpx.HTTPError as error:
            raise _unreachable(error) from error

    def chat_sync(
        self, messages: list[dict[str, Any]], tools: Any = None, **sampling: Any
    ) -> dict[str, Any]:
        """`chat` for code that is not async."""
        try:
            return _read(_client().post(**self._request(messages, tools, sampling)))
        except httpx.HTTPError as error:
            raise _unreachable(error) from error

    def _request(self, messages: Any, tools: Any, sampling: dict[str, Any]) -> dict[str, Any]:
        body = {"model": self.model, "messages": messages, **sampling}
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        content = msgspec.json.encode(body | ({"tools": tools} if tools else {}))
        return {"url": f"{self.url}/chat/completions", "content": content, "headers": headers}


def endpoint() -> Endpoint:
    """The endpoint of the rollout in which this is called. Raises AgentError outside of rollouts.

    In another program that a rollout starts, use the url and key, which it must be given; an
    `agent.command` and its Python children find them by this function too."""
    url, key = os.environ.get("OPENAI_BASE_URL", ""), os.environ.get("OPENAI_API_KEY", "")
    start = re.sub(r"(/a/[^/]+(/[^/]+)?)?(/v1)?/?$", "", url)
    log = attempt_log.current()
    attempt = _own_process(start) if log is None else log.attempt
    if not (url and attempt):
        raise AgentError(OUTSIDE)
    return Endpoint(f"{start}/a/{attempt}/v1", key)


def _own_process(gateway: str) -> str:
    """The attempt of an `agent.command`, all of whose variables are of one gateway."""
    trace = TRACE.match(os.environ.get("TRACEPARENT", ""))
    ours = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") == gateway
    return trace[1] if trace and ours else ""


def _settings() -> dict[str, Any]:
    # The attempt's deadline ends calls. No proxy is between agent and gateway. Connections are not
    # kept, as nobody could close them when their event loop ends.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return {"timeout": None, "trust_env": False, "limits": limits}


@cache
def _client() -> httpx.Client:
    return httpx.Client(**_settings())


def _read(answer: httpx.Response) -> dict[str, Any]:
    if answer.status_code != 200:
        raise PolicyError(f"a model call failed: {answer.status_code}, {_words(answer)}")
    try:
        message = msgspec.json.decode(answer.content)["choices"][0]["message"]
        said = {key: value for key, value in message.items() if value is not None}
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError):
        raise PolicyError(f"a model call had no message as answer: {answer.text:.300}") from None
    return {"role": "assistant", "content": "", **said}


def _words(answer: httpx.Response) -> str:
    """What an error says: its message, if it is one of OpenAI's API."""
    try:
        return str(msgspec.json.decode(answer.content)["error"]["message"])
    except (msgspec.DecodeError, LookupError, TypeError):
        return f"{answer.text:.300}"


def _unreachable(error: httpx.HTTPError) -> PolicyError:
    return PolicyError(f"a model call failed: {type(error).__name__}: {error}")
