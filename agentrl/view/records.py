"""Converts stored records to values for the templates. A missing number is None.

Pages refer to images by digest, and browsers fetch their files; an exported page contains them.
Only files of types that browsers decode and never execute are served.

Server-sent events make open pages reload their data after changes of the store. A run is stored
with the git commit of the run file's folder.
"""

from __future__ import annotations

import asyncio
import math
import re
import subprocess
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import SequenceMatcher
from itertools import takewhile, zip_longest
from typing import Any, NamedTuple, Protocol, TypeVar
from urllib.parse import quote

import msgspec

from agentrl import __version__
from agentrl.algorithms.train.features import Feature, ServedRun
from agentrl.core import images
from agentrl.core.errors import Invalid, NotFound, StoreError
from agentrl.core.images import describe, digest_of, in_words, url_of
from agentrl.core.types import (
    Credit,
    Image,
    Json,
    Purpose,
    Reward,
    Rollout,
    Trace,
    Transition,
    step_in_words,
)
from agentrl.store.base import Store
from agentrl.store.records import CallRow, Item
from agentrl.store.rows import digest
from agentrl.transcript import Spelling

# Characters of a message, task or result on a page; another page has all of it.
MAX_TEXT_CHARS = 2000
COLUMNS = ("advantage", "psi", "weight", "gate")
T = TypeVar("T", bound="HasId")
Spell = Callable[[str], Spelling]


def read_number(query: Mapping[str, str], name: str, kind: type[int] | type[float] = int) -> Any:
    """A number from a form; None for an empty field."""
    try:
        return kind(query[name]) if query.get(name) else None
    except ValueError:
        what = "whole number" if kind is int else "number"
        raise Invalid(f"{name} must be a {what}, not {query[name]!r}") from None


def number(value: float | None) -> float | None:
    """A float32 with just enough digits to be exact; None if it is missing."""
    return float(f"{value:.9g}") if value is not None and math.isfinite(value) else None


def finite(points: Iterable[tuple[int, float]]) -> list[tuple[int, float | None]]:
    """A curve with None instead of NaN, which JSON does not have."""
    return [(step, y if math.isfinite(y) else None) for step, y in points]


def text_of(value: Json) -> str:
    """A message's content, a task or a result as text."""
    if value is None or isinstance(value, str):
        return value or ""
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode()


def message(
    row: dict[str, Json], index: int, pictures: Mapping[str, Picture] = {}
) -> dict[str, Any]:
    """One chat message, cut at `MAX_TEXT_CHARS` characters. `index`: position in its call, -1: the
    answer. If it shows images, its `parts` are texts and pictures, in their order."""
    calls = []
    for call in row.get("tool_calls") or []:
        function = call.get("function") or {}
        arguments = text_of(function.get("arguments"))
        calls.append(
            (function.get("name"), arguments[:MAX_TEXT_CHARS], len(arguments) > MAX_TEXT_CHARS)
        )
    parts = list(_parts(row.get("content"), pictures))
    words = [part.label if isinstance(part, Picture) else part for part in parts]
    text = "\n".join(words) if parts else text_of(row.get("content"))
    fields = {"role": str(row.get("role", "?")), "text": text[:MAX_TEXT_CHARS], "size": len(text)}
    return fields | {"tools": calls, "index": index, "parts": parts}


def _parts(content: Json, pictures: Mapping[str, Picture]) -> Iterable[str | Picture]:
    """The texts and pictures of a message's content; nothing if it has no image."""
    if not isinstance(content, list) or all(url_of(part) is None for part in content):
        return
    left = MAX_TEXT_CHARS
    for part in content:
        if digest := digest_of(part):
            yield pictures.get(digest, LOST)
            continue
        text = text_of(in_words(part, {}))
        if text and left > 0:
            yield text[:left]
        left -= len(text)


CALLS_PER_PAGE = 50  # of a rollout; a page is addressed by any call on it
PAGES_LISTED = 60  # links to pages, at regular distances if there are more


