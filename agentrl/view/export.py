"""Exports a run as one HTML file that needs no network, and shows runs and rollouts in Jupyter.

The file contains the pages of the server, with the same style and script, as compressed chunks that
the browser unpacks when a page is opened. Jupyter shows them with the same templates.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import html
import random
import re
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any, TextIO, cast

import msgspec
from msgspec.structs import asdict

from agentrl.core.errors import ConfigError, NotFound
from agentrl.core.images import data_url
from agentrl.core.types import Image, RolloutState, step_number
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.store.run_folder import store_with
from agentrl.view.pages import LANES_PER_PAGE, Page, Pages
from agentrl.view.records import CALLS_PER_PAGE
from agentrl.view.templates import EXPORTED, STATIC, environment, hiding, island, render

PAGES_PER_CHUNK = 100  # pages per compressed chunk
GROUPS_PER_READ = 200  # groups per read
IMAGE_BYTES = 100_000_000  # of image files, which take a third more in the exported file
REDACTED = "--redact cannot read images, so all are left out"
HIDDEN = "█"
BLOCK = re.compile(rf"({HIDDEN}\d*)")
# Fields with JSON of agents, which may have any keys.
FREE = {"task", "result", "content", "arguments"}
# Keys of chat messages, which pages need to read them.
PROTOCOL = {"role", "content", "type", "text", "image_url", "url", "tool_calls", "function"}
PROTOCOL |= {"name", "arguments"}
TEXTS = {"task", "result", "messages", "answer", "failure", "message", "traceback", "transitions"}
TEXTS |= {"rewards", "note", "texts", "text", "seed", "question"}
BARE: dict[str, Any] = {"layout": "bare.html", "export": True}
# The two parts of an address, its query, the page, and further values of its template.
Exported = tuple[tuple[str, str], str, Page, dict[str, Any]]
RECORDS = {"failure", "transitions", "rewards"}  # fields with other records
READ = {"trace", "rollouts", "failures", "attempts", "sides", "calls"}


class Redaction:
    """Hides the matches of a pattern: each is replaced by a block and a number, the same for equal
    matches, so that links still work."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self._numbers: dict[str, int] = {}

    def hide(self, value: Any, *, free: bool = True) -> Any:
        """Hide matches in a text or JSON value; other objects are unchanged. `free`: whether keys
        of objects are searched, too, except keys of the protocol in messages."""
        if isinstance(value, str):
            parts = BLOCK.split(value)  # hidden parts, and the text between them
            parts[::2] = [self._pattern.sub(self._block, part) for part in parts[::2]]
            return "".join(parts)
        if isinstance(value, dict):
            return {
                self._key(key, free): self.hide(item, free=free or key in FREE)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)(self.hide(item, free=free) for item in value)
        return value

    def _key(self, key: Any, free: bool) -> Any:
        return self.hide(key) if free and key not in PROTOCOL else key

    def _block(self, match: re.Match[str]) -> str:
        number = self._numbers.setdefault(match[0], len(self._numbers) + 1)
        return f"{HIDDEN}{number}" if match[0] else ""

    def hide_tokens(self, values: dict[str, Any]) -> None:
        """Hide the text and ids of tokens that overlap with a match."""
        at, spans = 0, [match.span() for match in self._pattern.finditer("".join(values["text"]))]
        for i, piece in enumerate(values["text"]):
            if any(start < at + len(piece) and at < end for start, end in spans):
                values["text"][i], values["ids"][i] = HIDDEN, None
            at += len(piece)


