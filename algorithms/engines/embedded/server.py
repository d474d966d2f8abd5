"""The embedded policy server: serves the model that the learner in this process trains, with
OpenAI's paths, errors and server-sent events.

Owns one thread with an event loop for HTTP, and the engine's thread; with `keys` also a copy of the
trained weights. Invariant: every response names the version or versions that sampled it. Without
a copy, weights change only inside `updating`, while no call is in flight. With a copy, the learner
may write its own weights at any time, and `publish` updates the copy while calls run: a whole model
between two decoding steps; for an adapter it loads a second version, which new calls use.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import count
from typing import TypeVar
from uuid import uuid4

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from agentrl.algorithms.engines.base import VERSION_HEADER, LoopThread, port_taken
from agentrl.algorithms.engines.embedded.admission import (
    Admission,
    PendingRequest,
    StopConditions,
    deliver,
)
from agentrl.algorithms.engines.embedded.engine import ENDED, Engine, sentence_of
from agentrl.algorithms.engines.embedded.proof import served_context, supported_way
from agentrl.algorithms.engines.embedded.requests import (
    ChatRequest,
    ResponseFormat,
    StreamedChoice,
    StreamOptions,
    TextRequest,
    check_fields,
)
from agentrl.algorithms.model.chat import Chat, Codec, RequestError, Tokenizer, TooLongError
from agentrl.algorithms.model.lm_head import sampling_threads
from agentrl.algorithms.model.load import Adapters, Model, end_tokens
from agentrl.algorithms.model.scaled import inputs_of
from agentrl.algorithms.model.tool_formats import THINK
from agentrl.core.access import ANYBODY, Access
from agentrl.core.errors import PolicyError, nearest
from agentrl.core.http import listen, read_body, require_key
from agentrl.core.types import POLICY, Sampling

T = TypeVar("T")
RequestBody = TypeVar("RequestBody")
MAX_BODY_BYTES = 64 * 2**20  # bytes of a request
MIN_BODY_LIMIT = 4 * 2**20  # bytes of a request that every server reads
ESCAPED = 6  # maximum bytes of JSON per character
LARGE = 2**16  # bytes; larger requests are read outside the event loop
REASONING_OPENER = 16  # last tokens of a prompt, which may open the reasoning
MIN_TEMPERATURE = 1e-30  # positive; logits are divided by it in float32

_encoder = msgspec.json.Encoder()
_chat_decoder = msgspec.json.Decoder(ChatRequest)
_text_decoder = msgspec.json.Decoder(TextRequest)


class Routes:
    """The request handlers of one server."""

    def __init__(self, calls: Admission, chat: Chat, codec: Codec, name: str, defaults: Sampling):
        self._calls, self._chat, self._codec = calls, chat, codec
        self._name, self._defaults = name, defaults
        self._largest = MAX_BODY_BYTES
        if chat.text_only:  # a longer body certainly leaves no room to answer
            useful = max(MIN_BODY_LIMIT, ESCAPED * codec.most_bytes)
            self._largest = int(min(useful, MAX_BODY_BYTES))
        # A single thread, so that only one large request at a time takes memory for its tokens.
        self._reader = ThreadPoolExecutor(1, "large-requests")

    def app(self, allowed: Middleware) -> web.Application:
        middlewares = [allowed, _refusals, self._limits]
        app = web.Application(client_max_size=self._largest, middlewares=middlewares)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.text)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.health)
        app.on_response_prepare.append(self._stamp)
        return app

    def close(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._read(request, _chat_decoder, ChatRequest.__struct_fields__)
        if body.top_logprobs and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs = true", param="top_logprobs")
        prompt = await self._prompt(body)
        body.max_tokens = body.max_completion_tokens or body.max_tokens
        tools = bytes(body.tools) if body.tools != b"null" and body.tool_choice != "none" else b""
        form = self._format(body, prompt, "chatcmpl", tools=tools, logprobs=bool(body.logprobs))
        return await self._answer(request, body, form, body.top_logprobs or 0)

    async def text(self, request: web.Request) -> web.StreamResponse:
        body = await self._read(request, _text_decoder, TextRequest.__struct_fields__)
        prompt = body.prompt
        if isinstance(prompt, str):
            prompt = await self._aside(len(prompt), self._codec.encode_plain, prompt)
        form = self._format(body, tuple(prompt), "cmpl", logprobs=body.logprobs is not None)
        return await self._answer(request, body, form, body.logprobs or 0)

    async def tokenize(self, request: web.Request) -> web.Response:
        """The prompt tokens of a conversation, in the format of vLLM's /tokenize."""
        prompt = await self._prompt(await self._read(request, _chat_decoder))
        limit = self._calls.engine.max_context
        return _json({"count": len(prompt), "max_model_len": limit, "tokens": prompt})

    async def models(self, request: web.Request) -> web.Response:
        limit = self._calls.engine.max_context
        card = {"object": "model", "owned_by": "agentrl", "max_model_len": limit}
        cards = [{"id": name} | card for name in self._calls.versions]
        return _json({"object": "list", "data": cards})

    async def health(self, request: web.Request) -> web.Response:
        if not self._calls.engine.alive:
            raise RequestError("the engine has stopped; restart the algorithm process", status=503)
        return _json({"status": "ok", "version": self._calls.versions[self._name]})

    async def _prompt(self, body: ChatRequest) -> tuple[int, ...]:
        hints = {"reasoning_effort": body.reasoning_effort, "verbosity": body.verbosity}
        options = {name: value for name, value in hints.items() if value is not None}
        if (effort := body.reasoning_effort) is not None:  # like vLLM
            options["enable_thinking"] = effort != "none"
        options |= body.chat_template_kwargs or {}
        messages = bytes(body.messages)
        await self._chat.fetch(messages)
        tools = bytes(body.tools)
        size = len(messages) + len(tools)
        return await self._aside(size, self._chat.prompt, messages, tools, _encoder.encode(options))

    async def _read(
        self,
        request: web.Request,
        decoder: msgspec.json.Decoder[RequestBody],
        supported: tuple[str, ...] = (),
    ) -> RequestBody:
        """Read the body of a request. supported: names of the fields; empty: do not check
        fields."""
        raw = await read_body(request)
        body: RequestBody = await self._aside(len(raw), _decode, raw, decoder)
        if supported:
            await self._aside(len(raw), check_fields, raw, supported)
        return body

    async def _aside(self, size: int, work: Callable[..., T], *arguments: object) -> T:
        """Call a function: for a large request (size in bytes) in a thread, so that the event loop
        serves others meanwhile."""
        if size <= LARGE:
            return work(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._reader, work, *arguments)

    @web.middleware
    async def _limits(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """Reject a body that is too large with the same error as a prompt with too many tokens."""
        try:
            return await handler(request)
        except TooLongError as error:
            raise self._calls.too_long(error.what) from None
        except web.HTTPRequestEntityTooLarge:
            if self._largest == MAX_BODY_BYTES:
                raise
            raise self._calls.too_long(f"over {self._largest} bytes") from None

    def _format(
        self,
        body: ChatRequest | TextRequest,
        prompt: tuple[int, ...],
        kind: str,
        *,
        tools: bytes = b"",
        logprobs: bool,
    ) -> ResponseFormat:
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        opening = self._codec.decode(prompt[-REASONING_OPENER:]) if tools else ""
        return ResponseFormat(
            codec=self._codec,
            model=body.model or self._name,
            prompt=prompt,
            chat=isinstance(body, ChatRequest),
            tools=tools,
            parallel=not isinstance(body, ChatRequest) or body.parallel_tool_calls is not False,
            thinking=opening.rstrip().endswith(THINK),
            logprobs=logprobs,
            token_ids=bool(body.return_token_ids),
            stop=tuple(filter(None, stop)),
            id=f"{kind}-{uuid4().hex}",
        )

    async def _answer(
        self, request: web.Request, body: ChatRequest | TextRequest, form: ResponseFormat, top: int
    ) -> web.StreamResponse:
        """top: number of most likely tokens to return per position."""
        policy, sampling = self._policy(body.model), self._sampling(body)
        n, stream = body.n or 1, bool(body.stream)
        ends = StopConditions(form.stop, tuple(body.stop_token_ids or ()), bool(body.ignore_eos))
        async with self._calls.submit(
            form.prompt, sampling, policy, n=n, ends=ends, stream=stream, top=top
        ) as pending:
            if stream:
                options = body.stream_options or StreamOptions()
                return await self._stream(request, pending, form, bool(options.include_usage))
            updates = {index: update async for index, update in pending}
        version = updates[0].spans[0][1] if updates[0].spans else pending.version
        response = form.whole([updates[index] for index in range(n)], version)
        return _json(response, headers={VERSION_HEADER: str(version)})

    def _policy(self, model: str | None) -> str:
        """The policy for a request's model name. If a single one is served, any name selects it, so
        agents keep their model names; otherwise raises RequestError for an unknown name."""
        served = self._calls.versions
        if model in served:
            return str(model)
        if model and len(served) > 1:
            raise RequestError(
                f"no model {model!r} is served here; {nearest(model, served)}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return self._name

    def _sampling(self, body: ChatRequest | TextRequest) -> Sampling:
        default = self._defaults
        temperature = default.temperature if body.temperature is None else body.temperature
        if 0 < temperature < MIN_TEMPERATURE:
            raise RequestError(
                f"temperature {temperature:g} is below {MIN_TEMPERATURE:g}; use 0 for the "
                "most probable tokens",
                param="temperature",
            )
        return Sampling(
            temperature=temperature,
            top_p=default.top_p if body.top_p is None else body.top_p,
            top_k=default.top_k if body.top_k is None else max(body.top_k, 0),
            max_tokens=body.max_tokens or default.max_tokens,
            seed=default.seed if body.seed is None else body.seed,
        )

    async def _stream(
        self, request: web.Request, pending: PendingRequest, form: ResponseFormat, usage: bool
    ) -> web.StreamResponse:
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        choices: list[StreamedChoice] = []
        tokens, first = 0, True
        try:
            async for index, update in pending:
                if not choices:  # the version of the first token is known only here
                    version = update.spans[0][1] if update.spans else pending.version
                    choices = [StreamedChoice(form, n, version) for n in range(len(pending.calls))]
                    response.headers[VERSION_HEADER] = str(version)
                    await response.prepare(request)
                tokens += len(update.tokens)
                choice = choices[index].push(update)
                if choice is not None:
                    chunk = form.response([choice], first=first, chunk=True)
                    first = False
                    await response.write(_event(chunk))
            if usage:
                total = form.response([], usage=form.usage(tokens), first=False, chunk=True)
                await response.write(_event(total))
        except RequestError as refusal:
            if not response.prepared:
                raise
            # The status has been sent, so the error goes into the stream.
            await response.write(_event(refusal.body))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _stamp(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add headers: responses without a version, such as errors, get that of the default policy.
        `x-processors: none` says that no option changed the logits."""
        response.headers.setdefault(VERSION_HEADER, str(self._calls.versions[self._name]))
        response.headers["x-processors"] = "none"


@web.middleware
async def _refusals(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Convert every error, including aiohttp's, to OpenAI's error object."""
    try:
        return await handler(request)
    except RequestError as error:
        refusal = error
    except (msgspec.DecodeError, RecursionError) as error:  # in a part that is decoded later
        refusal = RequestError(f"the body cannot be read: {error}")
    except web.HTTPException as error:
        refusal = RequestError(
            f"{request.method} {request.path}: {error.text or error.reason}", status=error.status
        )
    return _json(refusal.body, status=refusal.status)


def _decode(raw: bytes, decoder: msgspec.json.Decoder[RequestBody]) -> RequestBody:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise RequestError(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None


def _json(
    body: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    content = _encoder.encode(body)
    return web.Response(
        body=content, status=status, headers=headers, content_type="application/json"
    )


def _event(body: object) -> bytes:
    return b"data: " + _encoder.encode(body) + b"\n\n"


NO_DEFAULTS = Sampling()


class EmbeddedServer:
    """A PolicyServer on a model object and its adapters. Its methods may be awaited from any event
    loop."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        name: str = POLICY,
        adapters: Adapters | None = None,
        max_batch: int = 64,
        max_context: int = 2048,
        threads: int = 0,
        defaults: Sampling = NO_DEFAULTS,
        in_flight: bool = False,
        access: Access = ANYBODY,
    ) -> None:
        """port: 0: any free one. max_context: maximum tokens of prompt and completion, capped by
        the model's positions. threads: 0: see `engine.threads`. defaults: sampling of requests that
        do not set it. in_flight: whether weights may change while calls run, which then recompute
        their KV cache, so that the log-prob of a token is that of its reported version. access: API
        keys and certificate. Serves every existing adapter under its name, and the model without
        adapters as `name`, if no adapter has that name. Requests without a model name get `name`.

        Logs how the model is computed; raises PolicyError if it cannot be served."""
        self.model = name
        self.base_url = ""
        self.in_flight = in_flight
        self._learned = self._copy = model, adapters
        if self.in_flight:
            adapters = adapters and adapters.copy()
            model = adapters.model if adapters else copy.deepcopy(model)
            self._copy = model, adapters
        self._numbers = count()
        self._opened: set[str] = set()  # adapters of the copy that `add` has loaded
        # Loads and unloads adapters while the engine's thread applies others.
        self._opener = ThreadPoolExecutor(1, "adapters")
        self._host, self._port, self._access = host, port, access
        self._http = LoopThread("policy-http")
        policies: dict[str, str | None] = {name: None}
        policies |= {adapter: adapter for adapter in (adapters.names if adapters else ())}
        engine = Engine(
            model,
            eos=end_tokens(model, tokenizer),
            max_batch=max_batch,
            max_context=served_context(model, max_context),
            threads=threads or sampling_threads(sum(p.numel() for p in model.parameters())),
            deliver=lambda updates: self._http.post(deliver, updates),
            adapters=adapters,
            policies=list(policies.values()),
            dropped=self._close_adapter,
            way=supported_way(model),
        )
        codec = Codec(tokenizer, engine.max_context)
        self._admission = Admission(engine, codec, list(policies))
        inputs = inputs_of(model)
        self._chat = inputs.chat(tokenizer, codec) if inputs else Chat(tokenizer, codec)
        self._routes = Routes(self._admission, self._chat, codec, name, defaults)
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        self._http.start()
        try:
            await self._http.run(self._listen())
        except OSError as error:
            await self.close()
            raise port_taken(self._host, self._port, error) from None

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        await self._http.run(self._admission.hold())
        try:
            yield
        finally:
            await self._http.call(self._admission.resume)

    async def publish(self, version: int, policy: str | None = None) -> None:
        """See `PolicyServer.publish`; outside `updating` it first waits for the calls in flight."""
        policy = policy or self.model
        if self.in_flight and self._admission.adapter_of(policy) is not None:
            await self.add(policy, version)
        elif self.in_flight:
            swap = self._admission.publish(version, policy, self._load)
            await self._http.run(swap)
        elif self._admission.held:
            await self._http.run(self._admission.publish(version, policy))
        else:
            async with self.updating():
                await self._http.run(self._admission.publish(version, policy))

    async def wait_for_failure(self) -> PolicyError:
        blind, failure = self._chat.blind, self._admission.engine.failure
        futures = [asyncio.wrap_future(future) for future in (blind, failure)]
        # Both may be set even if this is cancelled.
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if blind.done():
            return PolicyError(
                f"{blind.result()}. Then start over: the same command with --fresh, if it has this"
                " option; in Python fit(fresh=True)"
            )
        error = failure.result()
        return PolicyError(ENDED + sentence_of(error))

    async def add(self, policy: str, version: int) -> None:
        adapter = policy
        if self.in_flight:
            opened = self._opener.submit(self._open_adapter, policy)
            adapter = await asyncio.wrap_future(opened)
        await self._http.call(self._admission.add, policy, version, adapter)

    async def remove(self, policy: str) -> None:
        await self._http.call(self._admission.remove, policy)

    async def close(self) -> None:
        """Fail the calls in flight and stop. May be called again."""
        if self._http.running:
            await self._http.run(self._shut())
            await self._http.stop()
        self._opener.shutdown()

    @property
    def pauses(self) -> list[float]:
        """Seconds that each publish kept the engine from computing."""
        return self._admission.pauses

    def _load(self) -> None:
        (served, _), (learned, _) = self._copy, self._learned
        for target, source in zip(served.parameters(), learned.parameters(), strict=True):
            target.copy_(source)

    def _open_adapter(self, policy: str) -> str:
        (_, served), (_, learned) = self._copy, self._learned
        assert served is not None
        assert learned is not None
        name = f"{policy}#{next(self._numbers)}"
        served.duplicate(name, learned, policy)
        self._opened.add(name)
        return name

    def _close_adapter(self, adapter: str | None) -> None:
        """Unload an adapter of the copy that no request uses any more."""
        (_, served), opened = self._copy, self._opened
        if served is not None and adapter in opened:
            opened.remove(adapter)
            self._opener.submit(served.close, adapter)

    async def _listen(self) -> None:
        self._runner, url = await listen(
            self._routes.app(require_key(self._access)),
            self._host,
            self._port,
            access=self._access,
        )
        self._admission.requests.release()
        self._admission.engine.start()
        self.base_url = f"{url}/v1"

    async def _shut(self) -> None:
        if self._admission.engine.alive:
            await asyncio.to_thread(self._admission.engine.close)
        if self._runner is not None:
            await self._runner.cleanup()
        self._routes.close()
        await asyncio.get_running_loop().shutdown_default_executor()
