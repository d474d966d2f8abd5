"""The server of `agentrl view`: it answers GET requests about stores, which it only reads."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import webbrowser
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlencode

from msgspec.json import encode
from starlette import responses
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Message, Receive, Scope, Send

from agentrl.asgi.server import listen, run_loop, serve
from agentrl.base.access import Access, cross_site, is_loopback_host
from agentrl.errors import ConfigError, Forbidden, Invalid, NotFound, StoreError, Unavailable
from agentrl.store.urls import split_secret
from agentrl.types import Image
from agentrl.view import explanation
from agentrl.view.home.home import Home
from agentrl.view.live import ChangeFeed
from agentrl.view.pages import Page, Pages
from agentrl.view.records import read_number
from agentrl.view.templates import STATIC, render

KEY, COOKIE = "AGENTRL_VIEW_KEY", "agentrl-view"
AT = "/at/"  # then the key of a store, before the addresses of its pages
SHORTEST_KEY = 8  # characters
EXPLAIN_TIMEOUT = 120.0  # timeout of a rollout's explanation in seconds
MOST_EXPLAINED = 100  # explanations that are kept
STATUS = {NotFound: 404, Invalid: 400, KeyError: 400, Forbidden: 403, Unavailable: 503}
SECURITY = {
    b"content-security-policy": b"default-src 'none'; script-src 'self'; style-src 'self'; img-src"
    b" 'self'; connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
}
IMAGE = {
    "cache-control": "private, max-age=3600, immutable",
    # Of an address that is opened by itself: browsers add a style to the image.
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; sandbox",
}

# Path of a store -> function for its answer: a page, an image, plain text, or any other value as
# JSON.
Shown = Callable[[Pages, str, Request], Awaitable[Any]]
PATHS: dict[str, Shown] = {
    "/run/{id:path}": lambda pages, id, asked: pages.run(id, asked.query_params),
    "/step/{n:int}/{id:path}": lambda pages, id, asked: pages.step(id, asked.path_params["n"]),
    "/groups/{id:path}": lambda pages, id, asked: pages.groups(id, asked.query_params),
    "/find/{id:path}": lambda pages, id, asked: pages.find(id, asked.query_params),
    "/tasks/{id:path}": lambda pages, id, asked: pages.tasks(id, asked.query_params),
    "/policies/{id:path}": lambda pages, id, _: pages.policies(id),
    "/versions/{id:path}": lambda pages, id, _: pages.versions(id),
    "/prompts/{id:path}": lambda pages, id, _: pages.prompts(id),
    "/prompt/{id:path}": lambda pages, id, asked: pages.prompt(asked.query_params["run"], id),
    "/data/{id:path}": lambda pages, id, asked: pages.data(id, asked.query_params),
    "/group/{id:path}": lambda pages, id, asked: pages.group(asked.query_params["run"], id),
    "/rollout/{id:path}": lambda pages, id, asked: pages.rollout(id, asked.query_params),
    "/attempts/{id:path}": lambda pages, id, _: pages.attempts(id),
    "/lanes/{id:path}": lambda pages, id, asked: pages.lanes(id, asked.query_params),
    "/call/{n:int}/{id:path}": lambda pages, id, asked: pages.numbers(id, asked.path_params["n"]),
    "/compare": lambda pages, _, asked: pages.compare(
        asked.query_params["a"], asked.query_params["b"], asked.query_params
    ),
    "/raw/{id:path}": lambda pages, id, asked: pages.raw(id, asked.query_params),
    "/series/{id:path}": lambda pages, id, asked: pages.series(
        id, asked.query_params, asked.query_params.getlist("name")
    ),
    "/image/{id:path}": lambda pages, id, asked: pages.image(id, asked.query_params),
    "/tokens/{id:path}": lambda pages, id, asked: pages.tokens(
        id, [int(at) for at in asked.query_params.getlist("call") if at.isdecimal()]
    ),
}


class ViewApp:
    """Pages, their data as JSON, and the stream of changes. Invariants: it answers only GET and
    HEAD, without a key only requests to this machine's name, and writes nothing."""

    def __init__(self, home: Home, access: Access) -> None:
        self._access, self._home = access, home
        self._feed, self._explaining = ChangeFeed(home), asyncio.Semaphore(1)
        self._explained: dict[tuple[str, str], str] = {}  # of trained rollouts, which do not change
        routes: list[Any] = [
            Route("/", self._list),
            Route("/runs", self._compare),
            *(Route(path, self._answer(shown)) for path, shown in PATHS.items()),
        ]
        routes.append(Route("/explain/{id:path}", self._answer(self._explain)))
        routes += [Route("/events", self._events), Mount("/static", StaticFiles(directory=STATIC))]
        handlers: Any = dict.fromkeys((StoreError, HTTPException, KeyError), _refusal)
        app = Starlette(routes=routes, exception_handlers=handlers)
        self._app = GZipMiddleware(app, minimum_size=2000, compresslevel=5)

    def drain(self) -> None:
        self._feed.end()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        static = scope["path"].startswith("/static/")
        headers = SECURITY | {b"cache-control": b"no-cache" if static else b"no-store"}

        async def secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*(headers | dict(message["headers"])).items()]
            await send(message)

        refused = self._refused(Request(scope))
        scope["place"] = ""
        if scope["path"].startswith(AT):  # a page of one of several stores
            scope["place"], _, path = scope["path"].removeprefix(AT).partition("/")
            scope = {**scope, "path": f"/{path}", "raw_path": None}
        await (refused or self._app)(scope, receive, secured)

    def _refused(self, request: Request) -> responses.Response | None:
        """The response to a request that is refused; None for a permitted one."""
        if request.method not in ("GET", "HEAD"):
            return _sentence("Only GET is answered here: nothing can be written.", 405)
        if not self._access.keys:
            host = request.headers.get("host", "").encode("latin-1")
            refused = cross_site(request.method, host, b"")
            return None if refused is None else _sentence(f"{refused[1].capitalize()}.", refused[0])
        given = request.query_params.get("key")
        key = request.cookies.get(COOKIE, "") if given is None else given
        if not self._access.allows(key):
            text = "The key is missing or wrong: open the address that agentrl view printed."
            return _sentence(text, 401)
        if given is None:
            return None
        answer = responses.RedirectResponse(request.url.path)
        answer.set_cookie(COOKIE, given, httponly=True, samesite="strict")
        return answer

    def _answer(self, shown: Shown) -> Callable[[Request], Awaitable[responses.Response]]:
        async def answer(request: Request) -> responses.Response:
            key, id = request.scope["place"], request.path_params.get("id", "")
            if not key and not self._home.single:  # such as /run/NAME, whatever its store
                if shown is PATHS["/run/{id:path}"]:
                    return responses.RedirectResponse(await self._home.run_anywhere(id))
                raise NotFound("This page belongs to one of several stores: choose a run.")
            pages = await self._home.pages(key or self._home.only().key)
            found = await shown(pages, id, request)
            if isinstance(found, Page):
                return responses.HTMLResponse(render(found, base=self._home.base(key)))
            if isinstance(found, Image):  # another file has another digest
                return responses.Response(found.body, 200, IMAGE, found.media_type)
            if isinstance(found, str):
                return responses.PlainTextResponse(found)
            return responses.Response(encode(found), media_type="application/json")

        return answer

    async def _list(self, request: Request) -> responses.Response:
        return responses.HTMLResponse(render(await self._home.runs(request.query_params)))

    async def _compare(self, request: Request) -> responses.Response:
        page = await self._home.compare(request.query_params.getlist("run"))
        return responses.HTMLResponse(render(page))

    async def _explain(self, pages: Pages, id: str, asked: Request) -> Page:
        place = self._home.places[asked.scope["place"] or self._home.only().key]
        loaded = await pages.load(id)
        text = self._explained.get((place.key, id)) or await self._explanation(place.url, id)
        if loaded.trace.rollout.trained is not None and len(self._explained) < MOST_EXPLAINED:
            self._explained[place.key, id] = text
        values = {"run": loaded.state.run, "o": loaded.trace.rollout, "id": id}
        at = read_number(asked.query_params, "call")
        values |= explanation.read(text, loaded.outline, at)
        return Page("explain.html", f"{id} explained", values)

    async def _explanation(self, store: str, id: str) -> str:
        """The output of `agentrl explain`, which needs torch, from a separate process."""
        url, secret = split_secret(store)
        command = [sys.executable, "-m", "agentrl", "explain", "--store", url, "--", id]
        pipes: Any = {"stdin": -3, "stdout": -1, "stderr": -2, "env": os.environ | secret}
        async with self._explaining:
            process = await asyncio.create_subprocess_exec(*command, **pipes)
            try:
                out, _err = await asyncio.wait_for(process.communicate(), EXPLAIN_TIMEOUT)
            except TimeoutError:
                raise Unavailable(
                    f"The explanation took more than {EXPLAIN_TIMEOUT:.0f} s."
                ) from None
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        return out.decode(errors="replace")

    async def _events(self, request: Request) -> responses.Response:
        last = request.headers.get("last-event-id", "")
        stream = self._feed.stream(last)
        return responses.StreamingResponse(stream, media_type="text/event-stream")


