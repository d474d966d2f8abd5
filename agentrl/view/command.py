"""`agentrl view`: the runs of a store in a browser, or one run as an HTML file."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import quote

import click

from agentrl.base.parts import has
from agentrl.cli.store import only_store
from agentrl.config import store_in
from agentrl.errors import ConfigError
from agentrl.store import open_store


@click.command()
@click.argument("store", required=False)
@click.option("--run", metavar="NAME", help="Run to open first, or to export.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=7412, show_default=True, help="0 for any free port.")
@click.option("--open", "browse", is_flag=True, help="Open the page in the browser.")
@click.option(
    "--export",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the run as one HTML file that needs no network, and stop.",
)
@click.option(
    "--rollouts", default="all", show_default=True, help="To export: all, failures or sample:N."
)
@click.option("--redact", default="", metavar="REGEX", help="Hide matches in the export.")
def view(
    store: str | None,
    run: str | None,
    host: str,
    port: int,
    browse: bool,
    file: Path | None,
    rollouts: str,
    redact: str,
) -> None:
    """Show the runs of STORE, a URL, file or folder, in the browser, also during training.

    STORE defaults to the store of --run, else the only one below runs/. It is only read. Other
    machines need a key: that of the variable AGENTRL_VIEW_KEY, or a new one in the printed URL."""
    if not has("asgi"):
        raise ConfigError("agentrl view needs the part 'asgi', which is not installed here")
    try:
        from agentrl.view import export, server
    except ImportError as error:
        raise ConfigError(f"{error.name} is missing: pip install 'agentrl[view]'") from None

    if file is None and (rollouts != "all" or redact):
        raise click.UsageError("--rollouts and --redact need --export FILE")
    if store is None:
        own = Path("runs", run or "", "store.db")
        found = run and own.exists()
        store = store_in(own.parent.resolve()) if found else only_store(how="by its path or --run")
    elif Path(store).is_dir():
        store = only_store(Path(store), "by its path")
    if file is None:
        start = f"/run/{quote(run)}" if run else "/"
        server.run(store, host, port, start=start, browse=browse)
        return

    async def write(url: str, file: Path) -> str:
        async with open_store(url, readonly=True) as opened:
            names = await opened.runs()
            if run is None and len(names) != 1:
                raise ConfigError(f"choose one with --run: the store has {', '.join(names)}")
            chosen = run or names[0]
            return await export.export(opened, chosen, file, rollouts=rollouts, redact=redact)

    click.echo(asyncio.run(write(store, file)))
