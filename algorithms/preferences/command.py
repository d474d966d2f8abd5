"""`agentrl data`: data sets of pairs, labels and demonstrations in a store."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import wraps
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

import click
import msgspec

from agentrl.algorithms.preferences.draft import Draft
from agentrl.algorithms.preferences.files import export_rows
from agentrl.algorithms.preferences.formats import add_row
from agentrl.algorithms.preferences.mining import MineSpec, mine
from agentrl.base.images import described
from agentrl.base.row_files import read_rows, write_rows
from agentrl.errors import ConfigError
from agentrl.store import Store, open_store
from agentrl.store.records import Dataset, Item, Side
from agentrl.types import POLICY

ITEMS_PER_READ = 256  # items per read
Command = Callable[..., Any]
version_of = click.option("--version", type=int, default=0, help="Default: the newest.")


@click.group()
def data() -> None:
    """Create, inspect and export data sets of a store."""


def _with(
    *options: Command, create: bool = False
) -> Callable[[Callable[..., Awaitable[None]]], Command]:
    """A decorator for a command with these options, whose function gets the store first. create:
    the store, if there is none."""

    def declare(work: Callable[..., Awaitable[None]]) -> Command:
        @wraps(work)
        def command(url: str, **given: Any) -> None:
            async def run() -> None:
                async with open_store(url, create=create) as store:
                    await work(store, **given)

            asyncio.run(run())

        result: Command = command
        for option in (*options, STORE):
            result = option(result)
        return result

    return declare


STORE = click.option("--store", "url", required=True, help="URL or file of the store.")
MAKING = (
    click.option(
        "--test", type=click.FloatRange(0, 1), default=0.1, show_default=True,
        help="Fraction of prompts whose items are held out.",
    ),
    click.option(
        "--conflicts", type=click.Choice(["drop", "keep"]), default="drop", show_default=True,
        help="What to do with pairs that contradict each other.",
    ),
)  # fmt: skip


def _mining(*hows: str) -> tuple[Command, ...]:
    return (
        click.option("--how", type=click.Choice(hows), default=hows[0], show_default=True),
        click.option("--run", required=True, help="The run with the rollouts or sessions."),
        click.option("--reward", default="outcome", show_default=True),
        click.option("--steps", type=(int, int), help="First and last step of the rollouts."),
        click.option("--policy", default=POLICY, help="Policy or upstream of the calls."),
        click.option("--since", type=click.DateTime(), help="Earliest time of a call."),
        click.option("--least-version", default=0, help="Oldest policy version of a call."),
        click.option("--inexact", is_flag=True, help="Include calls without token ids."),
        click.argument("name"), *MAKING,
    )  # fmt: skip


@data.command("mine")
@_with(
    *_mining("extremes", "all", "best-of", "expert", "branch", "turn", "correction", "reasked"),
    click.option("--least", default=0.0, help="Smallest difference of rewards in a pair."),
    click.option("--per-group", default=0, help="Most pairs per group; 0: all."),
    click.option("--expert", default="", help="With --how expert: the run with better rollouts."),
)
async def mine_command(store: Store, **given: Any) -> None:
    """Create data set NAME with pairs of a run's rollouts, or of their calls."""
    if bool(given["expert"]) != (given["how"] == "expert"):
        raise click.UsageError("--expert RUN goes with --how expert, and with nothing else")
    await _mine(store, **given)


@data.command("label")
@_with(
    *_mining("label", "mc", "demonstration"),
    click.option("--threshold", default=0.5, help="Smallest reward of a good rollout."),
)
async def label_command(store: Store, **given: Any) -> None:
    """Create data set NAME with rollouts labelled by reward or by call (mc), or demonstrations."""
    await _mine(store, **given)


async def _mine(store: Store, name: str, test: float, conflicts: Any, **given: Any) -> None:
    since: datetime | None = given.pop("since")
    spec = msgspec.convert(given | {"since": since.timestamp() if since else 0.0}, MineSpec)
    if spec.run not in (runs := await store.runs()):
        raise ConfigError(f"--run {spec.run}: the store has {', '.join(runs) or 'no run'}")
    made = await _draft(store, name, test, conflicts, msgspec.to_builtins(spec))
    await mine(store, made, spec)
    await _commit(made)


