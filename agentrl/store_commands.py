"""`agentrl store ...`: serve, inspect and tidy a store."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import click


@click.group()
def store() -> None:
    """Serve, inspect and tidy a store."""


@store.command()
@click.argument("url")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=7411, show_default=True, help="0 for any free one.")
@click.option(
    "--keys",
    "file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="File with a line admin:KEY or runner:KEY for each key.",
)
@click.option("--max-body", default=64, show_default=True, help="MiB of one request.")
def serve(url: str, host: str, port: int, file: Path | None, max_body: int) -> None:
    """Give the store at URL to other machines, over HTTP, until SIGTERM.

    Keys come from --keys or the variable AGENTRL_STORE_KEYS, never from the command line, which
    every user of the machine can read. Without keys only this machine can be served. A key of
    scope runner claims, records and ends rollouts; admin may do everything. Clients open
    http://KEY@HOST:PORT, or http://HOST:PORT with the key in AGENTRL_STORE_KEY."""
    from agentrl.errors import ConfigError
    from agentrl.store import open_store

    try:
        from agentrl.store.http.keys import VARIABLE, Keys
        from agentrl.store.http.serve import run
    except ImportError as error:
        raise ConfigError(f"{error.name} is missing: pip install 'agentrl[server]'") from None

    if url.startswith(("http://", "https://")):
        raise ConfigError(f"{url} is served already: give the URL of the store behind it")
    if file is not None:
        keys = Keys.parse(file.read_text(), str(file))
    else:
        keys = Keys.parse(os.environ.get(VARIABLE, ""), VARIABLE)
    run(partial(open_store, url), host, port, keys, largest=max_body * 2**20)
