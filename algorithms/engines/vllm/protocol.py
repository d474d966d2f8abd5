"""The interfaces between learner, vLLM server and host, and the middleware of a vLLM server that
reports which version sampled each token, and which answers were truncated.

The client that changes vLLM's weights pauses it first, and names the new version here before it
resumes: in between no token is sampled. Since 0.32 vLLM labels tokens with a version; its outputs
have the labels, but its HTTP responses do not, so the middleware reads the labels of passing
outputs. In earlier releases vLLM's output processor has received every sampled token when a version
is named, and the middleware counts tokens there. A call carries the version at its admission in a
header; if vLLM accepts it only after the update, because it was in transit or in the tokenizer, all
of it belongs to the new version. Invariant: the response of a call that spans an update has
`agentrl_spans`, as the embedded server's (see `engines/base`).

vLLM reports `tool_calls` for a non-streamed answer with a call even if the token limit ended it,
for example within a second call (a stream reports `length`). Invariant: an answer that the limit
ended reports `length`.
"""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import parse_qsl, urlencode
from uuid import uuid4

import msgspec
from torch import Tensor

from agentrl.algorithms.engines.base import VERSION_HEADER
from agentrl.algorithms.model.scaled import Inputs
from agentrl.core.types import POLICY, Json

if TYPE_CHECKING:
    from agentrl.algorithms.engines.vllm.fleet import VllmClient


BASE = "base"  # the base model's name in requests to a child that serves adapters
HOLD, CLOSE, OPEN = "/agentrl/hold", "/agentrl/close", "/agentrl/open"
RUNNING = "/agentrl/running"  # control request that lists the adapters of calls in flight
INIT, START = "/init_weight_transfer_engine", "/start_weight_update"
UPDATE, FINISH = "/update_weights", "/finish_weight_update"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
MEMORY = "agentrl"  # name in vLLM of the weight-transfer backend in `worker_extension`


@dataclass(frozen=True)
class TrainedModel:
    """The learner's model, trained as a whole or by its adapters."""

    save: Callable[[Path], None]  # writes all weights, adapter merged, as a Hugging Face checkpoint
    weights: Callable[[], Mapping[str, Tensor]]  # the weights in memory, by checkpoint names
    save_tokenizer: Callable[[Path], None]
    score: Callable[[str, Sequence[int]], list[float]]
    """(policy, token ids) -> the learner's log-prob of each token but the first, temperature 1;
    0 for ids below 0, which are no text."""
    probe: Sequence[int]  # token ids whose log-probs are compared after each publish
    inputs: Inputs | None = None  # reader of images; its probe is compared, too
    gpu: int = -1  # index in this process of the weights' GPU; -1: none
    adapters: Sequence[str] = ()  # names; empty: all weights are trained
    save_base: Callable[[Path], None] | None = None  # writes the model without its adapters
    # Writes an adapter by name, in peft's format.
    save_adapter: Callable[[str, Path], None] | None = None
    rank: int = 0  # rank of the largest adapter


@dataclass
class ServedModel:
    """The files that a server starts with, and the current version of each policy."""

    weights: Path  # the checkpoint of the start; newer weights are sent
    tokenizer: Path
    versions: dict[str, int] = field(default_factory=lambda: {POLICY: 0})
    adapters: bool = False  # whether the policies are adapters
    backend: str = ""  # vLLM's weight-transfer backend; empty: none

    def name(self, policy: str) -> str:
        """A policy's name at vLLM, which is different for each version of an adapter."""
        return versioned(policy, self.versions[policy]) if self.adapters else policy

    def query(self) -> str:
        """`RequestHold.versions` as a query. A whole model answers to any name."""
        nameless = {} if self.adapters else {"": next(iter(self.versions.values()))}
        return urlencode(self.versions | nameless)


def versioned(policy: str, version: int) -> str:
    """The name of an adapter's version at vLLM."""
    return f"{policy}#{version}"


class LostError(Exception):
    """A request failed in a way that may mean the server is dying."""


