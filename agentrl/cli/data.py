"""`agentrl data`: data sets of pairs, labels and demonstrations in a store."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any, TypeVar

import click
import msgspec
from msgspec.structs import replace

from agentrl.datasets.draft import Draft, draft
from agentrl.datasets.files import add_row, export_rows, read_rows, write_rows
from agentrl.datasets.mining import MineSpec, mine
from agentrl.datasets.records import Dataset, Item, Side
from agentrl.errors import ConfigError
from agentrl.store import Store, open_store

T = TypeVar("T")
PAGE = 256  # items that are read at once
store_url = click.option("--store", "url", required=True, help="URL or file of the store.")
version_of = click.option("--version", type=int, default=0, help="Default: the newest.")
share = click.option(
    "--test", type=click.FloatRange(0, 1), default=0.1, show_default=True,
    help="Share of prompts whose items are held out.",
)  # fmt: skip
conflicts = click.option(
    "--conflicts", type=click.Choice(["drop", "keep"]), default="drop", show_default=True,
    help="Pairs that say the opposite of each other.",
)  # fmt: skip


@click.group()
def data() -> None:
    """Make, look at and hand out data sets of a store."""


def _mining(hows: list[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def declare(command: Callable[..., None]) -> Callable[..., None]:
        for option in (
            click.option("--how", type=click.Choice(hows), default=hows[0], show_default=True),
            click.option("--run", required=True, help="Whose rollouts."),
            click.option("--reward", default="outcome", show_default=True),
            click.option("--steps", type=(int, int), help="First and last, of the rollouts."),
            share, conflicts, store_url, click.argument("name"),
        ):  # fmt: skip
            command = option(command)
        return command

    return declare


@data.command("mine")
@_mining(["extremes", "all", "best-of", "expert", "branch", "turn"])
@click.option("--least", default=0.0, help="Difference of rewards of a pair.")
@click.option("--per-group", default=0, help="Pairs of a group at most; 0: all.")
@click.option("--expert", default="", help="With --how expert: the run with the better rollouts.")
def mine_command(name: str, url: str, test: float, conflicts: Any, **spec: Any) -> None:
    """Make data set NAME of pairs of a run's rollouts, or of their calls."""
    if bool(spec["expert"]) != (spec["how"] == "expert"):
        raise click.UsageError("--expert RUN goes with --how expert, and with no other")
    _mine(name, url, test, conflicts, spec)


@data.command("label")
@_mining(["label", "mc"])
@click.option("--threshold", default=0.5, help="With --how label: the reward that is good.")
def label_command(name: str, url: str, test: float, conflicts: Any, **spec: Any) -> None:
    """Make data set NAME of single rollouts, labelled by reward, or call by call (mc)."""
    _mine(name, url, test, conflicts, spec)


@data.command("import")
@click.argument("name")
@click.argument("source")
@store_url
@share
@conflicts
def import_command(name: str, source: str, url: str, test: float, conflicts: Any) -> None:
    """Make data set NAME of SOURCE: file.jsonl, file.parquet or hf:OWNER/NAME[@REV][:SPLIT]."""

    async def fill(store: Store, made: Draft) -> None:
        for row in read_rows(source):
            add_row(made, row)
            await made.flush()

    _make(name, url, {"source": source}, test, conflicts, fill)


@data.command()
@click.argument("name", required=False)
@store_url
@version_of
@click.option("--examples", default=3, show_default=True)
def show(name: str | None, url: str, version: int, examples: int) -> None:
    """List the data sets of a store, or say what is in NAME: kinds, gaps, lengths, examples."""

    async def look(store: Store) -> None:
        if name is None:
            for one in await store.datasets():
                state = one.digest or "unfinished"
                click.echo(f"{one.name} version {one.version}: {one.items} items, {state}")
            return
        found, items = await _items(store, name, version)
        click.echo(f"{name} version {found.version}, digest {found.digest}, made by {found.spec}")
        for (kind, split), n in sorted(Counter((i.kind, i.split) for i in items).items()):
            click.echo(f"{n:8} {kind} ({split})")
        margins = [item.margin for item in items if item.margin is not None]
        if len(margins) > 1:
            low, middle, high = quantiles(margins, n=4)
            click.echo(f"margins: quartiles {low:g}, {middle:g}, {high:g}")
        if pairs := [item for item in items[:PAGE] if item.rejected]:
            share = await _longer(store, pairs)
            click.echo(f"the better side is the longer one in {share:.0%} of pairs")
        for row in await export_rows(store, items[:examples]):
            shown = {key: value for key, value in row.items() if not key.endswith("_ids")}
            click.echo(msgspec.json.format(msgspec.json.encode(shown)).decode())

    asyncio.run(_with(url, look))


