"""Servers that answer calls: the router from roles to servers, and the HTTP client.

The rollout's seats, then the run file's table of roles map a role to a policy; for a role in
neither, the requested model name decides. Seats can also replace one policy by another. A call is
retried on connection errors, 429 and 5xx until the first byte of the model's output was sent to the
agent, each time on the current route, because the policy server may restart elsewhere.

Owns: a copy of the policies table, at most `MIN_READ_INTERVAL` seconds behind the store's change
feed; the connections, and whether each server returns token ids.
Invariant: a call to a policy that is published without a base URL, because its weights are being
updated, waits; calls to frozen endpoints never wait.
Writer: its own event loop only.
"""

from __future__ import annotations

import asyncio
import io
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import aiohttp
from msgspec import Struct

from agentrl.core.access import read_sent_key
from agentrl.core.config import UpstreamConfig
from agentrl.core.types import ANY_ROLE, AUXILIARY_ROLE, PolicyVersion, Sampling, Transition
from agentrl.runners.apis.chat import Body
from agentrl.runners.gateway.refusals import RefusedError, UpstreamError, failure, is_failure
from agentrl.runners.gateway.request import forwarded
from agentrl.runners.gateway.response import read
from agentrl.store.base import Store, keep_reading

if TYPE_CHECKING:
    from agentrl.runners.gateway.attribution import CallOrigin, CountedCall, ReceivedCall

log = logging.getLogger("agentrl.runner")
T = TypeVar("T")
Messages = list[Body]
Adapter = Callable[["Route", Messages], Awaitable[Messages]]
Seats = Mapping[str, str]  # role -> policy or frozen endpoint
NO_SEATS: Seats = MappingProxyType({})
MIN_READ_INTERVAL = 0.1  # seconds; of all writes in the feed few change a policy
DEFAULT = "policy"
FIRST_RETRY_PAUSE = 0.05  # seconds before the first retry; doubles
MAX_RETRY_PAUSE = 1.0  # seconds between retries
MAX_TRIES = 6  # for failures that are not transient
CHUNKED_ABOVE = 2**20  # bytes of a request
CONNECT_TIMEOUT = 5.0  # seconds to establish a connection
RECHECK_AFTER = 300.0  # seconds until token ids are requested again from a frozen endpoint

# Sent to trained policies only; a frozen endpoint may belong to a third party.
PRIVATE = {"baggage", "cookie", "traceparent", "tracestate"}


class Route(NamedTuple):
    """The server for a call."""

    policy: str  # name of the policy or frozen endpoint
    version: int | None
    base_url: str  # ends in /v1
    model: str  # model name at the server; empty: the name in the agent's request
    key: str = ""  # API key of the server
    frozen: bool = False  # not trained
    text: str | None = None  # fixed response to every call, instead of a server


class SentCall(Struct, frozen=True):
    """A call as sent to a server, or as answered from the record of a rollout."""

    call: ReceivedCall
    route: Route
    policy: str  # the policy to which the stored call belongs
    started: float  # unix seconds
    at: float  # the start by the monotonic clock
    body: bytes = b""
    sampling: Sampling = Sampling()  # effective
    capture: bool = False  # whether it requests token ids
    # Tokens that fit after the prompt, as counted by the server, if the agent requests more; 0: all
    # requested tokens fit, or the server cannot count them; None: not counted.
    fitting: int | None = None
    rows: Sequence[Transition] = ()  # rows of a recorded answer; empty: built from the response