class Paging(NamedTuple):
    """A page of calls: those from `first` up to, but not including, `end`, of `total`."""

    first: int
    end: int
    total: int
    size: int = CALLS_PER_PAGE

    @classmethod
    def of(cls, total: int, at: int | None, size: int = CALLS_PER_PAGE) -> Paging:
        """The page that has the call `at`, or the nearest one."""
        first = max(0, min(at or 0, total - 1)) // size * size
        return cls(first, min(first + size, total), total, size)

    @property
    def last(self) -> int:
        """The first call of the last page."""
        return max(self.total - 1, 0) // self.size * self.size

    @property
    def pages(self) -> list[tuple[int, int]]:
        """(first call, last call) of each page, or of `PAGES_LISTED` at regular distances."""
        starts = range(0, self.total, self.size)
        listed = starts[:: -(-len(starts) // PAGES_LISTED) or 1]
        return [(start, min(start + self.size, self.total) - 1) for start in listed]


class Conversations:
    """Finds the conversation that each call of a list continues. The work is proportional to the
    number of messages; a call that continues the previous call of its role costs only its new
    messages."""

    def __init__(self) -> None:
        self.compared = 0  # messages that were examined singly
        self._ends: dict[bytes, int] = {}  # digest of a conversation -> its last call
        self._last: dict[str, tuple[Sequence[Any], list[bytes]]] = {}  # role -> its last call
        self._digests: dict[int, tuple[Any, bytes]] = {}  # id of a message -> it and its digest

    def add(self, at: int, call: Transition) -> tuple[int | None, int]:
        """The earlier call that the call at position `at` continues (None: it starts a
        conversation), and the number of its messages that are shown there. The longest common
        conversation counts, even if the agent has rewritten the answer in another form."""
        messages = call.messages
        before, before_digests = self._last.get(call.role, ([], []))
        chain = [*before_digests] if before and messages[: len(before)] == before else []
        for message in messages[len(chain) :]:
            chain.append(digest(b"".join([*chain[-1:], self._digest(message)])))
        self._last[call.role] = messages, chain
        continued: tuple[int | None, int] = None, 0
        for n in range(len(chain), 0, -1):
            self.compared += 1
            if (parent := self._ends.get(chain[n - 1])) is not None:
                more = messages[n : n + 1]
                continued = parent, n + (bool(more) and more[0].get("role") == "assistant")
                break
        if chain:
            self._ends[chain[-1]] = at
        return continued

    def _digest(self, message: Json) -> bytes:
        self.compared += 1
        if (cached := self._digests.get(id(message))) is None:
            cached = message, digest(msgspec.json.encode(message, order="sorted"))
            self._digests[id(message)] = cached
        return cached[1]


def shown_before(call: Transition, row: CallRow, outline: Sequence[CallRow]) -> int:
    """The number of a call's first messages that are shown with its parent, even if the agent has
    rewritten the answer in another form."""
    if row.parent is None:
        return 0
    more = call.messages[row.shared : row.shared + 1]
    changed = row.shared == outline[row.parent].messages and bool(more)
    return row.shared + (changed and more[0].get("role") == "assistant")


def depths(outline: Sequence[CallRow]) -> list[int]:
    """How often the conversation of each call has forked."""
    counts: list[int] = []
    for at, row in enumerate(outline):
        counts.append(0 if row.parent is None else counts[row.parent] + (row.parent != at - 1))
    return counts


def credit_by_call(outline: Sequence[CallRow], credits: Sequence[Credit]) -> dict[str, Credit]:
    """Call -> its credit from its own policy's training, else from another policy's."""
    policies = {call.id: call.policy for call in outline}
    ordered = sorted(credits, key=lambda credit: credit.policy == policies.get(credit.transition))
    return {credit.transition: credit for credit in ordered}


def baseline_count(outline: Sequence[CallRow], credits: Mapping[str, Credit]) -> int:
    """The number of baselines of the step. A call stores all of them once, or once per token, and
    all calls have the same number."""
    common: set[int] = set()
    for call in outline:
        if (credit := credits.get(call.id)) and (n := call.tokens):
            stored = len(credit.baseline)
            possible = {stored} if stored % n else {stored, stored // n}
            common = common & possible or possible
    return min(common, default=0)


def token_values(
    call: Transition, credit: Credit | None, spelling: Spelling, baselines: int
) -> dict[str, Any]:
    """The values of a call's tokens: lists with one value per token, a single value if all are
    equal, or none. `logp` is the sampler's, `baseline` has one list per baseline."""
    ids = list(call.completion)
    values: dict[str, Any] = {"ids": ids, "text": spelling.pieces(ids)}
    values["logp"] = [number(x) for x in call.logprobs]
    values |= {key: [number(x) for x in getattr(credit, key, ())] for key in COLUMNS}
    compared = [number(x) for x in credit.baseline] if credit else []
    width = len(compared) // max(baselines, 1)
    values["baseline"] = [compared[i * width : (i + 1) * width] for i in range(baselines)]
    return values


def call_rows(
    trace: Trace,
    first: int,
    outline: Sequence[CallRow],
    credits: Sequence[Credit],
    spell: Spell,
    pictures: Mapping[str, Picture] = {},
) -> list[dict[str, Any]]:
    """The calls of a trace in order, each with its new messages, text, rewards and credit. `first`:
    position of the first of them in the rollout; `outline`: all calls of the rollout."""
    by_call, depth = credit_by_call(outline, credits), depths(outline)
    rewards: dict[str | None, list[Reward]] = {}
    for reward in trace.rollout.rewards:
        rewards.setdefault(reward.target, []).append(reward)
    rows: list[dict[str, Any]] = []
    for at, call in enumerate(trace.transitions, first):
        parent, shown = outline[at].parent, shown_before(call, outline[at], outline)
        credit, spelling = by_call.get(call.id), spell(call.policy)
        row: dict[str, Any] = {"call": call, "at": at, "parent": parent, "credit": credit}
        row["fresh"], row["forked"] = parent is None and at > 0, parent not in (None, at - 1)
        row["depth"] = depth[at]
        new = range(shown, len(call.messages))
        row["new"] = [message(call.messages[i], i, pictures) for i in new]
        row["exact"] = call.exact and len(call.completion) > 0
        row["answer"] = message({"role": "assistant"} | (call.answer or {}), -1)
        row["missing"] = spelling.missing
        text = spelling.text(call.completion) if row["exact"] else ""
        row["text"], row["size"] = text[: 2 * MAX_TEXT_CHARS], len(text)
        advantages = set(map(number, credit.advantage)) if credit else set()
        row["varies"] = len(advantages) > 1
        row["advantage"] = advantages.pop() if len(advantages) == 1 else None
        row["rewards"] = rewards.get(call.id, [])
        rows.append(row)
    return rows


class HasId(Protocol):
    @property
    def id(self) -> str: ...


def nested(rows: Sequence[T], origin: Callable[[T], str]) -> list[tuple[int, T]]:
    """(depth, row) of a tree, depth-first; `origin` is the id of a row's parent."""
    ids, below = {row.id for row in rows}, dict[str, list[T]]()
    for row in rows:
        below.setdefault(origin(row) if origin(row) in ids else "", []).append(row)

    def walk(id: str, depth: int) -> Iterable[tuple[int, T]]:
        for row in below.get(id, []):
            yield depth, row
            yield from walk(row.id, depth + 1)

    return list(walk("", 0))


def first_difference(a: Sequence[CallRow], b: Sequence[CallRow]) -> int | None:
    """The first call at which the sampled tokens of two rollouts differ; None: nowhere."""
    pairs = enumerate(zip_longest((call.sampled for call in a), (call.sampled for call in b)))
    return next((at for at, (x, y) in pairs if x != y), None)


def compared(
    a: Trace, b: Trace, spell_a: Spell, spell_b: Spell, first: int = 0
) -> list[dict[str, Any]]:
    """The calls of two traces in pairs, with the text of each side as (differs, text) parts from a
    diff of tokens, not of characters. `first`: the position of the first ones in their rollouts."""
    rows: list[dict[str, Any]] = []
    for at in range(max(len(a.transitions), len(b.transitions))):
        calls = [trace.transitions[at] if at < len(trace.transitions) else None for trace in (a, b)]
        ids = [list(call.completion) if call else [] for call in calls]
        texts = [
            spell(call.policy).pieces(list(call.completion)) if call else []
            for call, spell in zip(calls, (spell_a, spell_b), strict=True)
        ]
        parts: tuple[list[Any], list[Any]] = ([], [])
        for tag, i, j, k, m in SequenceMatcher(None, ids[0], ids[1], False).get_opcodes():
            parts[0].append((tag != "equal", "".join(texts[0][i:j])))
            parts[1].append((tag != "equal", "".join(texts[1][k:m])))
        same = None not in calls and ids[0] == ids[1]
        rows.append({"at": first + at, "x": calls[0], "y": calls[1], "same": same, "texts": parts})
    return rows


def item_talks(
    item: Item, sides: Mapping[str, Sequence[Transition]], pictures: Mapping[str, Picture] = {}
) -> tuple[Any, Any]:
    """The common first messages of an item's completions, and the remaining messages of each."""
    talks = [talk(sides.get(name, []), pictures, item.steps) for name in item.sides]
    both = zip(*(messages[:-1] for messages in talks), strict=False) if item.rejected else ()
    alike = len(list(takewhile(lambda two: two[0] == two[1], both)))
    return talks[0][:alike], [messages[alike:] for messages in talks]


def talk(
    calls: Sequence[Transition],
    pictures: Mapping[str, Picture] = {},
    steps: Sequence[float | None] = (),
) -> list[dict[str, Any]]:
    """Each message of the calls once; answers have their `label` from `steps`."""
    rows: list[dict[str, Any]] = []
    conversations = Conversations()
    for at, call in enumerate(calls):
        new = call.messages[conversations.add(at, call)[1] :]
        rows += [message(row, 0, pictures) for row in new]
        label = steps[at] if at < len(steps) else None
        rows.append(message({"role": "assistant"} | (call.answer or {}), -1) | {"label": label})
    return rows


def changes(old: str, new: str) -> list[tuple[str, str]]:
    """A word diff of two texts, as parts ("del", "ins" or "", text)."""
    a, b = (re.findall(r"\s+|\S+", text) for text in (old, new))
    parts: list[tuple[str, str]] = []
    for tag, i, j, k, m in SequenceMatcher(None, a, b, False).get_opcodes():
        parts.append(("" if tag == "equal" else "del", "".join(a[i:j])))
        parts.append(("ins", "" if tag == "equal" else "".join(b[k:m])))
    return parts


def curve(
    points: Iterable[tuple[int, float]],
    width: int = 300,
    height: int = 90,
    *,
    span: tuple[int, int] | None = None,
    bounds: tuple[float, float] | None = None,
) -> Any:
    """A curve as an SVG path with its extremes; None without a finite value. `span`, `bounds`:
    steps and values at the ends of the axes, by default those of the curve."""
    finite_points = [(x, y) for x, y in points if math.isfinite(y)]
    if not finite_points:
        return None
    low, high = min(y for _, y in finite_points), max(y for _, y in finite_points)
    start, end = span or (finite_points[0][0], finite_points[-1][0])
    bottom, top = bounds or (low, high)
    wide, tall = max(end - start, 1) / width, ((top - bottom) or 1.0) / height
    path = "L".join(
        f"{(x - start) / wide:.1f} {height - (y - bottom) / tall:.1f}" for x, y in finite_points
    )
    size = {
        "width": width,
        "height": height,
        "low": low,
        "high": high,
        "last": finite_points[-1][1],
    }
    return size | {"path": f"M{path}{'h.1' * (len(finite_points) == 1)}"}


TASK_KEYS = ("input", "question", "prompt", "instruction", "problem", "query", "text", "task", "id")
MAX_GIST_CHARS = 140  # characters


def gist(task: Json) -> str:
    """A one-line summary of a task or a result."""
    if isinstance(task, dict):
        summary = next((task[key] for key in TASK_KEYS if task.get(key)), None)
        if summary is None:
            summary = ", ".join(f"{key} {gist(value)}" for key, value in task.items())
        task = summary
    if isinstance(task, list):
        last = [entry for entry in task if isinstance(entry, dict) and entry.get("content")]
        task = last[-1]["content"] if last else ", ".join(map(gist, task))
    if isinstance(task, dict):
        return gist(task)
    text = " ".join(str(task if task is not None else "").split())
    return text if len(text) <= MAX_GIST_CHARS else f"{text[: MAX_GIST_CHARS - 1]}…"


def placed(rollout: Rollout) -> str:
    """Split, step and index of a rollout, as text instead of its id."""
    if rollout.step < 0:
        return f"session {rollout.id.partition('/')[2]}"
    kind = "held-out tasks" if rollout.purpose is Purpose.EVAL else "training"
    where = step_in_words(rollout.step, rollout.purpose)
    return f"{kind}, {where}, rollout {rollout.id.rpartition('/')[2] or rollout.id}"


TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")  # which browsers only decode
IMAGES_PER_READ = 16
MAX_CACHED_PICTURES = 10_000  # pictures whose description is kept
MAX_WIDTH, MAX_HEIGHT = 320, 208  # pixels of a thumbnail
SMALL, MAX_SCALE = 112, 8  # pixels to which small images are enlarged, in whole steps


class Picture(NamedTuple):
    """An image on a page; without an address only its label is shown."""

    label: str  # such as [image 1280x800 png 243 kB]
    digest: str = ""
    address: str = ""
    width: int = 0
    height: int = 0

    @property
    def scale(self) -> float:
        """How much larger its thumbnail is than the image; small images are enlarged."""
        fits = min(MAX_WIDTH / max(self.width, 1), MAX_HEIGHT / max(self.height, 1))
        return min(fits, max(1, min(MAX_SCALE, SMALL // max(self.width, self.height, 1))))


LOST = Picture(images.LOST)


class Album:
    """The images of a store. Caches descriptions of the latest images, which never change, but not
    their files."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pictures: dict[str, Picture] = {}

    async def of(self, run: str, calls: Iterable[Transition]) -> dict[str, Picture]:
        """The pictures of calls by digest, without those that are no longer stored."""
        wanted = sorted({digest for call in calls for digest in call.images})
        async for image in self.files(run, [d for d in wanted if d not in self._pictures]):
            while len(self._pictures) >= MAX_CACHED_PICTURES:
                del self._pictures[next(iter(self._pictures))]
            address = f"/image/{image.digest}?run={quote(run)}" if _is_shown(image) else ""
            self._pictures[image.digest] = Picture(
                describe(image), image.digest, address, image.width, image.height
            )
        return {digest: self._pictures[digest] for digest in wanted if digest in self._pictures}

    async def files(self, run: str, digests: Sequence[str]) -> AsyncIterator[Image]:
        """Yield the images that are stored, a few of them in memory at a time."""
        for first in range(0, len(digests), IMAGES_PER_READ):
            chunk = digests[first : first + IMAGES_PER_READ]
            stored = await self._store.images(run, chunk)
            for wanted in chunk:
                if wanted in stored:
                    yield stored[wanted]

    async def file(self, run: str, digest: str) -> Image:
        """An image by its digest. Raises NotFound for one that is not stored, or that a browser
        might run."""
        image = (await self._store.images(run, [digest])).get(digest)
        if image is None:
            raise NotFound(f"image {digest} is not stored: a prune has removed it")
        if not _is_shown(image):
            raise NotFound(f"image {digest} is of type {image.media_type}, which is not shown")
        return image


def _is_shown(image: Image) -> bool:
    return image.media_type in TYPES


KEEPALIVE_INTERVAL = 15.0  # seconds after which a comment shows that the connection is alive
EVENT_PAUSE = 0.7  # seconds between two events of a stream, because drawing slows down training
REREAD_PAUSE = 2.0  # seconds before another read of an unreadable store


class Changing(Protocol):
    """A store, or all stores of a server."""

    async def cursor(self) -> int: ...
    async def wait(self, cursor: int, *, timeout: float | None = None) -> int: ...


class ChangeFeed:
    """The event streams of one server."""

    def __init__(self, store: Changing) -> None:
        self._store, self._ending = store, asyncio.Event()

    def end(self) -> None:
        """End every stream, so that the server can stop."""
        self._ending.set()

    async def stream(self, last: str) -> AsyncIterator[str]:
        """Events `change` with the store's cursor as id. `last`: the client's last id; '': now."""
        cursor = int(last) if last.isdecimal() else await self._store.cursor()
        yield f"retry: 2000\nid: {cursor}\nevent: hello\ndata: {cursor}\n\n"
        while not self._ending.is_set():
            try:
                newest = await self._changed(cursor)
            except StoreError as error:
                yield f"event: lost\ndata: {' '.join(str(error).split())}\n\n"
                await self._rest(REREAD_PAUSE)
                continue
            changed, cursor = newest > cursor, newest
            yield f"id: {cursor}\nevent: change\ndata: {cursor}\n\n" if changed else ": quiet\n\n"
            await self._rest(EVENT_PAUSE if changed else 0)

    async def _changed(self, cursor: int) -> int:
        """The newest cursor, after a change, after KEEPALIVE_INTERVAL, or at the end."""
        wait = asyncio.ensure_future(self._store.wait(cursor, timeout=KEEPALIVE_INTERVAL))
        end = asyncio.ensure_future(self._ending.wait())
        try:
            await asyncio.wait((wait, end), return_when=asyncio.FIRST_COMPLETED)
            return wait.result() if wait.done() else cursor
        finally:
            wait.cancel()
            end.cancel()

    async def _rest(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ending.wait(), seconds)


DOCUMENTS = "origin"  # kind of the documents, one for each commit
GIT_TIMEOUT = 5.0  # seconds


class RunOrigin(Feature):
    async def start(self, run: ServedRun) -> None:
        documents = await asyncio.to_thread(origin, run.config.root)
        if documents:
            await run.store.put_documents(run.config.name, DOCUMENTS, documents)


def origin(root: str) -> dict[str, Json]:
    """The commit of a folder, and whether files were changed since; {} outside of a git
    repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", root, *safe, *arguments]
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=GIT_TIMEOUT
        )
        return done.stdout.strip()

    # Programs that the repository's settings name are not run.
    safe = ["-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null"]
    try:
        commit = git("rev-parse", "HEAD")
        for name in git("config", "--name-only", "--list").splitlines():
            if name.startswith("filter."):
                value = "false" if name.endswith(".required") else ""
                safe += ["-c", f"{name}={value}"]
        changed = bool(git("status", "--porcelain", "--untracked-files=no", "--", "."))
    except (OSError, subprocess.SubprocessError):
        return {}
    return {commit: {"changed": changed, "agentrl": __version__}}