@data.command("import")
@_with(click.argument("source"), click.argument("name"), *MAKING, create=True)
async def import_command(store: Store, name: str, source: str, test: float, conflicts: Any) -> None:
    """Create data set NAME from SOURCE: file.jsonl, file.parquet or hf:OWNER/NAME[@REV][:SPLIT].

    Creates the store too, if there is none: a run on a data set may begin with it."""
    made = await _draft(store, name, test, conflicts, {"source": source})
    for place, row in read_rows(source):
        add_row(made, place, row)
        await made.flush()
    await _commit(made)


@data.command()
@_with(
    click.argument("name", required=False), version_of,
    click.option("--examples", default=3, show_default=True),
)  # fmt: skip
async def show(store: Store, name: str | None, version: int, examples: int) -> None:
    """List the data sets of a store, or describe NAME: kinds, margins, lengths, examples."""
    if name is None:
        for one in await store.datasets():
            state = one.digest or "unfinished"
            click.echo(f"{one.name} version {one.version}: {one.items} items, {state}")
        return
    found, items = await _items(store, name, version)
    click.echo(f"{name} version {found.version}, digest {found.digest}")
    made = (f"{key} {value}" for key, value in found.spec.items() if value not in (None, "", 0))
    click.echo(f"made with {', '.join(made)}")
    for (kind, split), n in sorted(Counter((i.kind, i.split) for i in items).items()):
        click.echo(f"{n:8} {kind} ({split})")
    margins = [item.margin for item in items if item.margin is not None]
    if len(margins) > 1:
        low, middle, high = quantiles(margins, n=4)
        click.echo(f"margins: quartiles {low:g}, {middle:g}, {high:g}")
    if pairs := [item for item in items[:ITEMS_PER_READ] if item.rejected]:
        fraction = await _longer(store, pairs)
        click.echo(f"the better completion is the longer one in {fraction:.0%} of pairs")
    for row in await export_rows(store, items[:examples], described):
        shown = {key: value for key, value in row.items() if not key.endswith("_ids")}
        click.echo(msgspec.json.format(msgspec.json.encode(shown)).decode())


@data.command()
@_with(click.argument("name"), version_of)
async def freeze(store: Store, name: str, version: int) -> None:
    """Copy the calls of NAME's items, so that a prune may remove their rollouts."""
    found, items = await _items(store, name, version)
    for first in range(0, len(items), ITEMS_PER_READ):
        digests = [side for item in items[first : first + ITEMS_PER_READ] for side in item.sides]
        sides = await store.sides(digests)
        copies = [Side(digest=digest, own=calls) for digest, calls in sides.items() if calls]
        await store.add_items(name, found.version, [], copies)
    click.echo(f"{name} version {found.version}: {len(items)} items have their own tokens")


@data.command("export")
@_with(click.argument("path", type=click.Path(path_type=Path)), click.argument("name"), version_of)
async def export_command(store: Store, name: str, path: Path, version: int) -> None:
    """Write NAME to PATH (.jsonl or .parquet) with TRL's columns and exact tokens."""
    _, items = await _items(store, name, version)
    rows = await export_rows(store, items)
    write_rows(rows, path)
    click.echo(f"{len(items)} items in {path}")


async def _draft(store: Store, name: str, test: float, conflicts: Any, spec: Any) -> Draft:
    spec |= {"test": test, "conflicts": conflicts}
    return Draft(store, name, await store.draft_dataset(name, spec), test, conflicts)


async def _commit(made: Draft) -> None:
    """Commit a version, and print its size and what was left out."""
    if not made.items:
        counted = ", ".join(f"{n} {what}" for what, n in made.counts.items() if n)
        raise ConfigError(f"{made.name}: found nothing to learn from ({counted or 'no rows'})")
    found = await made.commit()
    click.echo(f"{found.name} version {found.version}: {found.items} items, digest {found.digest}")
    for what, n in made.counts.most_common():
        if n:
            click.echo(f"{n:8} {what}")


async def _items(store: Store, name: str, version: int) -> tuple[Dataset, list[Item]]:
    versions = [one for one in await store.datasets(name) if one.version == version or not version]
    if not versions:
        raise ConfigError(f"{name}: the store has no such data set or version")
    return versions[-1], await store.items(name, versions[-1].version)


async def _longer(store: Store, pairs: list[Item]) -> float:
    """The fraction of pairs whose better completion is the longer one."""
    sides = await store.sides([side for item in pairs for side in item.sides])
    sizes = {
        digest: sum(len(call.completion) or len(str(call.answer)) for call in calls)
        for digest, calls in sides.items()
    }
    return fmean(sizes[item.chosen] > sizes[item.sides[-1]] for item in pairs)
