"""`agentrl model import`."""

from __future__ import annotations

from pathlib import Path

import click
from msgspec import convert

from agentrl.config import RunConfig

DTYPES = ("bfloat16", "float32")


@click.group()
def model() -> None:
    """Models of other tools."""


@model.command("import")
@click.argument("source")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", show_default=True)
@click.option("--chat-template", help="A file or name (policy.chat_template), for the model's own.")
def import_model(source: str, directory: Path, dtype: str, chat_template: str | None) -> None:
    """Make a Hugging Face folder, which can be trained, of a GGUF file. SOURCE is the file, a
    folder with it, or the name of an installed package that carries it."""
    from agentrl.model_files.gguf_file import GgufFile
    from agentrl.model_files.importing import import_gguf
    from agentrl.model_files.sources import find

    file = GgufFile(find(source))
    name, licence = (file.value(f"general.{key}", "unnamed") for key in ("name", "license"))
    click.echo(
        f"{file.path}: {name}, {file.architecture}, {file.parameters / 1e6:.1f} M parameters, "
        f"licence {licence}"
    )
    settings = {"policy": {"chat_template": chat_template}} if chat_template else {}
    made = import_gguf(file, directory, dtype=dtype, config=convert(settings, RunConfig))
    for warning in made.warnings:
        click.echo(f"WARNING {warning}")
    click.echo(
        f"checked: {len(file.tokens)} tokens are those of the file, and the model ends an answer "
        f"with {made.end} (probability {made.probability:.2f})"
    )
    click.echo(f'wrote {directory} in {dtype}: set policy.model = "{directory}"')
