"""Attributes requests to attempts, by the first of these that names an attempt: the attempt's
secret key, sent as API key; the path `/a/{attempt}/v1`; the trace id of a W3C `traceparent` header;
the attempt's id, sent as API key. If the secret key is sent, path and trace must not name another
attempt. An attempt's id is not secret.

Owns: the attempts that this process runs, and the gateway's state of each.
Invariant: an attempt is active from `register` to `unregister`. Calls of other attempts are
refused, and calls in flight at its end are cancelled. A sealed attempt, whose agent runs outside
this process, accepts only calls with its secret key.
Writers: the worker registers and unregisters, the gateway's event loop does everything else.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, unquote_plus

from aiohttp import web
from aiohttp.typedefs import Middleware
from msgspec import Struct

from agentrl.core.http import bearer, read_body, request_key
from agentrl.core.types import LOOPS, Attempt, Sampling, Transition
from agentrl.runners.apis.base import Dialect
from agentrl.runners.apis.chat import ConversationMemory
from agentrl.runners.gateway.refusals import REPORTED, RefusedError
from agentrl.runners.gateway.request import ImagePolicy, ModelRequest, read_request
from agentrl.runners.gateway.upstream import NO_SEATS, Seats
from agentrl.runners.tracing.attempt_log import DEFAULT, NAMES, ROLE

if TYPE_CHECKING:
    from agentrl.runners.gateway.features import Answer, Change, Feature, Record

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Work = Callable[["CallOrigin", web.Request], Awaitable[web.StreamResponse]]
PARENT = re.compile("[0-9a-f]{2}-([0-9a-f]{32})-(?:(?!0{16})([0-9a-f]{16})-)?")
REMEMBERED_ATTEMPTS = 10_000  # ended attempts with remembered ids and keys
SILENT_SHARE = 0.5  # fraction of an attempt's time; a longer silence of the server fails the call
TIMER_PRECISION = 0.01  # seconds by which the timer of a call may be early
DEADLINE_MARGIN = 0.1  # seconds by which an executor may end the attempt early


class CountedCall(NamedTuple):
    """A model call's number in its attempt, and the failed calls that it retries."""

    number: int  # in the order of arrival; `Transition.index` is in the order of responses
    body_hash: int  # hash of the request body, equal for a retry
    repeats: tuple[int, ...]  # earlier calls with this hash that failed before this one began


class AgentPlace(NamedTuple):
    """The working environment of an agent process that has a workspace."""

    folder: Path  # its working directory
    private: Path  # folder for files exchanged with the runner
    env: Mapping[str, str]  # HOME and the like
    prefix: Sequence[str]  # prefix of its command line, which confines it
    give: Callable[[Path], None]  # makes the agent's user the owner of a folder's files


