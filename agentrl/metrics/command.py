"""`agentrl metrics`: the metrics of a run's steps."""

from __future__ import annotations

import asyncio
import csv
import io
import math

import click
import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from agentrl.cli import print_result
from agentrl.errors import NotFound
from agentrl.run_stores import store_with
from agentrl.store import open_store
from agentrl.types import StepRow


@click.command()
@click.argument("run")
@click.option("--csv", "form", flag_value="csv", help="A line per step.")
@click.option("--json", "form", flag_value="json", help="A JSON object per step.")
@click.option("--store", help="Store URL; default: the one that has the run, below this folder.")
def metrics(run: str, form: str | None, store: str | None) -> None:
    """Print the metrics of RUN: the first and last value of each, or all."""
    show = {"csv": as_csv, "json": as_json}.get(form or "", table)
    print_result(show(asyncio.run(read(store or store_with(run), run))))


async def read(url: str, run: str) -> list[StepRow]:
    """The steps of a run. Raises NotFound if the store does not have it."""
    async with open_store(url, readonly=True) as store:
        if await store.run(run) is None:
            raise NotFound(f"there is no run {run!r} in {store.url}; it has {await store.runs()}")
        return await store.steps(run)


def names(rows: list[StepRow]) -> list[str]:
    return sorted({name for row in rows for name in row.metrics})


def table(rows: list[StepRow]) -> RenderableType:
    """Every metric with its first and last value and their steps."""
    found = Table("metric", title=f"{sum(row.committed for row in rows)} steps")
    found.title_justify = "left"
    for column in ("first", "step", "last", "step"):
        found.add_column(column, justify="right")
    for name in names(rows):
        known = [(row.metrics[name], row.step) for row in rows if name in row.metrics]
        (first, began), (last, ended) = known[0], known[-1]
        found.add_row(Text(name), f"{first:.6g}", str(began), f"{last:.6g}", str(ended))
    return found


def as_csv(rows: list[StepRow]) -> str:
    """A line per step and a column per metric; unknown values are empty."""
    columns = names(rows)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["step", "committed", "at", *columns])
    for row in rows:
        values = [row.metrics.get(name, math.nan) for name in columns]
        known = ["" if math.isnan(value) else value for value in values]
        writer.writerow([row.step, int(row.committed), row.at, *known])
    return out.getvalue()


def as_json(rows: list[StepRow]) -> str:
    """A line with a JSON object per step."""
    return "".join(msgspec.json.encode(row).decode() + "\n" for row in rows)
