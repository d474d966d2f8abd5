"""A fleet of vLLM servers that are managed elsewhere, behind agentrl's load balancer; control
requests to vLLM servers, and the detection of their capabilities.

Owns the load balancer, an HTTP server in a thread that holds requests and distributes them over the
servers. No other client may call the servers for the same policy. They must be started with

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs \
        --generation-config vllm --enable-auto-tool-choice --tool-call-parser hermes

and, for token versions of calls that span an update (see `protocol.SpanMiddleware`), with
`--middleware agentrl.algorithms.engines.vllm.protocol.SpanMiddleware`; for adapters with
VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora --max-lora-rank RANK; to send weights without a
disk, with --weight-transfer-config '{"backend": ...}' (see `weights`); on a CPU, and for the
backend "agentrl", with
`--worker-extension-cls agentrl.algorithms.engines.vllm.worker_extension.Extension`.

Invariant: calls go only to servers with the newest weights or, during an update, with the previous
version, and responses name the version. A server that is down gets neither calls nor updates until
it has received the newest weights (`adopt`), because it restarts with old ones; while all are down,
calls wait.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from agentrl.algorithms.engines.base import (
    VERSION_HEADER,
    LoopThread,
    RequestHold,
    port_taken,
)
from agentrl.algorithms.engines.vllm.child import error_of, is_public_path, to_version
from agentrl.algorithms.engines.vllm.process import (
    MIN_VLLM,
    START_POLL,
    START_TIMEOUT,
    UPDATE_TIMEOUT,
    is_old,
)
from agentrl.algorithms.engines.vllm.protocol import (
    CLOSE,
    HOLD,
    INIT,
    LOAD,
    MEMORY,
    OPEN,
    RUNNING,
    SPANS,
    LostError,
    ServedModel,
    VllmHost,
    parse_versions,
)
from agentrl.core.access import ANYBODY, Access
from agentrl.core.errors import PolicyError
from agentrl.core.http import KEY_HEADERS, listen, read_body, require_key
from agentrl.core.types import POLICY, Json

ENGINES = {
    "MemoryEngine": MEMORY,
    "IPCWeightTransferEngine": "ipc",
    "NCCLWeightTransferEngine": "nccl",
}
INVALID_INIT_INFO = re.compile(rb"Invalid init_info for (\w+)")


@dataclass(frozen=True, slots=True)
class VllmClient:
    """Sends control requests to all up-to-date servers of a host, or to one."""

    host: VllmHost
    timeout: float  # seconds
    server: str = ""

    @property
    def urls(self) -> Sequence[str]:
        return (self.server,) if self.server else self.host.servers

    def only(self, server: str) -> VllmClient:
        """A client of one server, up to date or not."""
        return replace(self, server=server)

    async def post(self, path: str, body: Json = None, *, missing: bool = False) -> list[Any]:
        """Send to each server; returns the decoded responses. missing: 404 is allowed.

        Raises PolicyError for a rejection or a time-out, LostError if a server may be dying."""
        return await self._request("POST", path, body, missing)

    async def ask(self, url: str, method: str, path: str, body: Json = None) -> Any:
        """Send to one server; returns its decoded response. Raises as `post` does."""
        return (await self.only(url)._request(method, path, body, False))[0]

    async def _request(self, method: str, path: str, body: Json, missing: bool) -> list[Any]:
        try:
            async with asyncio.timeout(self.timeout):
                replies = await self.host.request(method, path, body, self.server)
        except TimeoutError:
            problem = "calls in flight did not end" if path == HOLD else "no answer"
            raise PolicyError(f"vLLM: {path}: {problem} within {self.timeout:g} s") from None
        for status, answer in replies:
            if status != 200 and not (missing and status == 404):
                reason = f"{path}: {status} {answer[:300].decode(errors='replace')}"
                if status >= 500:  # a server error, perhaps of a dying engine
                    raise LostError(reason)
                raise PolicyError(f"vLLM refused {reason}; {self.host.failure_reason()}")
        return [
            msgspec.json.decode(answer) if answer[:1] in (b"{", b"[") else None
            for _, answer in replies
        ]


@dataclass(frozen=True, slots=True)
class ServerCapabilities:
    """The common capabilities of all servers."""

    name: str  # the model's name in calls
    adapters: bool  # whether adapters can be loaded by name
    spans: bool  # whether calls that span an update name the version of each token
    backend: str  # vLLM's weight-transfer backend; empty: none, or different ones


async def probe(http: aiohttp.ClientSession, urls: Sequence[str]) -> ServerCapabilities:
    """Detect the capabilities. Raises PolicyError for different models, or no weight updates."""
    servers = [await _probe(http, url) for url in urls]
    names = [server.name for server in servers]
    if len(set(names)) != 1:
        raise PolicyError(
            f"engine.vllm.urls: they serve different models ({', '.join(names)}); start them "
            "with the same --served-model-name"
        )
    backends = {server.backend for server in servers}
    return ServerCapabilities(
        names[0],
        all(server.adapters for server in servers),
        all(server.spans for server in servers),
        backends.pop() if len(backends) == 1 else "",
    )


async def _probe(http: aiohttp.ClientSession, url: str) -> ServerCapabilities:
    version = (await _ask(http, "GET", f"{url}/version"))[1]["version"]
    if is_old(version):
        oldest = ".".join(map(str, MIN_VLLM))
        raise PolicyError(f"vLLM at {url} is {version}; start {oldest} or newer there")
    if (await _ask(http, "GET", f"{url}/is_paused"))[0] != 200:
        raise PolicyError(
            f"vLLM at {url} accepts no new weights; start it with VLLM_SERVER_DEV_MODE=1 "
            "in its environment, on an address that only this machine reaches"
        )
    status, models = await _ask(http, "GET", f"{url}/v1/models")
    if status != 200:
        raise PolicyError(
            f"vLLM at {url} refused /v1/models ({status}); set engine.vllm.key_env to "
            "the environment variable with its API key"
        )
    name = next(card["id"] for card in models["data"] if not card.get("parent"))
    loads = (await _ask(http, "POST", f"{url}{LOAD}", {}))[0] != 404
    spans = (await _ask(http, "GET", f"{url}{SPANS}"))[0] == 200
    return ServerCapabilities(name, loads, spans, await _backend(http, url))


async def _backend(http: aiohttp.ClientSession, url: str) -> str:
    """The weight-transfer backend of a server, from its error message for an invalid request:
    /server_info has it too, but takes minutes to describe the machine first."""
    try:
        nothing = {"init_info": {"agentrl": None}}
        async with http.post(f"{url}{INIT}", json=nothing) as reply:
            named = INVALID_INIT_INFO.search(await reply.read())
    except (TimeoutError, aiohttp.ClientError) as error:
        raise PolicyError(f"vLLM at {url}: {INIT}: {type(error).__name__}: {error}") from None
    return ENGINES.get(named[1].decode(), "") if named else ""


async def _ask(
    http: aiohttp.ClientSession, method: str, url: str, body: Any = None
) -> tuple[int, Any]:
    """Status, and the decoded body of a 200. Raises PolicyError if the answer is not vLLM's."""
    try:
        async with http.request(method, url, json=body) as reply:
            text = await reply.read()
            return reply.status, msgspec.json.decode(text) if reply.status == 200 else None
    except (TimeoutError, aiohttp.ClientError, msgspec.DecodeError) as error:
        raise PolicyError(
            f"engine.vllm.urls: {url} does not answer as vLLM does ({type(error).__name__}: "
            f"{error}); correct the URL"
        ) from None