class VllmHost(Protocol):
    """Where vLLM runs: a child process, or servers that are managed elsewhere."""

    url: str  # URL of the server that holds requests and answers calls
    # Known after `probe`:
    name: str  # the model's name in requests if all weights are trained
    refuses_adapters: str  # why adapters cannot be loaded by name; empty: they can be
    max_adapters: int  # number of adapters that can be served
    backend: str | None  # vLLM's weight-transfer backend; empty: none; None: `ServedModel.backend`
    spans: bool  # calls that span an update name the version of each token: see `VersionSpans`
    gpus: int  # vLLM computes on the first `gpus` GPUs that this process sees

    @property
    def servers(self) -> Sequence[str]:
        """URLs of the servers that have the newest weights."""

    async def probe(self) -> None:
        """Detect the servers' capabilities. Raises PolicyError if they accept no new weights."""

    async def start(self, serving: ServedModel) -> None:
        """Start vLLM with requests held; returns once it answers. Called again after `ended`.
        Raises PolicyError if the port is taken, or if vLLM ends or does not answer in time."""

    async def request(
        self, method: str, path: str, body: Json = None, server: str = ""
    ) -> list[tuple[int, bytes]]:
        """Send a control request to all servers that have the newest weights, or to one server.
        Returns status and body of each response. After HOLD and CLOSE new calls wait, or go to
        other servers, until OPEN?VERSIONS; HOLD returns once no call is in flight. Raises LostError
        if no server answers."""

    async def ended(self) -> object:
        """Wait until no server answers."""

    def returned(self) -> AsyncGenerator[str, None]:
        """Yield servers that answer again, with unknown weights, while others stayed up."""

    async def adopt(self, server: str) -> None:
        """Called when a returned server has the newest weights: calls may go there after OPEN."""

    async def stop(self) -> None: ...

    def failure_reason(self) -> str:
        """The most likely reason why vLLM ended, for an error message."""


class WeightSync(ABC):
    """Sends vLLM the weights that each policy had at its last `take`."""

    @property
    def in_turn(self) -> bool:
        """Whether weights can be sent to one server after another."""
        return True

    @abstractmethod
    def prepare(self, serving: ServedModel) -> None:
        """Write the files that a server starts with, and set their paths in `serving`."""

    @abstractmethod
    def take(self, policy: str) -> None:
        """Record the learner's current weights as the policy's newest."""

    @abstractmethod
    async def send(self, policy: str, servers: VllmClient) -> None:
        """Send the policy's newest weights. Does not clear prefix caches."""

    def close(self) -> None:  # noqa: B027 - files go with their folder
        """Free resources outside the folder."""


SPANS = "/agentrl/spans"  # exists with this middleware; ?VERSIONS sets the weights' versions
CALLS = "/v1/chat/completions", "/v1/completions"
REQUEST = re.compile(r"(?:chatcmpl|cmpl)-(\w+?)(?:[-_](\d+))?")  # vLLM's id: our id, prompt index
REPLACED = {b"x-request-id", b"content-length", VERSION_HEADER.encode()}  # headers of a call
DATA = b"data: "  # prefix of each event of a stream

AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
AsgiApp = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
VersionSpans = list[tuple[int, int]]  # (first token, version)


def parse_versions(query: str) -> dict[str, int]:
    """Parse a query such as `policy=3&other=0` into versions by policy."""
    return {policy: int(version) for policy, version in parse_qsl(query, keep_blank_values=True)}


@dataclass(slots=True)
class _Call:
    version: int  # at admission
    choices: dict[int, VersionSpans] = field(default_factory=dict)  # choices that span an update
    cut: set[int] = field(default_factory=set)  # choices that the token limit ended


