"""vLLM servers that somebody else started, behind one gate of our own.

Owns the gate, an HTTP server in a thread, which spreads calls over the servers, and the key to it.
The servers know neither versions nor holds; nobody else may call them for the same policy, and they
must be started with

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs \
        --generation-config vllm --enable-auto-tool-choice --tool-call-parser hermes

and for adapters with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora --max-lora-rank RANK; on
a CPU with `--worker-extension-cls agentrl.algorithms.engines.vllm_worker.Extension`.
Always true: the gate is closed from the moment a server is found to be gone until all servers have
the newest weights, because whoever restarts it does so with old ones.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import aiohttp
import msgspec
from aiohttp import web

from agentrl.algorithms.engines.vllm_child import (
    CONTROL,
    POLICY_VERSION,
    Gate,
    is_call,
    model_of,
)
from agentrl.algorithms.engines.vllm_process import OLDEST, POLL, is_old
from agentrl.algorithms.engines.vllm_serving import HOLD, OPEN, Serving
from agentrl.errors import PolicyError
from agentrl.types import POLICY

T = TypeVar("T")
WATCH = 1.0  # seconds between looks at servers that run; starting one takes longer
PATIENCE = 10.0  # seconds that a server has to say that it is well
LARGEST = 2**30  # bytes of a request
HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


class VllmFleet:
    """A Host of servers that run already."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str = "",
        start_timeout: float = 300.0,
        adapters: bool = False,
    ) -> None:
        """urls: http://host:port of each server. adapters: whether those are what is trained.
        start_timeout: seconds that servers have to come up, at first and again."""
        self.urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self.key, self.url, self.name = secrets.token_hex(16), "", POLICY
        self.hot = False
        self._bind, self._adapters, self._start_timeout = (host, port), adapters, start_timeout
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._words = "nothing is known about why"
        self._lost = asyncio.Event()
        self._home: asyncio.AbstractEventLoop | None = None  # where `start` was called
        # Those below belong to the thread.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None
        self._gate = Gate("")
        self._busy = dict.fromkeys(self.urls, 0)  # calls that each server is answering

    async def probe(self) -> None:
        """Find out what is possible. Raises PolicyError for servers that cannot be published to."""
        await self._healthy()
        names, hot = [], []
        async with self._client() as http:
            for url in self.urls:
                version = (await self._ask(http, "GET", f"{url}/version"))[1]["version"]
                if is_old(version):
                    oldest = ".".join(map(str, OLDEST))
                    raise PolicyError(f"vLLM at {url} is {version}; start {oldest} or newer there")
                if (await self._ask(http, "GET", f"{url}/is_paused"))[0] != 200:
                    raise PolicyError(
                        f"vLLM at {url} takes no new weights; start it with VLLM_SERVER_DEV_MODE=1 "
                        "in its environment, on an address that only this machine reaches"
                    )
                status, models = await self._ask(http, "GET", f"{url}/v1/models")
                if status != 200:
                    raise PolicyError(
                        f"vLLM at {url} refused /v1/models ({status}); set engine.vllm.key_env to "
                        "the environment variable with its API key"
                    )
                names += [next(card["id"] for card in models["data"] if not card.get("parent"))]
                wrong = await self._ask(http, "POST", f"{url}/v1/load_lora_adapter", {})
                hot.append(wrong[0] != 404)
        if len(set(names)) != 1:
            raise PolicyError(
                f"engine.vllm.urls: they serve different models ({', '.join(names)}); start them "
                "with the same --served-model-name"
            )
        self.name, self.hot = names[0], self._adapters and all(hot)

    async def start(self, serving: Serving) -> None:
        """All servers have these weights, and calls are let in.

        Raises PolicyError when the port is taken, and when a server stays silent or refuses."""
        self._lost.clear()
        self._home = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="vllm-gate", daemon=True
            )
            self._thread.start()
            await self._on_loop(self._listen())
        else:
            await self._healthy()
        policies = list(serving.adapters) or list(serving.versions)[:1]
        async with self._client() as http:
            for url in self.urls:
                for policy in policies:
                    for path, body in serving.loads(policy):
                        await self._must(http, url + path, body)
                await self._must(http, f"{url}/reset_prefix_cache", None)
        await self._on_loop(self._admit(serving.query()))

    async def ended(self) -> str:
        """The URL of a server that no longer answers, once there is one."""
        async with self._client() as http:
            while not self._lost.is_set():
                for url in self.urls:
                    if (words := await self._ill(http, url)) is not None:
                        await self._on_loop(self._lose(f"{url} {words}"))
                        break
                else:
                    try:
                        async with asyncio.timeout(WATCH):
                            await self._lost.wait()
                    except TimeoutError:
                        continue
                break
        return self._words

    async def stop(self) -> None:
        """Close the gate; the servers go on. A second time does nothing."""
        if self._loop is None or self._thread is None or self._loop.is_closed():
            return
        await self._on_loop(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()

    def last_words(self) -> str:
        return self._words

    async def _healthy(self) -> None:
        deadline = time.monotonic() + self._start_timeout
        async with self._client() as http:
            for url in self.urls:
                while (words := await self._ill(http, url)) is not None:
                    if time.monotonic() > deadline:
                        raise PolicyError(
                            f"engine.vllm.urls: {url} {words}, for {self._start_timeout:g} s "
                            "(engine.vllm.start_timeout); start vLLM there"
                        )
                    await asyncio.sleep(POLL)

    async def _ill(self, http: aiohttp.ClientSession, url: str) -> str | None:
        """What is wrong with a server."""
        try:
            async with asyncio.timeout(PATIENCE), http.get(f"{url}/health") as reply:
                return None if reply.status == 200 else f"answers {reply.status} to /health"
        except TimeoutError:
            return "does not answer"
        except (aiohttp.ClientError, ValueError) as error:
            return f"does not answer ({type(error).__name__}: {error})"

    async def _ask(
        self, http: aiohttp.ClientSession, method: str, url: str, body: Any = None
    ) -> tuple[int, Any]:
        """Status, and what a 200 says."""
        try:
            async with http.request(method, url, json=body) as reply:
                text = await reply.read()
                return reply.status, msgspec.json.decode(text) if reply.status == 200 else None
        except (TimeoutError, aiohttp.ClientError, msgspec.DecodeError) as error:
            raise PolicyError(
                f"engine.vllm.urls: {url} gave no answer of vLLM's ({type(error).__name__}: "
                f"{error}); correct the URL"
            ) from None

    async def _must(self, http: aiohttp.ClientSession, url: str, body: Any) -> None:
        try:
            async with http.post(url, json=body) as reply:
                if reply.status != 200:
                    words = (await reply.read())[:300].decode(errors="replace")
                    raise PolicyError(
                        f"vLLM refused {url}: {reply.status} {words}; it must find the files of "
                        "`output` under the same path"
                    )
        except (TimeoutError, aiohttp.ClientError) as error:
            raise PolicyError(f"vLLM at {url}: {type(error).__name__}: {error}") from None

    def _client(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=self._start_timeout)
        return aiohttp.ClientSession(headers=self._headers, timeout=timeout)

    async def _listen(self) -> None:
        app = web.Application(client_max_size=LARGEST)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            headers=self._headers,
        )
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0
        )
        await self._runner.setup()
        host, port = self._bind
        try:
            await web.TCPSite(self._runner, host, port, backlog=1024).start()
        except OSError as error:
            raise PolicyError(
                f"policy server: cannot listen on {host}:{port}: {error.strerror}; set engine.port "
                "to a free port, or to 0 for any"
            ) from None
        found = self._runner.addresses[0][1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{found}"

    async def _admit(self, versions: str) -> None:
        self._gate.open(versions)

    async def _lose(self, words: str) -> None:
        self._words = f"it is gone: {words}"
        self._gate.close()
        assert self._home is not None
        self._home.call_soon_threadsafe(self._lost.set)

    async def _shut(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    async def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get(CONTROL.decode()) == self.key:
            return await self._obey(request)
        if not is_call(request.path):
            return web.Response(status=404)
        async with self._gate.enter() as versions:
            body = await request.read()
            version = versions.get(model_of(body), versions.get(""))
            url = min(self._busy, key=self._busy.__getitem__)
            self._busy[url] += 1
            try:
                return await self._forward(request, url, body, version)
            finally:
                self._busy[url] -= 1

    async def _obey(self, request: web.Request) -> web.Response:
        """As a `Door` does; what is vLLM's goes to every server, and its answers are a list."""
        if request.path == HOLD:
            await self._gate.hold()
            return web.Response()
        if request.path == OPEN:
            if not self._lost.is_set():
                self._gate.open(request.query_string)
            return web.Response()
        body, answers = await request.read(), []
        assert self._session is not None
        kind = {"content-type": "application/json"}
        for url in self.urls:
            try:
                async with self._session.post(url + request.path, data=body, headers=kind) as reply:
                    answer = await reply.read()
            except aiohttp.ClientError as error:
                await self._lose(f"{url} does not answer ({type(error).__name__}: {error})")
                return web.Response(status=502, text=self._words)
            if reply.status != 200:
                return web.Response(status=reply.status, body=answer)
            answers.append(msgspec.Raw(answer if answer[:1] in b"{[" and answer else b"null"))
        return web.Response(body=msgspec.json.encode(answers))

    async def _forward(
        self, request: web.Request, url: str, body: bytes, version: str | None
    ) -> web.StreamResponse:
        assert self._session is not None
        left = HOP | self._headers.keys()
        sent = {k: v for k, v in request.headers.items() if k.lower() not in left}
        answer: web.StreamResponse | None = None
        try:
            async with self._session.request(
                request.method, url + request.path_qs, data=body, headers=sent
            ) as reply:
                answer = web.StreamResponse(status=reply.status)
                answer.content_type = reply.content_type
                if version is not None:
                    answer.headers[POLICY_VERSION.decode()] = version
                await answer.prepare(request)
                async for chunk in reply.content.iter_any():
                    await answer.write(chunk)
                await answer.write_eof()
                return answer
        except aiohttp.ClientConnectionResetError:  # of the caller, who went away
            raise
        except aiohttp.ClientError as error:
            await self._lose(f"{url} does not answer ({type(error).__name__}: {error})")
            if answer is None or not answer.prepared:
                message = f"vLLM is being restarted ({type(error).__name__}: {error})"
                return web.json_response({"error": {"message": message}}, status=503)
            if request.transport is not None:  # an end without the end: it may be asked again
                request.transport.abort()
            return answer
