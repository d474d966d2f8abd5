"""`agentrl store stats`, `vacuum`, `backup` and `prune`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
from rich.filesize import decimal

from agentrl.cli.store import age
from agentrl.errors import NotFound, StoreError
from agentrl.store import Store, open_store
from agentrl.store.urls import backend_of, split_secret

T = TypeVar("T")
SECONDS_PER_STEP = 2.0  # of a prune, after each of which it prints a line
store_option = click.option(
    "--store", "url", help="Store URL; default: the only store below runs/."
)


@click.command()
@store_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def stats(url: str | None, as_json: bool) -> None:
    """Print the number of rows in each table of the store, and its size."""
    url = url or only_store()
    found = asyncio.run(_with(url, lambda store: store.stats()))
    if as_json:
        click.echo(msgspec.json.encode(found).decode())
        return
    for table, n in found.rows.items():
        click.echo(f"{table:<12} {n:>12,}")
    click.echo(
        f"{decimal(found.bytes)} at {url}, of which a vacuum would give back "
        f"{decimal(found.free)}; cursor {found.cursor}"
    )


@click.command()
@store_option
def vacuum(url: str | None) -> None:
    """Return the space of pruned rows to the file system. Writers wait for it."""

    async def tidy(store: Store) -> tuple[int, int]:
        before = await store.stats()
        await store.vacuum()
        return before.bytes, (await store.stats()).bytes

    before, after = asyncio.run(_with(url or only_store(), tidy))
    click.echo(f"{decimal(before)} before, {decimal(after)} now")


@click.command()
@click.argument("url")
@click.argument("file", type=click.Path(path_type=Path))
def backup(url: str, file: Path) -> None:
    """Copy the store at URL, a file or a database, to FILE; runs may be live."""
    copy = backend_of(url).backup
    if file.exists() or copy is None:
        shown, _ = split_secret(url)
        raise StoreError(f"Name a new file and the store behind a server, not {file} and {shown}.")
    copy(url, file)
    click.echo(f"{decimal(file.stat().st_size)} in {file}")


@click.command()
@store_option
@click.option("--run", help="Only this run; default: the whole store.")
@click.option("--keep-last", type=int, metavar="N", help="Keep traces of the last N steps.")
@click.option("--older-than", callback=age, metavar="AGE", help="Keep what ended after AGE, as 7d.")
@click.option("--dry-run", is_flag=True, help="Only print what would be removed.")
def prune(
    url: str | None, run: str | None, keep_last: int | None, older_than: float | None, dry_run: bool
) -> None:
    """Remove traces of trained groups and evaluations that no step will read again.

    With both limits, traces that either of them keeps stay. Steps, metrics, checkpoints and
    untrained groups always stay. `agentrl store vacuum` shrinks the file. It may be stopped at any
    time: the next one goes on."""

    limits: Any = {"run": run, "keep_last": keep_last, "older_than": older_than}

    async def tidy(store: Store) -> dict[str, Any]:
        if dry_run:
            return msgspec.structs.asdict(await store.prune(**limits, dry_run=True))
        total, after = Counter[str](), None
        while True:  # a prune that is stopped between two steps has lost nothing
            found = msgspec.structs.asdict(
                await store.prune(**limits, after=after, seconds=SECONDS_PER_STEP)
            )
            after, share = found.pop("after"), found.pop("share")
            total.update(found)
            if after is None:
                return {name: total[name] for name in found}
            done = f"{total['rollouts']:,} rollouts with {total['transitions']:,} calls"
            click.echo(f"{share:.0%}: removed {done}", err=True)

    counts = asyncio.run(_with(url or only_store(), tidy))
    for name in ("after", "share"):
        counts.pop(name, None)
    size = decimal(counts.pop("bytes"))
    what = ", ".join(f"{n:,} {table}" for table, n in counts.items())
    click.echo(f"{'Would remove' if dry_run else 'Removed'} {what}: {size}")


async def _with(url: str, use: Callable[[Store], Awaitable[T]]) -> T:
    async with open_store(url, create=False) as opened:
        return await use(opened)


def only_store() -> str:
    """URL of the store below runs/. Raises StoreError if there is none or more than one."""
    folder = Path("runs")
    found = sorted([*folder.glob("store.db"), *folder.glob("*/store.db")])
    if not found:
        raise NotFound(f"There is no store below {folder}/: name one with --store.")
    if len(found) > 1:
        raise StoreError(
            f"There are {len(found)} stores below {folder}/ ({', '.join(map(str, found))}): "
            "choose one with --store."
        )
    return f"sqlite:///{found[0]}"
