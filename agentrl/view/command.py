"""`agentrl view` shows all runs, or writes one as an HTML file; `agentrl compare` prints a few."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
import msgspec
from rich.console import RenderableType
from rich.table import Table

from agentrl.cli import print_result
from agentrl.errors import ConfigError, NotFound, StoreError, install_command
from agentrl.run_stores import store_with
from agentrl.scores import missing_text, score_text
from agentrl.store import open_store
from agentrl.types import Json
from agentrl.view.summaries import Score, Summary, Verdict, matrix, summary, whole_settings

OUTCOMES = {"better": "better", "worse": "worse", "same": "no more than chance"}


@click.command()
@click.argument("stores", metavar="[STORE]...", nargs=-1)
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
@click.option(
    "--image-mb", type=click.IntRange(0), default=100, show_default=True,
    help="To export: images up to this size in all.",
)  # fmt: skip
def view(
    stores: tuple[str, ...],
    run: str | None,
    host: str,
    port: int,
    browse: bool,
    file: Path | None,
    rollouts: str,
    redact: str,
    image_mb: int,
) -> None:
    """Show all runs in the browser, also during training.

    They are those of each STORE, a URL, file or folder; by default of every store below this folder
    and of the one whose URL is in the variable AGENTRL_STORE_URL. Stores are only read. Other
    machines need a key: that of the variable AGENTRL_VIEW_KEY, or a new one in the printed URL."""
    try:
        from agentrl.run_stores import find, places
        from agentrl.view import export
        from agentrl.view.home import server
    except ImportError as error:
        raise ConfigError(f"{error.name} is missing: {install_command('view')}") from None

    if file is None and (rollouts != "all" or redact):
        raise click.UsageError("--rollouts and --redact need --export FILE")
    if file is None:
        start = f"/run/{quote(run)}" if run else "/"
        try:
            if run and not stores:
                find(run)
        except NotFound:
            raise
        except StoreError:  # several stores have it
            start = f"/?q={quote(run or '')}"
        server.run(stores, host, port, start=start, browse=browse)
        return

    async def write(url: str, file: Path) -> str:
        async with open_store(url, readonly=True) as opened:
            names = await opened.runs()
            if run is None and len(names) != 1:
                raise ConfigError(f"choose one with --run: the store has {', '.join(names)}")
            chosen = run or names[0]
            given: Any = {"rollouts": rollouts, "redact": redact, "image_bytes": image_mb * 10**6}
            return await export.export(opened, chosen, file, **given)

    if len(stores) > 1:
        raise click.UsageError("--export writes one run: give its store, or --run alone")
    known = [place.url for place in places(stores)]
    if run and len(known) != 1:
        known = [find(run)]
    if len(known) != 1:
        raise ConfigError(f"{len(known)} stores were found: choose a run with --run")
    click.echo(asyncio.run(write(known[0], file)))


@click.command()
@click.argument("runs", metavar="RUN RUN...", nargs=-1, required=True)
@click.option("--store", help="Store URL; default: those that have the runs, below this folder.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object per run.")
def compare(runs: tuple[str, ...], store: str | None, as_json: bool) -> None:
    """Compare each RUN: scores before and after training, whether that is more than chance, its
    state, and the settings that differ."""
    rows = [asyncio.run(_read(store or store_with(run), run)) for run in runs]
    settings = matrix([whole_settings(row) for row in rows])
    print_result(_lines(rows, settings) if as_json else _table(rows, settings))


async def _read(url: str, run: str) -> Summary:
    async with open_store(url, readonly=True) as store:
        if (state := await store.run(run)) is None:
            raise NotFound(f"there is no run {run!r} in {store.url}; it has {await store.runs()}")
        return await summary(store, state)


def _table(rows: Sequence[Summary], settings: Mapping[str, list[Json]]) -> RenderableType:
    """Of runs that are measured alike the scores are named once, before them."""
    table = Table("", *(row.run for row in rows))
    for found in ([row.verdict for row in rows], [row.sampled for row in rows]):
        names = list(dict.fromkeys(one.name for one in found if one.last))
        for end in ("first", "last") if names else ():
            word = {"first": "before", "last": "after"}[end]
            own = len(names) > 1  # then each has its name with it
            scores = [_score(one, getattr(one, end), named=own) for one in found]
            table.add_row(word if own else f"{names[0]}, {word}", *scores)
        if any(map(_changed, found)):
            words = [OUTCOMES[one.outcome] if _changed(one) else "-" for one in found]
            table.add_row("change" if len(names) > 1 else f"{names[0]}, change", *words)
    table.add_row("state", *(f"{row.condition()}, {row.state.step} steps" for row in rows))
    for key, values in settings.items():
        table.add_row(key, *("-" if value is None else str(value) for value in values))
    return table


def _changed(verdict: Verdict) -> bool:
    """Whether it was measured twice."""
    return bool(verdict.first and verdict.last and verdict.first.step != verdict.last.step)


def _score(verdict: Verdict, score: Score | None, *, named: bool) -> str:
    if score is None:
        return "-"
    what = f"{verdict.name} " if named else ""
    value, *ends = (
        score_text(x, verdict.percent, ".3g")
        for x in (score.value, score.low, score.high)
        if x is not None
    )
    interval = f" ({' to '.join(ends)})" if ends else ""
    return f"{what}{value}{interval}{missing_text(score.missing)}"


def _lines(rows: Sequence[Summary], settings: Mapping[str, list[Json]]) -> str:
    found = [
        {
            "run": row.run,
            "metric": row.verdict.metric,
            "before": row.verdict.first,
            "after": row.verdict.last,
            "outcome": row.verdict.outcome,
            "sampled_before": row.sampled.first,
            "sampled_after": row.sampled.last,
            "state": row.condition(),
            "steps": row.state.step,
            "settings": {key: values[at] for key, values in settings.items()},
        }
        for at, row in enumerate(rows)
    ]
    return "".join(msgspec.json.encode(one).decode() + "\n" for one in found)