class RedactedStore:
    """A store that hides matches in the texts of agents, tasks and failures, before a page cuts
    them. Names and ids, by which pages find their records, are hidden where they are shown."""

    def __init__(self, store: Store, redaction: Redaction) -> None:
        self._store, self._redaction = store, redaction

    def __getattr__(self, verb: str) -> Any:
        method = getattr(self._store, verb)
        if verb == "documents":
            return self._documents

        async def hidden(*args: Any, **named: Any) -> Any:
            return self.hide(await method(*args, **named))

        return hidden if verb in READ else method

    async def _documents(self, run: str, kind: str, *, after: str = "") -> dict[str, Any]:
        """Redact documents; ids and states stay, as in records."""
        documents = await self._store.documents(run, kind, after=after)
        return {key: self._hide_texts(document) for key, document in documents.items()}

    def _hide_texts(self, fields: dict[str, Any]) -> dict[str, Any]:
        hidden = {
            name: self.hide(fields[name])
            if name in RECORDS
            else self._redaction.hide(fields[name], free=name in FREE)
            for name in TEXTS & fields.keys()
        }
        return fields | hidden

    def hide(self, value: Any) -> Any:
        """The answer of a verb, in which the records at any depth have their matches hidden."""
        if isinstance(value, msgspec.Struct):
            fields = self._hide_texts(asdict(value))
            if isinstance(fields.get("rollout"), msgspec.Struct):
                fields["rollout"] = self.hide(fields["rollout"])
            return type(value)(**fields)
        if isinstance(value, dict):
            return {key: self.hide(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.hide(item) for item in value]
        return self._redaction.hide(value)


async def export(
    store: Store,
    run: str,
    file: Path,
    *,
    rollouts: str = "all",
    redact: str = "",
    image_bytes: int = IMAGE_BYTES,
) -> str:
    """Write a run to `file`; returns a sentence about its content. `rollouts`: all, failures or
    sample:N; `redact`: a regular expression; its matches are hidden in every text, and images are
    left out; `image_bytes`: maximum of all image files together, later images are left out.

    Raises ConfigError for an invalid `rollouts` or `redact`, NotFound for an unknown run."""
    try:
        redaction = Redaction(re.compile(redact)) if redact else None
    except re.error as error:
        raise ConfigError(f"--redact {redact!r} is not a regular expression: {error}") from None
    hide: Callable[[Any], Any] = redaction.hide if redaction else lambda value: value
    using = hiding(hide) if redaction else environment()
    pages = Pages(cast(Store, RedactedStore(store, redaction)) if redaction else store)
    chosen, total = await _chosen(store, run, rollouts)
    note = f"{sum(map(len, chosen.values())):,} of {total:,} rollouts"
    style = _static("uPlot.min.css", "view.css")
    script = _static("uPlot.iife.min.js", "view.js")
    hashes = {"style": _hash(style), "script": _hash(script)}
    head = using.get_template("export.html")
    partial, size = file.with_name(f"{file.name}.partial"), 0
    file.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("w", encoding="utf-8") as out:
        out.write(head.render(run=run, style=style, hashes=hashes, note=note, size=CALLS_PER_PAGE))
        index: dict[str, int] = {}
        chunk: dict[str, str] = {}
        shown: dict[str, None] = {}  # digests, in the order of the pages
        async for address, query, page, more in _pages(pages, redaction, run, chosen):
            url = "/".join(map(hide, address)) + query
            html = render(page, using=using, **BARE, **more)
            chunk[url], index[url] = html, len(index) // PAGES_PER_CHUNK
            shown |= dict.fromkeys(EXPORTED.findall(html))
            if len(chunk) == PAGES_PER_CHUNK:
                out.write(_packed(index[url], chunk))
                chunk = {}
        out.write(_packed(len(index) // PAGES_PER_CHUNK, chunk))
        out.write(f'<script type="application/json" id="index">{island(index)}</script>')
        why = (
            REDACTED if redact else f"the images of this file are limited to {image_bytes:,} bytes"
        )
        out.write(f'<script type="application/json" id="no-image">{island(why)}</script>')
        wanted = [] if redact else list(shown)
        written = await _write_images(out, pages.album.files(run, wanted), image_bytes)
        if shown:
            note += f", {written:,} of {len(shown):,} images"
            note += "" if written == len(shown) else f" ({why})"
        out.write(f"<script>{script}</script></body></html>\n")
        size = out.tell()
    partial.replace(file)
    return f"{note} in {file}, {size / 1e6:.2f} MB"


async def _write_images(out: TextIO, images: AsyncIterator[Image], limit: int) -> int:
    """Write images until their files have `limit` bytes; returns how many were written."""
    written, size = 0, 0
    async for image in images:
        size += len(image.body)
        if size > limit:
            break
        written += 1
        out.write(
            f'<script type="text/plain" id="image-{image.digest}">{data_url(image)}</script>\n'
        )
    return written


async def _pages(
    pages: Pages, redaction: Redaction | None, run: str, chosen: dict[str, list[str]]
) -> AsyncIterator[Exported]:
    """Yield every page of the file."""
    front = await pages.run(run, {})
    while front.values["reasons"] is None:  # not read yet, for a long run
        front = await pages.run(run, {})
    yield ("/run", run), "", front, {}
    for dataset in front.values["datasets"]:
        yield ("/data", dataset.name), "", await pages.data(dataset.name, {}), {}
    yield ("/versions", run), "", await pages.versions(run), {}
    if front.values["audited"]:
        yield ("/audit", run), "", await pages.audit(run), {}
    yield ("/prompts", run), "", (searched := await pages.prompts(run)), {}
    for candidate in searched.values["known"]:
        yield ("/prompt", candidate), "", await pages.prompt(run, candidate), {}
    yield ("/policies", run), "", await pages.policies(run), {}
    yield ("/groups", run), "", await pages.groups(run, {}), {}
    yield ("/tasks", run), "", await pages.tasks(run, {}), {}
    steps: set[int] = set()
    for group, ids in chosen.items():
        page = await pages.group(run, group)
        first = page.values["first"]
        steps |= {step_number(first.step, first.purpose)} if first.step >= 0 else set()
        steps |= set() if first.trained is None else {step_number(first.trained)}
        yield ("/group", group), "", page, {}
        async for exported in _rollouts(pages, redaction, ids):
            yield exported
    chosen_ids = {id for ids in chosen.values() for id in ids}
    examples = [
        example.rollout for example in front.values["examples"] if example.rollout not in chosen_ids
    ]
    async for exported in _rollouts(pages, redaction, examples):
        yield exported
    for step in sorted(steps):
        yield (f"/step/{step}", run), "", await pages.step(run, step), {}


async def _rollouts(
    pages: Pages, redaction: Redaction | None, ids: Sequence[str]
) -> AsyncIterator[Exported]:
    """Yield the pages of started rollouts."""
    for id in ids:
        try:
            loaded = await pages.load(id)
        except NotFound:
            continue  # not claimed yet
        total, size = loaded.paging.total, loaded.paging.size
        for first in range(0, max(total, 1), size):
            query = {"call": str(first)}
            page = await pages.rollout(id, query)
            tokens = await pages.tokens(id, range(first, min(first + size, total)))
            for values in tokens.values() if redaction else ():
                cast(Redaction, redaction).hide_tokens(values)
            yield ("/rollout", id), _query(first), page, {"tokens_of": tokens}
        if len({call.role for call in loaded.outline}) < 2:
            continue
        for first in range(0, total, LANES_PER_PAGE):
            yield ("/lanes", id), _query(first), await pages.lanes(id, {"call": str(first)}), {}


def _query(first: int) -> str:
    """The query of a page that begins with this call; `view.js` finds the page by any of its
    calls."""
    return f"?call={first}" if first else ""


async def _chosen(store: Store, run: str, rollouts: str) -> tuple[dict[str, list[str]], int]:
    """Group -> rollouts to write, and the total number of rollouts."""
    sample = re.fullmatch(r"sample:(\d+)", rollouts)
    if not sample and rollouts not in ("all", "failures"):
        raise ConfigError(f"--rollouts {rollouts}: write all, failures or sample:N")
    pairs, total, before = list[tuple[str, str]](), 0, None
    while rows := await store.groups(run, before=before, limit=GROUPS_PER_READ):
        before = rows[-1].id
        for row in rows:
            total += len(row.rollouts)
            for id, state in zip(row.rollouts, row.states, strict=True):
                if rollouts != "failures" or state is RolloutState.FAILED:
                    pairs.append((row.id, id))
    if sample and int(sample[1]) < len(pairs):
        pairs = sorted(random.Random(0).sample(pairs, int(sample[1])), reverse=True)
    chosen: dict[str, list[str]] = {}
    for group, id in pairs:
        chosen.setdefault(group, []).append(id)
    return chosen, total


def _packed(n: int, pages: dict[str, str]) -> str:
    data = base64.b64encode(gzip.compress(msgspec.json.encode(pages), 9, mtime=0)).decode()
    return f'<script type="text/plain" id="chunk-{n}">{data}</script>\n'


def _static(*names: str) -> str:
    return "\n".join((STATIC / name).read_text() for name in names)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"


MAX_IMAGE_BYTES = 8_000_000  # bytes of all images of a page, which the notebook's file has inside


class Shown:
    """An HTML document that notebooks render; `html` is its source."""

    def __init__(self, title: str, document: str, height: int) -> None:
        self.title, self.html, self._height = title, document, height

    def __repr__(self) -> str:
        return f"<{self.title}>"

    def _repr_html_(self) -> str:
        """An iframe without scripts, which isolates the style and the agents' texts."""
        return (
            f'<iframe sandbox srcdoc="{html.escape(self.html)}" title="{html.escape(self.title)}" '
            f'width="100%" height="{self._height}" style="border:0;resize:vertical"></iframe>'
        )


def show(name: str, *, store: str | None = None, call: int = 0) -> Shown:
    """Show a rollout, by an id such as staff/train/g0000007/0003, or a run with its curves, by its
    name, in a notebook. `store`: URL; default: the one that has the run, below the working
    directory. `call`: for a rollout with many calls, a call on the page to show. Raises StoreError
    if the store has no such run or rollout."""
    with ThreadPoolExecutor(1) as pool:  # a notebook's event loop runs in this thread
        url = store or pool.submit(store_with, name).result()
        page, values, images = pool.submit(asyncio.run, _read(url, name, call)).result()
    style = (STATIC / "view.css").read_text()
    context: Any = {"style": style, "values_of": values, "image_urls": images}
    document = render(page, layout="notebook.html", export=True, **context)
    return Shown(page.title, document, 620)


async def _read(url: str, name: str, call: int) -> tuple[Page, dict[str, Any], dict[str, str]]:
    """A page, the values of its tokens, and its images as data URLs."""
    async with open_store(url, readonly=True) as store:
        pages, values = Pages(store), dict[str, Any]()
        if await store.run(name) is not None:
            page = await pages.run(name, {})
        else:
            page = await pages.rollout(name, {"call": str(call)})
            paging = page.values["paging"]
            values = await pages.tokens(name, range(paging.first, paging.end))
        run, images, left = page.values["run"], dict[str, str](), MAX_IMAGE_BYTES
        shown = EXPORTED.findall(render(page, layout="bare.html", export=True))
        async for image in pages.album.files(run, list(dict.fromkeys(shown))):
            if (left := left - len(image.body)) >= 0:
                images[image.digest] = data_url(image)
        return page, values, images
