"""The server of `agentrl view`: answers GET requests about stores, which it only reads.

The first page lists the runs of all stores. A store is read again only after it has changed.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
import webbrowser
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

import msgspec
from msgspec.json import encode
from starlette import responses
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Message, Receive, Scope, Send

from agentrl.core.access import Access, cross_site, is_loopback_host
from agentrl.core.asgi import listen, run_loop, serve
from agentrl.core.errors import (
    AgentRLError,
    ConfigError,
    Forbidden,
    Invalid,
    NotFound,
    StoreError,
    Unavailable,
)
from agentrl.core.types import Image, Json
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.store.run_folder import OPENING_PATIENCE, Place, places
from agentrl.store.urls import split_secret
from agentrl.view import front, records, summaries
from agentrl.view.pages import SHOWN, Page, Pages, Query
from agentrl.view.records import ChangeFeed, read_number
from agentrl.view.summaries import (
    REWARD,
    SCORE,
    Summary,
    differing,
    matrix,
    summary,
    whole_settings,
)
from agentrl.view.templates import STATIC, render

KEY, COOKIE = "AGENTRL_VIEW_KEY", "agentrl-view"
AT = "/at/"  # prefix of pages of a store, followed by the store's key
MIN_KEY_CHARS = 8  # characters
EXPLAIN_TIMEOUT = 120.0  # timeout of a rollout's explanation in seconds
MAX_EXPLAINED = 100  # explanations that are kept
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
    # Headers of an image that is opened by its own address: browsers add a style to it.
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; sandbox",
}


# Path of a store -> function for its answer: a page, an image, plain text, or any other value as
# JSON.
Shown = Callable[[Pages, str, Request], Awaitable[Any]]
PATHS: dict[str, Shown] = {
    "/run/{id:path}": lambda pages, id, request: pages.run(id, request.query_params),
    "/step/{n:int}/{id:path}": lambda pages, id, request: pages.step(id, request.path_params["n"]),
    "/groups/{id:path}": lambda pages, id, request: pages.groups(id, request.query_params),
    "/find/{id:path}": lambda pages, id, request: pages.find(id, request.query_params),
    "/tasks/{id:path}": lambda pages, id, request: pages.tasks(id, request.query_params),
    "/policies/{id:path}": lambda pages, id, _: pages.policies(id),
    "/versions/{id:path}": lambda pages, id, _: pages.versions(id),
    "/audit/{id:path}": lambda pages, id, _: pages.audit(id),
    "/prompts/{id:path}": lambda pages, id, _: pages.prompts(id),
    "/prompt/{id:path}": lambda pages, id, request: pages.prompt(request.query_params["run"], id),
    "/data/{id:path}": lambda pages, id, request: pages.data(id, request.query_params),
    "/group/{id:path}": lambda pages, id, request: pages.group(request.query_params["run"], id),
    "/rollout/{id:path}": lambda pages, id, request: pages.rollout(id, request.query_params),
    "/attempts/{id:path}": lambda pages, id, _: pages.attempts(id),
    "/lanes/{id:path}": lambda pages, id, request: pages.lanes(id, request.query_params),
    "/call/{n:int}/{id:path}": lambda pages, id, request: pages.numbers(
        id, request.path_params["n"]
    ),
    "/compare": lambda pages, _, request: pages.compare(
        request.query_params["a"], request.query_params["b"], request.query_params
    ),
    "/raw/{id:path}": lambda pages, id, request: pages.raw(id, request.query_params),
    "/series/{id:path}": lambda pages, id, request: pages.series(
        id, request.query_params, request.query_params.getlist("name")
    ),
    "/image/{id:path}": lambda pages, id, request: pages.image(id, request.query_params),
    "/tokens/{id:path}": lambda pages, id, request: pages.tokens(
        id, [int(at) for at in request.query_params.getlist("call") if at.isdecimal()]
    ),
}


class ViewApp:
    """Pages, their data as JSON, and the stream of changes. Invariants: it answers only GET and
    HEAD; without a key, only requests with this machine's name as host; and it writes nothing."""

    def __init__(self, home: Home, access: Access) -> None:
        self._access, self._home = access, home
        self._feed, self._explaining = ChangeFeed(home), asyncio.Semaphore(1)
        # Cache for trained rollouts, which do not change.
        self._explained: dict[tuple[str, str], str] = {}
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
        """The response to a rejected request; None for a permitted one."""
        if request.method not in ("GET", "HEAD"):
            return _sentence("Only GET is answered here: nothing can be written.", 405)
        if not self._access.keys:
            host = request.headers.get("host", "").encode("latin-1")
            refused = cross_site(request.method, host, b"")
            return None if refused is None else _sentence(f"{refused[1].capitalize()}.", refused[0])
        query_key = request.query_params.get("key")
        key = request.cookies.get(COOKIE, "") if query_key is None else query_key
        if not self._access.allows(key):
            text = "The key is missing or wrong: open the address that agentrl view printed."
            return _sentence(text, 401)
        if query_key is None:
            return None
        answer = responses.RedirectResponse(request.url.path)
        answer.set_cookie(COOKIE, query_key, httponly=True, samesite="strict")
        return answer

    def _answer(self, shown: Shown) -> Callable[[Request], Awaitable[responses.Response]]:
        async def answer(request: Request) -> responses.Response:
            key, id = request.scope["place"], request.path_params.get("id", "")
            if not key and not self._home.single:  # such as /run/NAME, in any store
                if shown is PATHS["/run/{id:path}"]:
                    return responses.RedirectResponse(await self._home.run_anywhere(id))
                raise NotFound("This page belongs to one of several stores: choose a run.")
            pages = await self._home.pages(key or self._home.only().key)
            content = await shown(pages, id, request)
            if isinstance(content, Page):
                return responses.HTMLResponse(render(content, base=self._home.base(key)))
            if isinstance(content, Image):  # another file has another digest
                return responses.Response(content.body, 200, IMAGE, content.media_type)
            if isinstance(content, str):
                return responses.PlainTextResponse(content)
            return responses.Response(encode(content), media_type="application/json")

        return answer

    async def _list(self, request: Request) -> responses.Response:
        return responses.HTMLResponse(render(await self._home.runs(request.query_params)))

    async def _compare(self, request: Request) -> responses.Response:
        page = await self._home.compare(request.query_params.getlist("run"))
        return responses.HTMLResponse(render(page))

    async def _explain(self, pages: Pages, id: str, request: Request) -> Page:
        place = self._home.places[request.scope["place"] or self._home.only().key]
        loaded = await pages.load(id)
        text = self._explained.get((place.key, id)) or await self._explanation(place.url, id)
        if loaded.trace.rollout.trained is not None and len(self._explained) < MAX_EXPLAINED:
            self._explained[place.key, id] = text
        values = {"run": loaded.state.run, "o": loaded.trace.rollout, "id": id}
        at = read_number(request.query_params, "call")
        values |= front.read(text, loaded.outline, at)
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
    """The required key; without one everybody on this machine has access. Raises ConfigError for a
    weak key."""
    if key and not (len(key) >= MIN_KEY_CHARS and key.isascii() and key.isprintable()):
        raise ConfigError(f"{KEY}: give a key of at least {MIN_KEY_CHARS} ASCII characters")
    return Access(keys=(key,) if key else ())


