"""The first page: the runs of all stores. A store is read again only after it has changed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from agentrl.errors import AgentRLError, Invalid, NotFound, StoreError
from agentrl.run_stores import OPENING_PATIENCE, Place, places
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.types import Json
from agentrl.view import charts, records
from agentrl.view.pages import SHOWN, Page, Pages, Query
from agentrl.view.summaries import (
    REWARD,
    SCORE,
    Summary,
    differing,
    matrix,
    offset,
    summary,
    whole_settings,
)

SEARCH_PAUSE = 5.0  # seconds between two searches for stores
LOOK_PAUSE = 0.5  # seconds between two looks at the files
ASK_PAUSE = 3.0  # seconds between two questions to stores that are no files
AT_ONCE = 4  # stores that are read at the same time
RUNS_PER_PAGE = 100
MOST_COMPARED = 4
TITLES = {SCORE: "Held-out", REWARD: "Training reward", **charts.TRAINING}
SETTINGS_SHOWN = 4  # in a line, of those that set a run apart


class Line(NamedTuple):
    """A run of the list."""

    place: Place
    base: str  # where the addresses of its store begin
    row: Summary
    condition: str

    @property
    def curve(self) -> Any:
        return records.curve(self.row.curve, 96, 26)

    @property
    def value(self) -> str:
        """Of its tick box."""
        return f"{self.place.key}/{self.row.run}" if self.base else self.row.run


@dataclass(slots=True)
class Known:
    """What was read of a store."""

    stamp: object = None
    rows: dict[str, Summary] = field(default_factory=dict)
    datasets: list[Any] = field(default_factory=list)
    trouble: str = ""  # why it cannot be read
    reading: asyncio.Task[None] | None = None


class Home:
    """All stores of a server. `given`: URLs, files and folders; none: all that are found here.
    A single file or URL has its pages at the root, every other below /at/KEY."""

    def __init__(self, given: Sequence[str] = ()) -> None:
        self.given = list(given)
        self.single = len(self.given) == 1 and not Path(self.given[0]).is_dir()
        self.places: dict[str, Place] = {}
        self._known: dict[str, Known] = {}
        self._open: dict[str, tuple[object, Pages]] = {}
        self._searched, self._version, self._stamps = 0.0, 0, dict[str, object]()
        self._asked, self._slots = 0.0, asyncio.Semaphore(AT_ONCE)
        self._opening = asyncio.Lock()

    async def search(self) -> None:
        """Look for stores again, if the last look was some seconds ago."""
        if time.monotonic() - self._searched > SEARCH_PAUSE or not self.places:
            found = await asyncio.to_thread(places, self.given)
            self.places = {place.key: place for place in found}
            self._searched = time.monotonic()

    def base(self, key: str) -> str:
        return "" if self.single else f"/at/{quote(key, safe='')}"

    def only(self) -> Place:
        """The single store."""
        return next(iter(self.places.values()))

    async def pages(self, key: str) -> Pages:
        """The pages of a store, opened at their first use. A replaced file is opened anew."""
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
        for known in self._known.values():
            if known.reading is not None:
                known.reading.cancel()
        for _, pages in self._open.values():
            await pages.store.close()

    async def cursor(self) -> int:
        """Higher after every change of a store, or of the set of stores."""
        await self.search()
        if self.single:
            return await (await self.pages(self.only().key)).store.cursor()
        now = {key: place.stamp() for key, place in self.places.items()}
        remote = [key for key, stamp in now.items() if stamp is None]
        if remote and time.monotonic() - self._asked > ASK_PAUSE:
            self._asked = time.monotonic()
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
        while (  # noqa: ASYNC110 - files do not tell that they change
            newest := await self.cursor()
        ) <= cursor and time.monotonic() < end:
            await asyncio.sleep(LOOK_PAUSE)
        return newest

    async def lines(self) -> list[Line]:
        """All runs, those that changed last first."""
        await self.search()
        await asyncio.gather(*map(self._read, self.places.values()))
        now = time.time()
        found = [
            Line(place, self.base(key), row, row.condition(now))
            for key, place in self.places.items()
            for row in self._known[key].rows.values()
        ]
        return sorted(found, key=lambda line: (line.condition == "running", line.row.at))[::-1]

    async def _read(self, place: Place) -> None:
        """Read a store that has changed; one that does not answer is left to a later visit."""
        known = self._known.setdefault(place.key, Known())
        stamp = place.stamp()
        if known.reading is None and (stamp is None or stamp != known.stamp):
            known.reading = asyncio.ensure_future(self._summarise(place, known))
        if known.reading is None:
            return
        done, _ = await asyncio.wait({known.reading}, timeout=OPENING_PATIENCE)
        if done:
            known.stamp, known.reading = stamp, None
        else:
            known.trouble = "it does not answer: another process holds its lock, or it is slow"

    async def _summarise(self, place: Place, known: Known) -> None:
        try:
            async with self._slots:
                if place.key in self._open or place.stamp() is None:
                    await self._summaries((await self.pages(place.key)).store, known)
                    return
                store = await asyncio.to_thread(open_store, place.url, readonly=True)
                async with store:
                    await self._summaries(store, known)
        except (AgentRLError, OSError, msgspec.MsgspecError, ValueError) as error:
            known.trouble, known.rows = str(error) or type(error).__name__, {}

    async def _summaries(self, store: Store, known: Known) -> None:
        rows: dict[str, Summary] = {}
        for name in await store.runs():
            if (state := await store.run(name)) is None:
                continue
            old, held = known.rows.get(name), state.owned_until > time.time()
            same = old is not None and old.state == state and not held
            rows[name] = old if same and old is not None else await summary(store, state)
        known.rows, known.trouble = rows, ""
        with suppress(
            StoreError
        ):  # the key is for one run, and data sets belong to the whole store
            known.datasets = list({one.name: one for one in await store.datasets()}.values())

    async def runs(self, query: Query) -> Page:
        lines = await self.lines()
        words = query.get("q", "").lower().split()
        every = [(line, apart) for line, apart in zip(lines, _apart(lines), strict=True)]
        found = [one for one in every if all(word in _text(*one) for word in words)]
        key, down = query.get("sort") or "", query.get("order") != "up"
        if key:
            if key not in ORDERS:
                raise Invalid(f"sort must be one of {', '.join(ORDERS)}, not {key!r}")
            found = _sorted([line for line, _ in found], found, key, down=down)
        start = records.read_number(query, "from") or 0
        more = start + RUNS_PER_PAGE if len(found) > start + RUNS_PER_PAGE else None
        values: dict[str, Any] = {"rows": found[start : start + RUNS_PER_PAGE], "all": len(found)}
        values |= {"more": more, "query": query, "sort": key, "down": down, "single": self.single}
        troubles = [(p, self._known[k].trouble) for k, p in self.places.items()]
        values["troubles"] = [(place, text) for place, text in troubles if text]
        values["datasets"] = [
            (self.base(key), one) for key in self.places for one in self._known[key].datasets
        ]
        values["stores"], values["shown_settings"] = len(self.places), SETTINGS_SHOWN
        return Page("runs.html", "Runs", values)

    async def compare(self, chosen: Sequence[str]) -> Page:
        """Two to four runs: their verdicts, curves, and the settings that differ."""
        if not 2 <= len(chosen) <= MOST_COMPARED:
            raise Invalid("choose two to four runs to compare")
        await self.search()
        rows, curves, bases = list[Summary](), list[Mapping[str, Any]](), list[str]()
        for one in chosen:
            key, _, run = one.partition("/") if not self.single else (self.only().key, "", one)
            store = (await self.pages(key)).store
            if (state := await store.run(run)) is None:
                raise NotFound(f"there is no run {run!r} in this store")
            rows.append(await summary(store, state))
            curves.append(await store.series(run, SHOWN))
            bases.append(self.base(key))
        names = [name for name in SHOWN if any(one[name] for one in curves)]
        series = {name: [records.finite(one[name]) for one in curves] for name in names}
        labels = [row.run for row in rows]
        if len(set(labels)) < len(labels):  # of the same name, in several stores
            labels = list(chosen)
        values = {"rows": list(zip(bases, rows, labels, strict=True)), "names": names}
        values |= {
            "series": series,
            "titles": TITLES,
            "offsets": {name: [offset(name)] * len(rows) for name in names},
            "shares": [n for n in (SCORE, REWARD) if all(row.percent for row in rows)],
            "labels": labels,
            "settings": matrix(list(map(whole_settings, rows))),
        }
        return Page("compare_runs.html", "Compare runs", values)

    async def run_anywhere(self, run: str) -> str:
        """The address of a run by its name alone. Raises NotFound unless one store has it."""
        found = [line for line in await self.lines() if line.row.run == run]
        if len(found) != 1:
            many = f"{len(found)} stores have" if found else "no store here has"
            raise NotFound(f"{many} a run {run!r}: choose it in the list")
        return f"{found[0].base}/run/{quote(run)}"


def _identity(place: Place) -> object:
    """Of the file, whose replacement is another one."""
    if not place.url.startswith("sqlite:///"):
        return None
    try:
        found = Path(place.url.removeprefix("sqlite:///").partition("?")[0]).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _apart(lines: Sequence[Line]) -> list[Mapping[str, Json]]:
    return list(differing([line.row for line in lines]))


def _text(line: Line, apart: Mapping[str, Json]) -> str:
    """What the filter of the list looks at."""
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
    """Rows by a column; those without a value last."""
    value = ORDERS[key]
    known = [(value(line), row) for line, row in zip(lines, rows, strict=True)]
    missing = [row for x, row in known if x is None]
    ordered = sorted((one for one in known if one[0] is not None), key=lambda one: one[0])
    return [row for _, row in (reversed(ordered) if down else ordered)] + missing
