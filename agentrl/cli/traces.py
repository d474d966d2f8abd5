"""`agentrl traces`: imports traces of other tools into a store, and shows them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click
import msgspec

from agentrl.core.errors import ConfigError


@click.group()
def traces() -> None:
    """Import traces that other tools have recorded, and look at what they would train."""


REDACT = click.option(
    "--redact", multiple=True, metavar="RULE",
    help="Take out email, phone, card, iban, ip, key, /REGULAR EXPRESSION/ or the field of a name."
    " Repeatable.",
)  # fmt: skip
WHERE = click.option(
    "--where", multiple=True, metavar="NAME>=NUMBER",
    help="Which traces are good, by their feedback. Repeatable: all must hold.",
)  # fmt: skip


@traces.command("import")
@click.argument("source", type=click.Path(path_type=Path, exists=True), required=False)
@click.argument("out", required=False)
@REDACT
@click.option("--formats", is_flag=True, help="List the formats, their versions, what each loses.")
def import_command(
    source: Path | None, out: str | None, redact: tuple[str, ...], formats: bool
) -> None:
    """Add the traces of SOURCE, a file or a folder, to the store OUT.

    Formats are recognised. Importing again adds nothing."""
    if formats:
        click.echo(format_table())
        return
    if source is None or out is None:
        raise click.UsageError("name SOURCE and OUT, or --formats")
    from agentrl.recorded.importing import import_traces
    from agentrl.recorded.redact import Redactor

    redactor = Redactor(redact) if redact else None
    done = asyncio.run(import_traces(source, out, redactor.applied if redactor else None))
    for line in done.issues.lines():
        click.echo(f"WARNING {line}", err=True)
    rows = ", ".join(f"{count} {name}" for name, count in done.rows.items())
    if not done.traces + done.known:
        raise ConfigError(f"{source}: no trace was found ({rows or 'no row of a known format'});"
                          " `agentrl traces import --formats` lists the formats")  # fmt: skip
    duplicates = f", {done.known} were already there" if done.known else ""
    click.echo(
        f"{out}: {done.traces} traces added{duplicates}, with {done.calls} calls, {done.spans}"
        f" spans and {done.rewards} pieces of feedback (read: {rows})"
    )
    _print_redacted(redact, redactor.counts if redactor else {})
    click.echo(f"Next: agentrl traces look {out}; agentrl view {out}")


def _print_redacted(rules: tuple[str, ...], counts: dict[str, int]) -> None:
    for rule in rules:
        click.echo(f"redacted: {counts.get(rule, 0)} of {rule}")


def format_table() -> str:
    """The formats as a table of Markdown."""
    from agentrl.recorded.formats import FORMATS

    rows = (
        f"| {form.name} | {form.source} | {form.version} | {'; '.join(form.lost)} |"
        for form in FORMATS
    )
    return "\n".join(["| format | of | read from | not there |", "|---|---|---|---|", *rows])


@traces.command()
@click.argument("out")
@WHERE
@REDACT
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def look(out: str, where: tuple[str, ...], redact: tuple[str, ...], as_json: bool) -> None:
    """Show the contents of the traces in OUT, which parts would be trained, and what is left out
    and why.

    With --redact, take personal data out of the stored traces first."""
    from agentrl.recorded import look as looking
    from agentrl.recorded.redact import Redactor, redact_store
    from agentrl.recorded.training import Where
    from agentrl.store import open_store

    async def looked() -> tuple[looking.Look, dict[str, int]]:
        counts: dict[str, int] = {}
        if redact:
            async with open_store(out, create=False) as store:
                counts = await redact_store(store, Redactor(redact))
        async with open_store(out, readonly=True) as store:
            return await looking.look_at(store, Where.read(where) if where else None), counts

    contents, counts = asyncio.run(looked())
    if not contents.traces:
        raise ConfigError(f"{out} has no imported traces; agentrl traces import SOURCE {out}")
    if as_json:
        shown = looking.as_json(contents) | ({"redacted": counts} if redact else {})
        click.echo(msgspec.json.encode(shown).decode())
        return
    _print_redacted(redact, counts)
    for line in looking.lines_of(contents):
        click.echo(line)


@click.command("traces")
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--store", required=True, help="Store URL.")
@click.option("--run", default="recorded", show_default=True, help="Name of the run.")
@click.option(
    "--as", "form", required=True, help="Tool whose format is written.",
    type=click.Choice(["otlp", "phoenix", "langsmith", "langfuse", "atif", "chats"]),
)  # fmt: skip
def export_command(out: Path, store: str, run: str, form: str) -> None:
    """Write the traces of a run to OUT, JSON lines as another tool reads them."""
    from agentrl.recorded.export import export_traces

    traces, lines = asyncio.run(export_traces(store, run, form, out))
    click.echo(f"{out}: {traces} traces in {lines} lines")
