"""`agentrl crossplay`: checkpoints of a policy against each other, in every seat.

Of two players one has a seat and the other all the rest; for each seat this is one lineup, so both
play every seat equally often, on the same tasks. In a game of two seats the lineups of a pair are
those of the pair the other way round, and are played once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from pathlib import Path

from rich.table import Table

from agentrl.algorithms.sampling.ratings import fit_ratings
from agentrl.config import RunConfig, selfplay
from agentrl.config.evaluation_plan import EvaluationPlan, FrozenPolicy, Seats
from agentrl.errors import AgentRLError, ConfigError
from agentrl.evaluation import core as evaluation
from agentrl.evaluation.core import Played, SavedCheckpoint
from agentrl.types import Json, Rollout


@dataclass(frozen=True, slots=True)
class Matchup:
    """The returns of the row's player in games against the column's, over all seats."""

    games: int  # with a known return
    missing: int
    mean: float  # return
    error: float  # its standard error
    score: float  # 1 for each game won, 1/2 for each drawn


@dataclass(frozen=True, slots=True)
class PayoffMatrix:
    """Every player against every other. The diagonal is None."""

    players: list[str]
    meetings: list[list[Matchup | None]]
    ratings: list[float]  # Elo, of mean 0


def crossplay(
    config: RunConfig,
    paths: Sequence[Path],
    *,
    every: int = 0,
    games: int = 20,
    fresh: bool = False,
) -> PayoffMatrix:
    """Play the checkpoints at `paths`, or every `every` steps those of the run (0: all on disk),
    against each other.

    games: of each player against each other; fresh: play again what has been played. Raises
    ConfigError for what cannot be played."""
    roles = config.selfplay.seats
    if not roles:
        raise ConfigError(
            "selfplay.seats is empty: nobody knows which roles of the agent play against each "
            "other; name them, such as selfplay.seats = ['player_0', 'player_1']"
        )
    chosen = chosen_checkpoints(config, paths, every)
    policy = selfplay.learning_policy(config)
    found = [evaluation.frozen_policy(config, checkpoint, policy) for checkpoint in chosen]
    players = dict(found)
    if len(players) < len(found):
        raise ConfigError("two of the checkpoints have one name: give each only once")
    lineups = schedule(list(players), roles)
    last = _own_checkpoint(config, chosen)
    plan = EvaluationPlan(
        players=players,
        lineups=lineups,
        tasks=_dealt(config, ceil(games / len(roles))),
        temperature=config.sampling.temperature,
        steps=last.steps,
    )
    played = evaluation.run_plan(config, last, plan, "crossplay", fresh=fresh)
    return matrix(players, roles, lineups, played)


def chosen_checkpoints(
    config: RunConfig, paths: Sequence[Path], every: int = 0
) -> list[SavedCheckpoint]:
    """Raises ConfigError for fewer than two."""
    if paths and every:
        raise ConfigError("--every chooses from the run's checkpoints: give it, or checkpoints")
    if paths:
        found = [evaluation.checkpoint_at(path) for path in paths]
    else:
        found = evaluation.checkpoints_of(config)
        found = [made for made in found if not every or made.steps % every == 0]
    if len(found) < 2:
        kept = "" if paths else f"; the run keeps keep_checkpoints = {config.keep_checkpoints}"
        raise ConfigError(
            f"cross-play is between two checkpoints or more, and there is {len(found)}{kept}"
        )
    return found


def schedule(players: Sequence[str], roles: Sequence[str]) -> dict[str, Seats]:
    """The lineups of all pairs, by name; each once."""
    found: dict[str, Seats] = {}
    for row, column in _pairs(players):
        for role in roles:
            seats = seats_of(row, column, role, roles)
            found[lineup_name(seats)] = seats
    return found


def seats_of(player: str, other: str, role: str, roles: Sequence[str]) -> Seats:
    """One player in a seat, the other in the rest."""
    return {each: player if each == role else other for each in roles}


def lineup_name(seats: Mapping[str, str]) -> str:
    return ",".join(f"{role}={player}" for role, player in seats.items())


def matrix(
    players: Mapping[str, FrozenPolicy],
    roles: Sequence[str],
    lineups: Mapping[str, Seats],
    played: Played,
) -> PayoffMatrix:
    """Raises AgentRLError where no game has a return for every seat."""
    names = list(players)
    meetings: list[list[Matchup | None]] = [[None] * len(names) for _ in names]
    for row, column in _pairs(names):
        games = [
            (role, rollout)
            for role in roles
            for rollout in played[lineup_name(seats_of(row, column, role, roles))]
        ]
        meetings[names.index(row)][names.index(column)] = matchup(games, roles)
    if not any(cell and cell.games for row in meetings for cell in row):
        raise AgentRLError(
            f"no game gave a return to every seat ({', '.join(roles)}): the verifier gives one to "
            "each, as Reward(value, scope='role', target=ROLE)"
        )
    scores = [[cell.score if cell else 0.0 for cell in row] for row in meetings]
    counts = [[float(cell.games) if cell else 0.0 for cell in row] for row in meetings]
    return PayoffMatrix(names, meetings, fit_ratings(scores, counts))


def matchup(games: Sequence[tuple[str, Rollout]], roles: Sequence[str]) -> Matchup:
    """The result of games, each given with the seat of the row's player."""
    values, score = [], 0.0
    for role, rollout in games:
        got = selfplay.returns(rollout, roles)
        if got is None:
            continue
        values.append(got[role])
        score += selfplay.game_score(got, role, roles)
    mean, error = evaluation.mean_and_error(values)
    return Matchup(len(values), len(games) - len(values), mean, error, score)


def table(found: PayoffMatrix) -> Table:
    """The matrix as a table: mean return with its standard error, and the row's rating."""
    shown = Table("", *found.players, "Elo", title="return of the row against the column")
    shown.title_justify = "left"
    for name, row, rating in zip(found.players, found.meetings, found.ratings, strict=True):
        shown.add_row(name, *map(_cell, row), f"{rating:+.0f}")
    return shown


def as_json(found: PayoffMatrix) -> str:
    cells: Json = [
        {"row": row, "column": column, **_fields(cell)}
        for row, cells in zip(found.players, found.meetings, strict=True)
        for column, cell in zip(found.players, cells, strict=True)
        if cell is not None
    ]
    elo = dict(zip(found.players, found.ratings, strict=True))
    return evaluation.as_json({"players": found.players, "elo": elo, "meetings": cells})


def _fields(cell: Matchup) -> dict[str, Json]:
    return {name: getattr(cell, name) for name in Matchup.__slots__}


def _cell(cell: Matchup | None) -> str:
    if cell is None:
        return "-"
    if not cell.games:
        return "no game"
    error = f" ± {cell.error:.3f}" if isfinite(cell.error) else ""
    return f"{cell.mean:+.3f}{error} ({cell.games})"


def _pairs(players: Sequence[str]) -> Iterator[tuple[str, str]]:
    return ((row, column) for row in players for column in players if row != column)


def _dealt(config: RunConfig, games: int) -> list[dict[str, Json]]:
    tasks = evaluation.tasks_of(config)
    return [tasks[number % len(tasks)] for number in range(games)]


def _own_checkpoint(config: RunConfig, chosen: Sequence[SavedCheckpoint]) -> SavedCheckpoint:
    """The checkpoint of the policies that are not compared: the run's last one or, if none is on
    disk, the last that was named."""
    return (evaluation.checkpoints_of(config) or list(chosen))[-1]
