"""`agentrl crossplay`: checkpoints of a policy against each other."""

from __future__ import annotations

from pathlib import Path

import click

from agentrl.cli import ResumedCommand, print_result
from agentrl.config import load


@click.command(cls=ResumedCommand, continues="with the games that are left")
@click.argument("run_file", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option("--checkpoints", multiple=True, type=click.Path(path_type=Path), help="Repeatable.")
@click.option("--every", type=click.IntRange(1), help="Only the run's checkpoints every N steps.")
@click.option("--games", type=click.IntRange(1), default=20, help="Games per pair.")
@click.option("--fresh", is_flag=True, help="Play all games again.")
@click.option("--json", "plain", is_flag=True, help="JSON instead of a table.")
def crossplay(
    run_file: Path,
    overrides: tuple[str, ...],
    checkpoints: tuple[Path, ...],
    every: int | None,
    games: int,
    fresh: bool,
    plain: bool,
) -> None:
    """Play checkpoints of RUN_FILE's policy against each other: by default all on disk and the
    snapshots of its pool, so the first against the last, too.

    Prints the mean return of each pair, with seats swapped, and Elo ratings."""
    from agentrl.algorithms.selfplay import crossplay as commands

    config = load(run_file, overrides)
    found = commands.crossplay(config, checkpoints, every=every or 0, games=games, fresh=fresh)
    print_result(commands.as_json(found) if plain else commands.table(found))