def run(
    sources: Sequence[str], host: str, port: int, *, start: str = "/", browse: bool = False
) -> None:
    """Run the server until it is stopped; prints its address. Raises ConfigError for a port in use
    and StoreError for an unreadable store.

    If other machines can reach it, it requires a key: that of AGENTRL_VIEW_KEY, or a new one in the
    printed address."""
    key = os.environ.get(KEY) or ("" if is_loopback_host(host) else secrets.token_urlsafe(24))
    access = _access(key)
    query = f"?{urlencode({'key': key})}" if key else ""

    async def main() -> None:
        home = Home(sources)
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


SEARCH_PAUSE = 5.0  # seconds between two searches for stores
CHECK_PAUSE = 0.5  # seconds between two checks of files
ASK_PAUSE = 3.0  # seconds between two requests to stores that are not files
AT_ONCE = 4  # stores that are read concurrently
RUNS_PER_PAGE = 100
MAX_COMPARED = 4
TITLES = {SCORE: "Held-out", REWARD: "Training reward", **summaries.TRAINING}
SETTINGS_SHOWN = 4  # distinguishing settings of a run in its line


class Line(NamedTuple):
    """A line of the list of runs."""

    place: Place
    base: str  # prefix of links to pages of the store
    row: Summary
    condition: str

    @property
    def curve(self) -> Any:
        return records.curve(self.row.curve, 96, 26)

    @property
    def value(self) -> str:
        """The value of the run's checkbox."""
        return f"{self.place.key}/{self.row.run}" if self.base else self.row.run


