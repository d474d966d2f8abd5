"""HTTP client for policy servers: an unlimited connection pool, retries within the attempt.

Owns: the connections, and whether each server returns token ids.
A call is retried on connection errors, 429 and 5xx until the first byte of its response reaches the
agent, each time on the current route: the policy server may be restarting elsewhere.
"""

from __future__ import annotations

import asyncio
import io
import logging
import random
import time
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
import msgspec
from multidict import CIMultiDict

from agentrl.base.access import KEY_HEADERS
from agentrl.runners.gateway.attribution import CallOrigin, ModelCall, RefusedError
from agentrl.runners.gateway.capture import Fields, value
from agentrl.runners.gateway.prompt_rule import Messages, PromptRule, find_rule, is_plain
from agentrl.runners.gateway.routing import Route, Router
from agentrl.types import Json

log = logging.getLogger("agentrl.runner")
T = TypeVar("T")
BACKOFF = 0.05  # seconds before the first retry; doubles
LONGEST = 1.0  # seconds between retries
MAX_TRIES = 6  # for failures that are not transient
TRANSIENT = frozenset({429, 502, 503, 504})
CHUNKED_ABOVE = 2**20  # bytes of a request
LARGEST_ANSWER = 64 * 2**20  # bytes of a response that is not streamed, or of one event
LARGEST_STREAM = 4 * LARGEST_ANSWER  # bytes of all events of a stream
CONNECT = 5.0  # seconds to establish a connection
RECHECK_AFTER = 300.0  # seconds until a frozen endpoint is asked for token ids again

# Headers of a single connection; all others are passed on.
HOP_BY_HOP = {"accept-encoding", "authorization", "connection", "content-length"}
HOP_BY_HOP |= {"content-encoding", "date", "host", "keep-alive", "proxy-authorization", "server"}
HOP_BY_HOP |= {"te", "trailer", "transfer-encoding", "upgrade"}
HOP_BY_HOP |= {*KEY_HEADERS, "x-policy-version", "x-processors"}
# Sent to trained policies only; a frozen endpoint may belong to a third party.
PRIVATE = {"baggage", "cookie", "traceparent", "tracestate"}
# Fields that determine the prompt, as /tokenize has them; see `_rendered` for the others.
RENDERED = {"messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt"}
RENDERED |= {"continue_final_message", "add_special_tokens"}
REASONING = ("reasoning", "reasoning_content")  # names of one field of a message
PROBE = {"x-agentrl-probe": "1"}
EVENT_FIELDS = (b":", b"data", b"event", b"id", b"retry")  # starts of an event's lines


class PromptSize(msgspec.Struct):
    """Response of vLLM and the embedded server to /tokenize, without unused fields."""

    count: int
    max_model_len: int | None = None  # tokens of prompt and completion


@dataclass(eq=False)
class RefusedPromptError(LookupError):
    """A policy server refused to render a prompt, with its status and response body."""

    status: int
    words: bytes


_size = msgspec.json.Decoder(PromptSize)


@dataclass(eq=False)
class UpstreamError(Exception):
    """The policy server failed a call."""

    message: str
    status: int | None = None  # of the response, if there is one
    body: bytes = b""
    retry_after: float = 0.0  # seconds
    transient: bool = True  # a later retry may succeed
    final: bool = False  # the call must not be retried


