"""Games between frozen policies: `agentrl eval --crossplay` and `agentrl eval --ablate`.

`--crossplay` plays checkpoints of a policy against each other in every seat. A pair of players has
one lineup per seat, in which the first player has this seat and the second all others, so both play
every seat equally often, on the same tasks. In a game with two seats the pairs (a, b) and (b, a)
have the same lineups, which are played once.

`--ablate` measures what the training of each role contributes to a team's score. In each lineup,
one role is played by its untrained policy, or by its policy in another checkpoint. All lineups play
the same held-out tasks, so the differences are paired by task.

The games of a plan are a run without steps, in a folder beside the evaluated run. Its name has a
hash of everything that affects the games, so the same command finds finished games, also after
`kill -9`, and plays the rest; other weights or settings make another run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import cycle, islice, permutations
from math import ceil, isfinite, sqrt
from pathlib import Path
from statistics import fmean, stdev

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from agentrl import trainer
from agentrl.algorithms.ratings import fit_ratings, game_score, returns
from agentrl.algorithms.sampling import evaluate
from agentrl.algorithms.sampling.tasks import evaluation_rollouts
from agentrl.core import files
from agentrl.core.config import RunConfig, derived
from agentrl.core.config.derived import FrozenPolicy, Seats, initial_version, self_playing_policy
from agentrl.core.config.run_file import tasks_of as tasks_of_split
from agentrl.core.errors import AgentRLError, ConfigError, nearest
from agentrl.core.files import make_folder
from agentrl.core.processes import PHASE, run_blocking
from agentrl.core.types import (
    POLICY,
    Json,
    Purpose,
    Rollout,
    RolloutState,
    are_shares,
    gain_text,
    score_text,
)
from agentrl.evaluation import check_any_succeeded, evaluation_run, last_checkpoint
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.trainer import SavedCheckpoint


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
    level: int = PHASE,
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
    last = (trainer.checkpoints_of(config) or [trainer.checkpoint_at(paths[-1])])[-1]
    tasks = [without_scripts(task, roles) for task in tasks_of(config)]
    plan = EvaluationPlan(
        players=players,
        lineups=schedule(list(players), roles),
        tasks=list(islice(cycle(tasks), ceil(games / len(roles)))),
        temperature=config.sampling.temperature,
        steps=last.steps,
    )
    played = run_plan(config, last, plan, "crossplay", fresh=fresh, level=level)
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
    own = trainer.checkpoints_of(config)
    checkpoints = [trainer.checkpoint_at(path) for path in paths] if paths else own
    found = [frozen_policy(config, checkpoint, policy) for checkpoint in checkpoints]
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
    mean, error = mean_and_error(values)
    return Matchup(len(values), len(games) - len(values), mean, error, score)


def matrix_table(found: PayoffMatrix) -> Table:
    """A table of mean returns with their standard errors, and of the ratings of the rows."""
    shown = Table("", *found.players, "Elo", title="return of the row against the column")
    shown.title_justify = "left"
    for name, row, rating in zip(found.players, found.meetings, found.ratings, strict=True):
        shown.add_row(name, *map(_cell, row), f"{rating:+.0f}")
    return shown


def matrix_json(found: PayoffMatrix) -> str:
    cells = [
        {"row": row, "column": column, **asdict(cell)}
        for row, cells in zip(found.players, found.meetings, strict=True)
        for column, cell in zip(found.players, cells, strict=True)
        if cell is not None
    ]
    elo = dict(zip(found.players, found.ratings, strict=True))
    return _formatted_json({"players": found.players, "elo": elo, "meetings": cells})


def _cell(cell: Matchup | None) -> str:
    if cell is None:
        return "-"
    if not cell.games:
        return "no game"
    error = f" ± {cell.error:.3f}" if isfinite(cell.error) else ""
    return f"{cell.mean:+.3f}{error} ({cell.games})"


TEAM = "team"  # the lineup without a replacement


@dataclass(frozen=True, slots=True)
class AblationRow:
    """Mean outcomes of the team with and without the training of one role."""

    role: str
    player: str  # the policy that replaces the role's
    team: float
    without: float
    loss: float  # mean of team minus without, over the tasks with both outcomes
    error: float  # standard error of the loss
    pairs: int  # tasks with both outcomes
    share: bool = True  # whether outcomes are shown as percentages


def ablate(
    config: RunConfig,
    roles: Sequence[str],
    replacement: Path | None,
    *,
    fresh: bool = False,
    level: int = PHASE,
) -> list[AblationRow]:
    """Score the team of the run's last checkpoint with and without the training of each role, by
    default of all roles of trained policies. fresh: play all games again.

    Raises ConfigError for a role that no policy plays, or a checkpoint without its policy."""
    known = trained_roles(config)
    for role in roles:
        if config.policies and role not in known:
            raise ConfigError(
                f"--ablate {role}: no trained policy plays it; {nearest(role, known)}"
            )
    only = derived.trained_policies(config)[0]  # plays roles that the run file does not name
    wanted = {role: known.get(role, only) for role in roles or known}
    if not wanted:
        raise ConfigError(
            "the run file names no role that the policy plays: name one, such as --ablate agent"
        )
    last = trainer.checkpoint_at(last_checkpoint(config))
    other = trainer.checkpoint_at(replacement) if replacement else None
    found = {
        role: frozen_policy(config, other, policy) if other else initial_version(config, policy)
        for role, policy in wanted.items()
    }
    players = {role: name for role, (name, _) in found.items()}
    lineups: dict[str, Seats] = {TEAM: {}}
    lineups |= {f"{role}={name}": {role: name} for role, name in players.items()}
    plan = EvaluationPlan(
        players=dict(found.values()),
        lineups=lineups,
        tasks=tasks_of(config, config.eval.tasks),
        temperature=config.eval.temperature,
        steps=last.steps,
    )
    played = run_plan(config, last, plan, "ablation", fresh=fresh, level=level)
    return [
        ablation_row(role, name, played[TEAM], played[f"{role}={name}"])
        for role, name in players.items()
    ]


def trained_roles(config: RunConfig) -> dict[str, str]:
    """Role -> the trained policy that plays it."""
    trained = derived.trained_policies(config)
    roles = derived.policy_by_role(config)
    return {role: name for role, name in roles.items() if name in trained} or (
        {} if config.policies else dict.fromkeys(config.selfplay.seats, POLICY)
    )


def ablation_row(
    role: str, player: str, whole: Sequence[Rollout], without: Sequence[Rollout]
) -> AblationRow:
    """Compare rollouts with and without one role, on the same tasks in the same order."""
    scores, rest = outcomes(whole), outcomes(without)
    gaps = [a - b for a, b in zip(scores, rest, strict=True)]
    loss, error = mean_and_error(gaps)
    means = [mean_and_error(values)[0] for values in (scores, rest)]
    pairs, share = sum(map(isfinite, gaps)), are_shares((), [*scores, *rest])
    return AblationRow(role, player, means[0], means[1], loss, error, pairs, share)


def ablation_json(rows: Sequence[AblationRow]) -> str:
    return _formatted_json(rows)


def ablation_table(rows: Sequence[AblationRow]) -> Table:
    shown = Table("role", "played by", title="the team without what a role has learned")
    shown.title_justify = "left"
    share = all(one.share for one in rows)
    for column in ("team", "without", "loss", "tasks"):
        shown.add_column(column, justify="right")
    for one in rows:
        error = f" ± {gain_text(one.error, share).lstrip('+')}" if isfinite(one.error) else ""
        numbers = (score_text(x, share) for x in (one.team, one.without))
        loss = f"{gain_text(one.loss, share)}{error}"
        shown.add_row(one.role, one.player, *numbers, loss, str(one.pairs))
    return shown


PLAN = "plan.json"  # file in the folder of the run that plays the plan


class EvaluationPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lineups that each play the same tasks once, so two lineups differ only in their players."""

    players: dict[str, FrozenPolicy]
    lineups: dict[str, Seats]  # by name, which contains no slash
    tasks: list[dict[str, Json]]
    temperature: float
    steps: int  # training steps of the run's policies