class SpanMiddleware:
    """ASGI middleware around vLLM's server."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app
        self._calls: dict[str, _Call] = {}  # by request id
        # Version of the newest request for SPANS; None for adapters, because their calls keep their
        # version.
        self._version: int | None = None
        self._watched: Any = None  # vLLM's client of its engine
        self._processor: Any = None  # its output processor, where outputs have no labels

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        path, headers = scope.get("path"), dict(scope.get("headers", ()))
        version = headers.get(VERSION_HEADER.encode())
        if path in CALLS and version is not None:
            await self._serve(int(version), scope, receive, send)
        elif path == SPANS:
            if query := scope["query_string"].decode():
                self._version = parse_versions(query).get("")
                await self._name(scope["app"].state.engine_client)
            await answer(send, 200, b"{}")
        else:
            await self._app(scope, receive, send)

    async def _name(self, engine: Any) -> None:
        """Record that the newest version samples the next tokens."""
        if not _labels_tokens(engine):
            for request in self._watch_processor(engine.output_processor).values():
                self._change(request)
        elif self._version is not None:
            await engine.update_weight_version(str(self._version))

    def _watch(self, engine: Any) -> None:
        if not _labels_tokens(engine):
            self._watch_processor(engine.output_processor)
        if engine is not self._watched:
            self._watched, generate = engine, engine.generate

            async def watched(
                prompt: Any, sampling_params: Any, request_id: str, **named: Any
            ) -> AsyncGenerator[Any, None]:
                async with aclosing(
                    generate(prompt, sampling_params, request_id, **named)
                ) as outputs:
                    async for output in outputs:
                        self._note(request_id, sampling_params.n, output.outputs)
                        yield output

            engine.generate = watched

    def _note(self, request_id: str, n: int, completions: Sequence[Any]) -> None:
        """Record how completions end, and the labels of ended ones."""
        named = REQUEST.fullmatch(request_id)
        if named is None or (call := self._calls.get(named[1])) is None:
            return
        for completion in completions:
            index = int(named[2] or 0) * n + completion.index
            if completion.finish_reason == "length":
                call.cut.add(index)
            if self._version is None:
                continue
            labels = getattr(completion, "weight_versions", None) or ()
            # Weights without a name are those of the call's admission.
            spans = [
                (label.start, int(label.version) if label.version.isdigit() else call.version)
                for label in labels
            ]
            if any(version != call.version for _, version in spans):
                call.choices[index] = spans

    def _watch_processor(self, processor: Any) -> dict[str, Any]:
        """The requests of vLLM's output processor, which is patched to call `_change` for each that
        it accepts."""
        if processor is not self._processor:
            self._processor, take = processor, processor.add_request

            def add_request(request: Any, *arguments: Any, **named: Any) -> None:
                take(request, *arguments, **named)
                taken = processor.request_states.get(request.request_id)
                if taken is not None:
                    self._change(taken)

            processor.add_request = add_request
        requests: dict[str, Any] = processor.request_states
        return requests

    def _change(self, request: Any) -> None:
        """Record that the newest version samples the next tokens of one of vLLM's requests."""
        version, named = self._version, REQUEST.fullmatch(request.external_req_id)
        if version is None or named is None or (call := self._calls.get(named[1])) is None:
            return
        n = request.parent_req.sampling_params.n if request.parent_req else 1
        index = int(named[2] or 0) * n + request.request_index
        before = call.choices.get(index, [(0, call.version)])
        if before[-1][1] == version:
            return
        sampled = request.detokenizer.num_output_tokens()
        # Drop earlier versions that sampled no token.
        call.choices[index] = [span for span in before if span[0] < sampled] + [(sampled, version)]

    async def _serve(
        self, version: int, scope: MutableMapping[str, Any], receive: Receive, send: Send
    ) -> None:
        id, call = uuid4().hex, _Call(version)
        headers = [header for header in scope["headers"] if header[0] != b"x-request-id"]
        start: AsgiMessage = {}
        body = b""

        async def send_with_spans(message: AsgiMessage) -> None:
            nonlocal body
            if message["type"] == "http.response.start":
                start.update(message, headers=list(message["headers"]))
                return
            body += message.get("body", b"")
            stream = any(value.startswith(b"text/event-stream") for _, value in start["headers"])
            if message.get("more_body") and not stream:
                return
            completed, body = _completed(body, call), b""
            if start.pop("type", None):
                length = b"content-length"
                sized = [
                    (k, b"%d" % len(completed) if k == length else v) for k, v in start["headers"]
                ]
                await send({**start, "type": "http.response.start", "headers": sized})
            await send({**message, "body": completed})

        self._watch(scope["app"].state.engine_client)
        self._calls[id] = call
        try:
            added = [*headers, (b"x-request-id", id.encode())]
            await self._app({**scope, "headers": added}, receive, send_with_spans)
        finally:
            del self._calls[id]


def _labels_tokens(engine: Any) -> bool:
    """Whether vLLM labels tokens with a version. 0.31 accepts the name of a version, but its
    outputs have no labels."""
    outputs = sys.modules.get("vllm.outputs")
    fields = getattr(outputs, "CompletionOutput", object)
    has_labels = outputs is None or "weight_versions" in getattr(fields, "__annotations__", {})
    return has_labels and hasattr(engine, "update_weight_version")


def _completed(body: bytes, call: _Call) -> bytes:
    """A response, or the events of a streamed one, with spans in finished choices and the reason
    `length` for truncated ones. vLLM's bytes are returned unchanged where possible."""
    if not call.choices and not call.cut:
        return body
    if body.startswith(DATA):
        events = [event.removeprefix(DATA) for event in body.split(b"\n\n")]
        return b"\n\n".join(event and DATA + _completed(event, call) for event in events)
    try:
        answer = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError:  # an error message, or the end of a stream
        return body
    changed = False
    for choice in answer.get("choices", ()):
        if not (finish := choice.get("finish_reason")):
            continue
        if choice["index"] in call.cut and finish != "length":
            choice["finish_reason"] = "length"
            changed = True
        if spans := call.choices.get(choice["index"]):
            choice["agentrl_spans"] = spans
            changed = True
    return msgspec.json.encode(answer) if changed else body


async def answer(send: Send, status: int, body: bytes = b"") -> None:
    """Send a whole response."""
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})
