"""Export a run as one HTML file that needs no network and can be shared.

It contains the pages of the server, with the same style and script, as compressed chunks that the
browser unpacks when a page is opened.
"""

from __future__ import annotations

import base64
import gzip
import random
import re
from collections.abc import AsyncIterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, TextIO, cast

import msgspec
from msgspec.structs import asdict

from agentrl.base.images import data_url
from agentrl.errors import ConfigError, NotFound
from agentrl.store.base import Store
from agentrl.types import Image, RolloutState
from agentrl.view.pages import Pages
from agentrl.view.templates import EXPORTED, STATIC, environment, island, render

PAGES_PER_CHUNK = 100  # pages per compressed chunk
GROUPS_PER_READ = 200  # groups per read
IMAGE_BYTES = 100_000_000  # of the images' files, which are a third larger in the exported file
REDACTED = "--redact cannot read images, so all are left out"
HIDDEN = "█"
TEXTS = {"task", "result", "messages", "answer", "failure", "message", "traceback", "transitions"}
TEXTS |= {"rewards", "note", "texts", "text", "seed", "question"}
READ = {"trace", "rollouts", "failures", "attempts", "sides", "calls"}


class RedactedStore:
    """A store that hides matches of a pattern in the texts of agents, tasks and failures."""

    def __init__(self, store: Store, pattern: re.Pattern[str]) -> None:
        self._store, self._pattern = store, pattern

    def __getattr__(self, verb: str) -> Any:
        method = getattr(self._store, verb)
        if verb == "documents":
            return self._documents

        async def hidden(*args: Any, **named: Any) -> Any:
            return self.hide(await method(*args, **named))

        return hidden if verb in READ else method

    async def _documents(self, run: str, kind: str, *, after: str = "") -> dict[str, Any]:
        """Their ids and states stay, as in a record."""
        found = await self._store.documents(run, kind, after=after)
        return {key: self._hide_texts(one) for key, one in found.items()}

    def _hide_texts(self, fields: dict[str, Any]) -> dict[str, Any]:
        return fields | {name: self.hide(fields[name]) for name in TEXTS & fields.keys()}

    def hide(self, value: Any) -> Any:
        if isinstance(value, msgspec.Struct):
            own = self._hide_texts(asdict(value))
            if isinstance(own.get("rollout"), msgspec.Struct):
                own["rollout"] = self.hide(own["rollout"])
            return type(value)(**own)
        if isinstance(value, dict):
            return {key: self.hide(one) for key, one in value.items()}
        if isinstance(value, list):
            return [self.hide(one) for one in value]
        return self._pattern.sub(HIDDEN, value) if isinstance(value, str) else value

    def hide_tokens(self, values: dict[str, Any]) -> None:
        """Hide the text and ids of tokens that overlap with a match."""
        at, spans = 0, [one.span() for one in self._pattern.finditer("".join(values["text"]))]
        for i, piece in enumerate(values["text"]):
            if any(start < at + len(piece) and at < end for start, end in spans):
                values["text"][i], values["ids"][i] = HIDDEN, None
            at += len(piece)


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
    sample:N; `redact`: a regular expression whose matches are hidden in texts and tokens, without
    images then; `image_bytes`: of all images' files, of which later ones are left out.

    Raises ConfigError for an invalid `rollouts` or `redact`, NotFound for an unknown run."""
    try:
        redacted = RedactedStore(store, re.compile(redact)) if redact else None
    except re.error as error:
        raise ConfigError(f"--redact {redact!r} is not a regular expression: {error}") from None
    pages = Pages(cast(Store, redacted or store))
    chosen, total = await _chosen(store, run, rollouts)
    note = f"{sum(map(len, chosen.values())):,} of {total:,} rollouts"
    style = _static("uPlot.min.css", "view.css")
    script = _static("uPlot.iife.min.js", "view.js")
    hashes = {"style": _hash(style), "script": _hash(script)}
    head = environment().get_template("export.html")
    partial, size = file.with_name(f"{file.name}.partial"), 0
    file.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("w", encoding="utf-8") as out:
        out.write(head.render(run=run, style=style, hashes=hashes, note=note))
        index: dict[str, int] = {}
        chunk: dict[str, str] = {}
        shown: dict[str, None] = {}  # digests, in the order of the pages
        async for url, html in _pages(pages, redacted, run, chosen):
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
    """Write images until their files have `limit` bytes; returns how many there are."""
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
    pages: Pages, redacted: RedactedStore | None, run: str, chosen: dict[str, list[str]]
) -> AsyncIterator[tuple[str, str]]:
    """Yield the address and content of every page of the file."""
    front = await pages.run(run, {})
    while front.values["reasons"] is None:  # of a long run
        front = await pages.run(run, {})
    if redacted:
        rows = front.values["settings"].items()
        hidden = {
            name: [one._replace(value=redacted.hide(one.value)) for one in found]
            for name, found in rows
        }
        front.values.update(settings=hidden, facts=redacted.hide(front.values["facts"]))
    yield f"/run/{run}", _content(front)
    for dataset in front.values["datasets"]:
        yield f"/data/{dataset.name}", _content(await pages.data(dataset.name, {}))
    for address, part in pages.parts.items():
        for id in await part.ids(run):
            yield f"/{address}/{id}", _content(await part.page(id, {"run": run}))
    yield f"/policies/{run}", _content(await pages.policies(run))
    yield f"/groups/{run}", _content(await pages.groups(run, {}))
    yield f"/tasks/{run}", _content(await pages.tasks(run, {}))
    steps: set[int] = set()
    for group, ids in chosen.items():
        page = await pages.group(run, group)
        first = page.values["first"]
        steps |= {first.step, first.step if first.trained is None else first.trained}
        yield f"/group/{group}", _content(page)
        async for one in _rollouts(pages, redacted, ids):
            yield one
    own = {id for ids in chosen.values() for id in ids}
    examples = [one.rollout for one in front.values["examples"] if one.rollout not in own]
    async for one in _rollouts(pages, redacted, examples):
        yield one
    for step in sorted(steps):
        yield f"/step/{step}/{run}", _content(await pages.step(run, step))


async def _rollouts(
    pages: Pages, redacted: RedactedStore | None, ids: Sequence[str]
) -> AsyncIterator[tuple[str, str]]:
    """Yield the pages of rollouts that have begun."""
    for id in ids:
        try:
            page = await pages.rollout(id)
        except NotFound:
            continue  # not claimed yet
        tokens = await pages.tokens(id, range(len(page.values["calls"])))
        for values in tokens.values() if redacted else ():
            cast(RedactedStore, redacted).hide_tokens(values)
        yield f"/rollout/{id}", _content(page, tokens_of=tokens)
        if len(page.values["roles"]) > 1:
            yield f"/lanes/{id}", _content(await pages.lanes(id))


async def _chosen(store: Store, run: str, rollouts: str) -> tuple[dict[str, list[str]], int]:
    """Group -> rollouts to write, and the total number of rollouts."""
    sample = re.fullmatch(r"sample:(\d+)", rollouts)
    if not sample and rollouts not in ("all", "failures"):
        raise ConfigError(f"--rollouts {rollouts}: write all, failures or sample:N")
    found, total, before = list[tuple[str, str]](), 0, None
    while rows := await store.groups(run, before=before, limit=GROUPS_PER_READ):
        before = rows[-1].id
        for row in rows:
            total += len(row.rollouts)
            for id, state in zip(row.rollouts, row.states, strict=True):
                if rollouts != "failures" or state is RolloutState.FAILED:
                    found.append((row.id, id))
    if sample and int(sample[1]) < len(found):
        found = sorted(random.Random(0).sample(found, int(sample[1])), reverse=True)
    chosen: dict[str, list[str]] = {}
    for group, id in found:
        chosen.setdefault(group, []).append(id)
    return chosen, total


def _content(page: Any, **more: Any) -> str:
    return render(page, layout="bare.html", export=True, **more)


def _packed(n: int, pages: dict[str, str]) -> str:
    data = base64.b64encode(gzip.compress(msgspec.json.encode(pages), 9, mtime=0)).decode()
    return f'<script type="text/plain" id="chunk-{n}">{data}</script>\n'


def _static(*names: str) -> str:
    return "\n".join((STATIC / name).read_text() for name in names)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"