GAMES = (
    "agent", "workspace", "verifier", "judges", "reward_models", "sampling", "policy", "policies",
    "upstreams", "roles", "role_rules", "prompts", "selfplay", "seed",
)  # fmt: skip

"""The settings that affect games."""

LineupRollouts = dict[str, list[Rollout]]  # by lineup, in the order of the tasks


def frozen_policy(
    config: RunConfig, checkpoint: SavedCheckpoint, policy: str
) -> tuple[str, FrozenPolicy]:
    """The served name and record of a policy in a checkpoint; the name of another run's policy
    contains the run's. Raises ConfigError if the checkpoint has no such policy."""
    directory = checkpoint.path / policy if config.policies else checkpoint.path
    if not any((directory / f).is_file() for f in ("config.json", "adapter_config.json")):
        raise ConfigError(
            f"{checkpoint.path}: the policy {policy!r} is not in it; give a checkpoint of a run "
            f"with {'these policies' if config.policies else 'one policy'}"
        )
    output = checkpoint.path.parent.parent
    who = policy if output == Path(config.output).resolve() else f"{output.name}-{policy}"
    name = f"{who}@{checkpoint.path.name}".replace(".", "-")  # adapters' names have no dots
    return name, FrozenPolicy(policy=policy, directory=str(directory), steps=checkpoint.steps)


def tasks_of(config: RunConfig, limit: int = 0) -> list[dict[str, Json]]:
    """The first `limit` (0: all) held-out tasks or, without any, training tasks."""
    key = "heldout" if config.tasks.heldout else "train"
    if not getattr(config.tasks, key):
        raise ConfigError("tasks.heldout is missing: there is nothing to play")
    tasks = tasks_of_split(config, key)
    return tasks[: limit or None]