@dataclass(slots=True, eq=False)
class ActiveAttempt:
    """The gateway's state of an attempt in progress."""

    attempt: Attempt
    sealed: bool = False  # only calls with its key are accepted
    scoring: bool = False  # an attempt of a verifier, which reaches only frozen endpoints
    recorded: bool = True  # whether calls and spans are stored; a verifier's are not
    deadline: float = math.inf  # time.monotonic() of its time-out
    lenient: bool = False  # whether calls are answered, unrecorded, if the store fails
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)  # its secret
    calls: int = 0  # requests so far
    stored: int = 0  # calls so far, including those not yet durable: the `index` of the next one
    timed_out: bool = False  # a call was refused after the deadline
    lost: bool = False  # its lease had ended when a call was stored
    refused: str = ""  # status and body of the policy server's latest refusal
    failures: dict[int, str] = field(default_factory=dict)  # number of a call -> error message
    ended: dict[int, tuple[int, ...]] = field(default_factory=dict)  # body hash -> failed calls
    # Number of a call whose client disconnected before the answer -> seconds that the client had
    # waited.
    abandoned: dict[int, float] = field(default_factory=dict)
    # Digest of a question -> calls so far.
    questions: Counter[bytes] = field(default_factory=Counter)
    tasks: set[asyncio.Task[object]] = field(default_factory=set)  # calls in flight
    waits: int = 0  # calls in flight that began before the deadline
    cut: int = 0  # number of these that ended at the deadline or later
    memory: ConversationMemory = field(default_factory=ConversationMemory)
    roles: Collection[str] = ()  # roles named by the run file, a seat or a prompt
    # Changes of calls by features, in this order; see `agentrl.runners.gateway.features`.
    changes: list[Change] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    image_policy: ImagePolicy = field(default_factory=ImagePolicy)  # policy for images in its calls
    # Rows of responses that may be stored but of which the agent has read nothing, by body hash and
    # role, oldest first. Each answers one later equal call.
    undelivered: dict[tuple[int, str], deque[Sequence[Transition]]] = field(default_factory=dict)
    place: AgentPlace | None = None
    environment: str = ""  # environment that plays in place of an agent
    tokens: int = 0  # sampled so far
    max_calls: int = 0  # 0: no limit
    idle_calls: int = 0  # consecutive calls that add nothing to the policy's last answer
    last_body: int = 0  # hash of the latest request body
    max_tokens: int = 0  # sampled tokens after which calls are refused; 0: no limit
    on_spent: Callable[[str], None] | None = None  # called with the limit that was reached

    @property
    def id(self) -> str:
        return self.attempt.id

    @property
    def seats(self) -> Seats:
        """Seats of the rollout; empty for a verifier."""
        return NO_SEATS if self.scoring else self.attempt.rollout.seats

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    @property
    def waiting(self) -> int:
        """Model calls that the attempt waited for at its deadline, which ends calls, too."""
        return self.waits + self.cut

    def continues_unrecorded(self) -> bool:
        """Whether calls are answered although the store failed; none is recorded from then on."""
        self.recorded = self.recorded and not self.lenient
        return self.lenient

    def begin_call(self, raw: bytes) -> CountedCall:
        """Number a new call with request body `raw`. Raises RefusedError, and ends the attempt, if
        it has used up its calls or tokens."""
        spent = ""
        if self.max_calls and self.calls >= self.max_calls:
            spent = f"the agent made more than agent.max_calls = {self.max_calls} model calls"
            if self.idle_calls > self.max_calls / 2:
                spent += f"; {self.idle_calls} in a row {LOOPS}"
        elif self.max_tokens and self.tokens >= self.max_tokens:
            spent = f"the agent sampled agent.max_tokens = {self.max_tokens} tokens"
        if spent:
            if self.on_spent is not None:
                self.on_spent(spent)
            raise RefusedError(403, "attempt_ended", spent)
        number, self.calls = self.calls, self.calls + 1
        body_hash = hash(raw)
        return CountedCall(number, body_hash, self.ended.get(body_hash, ()))

    def count_idle_call(self, call: CountedCall, messages: Sequence[Mapping[str, object]]) -> None:
        """Count a request that ends with an answer of the policy, or repeats the previous
        request."""
        ends_with_answer = bool(messages) and messages[-1].get("role") == "assistant"
        adds_nothing = ends_with_answer or call.body_hash == self.last_body
        self.idle_calls, self.last_body = self.idle_calls + 1 if adds_nothing else 0, call.body_hash

    def seed_of(self, question: bytes) -> int:
        """The sampling seed of the next call with this question. It does not depend on the order of
        calls; it differs if the question is repeated or the rollout retried."""
        digest = blake2b(question, digest_size=16).digest()
        self.questions[digest] += 1
        seed, times = self.attempt.rollout.sampling.seed, self.questions[digest]
        identity = (seed, self.attempt.fence, digest.hex(), times)
        return int.from_bytes(blake2b(repr(identity).encode(), digest_size=6).digest())

    def time_is_up(self, what: str, failure: str = "") -> RefusedError:
        """Build the error for a call that got no answer from `what` before the deadline. `failure`:
        the call's last own failure."""
        self.timed_out = True
        message = f"attempt {self.id} ran out of time before {what} had answered"
        return RefusedError(504, "attempt_timeout", f"{message}; {failure}" if failure else message)

    def call_succeeded(self, call: CountedCall) -> None:
        """Clear the failures of this call and of earlier calls with the same request."""
        for number in (call.number, *call.repeats):
            self.failures.pop(number, None)

    def model_was_silent(self, call: CountedCall, seconds: float) -> None:
        """Mark the call as failed if the model sent nothing for most of the attempt's time: then
        the model, not the agent, caused the time-out."""
        hung = seconds > SILENT_SHARE * self.attempt.rollout.timeout
        if hung and self.left < DEADLINE_MARGIN:
            message = f"the model had not answered for {seconds:.3g} s when the time was up"
            self.failures.setdefault(call.number, message)

    def call_ended(self, call: CountedCall) -> None:
        """Record the end of a call. If it failed, only an equal request that begins later counts as
        its retry; a concurrent one does not."""
        if call.number in self.failures:
            failed = self.ended.get(call.body_hash, ())
            self.ended[call.body_hash] = (*failed, call.number)

    def keep_undelivered(self, call: CountedCall, role: str, rows: Sequence[Transition]) -> None:
        """Keep a response of which the agent has read nothing, for a retry of its call: otherwise
        both responses would be trained, although the agent has acted only on the second."""
        self.undelivered.setdefault((call.body_hash, role), deque()).append(rows)

    def take_undelivered(self, call: CountedCall, role: str) -> Sequence[Transition]:
        """Return the rows of the oldest undelivered response to an equal call; empty if there is
        none."""
        responses = self.undelivered.get((call.body_hash, role))
        return responses.popleft() if responses else ()

    def extend(self, seconds: float) -> None:
        """Set the time limit of a new stage; `math.inf` while the attempt waits for a stage."""
        self.deadline = time.monotonic() + seconds


