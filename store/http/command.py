"""`agentrl store serve`: a store for other machines."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import click

from agentrl.cli.store import age
from agentrl.errors import ConfigError, install_command
from agentrl.store import open_store
from agentrl.store.http.backend import HTTP, HTTPS
from agentrl.store.urls import backend_of


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
@click.option("--max-body", default=64, show_default=True, help="MiB of one request.")
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
    max_body: int,
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
        given = os.environ.get(VARIABLE)
        keys = Keys() if given is None else Keys.parse(given, VARIABLE)
    limited = keep_last is not None or older_than is not None
    retention = Retention(keep_last, older_than) if limited else None
    run(
        partial(open_store, url),
        host,
        port,
        keys,
        largest=max_body * 2**20,
        retention=retention,
        processes=processes,
    )
