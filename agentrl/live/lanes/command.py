"""`agentrl live status`, `promote`, `rollback` and `offer`: look at versions, and decide by hand.

They write to the store, so they work whichever processes of the run are alive.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agentrl.cli import print_result
from agentrl.config import RunConfig, load
from agentrl.errors import ConfigError, Conflict, NotFound
from agentrl.live.records.documents import (
    Compared,
    Event,
    EventKind,
    Lanes,
    Told,
    Wish,
    decide,
    put_wish,
    told,
    unmet,
)
from agentrl.scores import missing_text
from agentrl.store import open_store
from agentrl.store.base import Store

T = TypeVar("T")
RETRIES = 5  # of a decision while others decide, too
EVENTS = 8  # newest ones that are shown
run_file = click.argument("run_file", type=click.Path(path_type=Path))


@click.command()
@run_file
@click.option("--json", "as_json", is_flag=True, help="All documents, as JSON.")
def status(run_file: Path, as_json: bool) -> None:
    """Print the versions of the live run of RUN_FILE, how they compare, and what was decided."""
    known = _with_store(load(run_file), lambda store, run: told(store, run))
    print_result(msgspec.json.encode(known).decode() if as_json else shown(known))


@click.command()
@run_file
@click.argument("version", type=int, required=False)
def promote(run_file: Path, version: int | None) -> None:
    """Let the candidate serve all sessions from now on, whatever the comparison says so far.
    VERSION: that it must be."""
    _decide(run_file, lambda known: by_hand(known, "promoted", version))


@click.command()
@run_file
@click.argument("version", type=int, required=False)
def rollback(run_file: Path, version: int | None) -> None:
    """Let the version serve that did before the last promotion. VERSION: that it must be."""
    _decide(run_file, lambda known: by_hand(known, "rolled back", version))


@click.command()
@run_file
@click.argument("folder", type=click.Path(path_type=Path))
def offer(run_file: Path, folder: Path) -> None:
    """Offer the weights in FOLDER, a checkpoint or a snapshot, as a candidate."""
    folder = folder.resolve()
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise ConfigError(f"{folder} has no weights: no config.json and no adapter_config.json")

    async def wish(store: Store, run: str) -> None:
        await put_wish(store, run, Wish(path=str(folder), asked=time.time()))

    _with_store(load(run_file), wish)
    click.echo(
        "offered: it is the candidate once the run's training half has copied and loaded it, and "
        "what was offered before it is decided about"
    )


def by_hand(known: Told, kind: EventKind, version: int | None) -> Event:
    """What a user's decision becomes. Raises ConfigError if it is impossible."""
    lanes = known.lanes
    if lanes is None:
        raise ConfigError("no version is served yet: start the run with `agentrl live RUN_FILE`")
    goal = lanes.candidate if kind == "promoted" else lanes.previous
    if goal is None or version not in (None, goal):
        raise ConfigError(_impossible(known, lanes, kind, version))
    since = lanes.promoted() if kind == "promoted" else lanes.returned()
    about = goal if kind == "promoted" else lanes.serving
    return Event(time=time.time(), kind=kind, version=about, lanes=since, why="decided by hand")


def shown(known: Told) -> RenderableType:
    """For a terminal."""
    if known.lanes is None:
        return "No version is served yet."
    said = [Text("what was decided", style="bold")]
    for event in known.events[-EVENTS:]:
        at = time.strftime("%d %b %H:%M:%S", time.localtime(event.time))
        said.append(Text(f"{at}  version {event.version} {event.kind}: {event.why}"))
    for version, wish in unmet(known):
        said.append(Text(f"version {version} is offered and not loaded yet: {wish.path}"))
    return Group(_lanes(known, known.lanes), *said)


def _lanes(known: Told, lanes: Lanes) -> Table:
    table = Table("version", "lane", "traffic", "outcome", "sessions", "points more", "held-out")
    found = known.compared.get(lanes.candidate or -1)
    alone = 1.0 if lanes.candidate is None else 1 - lanes.share
    table.add_row(str(lanes.serving), "serving", f"{alone:.0%}", *_figures(found, 1))
    if lanes.candidate is not None:
        table.add_row(str(lanes.candidate), "candidate", f"{lanes.share:.0%}", *_figures(found, 0))
    if lanes.previous is not None:
        table.add_row(str(lanes.previous), "before", "its sessions", "", "", "", "")
    return table


def _figures(found: Compared | None, side: int) -> tuple[str, str, str, str]:
    if found is None:
        return "", "", "", ""
    mean, score = found.means[side], found.held_out[side]
    between = f"{100 * found.low:+.0f} to {100 * found.high:+.0f}" if side == 0 else ""
    return (
        "" if mean is None else f"{mean:.1%}",
        str(found.sessions[side]),
        between,
        "" if score is None else f"{score:.1%}{missing_text(found.missing[side])}",
    )


def _impossible(known: Told, lanes: Lanes, kind: str, version: int | None) -> str:
    asked = f"version {version}" if version is not None else "there"
    if kind == "promoted":
        now = "there is no candidate" if lanes.candidate is None else f"it is {lanes.candidate}"
        said = f"{asked} is no candidate" if version is not None else now
    else:
        now = "none did" if lanes.previous is None else f"{lanes.previous} did"
        said = f"only the version that served before can be rolled back to, and {now}"
    folders = ", ".join(f"{one.version}: {one.path}" for one in known.versions.values())
    again = "any version can be offered again by `agentrl live offer RUN_FILE FOLDER`"
    return f"{said}; {again} ({folders})"


def _decide(path: Path, event_of: Callable[[Told], Event]) -> None:
    async def carry_out(store: Store, run: str) -> Event:
        for _ in range(RETRIES):
            with suppress(Conflict):
                return await once(store, run)
        return await once(store, run)

    async def once(store: Store, run: str) -> Event:
        known = await told(store, run)
        event = event_of(known)
        await decide(store, run, known, event)
        return event

    event = _with_store(load(path), carry_out)
    click.echo(f"version {event.version} {event.kind}; version {event.serving} serves")


def _with_store(config: RunConfig, act: Callable[[Store, str], Coroutine[Any, Any, T]]) -> T:
    async def opened() -> T:
        async with open_store(config.store, create=False) as store:
            if await store.run(config.name) is None:
                raise NotFound(f"{config.store} has no run {config.name!r}: start it first")
            return await act(store, config.name)

    return asyncio.run(opened())
