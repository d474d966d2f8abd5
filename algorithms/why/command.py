"""`agentrl why`: the most likely reasons that a run does not learn."""

from __future__ import annotations

import asyncio

import click

from agentrl.config import store_with


@click.command()
@click.argument("run")
@click.option("--store", help="Store URL; default: the one that has the run, below this folder.")
def why(run: str, store: str | None) -> None:
    """Print whether RUN learned and, if not, why: likeliest reasons first, and what to change."""
    from agentrl.algorithms.why.changes import changes_text
    from agentrl.algorithms.why.record import PolicyRun, read
    from agentrl.algorithms.why.rules import opening, reasons
    from agentrl.store import open_store

    url = store or store_with(run)

    async def read_all() -> dict[str, PolicyRun]:
        async with open_store(url, readonly=True) as opened:
            return await read(opened, run)

    records = asyncio.run(read_all())
    for policy, record in records.items():
        found = reasons(record)
        named = f"{policy}: " if len(records) > 1 else ""
        click.echo(f"{named}{opening(record, found)}")
        for number, reason in enumerate(found, start=1):
            click.echo(f"{number}. {reason.text}\n   change {reason.change}")
            if reason.example:
                click.echo(f"   example: agentrl show {reason.example}")
        tasks = f"{len(record.heldout)} held-out tasks" if record.heldout else ""
        measured = [f"{len(record.steps)} steps", tasks, changes_text(record.changes)]
        click.echo(f"({'; '.join(filter(None, measured))})")