HEALTH_INTERVAL = 1.0  # seconds between health checks; starting a server takes longer
HEALTH_TIMEOUT = 10.0  # seconds to wait for the answer to a health check
CRASH_GRACE = 5.0  # seconds after a failed request until a crashed server fails its health check
# Seconds to keep a connection; vLLM closes it after 5, which would seem a crash.
IDLE_CONNECTION = 2.0
MAX_REQUEST_BYTES = 2**30  # bytes of a request
HOP = {*KEY_HEADERS, "authorization", "connection", "content-length", "host", "keep-alive"}
HOP |= {"transfer-encoding"}


@dataclass(slots=True)
class _Server:
    versions: dict[str, int] | None = None  # served versions; None: it gets no calls
    calls: int = 0  # in flight


class VllmFleet:
    """A VllmHost for servers that are already running."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str = "",
        access: Access = ANYBODY,
        start_timeout: float = START_TIMEOUT,
        timeout: float = UPDATE_TIMEOUT,
        adapters: bool = False,
    ) -> None:
        """urls: http://host:port of each server. api_key: sent to the servers. access: who may call
        the load balancer. adapters: whether adapters are trained. start_timeout: seconds to wait
        for servers to start or restart. timeout: seconds after which a server without an answer to
        a control request counts as down."""
        self.urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self.url, self.name = "", POLICY
        self.max_adapters = sys.maxsize  # vLLM swaps adapters beyond its --max-loras in on request
        self.refuses_adapters, self.gpus = "", 0
        self.backend: str | None = ""
        self.spans = False
        self._bind, self._adapters, self._access = (host, port), adapters, access
        self._start_timeout, self._timeout = start_timeout, timeout
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._reason = "nothing is known about why"
        self._gone = asyncio.Event()  # set while no server answers
        # Event loop on which `start` was called.
        self._home: asyncio.AbstractEventLoop | None = None
        # The fields below belong to the thread.
        self._http = LoopThread("vllm-gate")
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None
        self._requests = RequestHold()
        self._busy: dict[str, _Server] = {}  # servers that are up, by URL

    @property
    def servers(self) -> Sequence[str]:
        return tuple(self._busy)

    async def probe(self) -> None:
        """See `VllmHost.probe`."""
        async with self._client() as http:
            await asyncio.gather(*(self._healthy(http, url) for url in self.urls))
            can = await probe(http, self.urls)
        self.name, self.backend, self.spans = can.name, can.backend, can.spans
        # The backend "ipc" maps the learner's memory; otherwise servers have separate GPUs.
        self.gpus = 1 if can.backend == "ipc" else 0
        if not self._adapters:
            self.refuses_adapters = "all weights are trained"
        elif not can.adapters:
            needed = "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            self.refuses_adapters = f"vLLM was not started with {needed}"

    async def start(self, serving: ServedModel) -> None:
        """Wait for all servers at first, later for any one of them."""
        self._gone.clear()
        self._home = asyncio.get_running_loop()
        async with self._client() as http:
            if not self._http.running:
                self._http.start()
                await self._http.run(self._listen())
                up = self.urls
            else:
                up = [await _first(self._healthy(http, url) for url in self.urls)]
        await self._http.call(self._mark_ready, up)

    async def request(
        self, method: str, path: str, body: Json = None, server: str = ""
    ) -> list[tuple[int, bytes]]:
        return await self._http.run(self._control(method, path, body, server))

    async def ended(self) -> str:
        """Wait until no server answers; returns the reason."""
        await self._gone.wait()
        return self._reason

    async def returned(self) -> AsyncGenerator[str, None]:
        """Yield servers that answer again while others stayed up. Checks the health of all."""
        async with self._client() as http:
            while True:
                await asyncio.sleep(HEALTH_INTERVAL)
                for url in self.urls:
                    problem = await self._health_problem(http, url)
                    if problem is not None:
                        await self._http.call(self._mark_gone, url, problem)
                    elif url not in self._busy and not self._gone.is_set():
                        yield url

    async def adopt(self, server: str) -> None:
        await self._http.call(self._mark_ready, [server])

    async def stop(self) -> None:
        """Stop the load balancer, not the servers. May be called again."""
        if self._http.running:
            await self._http.run(self._shut())
            await self._http.stop()

    def failure_reason(self) -> str:
        return self._reason

    async def _healthy(self, http: aiohttp.ClientSession, url: str) -> str:
        deadline = time.monotonic() + self._start_timeout
        while (problem := await self._health_problem(http, url)) is not None:
            if time.monotonic() > deadline:
                raise PolicyError(
                    f"engine.vllm.urls: {url} {problem}, for {self._start_timeout:g} s; start vLLM "
                    "there"
                )
            await asyncio.sleep(START_POLL)
        return url

    async def _health_problem(self, http: aiohttp.ClientSession, url: str) -> str | None:
        """The result of a health check: the problem, or None."""
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT), http.get(f"{url}/health") as reply:
                return None if reply.status == 200 else f"answers {reply.status} to /health"
        except TimeoutError:
            return "does not answer"
        except (aiohttp.ClientError, ValueError) as error:
            return f"does not answer ({type(error).__name__}: {error})"

    def _client(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=self._start_timeout)
        return aiohttp.ClientSession(headers=self._headers, timeout=timeout)

    async def _listen(self) -> None:
        app = web.Application(
            client_max_size=MAX_REQUEST_BYTES, middlewares=[require_key(self._access)]
        )
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION),
            timeout=aiohttp.ClientTimeout(total=None),
            headers=self._headers,
        )
        try:
            self._runner, self.url = await listen(app, *self._bind, access=self._access)
        except OSError as error:
            raise port_taken(*self._bind, error) from None

    def _mark_ready(self, urls: Sequence[str]) -> None:
        self._busy |= {url: self._busy.get(url) or _Server() for url in urls}

    def _mark_gone(self, url: str, problem: str) -> None:
        self._reason = f"it is down: {url} {problem}"
        if self._busy.pop(url, None) is None:
            return
        if not self._open():
            self._requests.close()
        if self._busy:
            return
        assert self._home is not None
        self._home.call_soon_threadsafe(self._gone.set)

    def _open(self) -> dict[str, _Server]:
        """The servers that calls may go to."""
        return {url: server for url, server in self._busy.items() if server.versions is not None}

    async def _shut(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if not is_public_path(request.path):
            return web.Response(status=404)
        # Read first: a request whose body never ends must not delay an update.
        body = await read_body(request)
        await self._requests.wait_released()
        url, server = min(self._open().items(), key=lambda item: item[1].calls)
        assert server.versions is not None
        body, name, version = to_version(body, server.versions)
        with self._requests.call(name):
            server.calls += 1
            try:
                return await self._forward(request, url, body, version)
            finally:
                server.calls -= 1

    async def _control(
        self, method: str, path: str, body: Json, server: str
    ) -> list[tuple[int, bytes]]:
        """See `VllmHost.request`. A server that does not answer is marked as down."""
        if path == HOLD:
            await self._requests.hold()
            return []
        if path == RUNNING:
            return [(200, msgspec.json.encode(list(self._requests.running)))]
        urls = [server] if server else list(self._busy)
        if path == CLOSE or path.startswith(f"{OPEN}?"):
            versions = None if path == CLOSE else parse_versions(path.removeprefix(f"{OPEN}?"))
            for target in self._busy.keys() & set(urls):
                self._busy[target].versions = versions
            (self._requests.release if self._open() else self._requests.close)()
            return []
        results = await asyncio.gather(*(self._ask(url, method, path, body) for url in urls))
        replies = [reply for reply in results if reply is not None]
        if not replies:
            raise LostError(f"{path}: {self._reason}")
        return replies

    async def _ask(self, url: str, method: str, path: str, body: Json) -> tuple[int, bytes] | None:
        """Status and body of one server's response; None: it is down."""
        assert self._session is not None
        try:
            async with (
                asyncio.timeout(self._timeout),
                self._session.request(method, url + path, json=body) as reply,
            ):
                status, answer = reply.status, await reply.read()
                if status < 500 or await self._survives(url):
                    return status, answer
                self._mark_gone(url, f"{path}: {status} {answer[:300]!r}")
        except TimeoutError:
            late = f"no answer within {self._timeout:g} s"
            self._mark_gone(url, f"{path}: {late}")
        except aiohttp.ClientError as error:
            self._mark_gone(url, f"does not answer ({type(error).__name__}: {error})")
        return None

    async def _survives(self, url: str) -> bool:
        """Whether a server remains healthy for DYING seconds after a failed request."""
        assert self._session is not None
        deadline = time.monotonic() + CRASH_GRACE
        while time.monotonic() < deadline:
            if await self._health_problem(self._session, url) is not None:
                return False
            await asyncio.sleep(START_POLL)
        return True

    async def _forward(
        self, request: web.Request, url: str, body: bytes, version: int | None
    ) -> web.StreamResponse:
        assert self._session is not None
        dropped_headers = HOP | {VERSION_HEADER}
        sent = {k: v for k, v in request.headers.items() if k.lower() not in dropped_headers}
        stamp = {} if version is None else {VERSION_HEADER: str(version)}
        answer: web.StreamResponse | None = None
        try:
            async with self._session.request(
                request.method, url + request.path_qs, data=body, headers=sent | stamp
            ) as reply:
                if reply.status == 500:
                    status, words = error_of(await reply.read())
                    return web.Response(
                        status=status, body=words, content_type="application/json", headers=stamp
                    )
                answer = web.StreamResponse(status=reply.status)
                answer.content_type = reply.content_type
                answer.headers.update(stamp)
                await answer.prepare(request)
                async for chunk in reply.content.iter_any():
                    await answer.write(chunk)
                await answer.write_eof()
                return answer
        except aiohttp.ClientConnectionResetError:  # the caller has disconnected
            raise
        except aiohttp.ClientError as error:
            self._mark_gone(url, f"does not answer ({type(error).__name__}: {error})")
            if answer is None or not answer.prepared:
                message = f"vLLM is being restarted ({type(error).__name__}: {error})"
                return web.json_response({"error": {"message": message}}, status=503)
            if request.transport is not None:  # a cut connection makes the caller retry
                request.transport.abort()
            return answer


async def _first(healthy: Iterable[Coroutine[Any, Any, str]]) -> str:
    """The first healthy server. Raises the error of the last check if there is none."""
    checks = pending = {asyncio.ensure_future(check) for check in healthy}
    try:
        while True:
            finished, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for check in finished:
                if check.exception() is None or not pending:
                    return check.result()
    finally:
        for check in pending:
            check.cancel()
        await asyncio.gather(*checks, return_exceptions=True)
