"""Commands about run files: their JSON Schema, and a first one to change."""

from __future__ import annotations

import shutil
from pathlib import Path

import click
import msgspec

from agentrl.config.json_schema import run_file_schema
from agentrl.errors import ConfigError

STARTER = Path(__file__).with_name("starter")
FILES = ("run.toml", "agent.py", "tasks.jsonl", "verifier.py", "policy.py")


@click.group()
def config() -> None:
    """The run file."""


@config.command("schema")
def schema() -> None:
    """Print the JSON Schema of the run file, by which editors check and complete it."""
    click.echo(msgspec.json.format(msgspec.json.encode(run_file_schema())).decode())


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=".")
def init(folder: Path) -> None:
    """Write a commented run file with agent, tasks, verifier and a tiny model into FOLDER.

    No file is overwritten."""
    present = [name for name in FILES if (folder / name).exists()]
    if present:
        raise ConfigError(f"{folder} has {', '.join(present)} already; name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            shutil.copyfile(STARTER / name, folder / name)
    except OSError as error:
        raise ConfigError(f"cannot write into {folder} ({error.strerror})") from None
    click.echo(f"Wrote {', '.join(FILES)}. Next: agentrl train {folder / 'run.toml'}")