@dataclass(slots=True)
class StoreContents:
    """The cached contents of a store."""

    stamp: object = None
    rows: dict[str, Summary] = field(default_factory=dict)
    datasets: list[Any] = field(default_factory=list)
    trouble: str = ""  # why the store cannot be read
    reading: asyncio.Task[None] | None = None


class Home:
    """All stores of a server. `sources`: URLs, files and folders; none: all stores below the
    working directory. A single file or URL has its pages at the root, any other store below
    /at/KEY."""

    def __init__(self, sources: Sequence[str] = ()) -> None:
        self.sources = list(sources)
        self.single = len(self.sources) == 1 and not Path(self.sources[0]).is_dir()
        self.places: dict[str, Place] = {}
        self._contents: dict[str, StoreContents] = {}
        self._open: dict[str, tuple[object, Pages]] = {}
        self._searched, self._version, self._stamps = 0.0, 0, dict[str, object]()
        self._last_poll, self._slots = 0.0, asyncio.Semaphore(AT_ONCE)
        self._opening = asyncio.Lock()

    async def search(self) -> None:
        """Search for stores again, if the last search was some seconds ago."""
        if time.monotonic() - self._searched > SEARCH_PAUSE or not self.places:
            stores = await asyncio.to_thread(places, self.sources)
            self.places = {place.key: place for place in stores}
            self._searched = time.monotonic()

    def base(self, key: str) -> str:
        return "" if self.single else f"/at/{quote(key, safe='')}"

    def only(self) -> Place:
        """The single store."""
        return next(iter(self.places.values()))

    async def pages(self, key: str) -> Pages:
        """The pages of a store, opened at their first use. A replaced file is opened again."""
        place = self.places.get(key)
        if place is None:
            self._searched = 0.0
            await self.search()
        if (place := self.places.get(key)) is None:
            raise NotFound(f"There is no store {key!r} any more.")
        async with self._opening:
            same = _identity(place)
            if (opened := self._open.get(key)) is not None and opened[0] == same:
                return opened[1]
            if opened is not None:
                await opened[1].store.close()
            store = await asyncio.to_thread(open_store, place.url, readonly=True)
            self._open[key] = same, Pages(store)
            return self._open[key][1]

    async def close(self) -> None:
        for contents in self._contents.values():
            if contents.reading is not None:
                contents.reading.cancel()
        for _, pages in self._open.values():
            await pages.store.close()

    async def cursor(self) -> int:
        """A number that grows with every change of a store, or of the set of stores."""
        await self.search()
        if self.single:
            return await (await self.pages(self.only().key)).store.cursor()
        now = {key: place.stamp() for key, place in self.places.items()}
        remote = [key for key, stamp in now.items() if stamp is None]
        if remote and time.monotonic() - self._last_poll > ASK_PAUSE:
            self._last_poll = time.monotonic()
            for key in remote:
                with suppress(AgentRLError):
                    self._stamps[f"cursor of {key}"] = await (await self.pages(key)).store.cursor()
                    now[key] = self._stamps[f"cursor of {key}"]
        else:
            now |= {key: self._stamps.get(f"cursor of {key}") for key in remote}
        if now != {key: self._stamps.get(key) for key in self._seen()} or not self._version:
            self._version += 1
        for key in self._seen() - now.keys():
            del self._stamps[key]
        self._stamps |= now
        return self._version

    def _seen(self) -> set[str]:
        return {key for key in self._stamps if not key.startswith("cursor of ")}

    async def wait(self, cursor: int, *, timeout: float | None = None) -> int:
        """The cursor, once it is higher, or after the timeout."""
        if self.single:
            store = (await self.pages(self.only().key)).store
            return await store.wait(cursor, timeout=timeout)
        end = time.monotonic() + (timeout or 0.0)
        while (  # noqa: ASYNC110 - files do not announce their changes
            newest := await self.cursor()
        ) <= cursor and time.monotonic() < end:
            await asyncio.sleep(CHECK_PAUSE)
        return newest

    async def lines(self) -> list[Line]:
        """All runs: first those that are running, then by their last change, newest first."""
        await self.search()
        await asyncio.gather(*map(self._read, self.places.values()))
        now = time.time()
        lines = [
            Line(place, self.base(key), row, row.condition(now))
            for key, place in self.places.items()
            for row in self._contents[key].rows.values()
        ]
        return sorted(lines, key=lambda line: (line.condition == "running", line.row.at))[::-1]

    async def _read(self, place: Place) -> None:
        """Read a store if it has changed; one that does not answer is read again at a later
        request."""
        contents = self._contents.setdefault(place.key, StoreContents())
        stamp = place.stamp()
        if contents.reading is None and (stamp is None or stamp != contents.stamp):
            contents.reading = asyncio.ensure_future(self._summarise(place, contents))
        if contents.reading is None:
            return
        done, _ = await asyncio.wait({contents.reading}, timeout=OPENING_PATIENCE)
        if done:
            contents.stamp, contents.reading = stamp, None
        else:
            contents.trouble = "it does not answer: another process holds its lock, or it is slow"

    async def _summarise(self, place: Place, contents: StoreContents) -> None:
        try:
            async with self._slots:
                if place.key in self._open or place.stamp() is None:
                    await self._summaries((await self.pages(place.key)).store, contents)
                    return
                store = await asyncio.to_thread(open_store, place.url, readonly=True)
                async with store:
                    await self._summaries(store, contents)
        except (AgentRLError, OSError, msgspec.MsgspecError, ValueError) as error:
            contents.trouble, contents.rows = str(error) or type(error).__name__, {}

    async def _summaries(self, store: Store, contents: StoreContents) -> None:
        rows: dict[str, Summary] = {}
        for name in await store.runs():
            if (state := await store.run(name)) is None:
                continue
            old, held = contents.rows.get(name), state.owned_until > time.time()
            same = old is not None and old.state == state and not held
            rows[name] = old if same and old is not None else await summary(store, state)
        contents.rows, contents.trouble = rows, ""
        with suppress(
            StoreError
        ):  # the key is for one run, and data sets belong to the whole store
            datasets = {dataset.name: dataset for dataset in await store.datasets()}
            contents.datasets = list(datasets.values())

    async def runs(self, query: Query) -> Page:
        lines = await self.lines()
        words = query.get("q", "").lower().split()
        rows = [(line, apart) for line, apart in zip(lines, _apart(lines), strict=True)]
        matching = [row for row in rows if all(word in _text(*row) for word in words)]
        key, down = query.get("sort") or "", query.get("order") != "up"
        if key:
            if key not in ORDERS:
                raise Invalid(f"sort must be one of {', '.join(ORDERS)}, not {key!r}")
            matching = _sorted([line for line, _ in matching], matching, key, down=down)
        start = records.read_number(query, "from") or 0
        more = start + RUNS_PER_PAGE if len(matching) > start + RUNS_PER_PAGE else None
        shown = matching[start : start + RUNS_PER_PAGE]
        values: dict[str, Any] = {"rows": shown, "all": len(matching)}
        values |= {"more": more, "query": query, "sort": key, "down": down, "single": self.single}
        troubles = [(p, self._contents[k].trouble) for k, p in self.places.items()]
        values["troubles"] = [(place, text) for place, text in troubles if text]
        values["datasets"] = [
            (self.base(key), dataset)
            for key in self.places
            for dataset in self._contents[key].datasets
        ]
        values["stores"], values["shown_settings"] = len(self.places), SETTINGS_SHOWN
        return Page("runs.html", "Runs", values)

    async def compare(self, chosen: Sequence[str]) -> Page:
        """Two to four runs: their verdicts, curves, and the settings that differ."""
        if not 2 <= len(chosen) <= MAX_COMPARED:
            raise Invalid("choose two to four runs to compare")
        await self.search()
        rows, curves, bases = list[Summary](), list[Mapping[str, Any]](), list[str]()
        for choice in chosen:
            key, _, run = (
                choice.partition("/") if not self.single else (self.only().key, "", choice)
            )
            store = (await self.pages(key)).store
            if (state := await store.run(run)) is None:
                raise NotFound(f"there is no run {run!r} in this store")
            rows.append(await summary(store, state))
            curves.append(summaries.by_number(await store.series(run, SHOWN)))
            bases.append(self.base(key))
        names = [name for name in SHOWN if any(curve[name] for curve in curves)]
        series = {name: [records.finite(curve[name]) for curve in curves] for name in names}
        labels = [row.run for row in rows]
        if len(set(labels)) < len(labels):  # runs of the same name in several stores
            labels = list(chosen)
        values = {"rows": list(zip(bases, rows, labels, strict=True)), "names": names}
        values |= {
            "series": series,
            "titles": TITLES,
            "shares": [n for n in (SCORE, REWARD) if all(row.percent for row in rows)],
            "labels": labels,
            "settings": matrix(list(map(whole_settings, rows))),
        }
        return Page("compare_runs.html", "Compare runs", values)

    async def run_anywhere(self, run: str) -> str:
        """The address of a run by its name alone. Raises NotFound unless one store has it."""
        lines = [line for line in await self.lines() if line.row.run == run]
        if len(lines) != 1:
            owners = f"{len(lines)} stores have" if lines else "no store here has"
            raise NotFound(f"{owners} a run {run!r}: choose it in the list")
        return f"{lines[0].base}/run/{quote(run)}"


