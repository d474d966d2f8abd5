"""`agentrl why`: the likeliest reasons that a run does not learn."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from agentrl.config import store_in


@click.command()
@click.argument("run")
@click.option("--store", help="Store URL; default: the one that `agentrl train` makes for RUN.")
def why(run: str, store: str | None) -> None:
    """Say why RUN does not learn: the likeliest reasons first, each with the setting to change."""
    for line in asyncio.run(_lines(store or store_in(Path("runs", run).resolve()), run)):
        click.echo(line)


async def _lines(url: str, run: str) -> list[str]:
    from agentrl.algorithms.diagnostics.why import read, reasons
    from agentrl.store import open_store

    async with open_store(url, readonly=True) as store:
        records = await read(store, run)
    lines = []
    for policy, record in records.items():
        found = reasons(record)
        lines.append(f"{policy}: {len(record.steps)} steps, {len(found) or 'no'} reasons found")
        for number, reason in enumerate(found, start=1):
            lines += [f"{number}. {reason.text}", f"   evidence: {reason.evidence}"]
            lines.append(f"   change:   {reason.change}")
    return lines
