"""`agentrl store`: serve a store to other machines, show its size, back it up and prune it."""

from __future__ import annotations

import asyncio
import os
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
from rich.filesize import decimal

from agentrl.cli import CommandGroup
from agentrl.core.errors import ConfigError, NotFound, StoreError, install_command
from agentrl.store import Store, open_store
from agentrl.store.backends import HTTP, HTTPS
from agentrl.store.urls import backend_of, split_secret

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


@click.group(cls=CommandGroup, path="store")
def store() -> None:
    """Serve, inspect and maintain a store."""


def age(_: click.Context, __: click.Parameter, value: str | None) -> float | None:
    """A click callback: seconds from a number with a unit, such as 90s, 30m, 12h, 7d or 2w."""
    if value is None:
        return None
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", value)
    if parts is None:
        raise click.BadParameter(f"{value!r} is not an age: write it as 90s, 30m, 12h, 7d or 2w.")
    return float(parts[1]) * UNITS[parts[2]]


@click.command()
@click.argument("url")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=7411, show_default=True, help="0 for any free port.")
@click.option(
    "--keys",
    "file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="File with a line per key: admin:KEY, runner:KEY or reader:KEY; for one run only"
    " runner@RUN:KEY or reader@RUN:KEY; with ;until=YYYY-MM-DD if it expires. Changes take effect"
    " without a restart.",
)
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Processes that serve together, each on a core of its own.",
)
@click.option("--keep-last", type=int, metavar="N", help="Prune hourly, keep the last N steps.")
@click.option(
    "--older-than", callback=age, metavar="AGE", help="Prune hourly what ended before AGE, as 7d."
)
def serve(
    url: str,
    host: str,
    port: int,
    file: Path | None,
    processes: int,
    keep_last: int | None,
    older_than: float | None,
) -> None:
    """Serve the store at URL to other machines over HTTP, until SIGTERM.

    Keys come from --keys or the variable AGENTRL_STORE_KEYS, never from the command line, which
    every user of the machine can read. Without keys only this machine is served. A key with scope
    runner may claim, record and end rollouts; reader may only read; admin may do everything.
    Clients open http://KEY@HOST:PORT, or http://HOST:PORT with the key in AGENTRL_STORE_KEY. With
    --keep-last or --older-than, the server prunes like `agentrl store prune`."""
    try:
        from agentrl.store.http.keys import VARIABLE, KeyFile, Keys
        from agentrl.store.http.serve import Retention, run
    except ImportError as error:
        raise ConfigError(f"{error.name} is missing: {install_command('server')}") from None

    if backend_of(url) in (HTTP, HTTPS):
        raise ConfigError(f"{url} is a server already: give the URL of the store behind it")
    if file is not None:
        keys: Keys | KeyFile = KeyFile(file)
    else:
        text = os.environ.get(VARIABLE)
        keys = Keys() if text is None else Keys.parse(text, VARIABLE)
    limited = keep_last is not None or older_than is not None
    retention = Retention(keep_last, older_than) if limited else None
    run(
        partial(open_store, url),
        host,
        port,
        keys,
        retention=retention,
        processes=processes,
    )


T = TypeVar("T")
SECONDS_PER_STEP = 2.0  # seconds between progress lines of a prune
store_option = click.option(
    "--store", "url", help="Store URL; default: the only store below runs/."
)


@click.command()
@store_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def stats(url: str | None, as_json: bool) -> None:
    """Print the number of rows in each table of the store, and its size."""
    url = url or only_store()
    sizes = asyncio.run(_with(url, lambda store: store.stats()))
    if as_json:
        click.echo(msgspec.json.encode(sizes).decode())
        return
    for table, n in sizes.rows.items():
        click.echo(f"{table:<12} {n:>12,}")
    click.echo(
        f"{decimal(sizes.bytes)} at {url}, of which a vacuum would give back "
        f"{decimal(sizes.free)}; cursor {sizes.cursor}"
    )


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
@click.option("--vacuum", is_flag=True, help="Then shrink the file, or only that without limits.")
def prune(
    url: str | None, run: str | None, keep_last: int | None, older_than: float | None,
    dry_run: bool, vacuum: bool,
) -> None:  # fmt: skip
    """Remove traces of trained groups and evaluations that no step will read again.

    With both limits, traces that either of them keeps stay. Steps, metrics, checkpoints and
    untrained groups always stay. A prune may be stopped at any time; the next one continues."""

    limits: Any = {"run": run, "keep_last": keep_last, "older_than": older_than}
    if vacuum and dry_run:
        raise click.UsageError("give --dry-run or --vacuum, not both: a vacuum cannot be tried")
    if vacuum and keep_last is None and older_than is None:
        print_shrunk(url or only_store())
        return

    async def tidy(store: Store) -> dict[str, Any]:
        if dry_run:
            return msgspec.structs.asdict(await store.prune(**limits, dry_run=True))
        total, after = Counter[str](), None
        while True:  # a prune that is stopped between two steps has lost nothing
            removed = msgspec.structs.asdict(
                await store.prune(**limits, after=after, seconds=SECONDS_PER_STEP)
            )
            after, share = removed.pop("after"), removed.pop("share")
            total.update(removed)
            if after is None:
                return {name: total[name] for name in removed}
            progress = f"{total['rollouts']:,} rollouts with {total['transitions']:,} calls"
            click.echo(f"{share:.0%}: removed {progress}", err=True)

    counts = asyncio.run(_with(url or only_store(), tidy))
    for name in ("after", "share"):
        counts.pop(name, None)
    size = decimal(counts.pop("bytes"))
    what = ", ".join(f"{n:,} {table}" for table, n in counts.items())
    click.echo(f"{'Would remove' if dry_run else 'Removed'} {what}: {size}")
    if vacuum:
        print_shrunk(url or only_store())


def print_shrunk(url: str) -> None:
    """Shrink a store, and print by how much."""
    before, after = asyncio.run(_with(url, shrink))
    click.echo(f"{decimal(before)} before, {decimal(after)} now")


async def shrink(store: Store) -> tuple[int, int]:
    """Return the space of pruned rows to the file system: bytes before and after."""
    before = await store.stats()
    await store.vacuum()
    return before.bytes, (await store.stats()).bytes


async def _with(url: str, use: Callable[[Store], Awaitable[T]]) -> T:
    async with open_store(url, create=False) as opened:
        return await use(opened)


def only_store() -> str:
    """URL of the store below runs/. Raises StoreError if there is none or more than one."""
    folder = Path("runs")
    files = sorted([*folder.glob("store.db"), *folder.glob("*/store.db")])
    if not files:
        raise NotFound(f"There is no store below {folder}/: name one with --store.")
    if len(files) > 1:
        raise StoreError(
            f"There are {len(files)} stores below {folder}/ ({', '.join(map(str, files))}): "
            "choose one with --store."
        )
    return f"sqlite:///{files[0]}"