class Router:
    """Maps seats, role and model name of a request to the server that answers it."""

    def __init__(
        self,
        store: Store,
        run: str,
        upstreams: Mapping[str, UpstreamConfig] | None = None,
        roles: Mapping[str, str] | None = None,
        policies: Collection[str] = (),
        *,
        remote: bool = False,
        key: str = "",
        models: Collection[str] = (),
    ) -> None:
        """`policies`: names of a run's policies, each for the roles mapped to it. `remote`: whether
        the run has no policy, so that calls do not wait for one. `key`: API key of policy servers.
        `models`: the run's trained models, which agents may request.

        Raises ConfigError if the key of a frozen endpoint is not in the environment."""
        self.store, self.run = store, run
        self.policies: dict[str, PolicyVersion] = {}
        self.frozen = {
            name: _frozen(name, settings) for name, settings in (upstreams or {}).items()
        }
        self.roles = roles or {}
        self.several = tuple(policies) if len(policies) > 1 else ()
        self.default = next(iter(policies)) if len(policies) == 1 else DEFAULT
        self.remote, self._key, self._models = remote, key, models
        self.any = self.frozen.get(self.roles.get(ANY_ROLE, "")) if remote else None
        self.read = asyncio.Event()  # set after the first read of the policies table
        self._changed = asyncio.Event()  # set and replaced whenever a route may have changed

    async def follow(self) -> None:
        """Update the copy of the policies table whenever it changes, until cancelled. While the
        store is unavailable, the last copy is used."""
        missed = f"the routes of run {self.run} cannot be read"
        await keep_reading(self.store, self._read, missed, pause=MIN_READ_INTERVAL)

    async def _read(self) -> None:
        self.policies = await self.store.policies(self.run)
        self.read.set()
        self.refresh_routes()

    def refresh_routes(self) -> None:
        """Let waiting calls find their servers again: policies or seats have changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def route(self, model: str, role: str, seats: Seats = NO_SEATS) -> Route:
        """Return the server of a call; wait while its policy is not served."""
        while (route := self.find(model, role, seats)) is None:
            await self._changed.wait()
        return route

    @property
    def ready(self) -> bool:
        """Whether calls can be answered, to current knowledge."""
        return bool(self.policies) or self.remote

    def why_unmapped(
        self, model: str, role: str, seats: Seats = NO_SEATS, inside: Sequence[str] = ()
    ) -> str:
        """Explain why no policy or endpoint of the run can ever answer a call; empty if one can,
        now or later. `inside`: names of agents around the call that are not roles."""
        if not self.several and (self.policies or not self.remote):
            return ""
        served = {policy.model for policy in self.policies.values()}
        named = model in {*self.several, *self.policies, *self.frozen, *served} or self.any
        if named or self.policy_of_role(role, seats) is not None:
            return ""
        around = f", inside of {', '.join(map(repr, inside))}" if inside else ""
        request = f"the role {role!r}{around}, which asks for the model {model!r:.80}"
        if self.remote and not self.policies:
            return (
                f"no endpoint plays {request}, and the run has no model of its own: map it to one"
                f" of {', '.join(map(repr, sorted(self.frozen)))} in [roles], or set policy.model"
            )
        if DEFAULT in self.several:
            return ""
        players = ", ".join(f"{role!r} by {name!r}" for role, name in sorted(self.roles.items()))
        return (
            f"no policy plays {request}: the run file has {players}. Add one of its names to the "
            "roles of a policy (policies.NAME.roles), or ask for a policy by its name"
        )

    def find(self, model: str, role: str, seats: Seats = NO_SEATS) -> Route | None:
        """Find the server by role, if the rollout's seats or the run file map it, else by model
        name: a frozen endpoint, a policy, a served model. Agents keep their model names
        ("gpt-4o-mini"), so any other name means the trained policy, if there is only one. Seats may
        replace the resulting policy. Returns None if the policy is not served now."""
        mapped = self.policy_of_role(role, seats)
        name = model if mapped is None else mapped
        if name in self.frozen:
            return self.frozen[name]
        policy = self.policies.get(name)
        if policy is None and mapped is None:
            served = (p for p in self.policies.values() if p.model == name)
            policy = next(served, None) or self.policies.get(self.default)
            policy = policy or next(iter(() if self.several else self.policies.values()), None)
        if policy is not None and policy.policy in seats:
            policy = self.policies.get(seats[policy.policy])
        if policy is None or not policy.base_url:
            return self.any
        return Route(policy.policy, policy.version, policy.base_url, policy.model, self._key)

    def is_chosen(self, model: str, role: str, seats: Seats) -> bool:
        """Whether a call selects the policy that answers it, by its role or model name. A call
        without a model name accepts any policy."""
        names = {policy.model for policy in self.policies.values()}
        names |= {"", self.default, *self.policies, *self.several, *self._models}
        return model in names or self.policy_of_role(role, seats) is not None

    def is_auxiliary(self, role: str, seats: Seats) -> bool:
        """Whether calls of a role are outside the agent's work, and none trains a policy."""
        return role == AUXILIARY_ROLE and self.policy_of_role(role, seats) is None

    def policy_of_role(self, role: str, seats: Seats) -> str | None:
        """Return the policy or endpoint of a role; None if neither seats nor run file map it."""
        return seats.get(role) or self.roles.get(role)

    def unserved_reason(self, role: str, seats: Seats) -> str:
        """Explain why `find` returns None at the moment."""
        name = self.policy_of_role(role, seats)
        if name is None or name in self.policies:
            return "no policy server was ready for this call"
        return f"no server has the policy {name!r}, which plays the role {role!r} here"