def _identity(place: Place) -> object:
    """Identity of a store: for a file it changes if the file is replaced."""
    if not place.url.startswith("sqlite:///"):
        return None
    try:
        stat = Path(place.url.removeprefix("sqlite:///").partition("?")[0]).stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


def _apart(lines: Sequence[Line]) -> list[Mapping[str, Json]]:
    return list(differing([line.row for line in lines]))


def _text(line: Line, apart: Mapping[str, Json]) -> str:
    """The text that the filter of the list searches."""
    words: Iterable[object] = (
        line.row.run, line.place.label, line.condition, *line.row.facts.values(),
        *(f"{key}={value}" for key, value in apart.items()),
    )  # fmt: skip
    return " ".join(map(str, words)).lower()


ORDERS: dict[str, Callable[[Line], Any]] = {
    "run": lambda line: line.row.run.lower(),
    "before": lambda line: line.row.verdict.first and line.row.verdict.first.value,
    "after": lambda line: line.row.verdict.last and line.row.verdict.last.value,
    "gain": lambda line: line.row.verdict.gain if line.row.verdict.first else None,
    "step": lambda line: line.row.state.step,
    "state": lambda line: line.condition,
    "age": lambda line: line.row.at,
    "model": lambda line: line.row.facts.get("model"),
    "preset": lambda line: line.row.facts.get("preset"),
}


def _sorted(lines: Sequence[Line], rows: Sequence[Any], key: str, *, down: bool) -> list[Any]:
    """Rows sorted by a column; rows without a value come last."""
    value = ORDERS[key]
    valued = [(value(line), row) for line, row in zip(lines, rows, strict=True)]
    missing = [row for x, row in valued if x is None]
    ordered = sorted((pair for pair in valued if pair[0] is not None), key=lambda pair: pair[0])
    return [row for _, row in (reversed(ordered) if down else ordered)] + missing
