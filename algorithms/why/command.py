"""`agentrl why`: the most likely reasons that a run does not learn."""

from __future__ import annotations

import asyncio

import click

from agentrl.run_stores import store_with


@click.command()
@click.argument("run")
@click.option("--store", help="Store URL; default: the one that has the run, below this folder.")
def why(run: str, store: str | None) -> None:
    """Print whether RUN learned and, if not, why: likeliest reasons first, and what to change."""
    from agentrl.algorithms.why.record import PolicyRun, read
    from agentrl.algorithms.why.rules import opening, reasons
    from agentrl.changes import changes_text
    from agentrl.store import open_store

    url = store or store_with(run)

    async def read_all() -> dict[str, PolicyRun]:
        async with open_store(url, readonly=True) as opened:
            return await read(opened, run)

    records = asyncio.run(read_all())
    about: dict[str, list[str]] = {}  # of policies for which all is the same, once
    measured: dict[str, list[str]] = {}
    for policy, record in records.items():
        found = reasons(record)
        lines = [opening(record, found)]
        for number, reason in enumerate(found, start=1):
            lines.append(f"{number}. {reason.text}\n   change {reason.change}")
            if reason.example:
                lines.append(f"   example: agentrl show {reason.example}")
        about.setdefault("\n".join(lines), []).append(policy)
        tasks = f"{len(record.heldout)} held-out tasks" if record.heldout else ""
        figures = [f"{len(record.steps)} steps", tasks, changes_text(record.changes)]
        measured.setdefault("; ".join(filter(None, figures)), []).append(policy)
    for text, policies in about.items():
        click.echo(f"{', '.join(policies)}: {text}" if len(about) > 1 else text)
    for text, policies in measured.items():
        named = f"{', '.join(policies)}: " if len(measured) > 1 else ""
        click.echo(f"({named}{text})")