def _frozen(name: str, config: UpstreamConfig) -> Route:
    key = read_sent_key(config.key_env, f"upstreams.{name}.key_env", "the endpoint's")
    url = config.base_url.rstrip("/")
    return Route(name, None, url, config.model, key, frozen=True, text=config.text)


class Upstream:
    """Posts calls to the servers that a router selects. Bound to one event loop."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.adapters: list[Adapter] = []
        self.max_lengths: dict[str, int] = {}  # base URL -> maximum tokens, once exceeded
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            headers={"accept-encoding": "identity"},  # compression slows down a local hop
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT),
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

    def note_token_ids(self, route: Route, *, returned: bool) -> None:
        """Record whether a server returned token ids. Token ids are always requested from a server
        that has returned some, and from every policy server, because training needs them."""
        if returned:
            self._give_token_ids.add(route.base_url)
        elif route.frozen:
            self._refused_at[route.base_url] = time.monotonic()

    async def adapt(self, route: Route, messages: Messages) -> Messages:
        """Adapt messages to the route's policy by the adapters, if not every chat template renders
        them. Raises UntranslatableError for text that would be lost."""
        if not (route.frozen or is_plain(messages)):
            for adapt in self.adapters:
                messages = await adapt(route, messages)
        return messages

    async def retry(
        self,
        caller: CallOrigin,
        model: str,
        call: CountedCall,
        once: Callable[[Route], Awaitable[T]],
    ) -> T:
        """Call `once` until it succeeds; meanwhile the attempt records the call's failure.

        Raises the last UpstreamError if a retry is useless or the attempt has no time left, and
        RefusedError for a verifier's call to a policy or for a role without a policy."""
        active, role = caller.active, caller.role_of(model)
        if active.scoring:
            route = self.router.find(model, role)
            if route is None or route.policy not in self.router.frozen:
                raise RefusedError(
                    403,
                    "not_frozen",
                    f"a verifier reaches the endpoints of [upstreams] only, and {model!r:.80} is"
                    " none of them: add it to the run file, or ask for one of"
                    f" {', '.join(map(repr, self.router.frozen)) or 'those that you add'}",
                )
        seats = active.seats
        if why := self.router.why_unmapped(model, role, seats, caller.inside):
            active.failures[call.number] = why  # even if the agent ignores the error
            raise RefusedError(404, "role_unplayed", why)
        wait, tries = FIRST_RETRY_PAUSE, 0
        while True:
            tries += 1
            if (route := self.router.find(model, role, seats)) is None:
                active.failures[call.number] = self.router.unserved_reason(role, seats)
                route = await self.router.route(model, role, seats)
            try:
                value = await once(route)
            except UpstreamError as error:
                active.failures[call.number] = error.message
                pause = max(error.retry_after, wait * random.uniform(0.5, 1.0))
                useless = tries >= MAX_TRIES and not error.transient
                if error.final or useless or pause >= active.left:
                    raise
                wait = min(2 * wait, MAX_RETRY_PAUSE)
                await asyncio.sleep(pause)
            else:
                active.call_succeeded(call)
                return value

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
        if body.startswith(b"{"):  # wget and curl send JSON as a form by default
            sent["content-type"] = "application/json"
        if route.frozen:
            for name in PRIVATE:
                sent.popall(name, None)
        if route.key:
            sent["authorization"] = f"Bearer {route.key}"
        try:
            # A large body is sent in chunks, because a single write would delay other calls.
            data = body if len(body) < CHUNKED_ABOVE else io.BytesIO(body)
            async with self.session.post(
                url, data=data, headers=sent, allow_redirects=False
            ) as answer:
                if answer.status != 200 and is_failure(answer.status):
                    after = answer.headers.get("retry-after", "")
                    raise failure(route, url, answer.status, await read(answer), after)
                yield answer
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UpstreamError(
                f"the policy server at {url} is unreachable ({type(error).__name__}: {error})"
            ) from error


def is_plain(messages: Messages) -> bool:
    """Whether every chat template renders these messages: only texts of user and assistant."""
    return all(
        message.get("role") in ("user", "assistant")
        and not (message.get("tool_calls") and message.get("content"))
        for message in messages
    )