def run_plan(
    config: RunConfig,
    checkpoint: SavedCheckpoint,
    plan: EvaluationPlan,
    kind: str,
    *,
    fresh: bool = False,
    level: int = PHASE,
) -> LineupRollouts:
    """Play a plan and return its games by lineup. config: the trained run; checkpoint: of the
    policies that are not players of the plan; fresh: play all games again. Raises AgentRLError if
    every game failed or a role made no call."""
    own = plan_run(config, checkpoint, plan, kind)
    trainer.check(own)
    if fresh:
        trainer.clear(own)
    read = {Path(one.directory) for one in plan.players.values() if one.directory}
    read = {folder.parent if config.policies else folder for folder in read}
    with files.reading(*(folder for folder in read | {checkpoint.path} if folder.is_dir())):
        return run_blocking(played(own, plan, level))


def plan_run(
    config: RunConfig, checkpoint: SavedCheckpoint, plan: EvaluationPlan, kind: str
) -> RunConfig:
    """The settings of the evaluation run."""
    settings = [getattr(config, key) for key in GAMES]
    directories = [str(checkpoint.path), *(one.directory for one in plan.players.values())]
    # The newest modification time (ns) tells apart weights that another run wrote to the same path.
    # 0: a hub name.
    weights = [
        (name, max((file.stat().st_mtime_ns for file in Path(name).rglob("*")), default=0))
        for name in directories
        if name
    ]
    about = msgspec.json.encode([plan, weights, settings])
    name = f"{config.name}-{kind}-{sha256(about).hexdigest()[:8]}"
    return msgspec.structs.replace(
        evaluation_run(config, name, checkpoint.path),
        tasks=msgspec.structs.replace(
            config.tasks, heldout=config.tasks.heldout or config.tasks.train
        ),
    )


async def played(config: RunConfig, plan: EvaluationPlan, level: int = PHASE) -> LineupRollouts:
    output = make_folder(Path(config.output))
    async with open_store(config.store) as store:
        found = await ended(store, config, plan)
        if found is None:
            (output / PLAN).write_bytes(msgspec.json.encode(plan))
            console = Console(stderr=True)  # stdout is for the result
            await trainer.supervise(
                store, config, process="plan", alone=True, console=console, level=level
            )
            found = await ended(store, config, plan)
        if found is None:
            raise AgentRLError(f"{output}: games are missing; rerun the command")
        for name, seats in plan.lineups.items():
            await check_heard(store, name, found[name], seats)
    return found


async def ended(store: Store, config: RunConfig, plan: EvaluationPlan) -> LineupRollouts | None:
    """The games of each lineup, if all have ended."""
    found: LineupRollouts = {name: [] for name in plan.lineups}
    if await store.run(config.name) is None:
        return None
    for row in await store.rollouts(config.name, purpose=Purpose.EVAL):
        if row.state.terminal:
            found[row.group.rpartition("/")[2]].append(row)
    if any(len(rows) < len(plan.tasks) for rows in found.values()):
        return None
    return {name: sorted(rows, key=lambda row: row.index) for name, rows in found.items()}


async def check_heard(
    store: Store, lineup: str, rows: Sequence[Rollout], seats: Mapping[str, str]
) -> None:
    """Raises ConfigError for a role without a call in any game, which is probably misspelled."""
    silent = set(seats)
    for row in rows:
        if not silent:
            return
        trace = await store.trace(row.id)
        silent.difference_update(call.role for call in (trace.transitions if trace else ()))
    if silent:
        check_any_succeeded(rows, lineup, " with --fresh")
        raise ConfigError(
            f"no model plays the role {sorted(silent)[0]!r} in {lineup}: no call of the agent has "
            "this role. If the tasks seat an opponent of their own there, name others with "
            "tasks.heldout=FILE; else use the roles of its calls (agentrl.role, graph nodes or "
            "model names). Then rerun the command with --fresh"
        )


def outcomes(rows: Iterable[Rollout]) -> list[float]:
    """The outcome of each game; NaN if missing."""
    return [row.reward() if row.state is RolloutState.SUCCEEDED else float("nan") for row in rows]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error of the finite values; NaN if there are too few."""
    known = [value for value in values if isfinite(value)]
    mean = fmean(known) if known else float("nan")
    error = stdev(known) / sqrt(len(known)) if len(known) > 1 else float("nan")
    return mean, error


def _formatted_json(value: object) -> str:
    """Formatted JSON, with null for NaN."""
    return msgspec.json.format(msgspec.json.encode(value)).decode()


def main(config: RunConfig) -> None:
    """Play the plan in the run's folder."""
    file = Path(config.output, PLAN)
    plan = msgspec.json.decode(file.read_bytes(), type=EvaluationPlan)
    asyncio.run(play_plan(config, plan))


async def play_plan(config: RunConfig, plan: EvaluationPlan) -> None:
    """Serve the run's policies and the players, and roll out every task with every lineup. Rollouts
    that have ended do not run again.

    Raises PolicyError for a player that cannot be served."""
    from agentrl.algorithms.train.stages import served

    async with served(config, plan.steps, plan.players) as (store, _):
        sampling = replace(config.sampling, temperature=plan.temperature)
        requested = {
            name: evaluation_rollouts(config, 0, name, plan.tasks, sampling, seats)
            for name, seats in plan.lineups.items()
        }
        await evaluate.play(store, requested)