@data.command()
@click.argument("name")
@store_url
@version_of
def freeze(name: str, url: str, version: int) -> None:
    """Copy the calls that NAME refers to, so that a prune may remove their rollouts."""

    async def copy(store: Store) -> None:
        found, items = await _items(store, name, version)
        for first in range(0, len(items), PAGE):
            digests = [side for item in items[first : first + PAGE] for side in item.sides]
            sides = await store.sides(digests)
            copies = [Side(digest=digest, own=calls) for digest, calls in sides.items() if calls]
            await store.add_items(name, found.version, [], copies)
        click.echo(f"{name} version {found.version}: {len(items)} items have their own tokens")

    asyncio.run(_with(url, copy))


@data.command("export")
@click.argument("name")
@click.argument("path", type=click.Path(path_type=Path))
@store_url
@version_of
def export_command(name: str, path: Path, url: str, version: int) -> None:
    """Write NAME to PATH, .jsonl or .parquet, in the columns of TRL and with exact tokens."""

    async def write(store: Store) -> None:
        _, items = await _items(store, name, version)
        write_rows(await export_rows(store, items), path)
        click.echo(f"{len(items)} items in {path}")

    asyncio.run(_with(url, write))


def _mine(name: str, url: str, test: float, conflicts: Any, given: dict[str, Any]) -> None:
    spec = msgspec.convert(given, MineSpec)
    fields = msgspec.to_builtins(replace(spec))

    async def fill(store: Store, made: Draft) -> None:
        if spec.run not in (runs := await store.runs()):
            raise ConfigError(f"--run {spec.run}: the store has {', '.join(runs) or 'no run'}")
        await mine(store, made, spec)

    _make(name, url, fields, test, conflicts, fill)


def _make(
    name: str, url: str, spec: dict[str, Any], test: float, conflicts: Any,
    fill: Callable[[Store, Draft], Awaitable[None]],
) -> None:  # fmt: skip
    """Make a version and say what is in it, and what was left out."""
    spec = spec | {"test": test, "conflicts": conflicts}

    async def make(store: Store) -> None:
        made = await draft(store, name, spec, test, conflicts)
        await fill(store, made)
        if not made.items:
            counted = ", ".join(f"{n} {what}" for what, n in made.counts.items() if n)
            raise ConfigError(f"{name}: nothing to learn from was found ({counted or 'no rows'})")
        found = await made.commit()
        click.echo(f"{name} version {found.version}: {found.items} items, digest {found.digest}")
        for what, n in made.counts.most_common():
            if n:
                click.echo(f"{n:8} {what}")

    asyncio.run(_with(url, make))


async def _with(url: str, work: Callable[[Store], Awaitable[T]]) -> T:
    async with open_store(url, create=False) as store:
        return await work(store)


async def _items(store: Store, name: str, version: int) -> tuple[Dataset, list[Item]]:
    versions = [one for one in await store.datasets(name) if one.version == version or not version]
    if not versions:
        raise ConfigError(f"{name}: the store has no such data set or version")
    return versions[-1], await store.items(name, versions[-1].version)


async def _longer(store: Store, pairs: list[Item]) -> float:
    """The share of pairs whose better side is the longer one."""
    sides = await store.sides([side for item in pairs for side in item.sides])
    sizes = {
        digest: sum(len(call.completion) or len(str(call.answer)) for call in calls)
        for digest, calls in sides.items()
    }
    return fmean(sizes[item.chosen] > sizes[item.sides[-1]] for item in pairs)
