"""Chat completions outside of rollouts, from an upstream or a policy of the run: for judges and for
the reflector of a prompt search.
"""

from __future__ import annotations

import asyncio
import os
from typing import NamedTuple

import aiohttp
import msgspec

from agentrl.core.config import RunConfig
from agentrl.core.errors import AgentRLError, TrainingError
from agentrl.core.types import Json
from agentrl.store.base import Store

REFUSED = (400, 413, 422)  # statuses with which servers reject the request itself
RESUMES = "; the same command resumes from here"  # end of an error
REQUEST_TRIES = 8  # maximum of attempts at a busy or unreachable server
FIRST_WAIT, MAX_WAIT = 0.5, 60.0  # seconds between attempts; doubled, or its retry-after
REQUEST_TIMEOUT = aiohttp.ClientTimeout(total=600.0)  # seconds


class ModelServer(NamedTuple):
    """The server of a model. identity: the model's name; for a policy also run and version."""

    url: str
    model: str
    identity: str
    key: str = ""
    text: str | None = None  # a fixed answer instead of a server


class Completion(NamedTuple):
    """first: (text, log-prob) of the most probable first tokens, if requested."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first: tuple[tuple[str, float], ...] = ()


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Message(msgspec.Struct):
    content: str | None = None


class _Likely(msgspec.Struct):
    token: str
    logprob: float


class _Position(msgspec.Struct):
    top_logprobs: list[_Likely] = []


class _LogProbs(msgspec.Struct):
    content: list[_Position] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    logprobs: _LogProbs | None = None


class _Reply(msgspec.Struct):
    """The fields of a response that are used."""

    choices: list[_Choice]
    usage: _Usage | None = None


def upstream_endpoint(config: RunConfig, name: str) -> ModelServer:
    upstream = config.upstreams[name]
    key = os.environ.get(upstream.key_env, "").strip() if upstream.key_env else ""
    model = upstream.model or name
    return ModelServer(upstream.base_url, model, upstream.text or model, key, upstream.text)


async def find_endpoint(store: Store, config: RunConfig, name: str) -> ModelServer:
    """The endpoint of an upstream, or of a policy that is served now."""
    if name in config.upstreams:
        return upstream_endpoint(config, name)
    served = (await store.policies(config.name))[name]
    identity = f"{config.name}/{name}@{served.version}"
    return ModelServer(served.base_url, served.model, identity, config.engine.access.key)


async def complete(
    session: aiohttp.ClientSession, endpoint: ModelServer, question: str, who: str, **fields: Json
) -> Completion:
    """Request a completion. fields: further fields of the request, such as sampling parameters.
    who: the caller, as the prefix of error messages. Retries while the server is busy or
    unreachable. Raises AgentRLError, and its subclass TrainingError if the server rejects the
    request."""
    if endpoint.text is not None:
        return Completion(endpoint.text)
    messages = [{"role": "user", "content": question}]
    content = await post(session, endpoint, "chat/completions", who, messages=messages, **fields)
    return _read(content, f"{who}: {endpoint.url}/chat/completions")


async def post(
    session: aiohttp.ClientSession, endpoint: ModelServer, path: str, who: str, **fields: Json
) -> bytes:
    """Send `fields` to a path of the server; returns the response. Retries and raises as
    `complete` does."""
    url, why, status = f"{endpoint.url}/{path}", "", 0
    body = {"model": endpoint.model, **fields}
    headers = {"authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
    for number in range(REQUEST_TRIES):
        wait = FIRST_WAIT * 2**number
        try:
            async with session.post(
                url, json=body, headers=headers, timeout=REQUEST_TIMEOUT
            ) as answer:
                content, status = await answer.read(), answer.status
                after = answer.headers.get("retry-after", "")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            why = f"is unreachable ({type(error).__name__}: {error})"
        else:
            if status == 200:
                return content
            why = f"answered {status}: {content[:300].decode(errors='replace')}"
            wait = float(after) if after.isdigit() else wait
            if status != 429 and status < 500:
                break
        if number + 1 < REQUEST_TRIES:
            await asyncio.sleep(min(wait, MAX_WAIT))
    kind = TrainingError if status in REFUSED else AgentRLError
    raise kind(f"{who}: {url} {why}{RESUMES}")


def _read(content: bytes, who: str) -> Completion:
    try:
        reply = msgspec.json.decode(content, type=_Reply)
        choice, used = reply.choices[0], reply.usage or _Usage()
    except (msgspec.DecodeError, IndexError) as error:
        raise TrainingError(f"{who} returned no chat completion ({error})") from None
    positions = (choice.logprobs and choice.logprobs.content) or [_Position()]
    first = tuple((likely.token, likely.logprob) for likely in positions[0].top_logprobs)
    text = choice.message.content or ""
    return Completion(text, used.prompt_tokens, used.completion_tokens, first)