class CallOrigin(NamedTuple):
    """The attempt and role that make a call."""

    active: ActiveAttempt
    role: str | None  # None: determined by the requested model, see `role_of`
    span: str | None  # span id of the request's parent, 16 hex digits
    inside: tuple[str, ...] = ()  # names of nodes and agent around the call, innermost first

    def role_of(self, model: str) -> str:
        """Return the role of a call that requests `model`: see
        `agentrl.runners.tracing.attempt_log`."""
        return self.role or (model if model in self.active.roles else DEFAULT)


class ReceivedCall(Struct, frozen=True):
    """A call as received from the agent."""

    caller: CallOrigin
    http: web.Request
    raw: bytes  # the request's body
    counted: CountedCall
    request: ModelRequest
    defaults: Sampling  # the rollout's defaults for parameters that the agent does not set
    arrived: float  # by the monotonic clock

    @property
    def active(self) -> ActiveAttempt:
        return self.caller.active

    @property
    def role(self) -> str:
        return self.caller.role_of(self.request.model)

    def fail(self, why: str) -> None:
        """Fail the attempt, even if the agent ignores the error, unless the call is retried."""
        self.active.failures[self.counted.number] = why


async def receive(caller: CallOrigin, http: web.Request, dialect: Dialect) -> ReceivedCall:
    """Read a call. Raises the errors of `read_request` for an invalid request, which does not count
    as a call; RefusedError if the attempt may make no further call; and errors of features."""
    arrived, raw, active = time.monotonic(), await read_body(http), caller.active
    request = read_request(dialect, raw, active.memory, active.calls)
    counted, defaults = active.begin_call(raw), active.attempt.rollout.sampling
    try:
        return changed(ReceivedCall(caller, http, raw, counted, request, defaults, arrived))
    except BaseException:
        active.call_ended(counted)  # otherwise done by `CallHandler.run`
        raise


def changed(call: ReceivedCall) -> ReceivedCall:
    """Return the call after the changes of its attempt's features."""
    for change in call.active.changes:
        call = change(call)
    return call