class Upstream:
    """Posts calls to the servers that a router selects. Bound to one event loop."""

    def __init__(self, router: Router, *, as_sent: bool = False) -> None:
        """`as_sent`: send messages unchanged, whatever a policy's chat template renders."""
        self.router, self._as_sent = router, as_sent
        self._rules: dict[str, asyncio.Task[PromptRule]] = {}  # by base URL
        self.max_lengths: dict[str, int] = {}  # base URL -> maximum tokens, once exceeded
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            headers={"accept-encoding": "identity"},  # compression slows down a local hop
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT),
            read_bufsize=2**20,
            cookie_jar=aiohttp.DummyCookieJar(),  # attempts share no cookies
        )
        self._give_token_ids: set[str] = set()  # base URLs of servers that returned token ids
        self._refused_at: dict[str, float] = {}  # base URL -> time.monotonic() of its refusal
        self._warned: set[str] = set()

    def warn_once(self, message: str, *args: object) -> None:
        """Log a warning that applies to many calls only once."""
        if message not in self._warned:
            self._warned.add(message)
            log.warning(message, *args)

    def gives_token_ids(self, route: Route) -> bool | None:
        """Whether the server returns token ids; None if unknown."""
        if route.base_url in self._give_token_ids:
            return True
        since = self._refused_at.get(route.base_url)
        return None if since is None or time.monotonic() - since > RECHECK_AFTER else False

    def note_token_ids(self, route: Route, *, given: bool) -> None:
        """Record whether a server returned token ids. A server that did so once is always asked
        again, and so is every policy server, because training needs them."""
        if given:
            self._give_token_ids.add(route.base_url)
        elif route.frozen:
            self._refused_at[route.base_url] = time.monotonic()

    async def adapt(self, route: Route, messages: Messages) -> Messages:
        """Adapt messages to the chat template of the route's policy, by a rule that the first call
        to each server finds. Raises UntranslatableError for text that would be lost."""
        if route.frozen or self._as_sent or is_plain(messages):
            return messages
        finding = self._rules.get(route.base_url)
        if finding is None or (finding.done() and (finding.cancelled() or finding.exception())):
            finding = asyncio.create_task(self._find_rule(route))
            self._rules[route.base_url] = finding
        return (await asyncio.shield(finding)).apply(messages)

    async def _find_rule(self, route: Route) -> PromptRule:
        async def count(messages: Messages) -> int | None:
            try:
                return (await self.prompt_size(route, {"messages": messages})).count
            except RefusedPromptError:
                return None
            except UpstreamError as error:
                if error.status != 500:
                    raise
                return None  # the template failed

        try:
            return await find_rule(count, route.policy)
        except LookupError as error:
            log.warning("policy %s: messages go as they come, because %s", route.policy, error)
            return PromptRule()

    async def prompt_size(
        self, route: Route, chat: Fields, headers: Mapping[str, str] = PROBE
    ) -> PromptSize:
        """Return the length of a prompt. Raises RefusedPromptError if the server refuses it,
        LookupError if the server cannot count tokens, and the errors of `post`."""
        body = _rendered(chat) | {"model": route.model or chat.get("model", "")}
        server = route._replace(base_url=route.base_url.removesuffix("/v1"))
        async with self.post(server, "tokenize", msgspec.json.encode(body), headers) as reply:
            found = await read(reply)
            if reply.status in (400, 422):
                raise RefusedPromptError(reply.status, found)
            try:
                return _size.decode(found)
            except msgspec.DecodeError:
                why = f"{server.base_url}/tokenize does not tell how long a prompt is"
                raise LookupError(why) from None

    async def retry(
        self,
        caller: CallOrigin,
        model: str,
        asked: ModelCall,
        once: Callable[[Route], Awaitable[T]],
    ) -> T:
        """Call `once` until it succeeds; meanwhile the attempt records the call's failure.

        Raises the last UpstreamError if a retry is useless or the attempt has no time left, and
        RefusedError for a verifier's call to a policy or for a role without a policy."""
        active, role = caller.attempt, caller.role_of(model)
        if active.scoring:
            route = self.router.find(model, role)
            if route is None or not route.frozen:
                raise RefusedError(
                    403,
                    "not_frozen",
                    f"a verifier reaches the endpoints of [upstreams] only, and {model!r:.80} is"
                    " none of them: add it to the run file, or ask for one of"
                    f" {', '.join(map(repr, self.router.frozen)) or 'those that you add'}",
                )
        seats = active.seats
        if why := self.router.why_unmapped(model, role, seats, caller.inside):
            active.failures[asked.number] = why  # even if the agent ignores the error
            raise RefusedError(404, "role_unplayed", why)
        wait, tries = BACKOFF, 0
        while True:
            tries += 1
            if (route := self.router.find(model, role, seats)) is None:
                active.failures[asked.number] = self.router.why_not_served(role, seats)
                route = await self.router.route(model, role, seats)
            try:
                value = await once(route)
            except UpstreamError as error:
                active.failures[asked.number] = error.message
                pause = max(error.retry_after, wait * random.uniform(0.5, 1.0))
                useless = tries >= MAX_TRIES and not error.transient
                if error.final or useless or pause >= active.left:
                    raise
                wait = min(2 * wait, LONGEST)
                await asyncio.sleep(pause)
            else:
                active.call_succeeded(asked)
                return value

    async def find_room(self, route: Route, chat: Fields, asked: int | None) -> int:
        """Return the number of tokens that fit after the prompt if the call asks for more, else 0.
        vLLM refuses such a call, but the agent cannot know the prompt's length."""
        if "messages" not in chat or not asked:
            return 0
        try:
            size = await self.prompt_size(route, chat)
        except LookupError:
            return 0
        room = (size.max_model_len or 0) - size.count
        if size.max_model_len is None or not 0 < room < asked:
            return 0
        self.max_lengths[route.base_url] = size.max_model_len
        self.warn_once(
            "policy %s: an answer has at most the %d tokens that its prompt leaves, and the agent"
            " asks for %d",
            *(route.policy, room, asked),
        )
        return room

    @asynccontextmanager
    async def post(
        self, route: Route, api: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Post a body and yield the server's response.

        Raises UpstreamError for 3xx, 401, 403, 429, 5xx and connection errors: none of them is the
        agent's fault."""
        if route.text is not None:
            raise UpstreamError(
                f"the endpoint {route.policy!r} has one text for every call, and none for {api}",
                final=True,
            )
        url = f"{route.base_url}/{api}"
        sent = forwarded(headers)
        if route.frozen:
            for name in PRIVATE:
                sent.popall(name, None)
        if route.key:
            sent["authorization"] = f"Bearer {route.key}"
        try:
            # A large body is sent in chunks, as writing it at once would delay other calls.
            data = body if len(body) < CHUNKED_ABOVE else io.BytesIO(body)
            async with self.session.post(
                url, data=data, headers=sent, allow_redirects=False
            ) as answer:
                if is_failure(answer.status):
                    after = answer.headers.get("retry-after", "")
                    raise failure(route, url, answer.status, await read(answer), after)
                yield answer
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UpstreamError(
                f"the policy server at {url} is unreachable ({type(error).__name__}: {error})"
            ) from error


def is_failure(status: int) -> bool:
    """Whether a status other than 200 is not the agent's fault."""
    return 300 <= status < 400 or status in (401, 403, 429) or status >= 500


def failure(
    route: Route, url: str, status: int, words: bytes, retry_after: str = ""
) -> UpstreamError:
    """Build the error for a response with the status of a failure, and the body `words`."""
    if status < 400 or status in (401, 403):
        return UpstreamError(
            f"the endpoint {route.policy!r} at {url} answered {status}; correct its"
            " base_url or its API key",
            final=True,
        )
    said = words[:500].decode(errors="replace")
    return UpstreamError(
        f"the policy server at {url} answered {status}: {said}",
        status=status,
        body=words,
        retry_after=float(retry_after) if retry_after.isdecimal() else 0.0,
        transient=status in TRANSIENT,
    )


def _rendered(chat: Fields) -> Fields:
    """Return the fields of a chat completion that determine its prompt, for vLLM's /tokenize. Of
    what vLLM does to a chat completion before rendering, /tokenize renames no reasoning and makes
    no template argument of other fields."""
    body = {name: chat[name] for name in RENDERED if name in chat}
    sent = body.get("messages")
    if not isinstance(sent, msgspec.Raw) or b'"reasoning' in bytes(sent):
        body["messages"] = [_with_reasoning(message) for message in value(chat, "messages") or ()]
    effort = value(chat, "reasoning_effort")
    extra = {} if effort is None else {"reasoning_effort": effort}
    if documents := value(chat, "documents"):
        extra["documents"] = documents
    if extra:
        thinking = {} if effort is None else {"enable_thinking": effort != "none"}
        given = value(chat, "chat_template_kwargs") or {}
        body["chat_template_kwargs"] = {**thinking, **given, **extra}
    return body


def _with_reasoning(message: Json) -> Json:
    """Return a message with its reasoning under both names, of which a server reads one."""
    found = message if isinstance(message, dict) else {}
    thought = next((found[name] for name in REASONING if found.get(name) is not None), None)
    return message if thought is None else message | dict.fromkeys(REASONING, thought)


async def read(answer: aiohttp.ClientResponse) -> bytes:
    """Read the body of a response. Raises UpstreamError if it is too large."""
    parts = [part async for part in _limited(answer, LARGEST_ANSWER)]
    return (parts[0] if len(parts) == 1 else b"".join(parts)).removeprefix(BOM_UTF8)


async def _limited(answer: aiohttp.ClientResponse, limit: int) -> AsyncIterator[bytes]:
    size = 0
    async for part in answer.content.iter_any():
        size += len(part)
        if size > limit:
            raise _too_large(f"the policy server at {answer.url} sent an answer", limit)
        yield part


def _too_large(what: str, limit: int) -> UpstreamError:
    message = f"{what} of more than {limit} bytes, which is the most that the gateway reads"
    return UpstreamError(f"{message}; limit max_tokens or n", final=True)


def forwarded(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Return the headers without those of a single connection."""
    return CIMultiDict((k, _text(v)) for k, v in headers.items() if k.lower() not in HOP_BY_HOP)


def _text(value: str) -> str:
    """Convert a header's value that is not UTF-8, which aiohttp requires, from Latin-1."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode(errors="surrogateescape").decode("latin-1")
    return value


def read_event(event: bytes) -> tuple[bytes, bytes]:
    """Split a server-sent event into its other lines and its data. What is no event, such as the
    bare JSON of an error, is data."""
    lines = event.split(b"\n")
    data = [line[5:] for line in lines if line.startswith(b"data:")]
    other = [line + b"\n" for line in lines if line and not line.startswith(b"data:")]
    if not data and not all(line.startswith(EVENT_FIELDS) for line in other):
        return b"", event.strip()
    return b"".join(other), b"\n".join(data).strip()


def stream(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Iterate over the events of a response. Raises UpstreamError if it is too large."""
    return events(_limited(answer, LARGEST_STREAM))


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Split a stream into server-sent events, each with its closing blank line, without the byte
    order mark before the first.

    Raises UpstreamError for an event that is too large."""
    rest, pending = b"", b""  # pending: a "\r" that may belong to a "\r\n"
    mark = BOM_UTF8
    async for chunk in chunks:
        if pending or b"\r" in chunk:
            chunk = pending + chunk
            pending = b"\r" if chunk.endswith(b"\r") else b""
            chunk = chunk.removesuffix(b"\r").replace(b"\r\n", b"\n")
        rest += chunk
        *whole, rest = rest.split(b"\n\n")
        if len(rest) > LARGEST_ANSWER:
            raise _too_large("a policy server sent an event", LARGEST_ANSWER)
        for event in whole:
            yield event.removeprefix(mark) + b"\n\n"
            mark = b""
    if rest.strip():
        yield rest.removeprefix(mark) + pending
