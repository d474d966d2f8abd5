"""`agentrl crossplay`: play checkpoints of a policy against each other, in every seat.

A pair of players has one lineup per seat, in which the first player has this seat and the second
all others. So both play every seat equally often, on the same tasks. In a game with two seats the
pairs (a, b) and (b, a) have the same lineups, which are played once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice, permutations
from math import ceil, isfinite
from pathlib import Path

from rich.table import Table

from agentrl.algorithms.selfplay.ratings import fit_ratings, game_score, returns
from agentrl.checkpoints import saved as evaluation
from agentrl.config import RunConfig
from agentrl.config.policies import FrozenPolicy, Seats, self_playing_policy
from agentrl.errors import AgentRLError, ConfigError
from agentrl.evaluation.plans import play
from agentrl.evaluation.plans.plan import EvaluationPlan
from agentrl.evaluation.plans.play import LineupRollouts
from agentrl.types import Json, Rollout


@dataclass(frozen=True, slots=True)
class Matchup:
    """The result of the row's player against the column's, over all seats."""

    games: int  # games with a known return
    missing: int  # games without
    mean: float  # mean return
    error: float  # standard error of the mean
    score: float  # sum over games: 1 for a win, 1/2 for a draw


@dataclass(frozen=True, slots=True)
class PayoffMatrix:
    """Every player against every other; None on the diagonal."""

    players: list[str]
    meetings: list[list[Matchup | None]]
    ratings: list[float]  # Elo, with mean 0


def crossplay(
    config: RunConfig,
    paths: Sequence[Path],
    *,
    every: int = 0,
    games: int = 20,
    fresh: bool = False,
) -> PayoffMatrix:
    """Play checkpoints against each other: those at `paths`, or the run's checkpoints and the
    snapshots of its pool at every `every` steps (0: all on disk).

    games: per pair; fresh: play all games again. Raises ConfigError for fewer than two players."""
    roles = config.selfplay.seats
    if not roles:
        raise ConfigError(
            "selfplay.seats is empty: name the roles of the agent that play against each other, "
            "such as selfplay.seats = ['player_0', 'player_1']"
        )
    players = chosen_players(config, paths, every)
    # The checkpoint for policies that are not compared: the run's last one on disk, else the last
    # given one.
    last = (evaluation.checkpoints_of(config) or [evaluation.checkpoint_at(paths[-1])])[-1]
    tasks = [without_scripts(task, roles) for task in play.tasks_of(config)]
    plan = EvaluationPlan(
        players=players,
        lineups=schedule(list(players), roles),
        tasks=list(islice(cycle(tasks), ceil(games / len(roles)))),
        temperature=config.sampling.temperature,
        steps=last.steps,
    )
    played = play.run_plan(config, last, plan, "crossplay", fresh=fresh)
    return matrix(list(players), roles, played)


def without_scripts(task: dict[str, Json], roles: Sequence[str]) -> dict[str, Json]:
    """The task of a game (`GameTask`) with models in all seats: held-out tasks may have scripted
    players in some, but here checkpoints play each other."""
    game = task["input"]
    if not (isinstance(game, dict) and "game" in game and isinstance(game.get("players"), dict)):
        return task
    players = {role: kind for role, kind in game["players"].items() if role not in roles}
    return {**task, "input": {**game, "players": players}}


def chosen_players(
    config: RunConfig, paths: Sequence[Path], every: int = 0
) -> dict[str, FrozenPolicy]:
    """The players to compare by their served names, oldest first. Raises ConfigError for fewer than
    two."""
    if paths and every:
        raise ConfigError("--every chooses from the run's checkpoints: give --every or checkpoints")
    policy = self_playing_policy(config)
    own = evaluation.checkpoints_of(config)
    checkpoints = [evaluation.checkpoint_at(path) for path in paths] if paths else own
    found = [play.frozen_policy(config, checkpoint, policy) for checkpoint in checkpoints]
    if len(dict(found)) < len(found):
        raise ConfigError("two checkpoints have the same name: give each only once")
    if not paths:
        saved = {player.steps for _, player in found}
        pool = (one for one in pool_players(config, policy) if one[1].steps not in saved)
        found = sorted([*found, *pool], key=lambda one: (one[1].steps, one[0]))
        found = [one for one in found if not every or one[1].steps % every == 0]
    if not (paths or own):
        raise ConfigError(f"{config.output} has no checkpoint yet; train it: agentrl train")
    if len(found) < 2:
        kept = "" if paths else f"; the run keeps keep_checkpoints = {config.keep_checkpoints}"
        raise ConfigError(
            f"cross-play needs at least two checkpoints, and there is {len(found)}{kept}"
        )
    return dict(found)


def pool_players(config: RunConfig, policy: str) -> Iterator[tuple[str, FrozenPolicy]]:
    """The snapshots of a policy that are in the run's pool on disk."""
    for folder in Path(config.output, "pool").glob(f"{policy}@*"):
        steps = folder.name.partition("@")[2]
        if steps.isdecimal() and folder.is_dir():
            yield folder.name, FrozenPolicy(policy, str(folder.resolve()), int(steps))


