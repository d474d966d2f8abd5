"""`agentrl why`: the most likely reasons that a run does not learn."""

from __future__ import annotations

import asyncio

import click

from agentrl.config import store_with


@click.command()
@click.argument("run")
@click.option("--store", help="Store URL; default: the one that has the run, below this folder.")
def why(run: str, store: str | None) -> None:
    """Print why RUN does not learn: most likely reasons first, with the settings to change."""
    from agentrl.algorithms.why.changes import changes_text
    from agentrl.algorithms.why.record import PolicyRun, read
    from agentrl.algorithms.why.rules import learned, reasons
    from agentrl.store import open_store

    url = store or store_with(run)

    async def read_all() -> dict[str, PolicyRun]:
        async with open_store(url, readonly=True) as opened:
            return await read(opened, run)

    for policy, record in asyncio.run(read_all()).items():
        found = reasons(record)
        count = f"{len(found) or 'no'} reason{'' if len(found) == 1 else 's'} found"
        if learned(record):
            count = "it learned" + (", but:" if found else "")
        measured = changes_text(record.changes)
        click.echo(f"{policy}: {len(record.steps)} steps, {measured}{count}")
        for number, reason in enumerate(found, start=1):
            click.echo(f"{number}. {reason.text}\n   change {reason.change}")
            if reason.example:
                click.echo(f"   example: agentrl show {reason.example}")
