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
    from agentrl.algorithms.why import rules
    from agentrl.store import open_store

    url = store or store_with(run)

    async def read() -> dict[str, rules.PolicyRun]:
        async with open_store(url, readonly=True) as opened:
            return await rules.read(opened, run)

    for policy, record in asyncio.run(read()).items():
        found = rules.reasons(record)
        measured = [
            f"{name} {change.first:.3f} to {change.last:.3f}, "
            for name, change in record.changes.items()
        ]
        if measured:
            measured.insert(0, "means of the first and last fifth: ")
        count = f"{len(found) or 'no'} reason{'' if len(found) == 1 else 's'} found"
        if record.improved:
            count = "it improved" + (", but:" if found else "")
        click.echo(f"{policy}: {len(record.steps)} steps, {''.join(measured)}{count}")
        for number, reason in enumerate(found, start=1):
            click.echo(f"{number}. {reason.text}\n   change {reason.change}")