class AttemptRegistry:
    """The active attempts. `open`: attempts that are not sealed accept calls, which is safe only
    if no other machine can connect."""

    def __init__(
        self, *, open: bool = True, roles: Collection[str] = (), features: Sequence[Feature] = ()
    ) -> None:
        self.open, self.roles, self.features = open, frozenset(roles), features
        self.unowned = 0  # calls so far that belonged to no attempt
        self._active: dict[str, ActiveAttempt] = {}
        self._keys: dict[str, ActiveAttempt] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()  # keys and ids -> id

    def register(
        self,
        attempt: Attempt,
        *,
        sealed: bool = False,
        scoring: bool = False,
        recorded: bool = True,
    ) -> ActiveAttempt:
        roles = self.roles.union(attempt.rollout.seats)
        recorded = recorded and not scoring
        active = ActiveAttempt(attempt, sealed, scoring, recorded, roles=roles)
        active.extend(attempt.rollout.timeout)
        for feature in () if scoring else self.features:
            feature.join(active)
        self._active[active.id] = self._keys[active.key] = active
        return active

    def unregister(self, attempt: str) -> None:
        active = self._active.pop(attempt, None)
        if active is not None:
            del self._keys[active.key]
            self._ended |= {attempt: attempt, active.key: attempt}
            while len(self._ended) > 2 * REMEMBERED_ATTEMPTS:
                self._ended.popitem(last=False)

    def active(self) -> list[ActiveAttempt]:
        return list(self._active.values())

    def find(self, attempt: str) -> ActiveAttempt:
        """Return an attempt that needs no key. Raises RefusedError if it has ended, is unknown or
        is sealed."""
        active = self._active.get(attempt)
        # A verifier's trace id is random and secret from agents.
        if active is not None and not active.sealed and (self.open or active.scoring):
            return active
        if active is not None:
            raise RefusedError(
                401,
                "key_missing",
                f"attempt {attempt} accepts only its own API key: use the one that its environment"
                " has in OPENAI_API_KEY",
            )
        if attempt in self._ended:
            message = f"attempt {self._ended[attempt]} has ended; it can call a model only while it"
            raise RefusedError(403, "attempt_ended", f"{message} runs")
        raise RefusedError(
            404, "attempt_unknown", f"there is no attempt {attempt!r:.80} in this runner"
        )

    def caller(self, headers: Mapping[str, str], path: Mapping[str, str]) -> CallOrigin:
        """Return attempt and role of a request. `path` holds `attempt` and `role` if the URL names
        them.

        Raises RefusedError with a message that explains how to fix the request."""
        # A malformed header counts as missing: stored span ids must be valid for export.
        parent = PARENT.match(headers.get("traceparent", ""))
        trace, span = (parent[1], parent[2]) if parent else ("", None)
        active = self._owner(headers, path, trace)
        baggage = _baggage(headers.get("baggage", ""))
        names = tuple(unquote(name) for name in baggage.get(NAMES, "").split(",") if name)
        inner = next((name for name in names if name in active.roles), None)
        return CallOrigin(active, path.get("role") or baggage.get(ROLE) or inner, span, names)

    async def within(self, work: Work, request: web.Request) -> web.StreamResponse:
        """Run `work` for the attempt of the request; the attempt's end cancels it."""
        caller = self.caller(request.headers, request.match_info)
        task = asyncio.current_task()
        assert task is not None
        active, in_time = caller.active, caller.active.left > 0
        active.tasks.add(task)
        active.waits += in_time
        try:
            return await work(caller, request)
        finally:
            active.tasks.discard(task)
            if in_time:
                active.waits -= 1
                active.cut += active.left < TIMER_PRECISION

    def _owner(
        self, headers: Mapping[str, str], path: Mapping[str, str], trace: str
    ) -> ActiveAttempt:
        """Return the attempt of a request."""
        # An OpenTelemetry client may send its environment's header still percent-encoded.
        api_key = bearer(unquote(request_key(headers)))  # an attempt's secret key, or its id
        if api_key in self._keys:
            active = self._keys[api_key]
            other_trace = trace != active.id and (trace in self._active or trace in self._ended)
            if other_trace or path.get("attempt", active.id) != active.id:
                message = "this API key is of another attempt than the request's URL or trace"
                raise RefusedError(403, "wrong_attempt", message)
            return active
        if "attempt" in path:
            return self.find(path["attempt"])
        for attempt in (trace, api_key):
            if attempt in self._active or attempt in self._ended:
                return self.find(attempt)
        self.unowned += 1
        raise RefusedError(
            401,
            "attempt_missing",
            "this model call belongs to no rollout: it carries neither a traceparent header of a"
            " running attempt, nor its id as API key, nor /a/{attempt}/v1 in its base URL. Make it"
            " inside the agent's own call (in a thread, copy the context with"
            " contextvars.copy_context().run); a server that the agent started serves all rollouts,"
            " so let it forward the traceparent header of the request that it serves; or use one of"
            " the other two",
        )


def answering_errors(answer: Callable[[web.Request, BaseException], web.Response]) -> Middleware:
    """A middleware that answers errors of `REPORTED` with `answer`."""

    @web.middleware
    async def answering(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except REPORTED as error:
            return answer(request, error)

    return answering


def _baggage(header: str) -> dict[str, str]:
    values = {}
    for item in header.split(","):
        name, _, value = item.partition(";")[0].partition("=")
        if value:
            values[name.strip()] = unquote_plus(value.strip())
    return values
