"""`agentrl ablate`: a team with one role played by another policy."""

from __future__ import annotations

from pathlib import Path

import click

from agentrl.cli import ResumedCommand, print_result
from agentrl.config import load


@click.command(cls=ResumedCommand, continues="with the games that are left")
@click.argument("run_file", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option("--role", "roles", multiple=True, help="Repeatable; default: each in turn.")
@click.option(
    "--with", "replacement", type=click.Path(path_type=Path), help="Replace by this checkpoint."
)
@click.option("--fresh", is_flag=True, help="Play all games again.")
@click.option("--json", "plain", is_flag=True, help="JSON instead of a table.")
def ablate(
    run_file: Path,
    overrides: tuple[str, ...],
    roles: tuple[str, ...],
    replacement: Path | None,
    fresh: bool,
    plain: bool,
) -> None:
    """Score RUN_FILE's team with one role played by its untrained policy."""
    from agentrl.evaluation.plans.play import as_json
    from agentrl.teams import ablation

    rows = ablation.ablate(load(run_file, overrides), roles, replacement, fresh=fresh)
    print_result(as_json(rows) if plain else ablation.table(rows))