def schedule(players: Sequence[str], roles: Sequence[str]) -> dict[str, Seats]:
    """Name -> lineup, for all pairs without duplicates."""
    pairs = permutations(players, 2)
    return dict(lineup(row, column, role, roles) for row, column in pairs for role in roles)


def lineup(player: str, other: str, role: str, roles: Sequence[str]) -> tuple[str, Seats]:
    """Name and seats of a lineup with one player in a seat and the other in all others."""
    seats = {each: player if each == role else other for each in roles}
    return ",".join(f"{role}={player}" for role, player in seats.items()), seats


def matrix(players: list[str], roles: Sequence[str], played: LineupRollouts) -> PayoffMatrix:
    """The payoff matrix of games. Raises AgentRLError if none has a return for every seat."""
    meetings: list[list[Matchup | None]] = [[None] * len(players) for _ in players]
    for row, column in permutations(range(len(players)), 2):
        pair = players[row], players[column]
        names = {role: lineup(*pair, role, roles)[0] for role in roles}
        games = [(role, rollout) for role, name in names.items() for rollout in played[name]]
        meetings[row][column] = matchup(games, roles)
    if not any(cell and cell.games for row in meetings for cell in row):
        raise AgentRLError(
            f"no game gave a return to every seat ({', '.join(roles)}): the verifier must return "
            "one for each, as Reward(value, scope='role', target=ROLE)"
        )
    scores = [[cell.score if cell else 0.0 for cell in row] for row in meetings]
    counts = [[float(cell.games) if cell else 0.0 for cell in row] for row in meetings]
    return PayoffMatrix(players, meetings, fit_ratings(scores, counts))


def matchup(games: Sequence[tuple[str, Rollout]], roles: Sequence[str]) -> Matchup:
    """The result of (seat of the row's player, game) pairs."""
    values, score = [], 0.0
    for role, rollout in games:
        got = returns(rollout, roles)
        if got is None:
            continue
        values.append(got[role])
        score += game_score(got, role, roles)
    mean, error = play.mean_and_error(values)
    return Matchup(len(values), len(games) - len(values), mean, error, score)


def table(found: PayoffMatrix) -> Table:
    """A table of mean returns with their standard errors, and of the ratings of the rows."""
    shown = Table("", *found.players, "Elo", title="return of the row against the column")
    shown.title_justify = "left"
    for name, row, rating in zip(found.players, found.meetings, found.ratings, strict=True):
        shown.add_row(name, *map(_cell, row), f"{rating:+.0f}")
    return shown


def as_json(found: PayoffMatrix) -> str:
    cells = [
        {"row": row, "column": column, **asdict(cell)}
        for row, cells in zip(found.players, found.meetings, strict=True)
        for column, cell in zip(found.players, cells, strict=True)
        if cell is not None
    ]
    elo = dict(zip(found.players, found.ratings, strict=True))
    return play.as_json({"players": found.players, "elo": elo, "meetings": cells})


def _cell(cell: Matchup | None) -> str:
    if cell is None:
        return "-"
    if not cell.games:
        return "no game"
    error = f" ± {cell.error:.3f}" if isfinite(cell.error) else ""
    return f"{cell.mean:+.3f}{error} ({cell.games})"