def _sentence(text: str, status: int) -> responses.Response:
    """An error page with a message."""
    return responses.HTMLResponse(render(Page("error.html", "Not shown", {"text": text})), status)


async def _refusal(_: Request, error: Exception) -> responses.Response:
    if isinstance(error, HTTPException):
        return _sentence(f"{error.detail}: this address shows nothing.", error.status_code)
    status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 500)
    lacks = isinstance(error, KeyError)
    return _sentence(f"The address lacks {error.args[0]}=." if lacks else str(error), status)


def _access(key: str) -> Access:
    """Who may look; without a key everybody on this machine. Raises ConfigError for a weak key."""
    if key and not (len(key) >= SHORTEST_KEY and key.isascii() and key.isprintable()):
        raise ConfigError(f"{KEY}: give a key of at least {SHORTEST_KEY} ASCII characters")
    return Access(keys=(key,) if key else ())


def run(
    given: Sequence[str], host: str, port: int, *, start: str = "/", browse: bool = False
) -> None:
    """Run the server until it is stopped; prints its address. Raises ConfigError for a port in use
    and StoreError for an unreadable store.

    If other machines can reach it, it requires a key: that of AGENTRL_VIEW_KEY, or a new one in the
    printed address."""
    key = os.environ.get(KEY) or ("" if is_loopback_host(host) else secrets.token_urlsafe(24))
    access = _access(key)
    query = f"?{urlencode({'key': key})}" if key else ""

    async def main() -> None:
        home = Home(given)
        await home.search()
        what = f"{len(home.places)} store{'' if len(home.places) == 1 else 's'}"
        if home.single:  # raises for an unreadable store before the address is printed
            store = (await home.pages(home.only().key)).store
            await store.cursor()
            what = store.url
        where = f"[{host}]" if ":" in host else host
        address = f"http://{where}:{listening.getsockname()[1]}{start}{query}"

        def ready(_: object) -> None:
            print(f"Viewing {what} at {address}", flush=True)
            if browse:
                webbrowser.open(address)

        reading = asyncio.ensure_future(home.lines())  # so that the first visit need not wait
        try:
            await serve(ViewApp(home, access), listening, ready)
        finally:
            reading.cancel()
            await home.close()

    with listen(host, port) as listening:
        run_loop(main())
