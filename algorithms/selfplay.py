"""Self-play: a policy plays against itself or a pool of its snapshots, and is rated.

Owns the pool, a part of the run's state: snapshots of one policy, its scores against each of them
by seat, and Elo ratings. Changes once per trained step. Invariant: the policy in each seat is a
function of seed, group, index and the pool at the time of the request; all rollouts of a group have
the same opponent, in every seat but the learner's, and the learner plays each seat equally often,
so rewards of one seat are compared under equal conditions.

Owns the directories `<output>/pool/NAME@STEPS` of served snapshots: a Hugging Face model or an
adapter, without optimizer state. Invariant: a directory is complete once it exists; it is written
before the commit that adds its snapshot to the pool, and deleted after the first checkpoint without
it, from which a killed run continues.

A score is 1 if the learner's return is above the mean of the other seats' returns, 1/2 if it is
equal, which also covers general-sum games.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import msgspec

from agentrl.algorithms.credit.calls import Ema
from agentrl.algorithms.credit.core import GroupRelative, Whiten, nested_records
from agentrl.algorithms.learners.base import Learner
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.ratings import elo, game_score, priorities, returns, win_rate
from agentrl.algorithms.train.checkpoint import parse_name, save_policy
from agentrl.algorithms.train.features import Feature, LoadedRun, ServedRun
from agentrl.algorithms.train.metrics import Metrics
from agentrl.algorithms.train.serving import PolicyServers
from agentrl.core.config import RunConfig
from agentrl.core.config.derived import self_playing_policy
from agentrl.core.config.learning import PfspOpponents, SelfplayConfig, SnapshotOpponents
from agentrl.core.errors import ConfigError, PolicyError, TrainingError, nearest
from agentrl.core.files import PARTIAL, delete_directory
from agentrl.core.types import Group, Json, Rollout, RolloutState, Scope, StepReward
from agentrl.store.base import Store

log = logging.getLogger("agentrl.algorithm")


@dataclass(frozen=True, slots=True)
class SnapshotStore:
    """Saves and serves the snapshots of a pool. learner: of the pool's policy; run: the name of the
    run."""

    pool: OpponentPool
    learner: Learner
    serving: PolicyServers
    store: Store
    run: str
    folder: Path
    served: set[str] = field(default_factory=set)
    dropped: dict[str, int] = field(default_factory=dict)  # steps at which, by name, until deleted

    async def start(self, steps: int) -> None:
        """Serve the pool at the start of the process, after `steps` steps; adds a first snapshot to
        an empty pool, and cancels games against snapshots of steps that were rolled back. Raises
        PolicyError for a snapshot that is missing on disk."""
        if not self.pool.now.snapshots:
            await self.save_due(steps)
        pool_names = {snapshot.name for snapshot in self.pool.now.snapshots}
        lost = [
            row.id
            for row in await self._running()
            if any(
                name not in pool_names and name.startswith(f"{self.pool.policy}@")
                for name in row.seats.values()
            )
        ]
        if lost:
            log.warning("%d games against opponents that are no longer there: cancelled", len(lost))
            await self.store.cancel(lost)
        async with self.serving.updating():
            await self._serve()

    async def save_due(self, steps: int) -> None:
        """Save the snapshot that is due after `steps` steps, before the commit of the last step."""
        rows = await self._running() if self.pool.ahead else ()
        playing = {name for row in rows for name in row.seats.values()}
        snapshot = self.pool.finish(steps, playing)
        if snapshot is not None:
            save_policy(self.folder / snapshot.name, self.learner)

    async def serve_pool(self) -> None:
        """Serve exactly the snapshots of the pool and delete all others that no checkpoint needs.
        Call inside `updating` after a commit: only the run's owner can commit, so no other process
        deletes files."""
        before, run = {*self.served}, await self.store.run(self.run)
        assert run is not None
        await self._serve()
        self.dropped.update(dict.fromkeys(before - self.served, run.step))
        saved, _ = (run.checkpoint and parse_name(Path(run.checkpoint))) or (0, 0)
        needed = {name for name, steps in self.dropped.items() if steps > saved}
        for path in self.folder.iterdir():
            if path.name not in self.served | needed and (PARTIAL in path.name or "@" in path.name):
                self.dropped.pop(path.name, None)
                delete_directory(path)

    async def _running(self) -> list[Rollout]:
        """The rollouts that have not ended."""
        states = [state for state in RolloutState if not state.terminal]
        by_state = [await self.store.rollouts(self.run, state=state) for state in states]
        return [row for rows in by_state for row in rows]

    async def _serve(self) -> None:
        wanted = {snapshot.name: snapshot for snapshot in self.pool.now.snapshots}
        for name in sorted(self.served - wanted.keys()):
            await self.serving.drop(name)
            self.served.remove(name)
        for name in sorted(wanted.keys() - self.served):
            if not (self.folder / name).is_dir():
                raise PolicyError(
                    f"{self.folder / name}: the checkpoint has this opponent in its pool, and the "
                    "folder is missing; restore it, or start a new run"
                )
            await self.serving.freeze(name, self.folder / name, wanted[name].step)
            self.served.add(name)


SELFPLAY = "selfplay"  # name of the pool in the state of the run
FIRST = 1000.0  # Elo rating of the initial policy
ELO_K = 16.0  # K-factor: half of chess's for new players
MEMORY = 0.99  # decay of a result per later game, as in AlphaStar's payoffs, Nature 575


class SeatRecord(msgspec.Struct):
    """Decayed sums of games and scores of the learner in one seat against one snapshot."""

    games: float = 0.0
    score: float = 0.0

    def add(self, score: float) -> None:
        self.games = MEMORY * self.games + 1
        self.score = MEMORY * self.score + score


class Snapshot(msgspec.Struct):
    """The policy after `step` steps."""

    name: str
    step: int
    rating: float
    records: dict[str, SeatRecord] = {}  # the learner's results against it, by the learner's seat
    until: int | None = None  # retired, and served until this step; None: in use

    def rate(self) -> float:
        """The learner's smoothed win rate against it, mean over seats."""
        if not self.records:
            return win_rate(0.0, 0.0)
        return fmean(win_rate(record.score, record.games) for record in self.records.values())


class PoolState(msgspec.Struct):
    """The state of a pool in a checkpoint."""

    rating: float = FIRST
    snapshots: list[Snapshot] = []


class ScoredGame(NamedTuple):
    """The scores of one finished game."""

    opponent: str  # may be the learner itself
    scores: dict[str, float]  # by seats of the learner


@dataclass(slots=True)
class OpponentPool:
    """The opponents of `policy`. ahead: number of steps that rollouts may be prefetched. seen: the
    roles in all games since the process started."""

    settings: SelfplayConfig
    policy: str
    seed: int
    ahead: int = 0
    now: PoolState = field(default_factory=PoolState)
    seen: set[str] = field(default_factory=set)

    @property
    def drawn(self) -> list[Snapshot]:
        """The snapshots that may be drawn as opponents, oldest first."""
        return [snapshot for snapshot in self.now.snapshots if snapshot.until is None]

    def seats(self, group: str, index: int) -> dict[str, str]:
        """The policy in each seat, for rollout `index` of a group."""
        roles = self.settings.seats
        opponent = self.opponent(group)
        learner = roles[index % len(roles)]
        return {role: self.policy if role == learner else opponent for role in roles}

    def opponent(self, group: str) -> str:
        """The opponent in all rollouts of a group: a snapshot, or the policy itself."""
        rng = random.Random(f"{self.seed}/{group}/opponent")
        settings, snapshots = self.settings, self.drawn
        if not isinstance(settings, SnapshotOpponents) or not snapshots:
            return self.policy
        if rng.random() < settings.self_share:
            return self.policy
        if settings.opponents == "latest":
            return snapshots[-1].name
        weights = None
        if isinstance(settings, PfspOpponents):
            weights = priorities([snapshot.rate() for snapshot in snapshots])
        return rng.choices(snapshots, weights)[0].name

    def record_games(self, groups: Sequence[Group]) -> dict[str, float]:
        """Record the results of a step's games; returns metrics. Raises TrainingError for a seat
        that the games do not have."""
        all_rollouts = (rollout for group in groups for rollout in group.rollouts)
        rollouts = [rollout for rollout in all_rollouts if rollout.branch is None]
        self._check_seats(rollouts)
        scored = [game for rollout in rollouts if (game := self.game(rollout)) is not None]
        by_name = {snapshot.name: snapshot for snapshot in self.now.snapshots}
        for game in scored:
            if game.opponent in by_name:
                self._record(by_name[game.opponent], game)
        return self.game_metrics(scored, len(rollouts) - len(scored))

    def game(self, rollout: Rollout) -> ScoredGame | None:
        """The scores of a rollout; None if it failed or a seat has no return."""
        roles = self.settings.seats
        by_role = returns(rollout, roles)
        if by_role is None:
            return None
        learner_roles = [
            role for role in roles if rollout.seats.get(role, self.policy) == self.policy
        ]
        others = {rollout.seats[role] for role in roles if role not in learner_roles}
        scores = {role: game_score(by_role, role, roles) for role in learner_roles}
        return ScoredGame(others.pop() if others else self.policy, scores)

    def game_metrics(self, games: Sequence[ScoredGame], unscored: int) -> dict[str, float]:
        """Metrics of one step's games and of the pool."""
        metrics = {"selfplay/games": float(len(games)), "selfplay/unscored": float(unscored)}
        if all_scores := [score for game in games for score in game.scores.values()]:
            metrics["selfplay/draws"] = fmean(score == 0.5 for score in all_scores)
        met = [game for game in games if game.opponent != self.policy]
        if met:
            metrics["selfplay/win_rate"] = fmean(s for game in met for s in game.scores.values())
        for role in self.settings.seats:
            if scores := [game.scores[role] for game in met or games if role in game.scores]:
                metrics[f"selfplay/seat/{role}"] = fmean(scores)
        if self.settings.opponents != "self":
            metrics["selfplay/elo"] = self.now.rating
            metrics["selfplay/pool"] = float(len(self.drawn))
            metrics |= {f"selfplay/win_rate/{s.name}": s.rate() for s in self.drawn}
            metrics |= {f"selfplay/elo/{s.name}": s.rating for s in self.drawn}
        return metrics

    def finish(self, steps: int, playing: Collection[str] = ()) -> Snapshot | None:
        """Update the pool after `steps` steps; returns the new snapshot, if one is due, which must
        be saved before the commit that adds it to the pool. Drops retired snapshots that are not
        `playing`: a slow game may end many steps after its request."""
        before, settings = self.now.snapshots, self.settings
        due = {s.name for s in before if s.until is not None and s.until <= steps} - {*playing}
        self.now.snapshots = [s for s in before if s.name not in due]
        if not isinstance(settings, SnapshotOpponents) or (before and steps % settings.every):
            return None
        name = f"{self.policy}@{steps:06d}"
        self.now.snapshots.append(Snapshot(name, steps, self.now.rating))
        while len(self.drawn) > settings.pool:
            retired = most_redundant(self.drawn)
            retired.until = steps + self.ahead
            if not self.ahead:
                self.now.snapshots.remove(retired)
        return self.now.snapshots[-1]

    def dump(self) -> Json:
        state: Json = msgspec.to_builtins(self.now)
        return state

    def restore(self, data: Json) -> None:
        """Restore the result of `dump`. Raises msgspec.ValidationError for anything else."""
        self.now = msgspec.convert(data, PoolState)

    def _record(self, snapshot: Snapshot, game: ScoredGame) -> None:
        for seat, score in game.scores.items():
            snapshot.records.setdefault(seat, SeatRecord()).add(score)
            mine, theirs = self.now.rating, snapshot.rating
            self.now.rating = elo(mine, theirs, score, ELO_K)
            snapshot.rating = elo(theirs, mine, 1 - score, ELO_K)

    def _check_seats(self, rollouts: Sequence[Rollout]) -> None:
        """Raise TrainingError for a seat that was never played. A role without a call counts if it
        has a reward: it may have lost before its first move."""
        games = [rollout for rollout in rollouts if rollout.state is RolloutState.SUCCEEDED]
        rows = (row for rollout in games for row in rollout.rewards)
        self.seen.update(row.target for row in rows if row.scope is Scope.ROLE and row.target)
        self.seen.update(call.role for rollout in games for call in rollout.transitions)
        for role in self.settings.seats:
            if self.seen and role not in self.seen:
                raise TrainingError(
                    f"selfplay.seats: no model played {role!r} in any of {len(games)} games, whose "
                    f"roles are {', '.join(sorted(self.seen))}; {nearest(role, self.seen)}"
                )


def most_redundant(snapshots: Sequence[Snapshot]) -> Snapshot:
    """The snapshot to drop from a pool of two or more, oldest first, that leaves the steps most
    evenly covered. Keeps the newest, and the first of more than two."""
    if len(snapshots) == 2:
        return snapshots[0]
    gaps = [after.step - before.step for before, after in pairwise(snapshots)]
    wide = [before + after for before, after in pairwise(gaps)]
    return snapshots[1 + wide.index(min(wide))]


def check_seat_comparison(algo: Algo) -> None:
    """Raise ConfigError for an algorithm that compares the returns of different seats (the first
    mover may have an advantage with any player), or that sums the returns of all seats."""
    for part in nested_records(algo.credit):
        if isinstance(part, GroupRelative):
            alone = part.base == part.norm == "none"
            fair = "role" in part.by and "role" in (part.norm_by or part.by)
            if isinstance(part.base, Ema):
                fair = part.base.level != "rollout" and (part.norm == "none" or fair)
        elif isinstance(part, Whiten):
            alone, fair = False, "role" in part.by
        elif isinstance(part, Ema):
            continue
        else:  # the sum over later rewards of a rollout, of any role
            reward = getattr(part, "reward", None)
            alone, fair = False, not (isinstance(reward, str) and reward.startswith("role:"))
        if not (alone or fair):
            raise ConfigError(
                f"algorithm.preset = {algo.name!r} compares the seats of a game with each other, "
                "or adds up what they earn; choose spiral, or grpo+per-role with "
                "algorithm.options.reward = 'role:outcome'"
            )


class SelfPlay(Feature):
    """Games against itself or a pool of snapshots (`[selfplay]`)."""

    def __init__(self, config: RunConfig) -> None:
        self.settings, self.policy = config.selfplay, self_playing_policy(config)
        ahead = ceil(config.algorithm.max_staleness)
        self.pool = OpponentPool(self.settings, self.policy, config.seed, ahead=ahead)
        self.snapshots: SnapshotStore | None = None

    async def prepare(self, run: LoadedRun) -> None:
        if self.settings.opponents != "self":
            run.policies.state.parts[SELFPLAY] = self.pool

    async def start(self, run: ServedRun) -> None:
        if self.settings.opponents == "self":
            return
        learner, folder = run.policies.updaters[self.policy].learner, Path(run.config.output)
        self.snapshots = SnapshotStore(
            self.pool, learner, run.serving, run.store, run.config.name, folder / "pool"
        )
        await self.snapshots.start(run.state.step)

    def claimed(self, groups: Sequence[Group]) -> Metrics:
        return self.pool.record_games(groups)

    async def before_commit(self, steps: int) -> list[StepReward]:
        if self.snapshots is not None:
            await self.snapshots.save_due(steps)
        return []

    async def published(self) -> None:
        if self.snapshots is not None:
            await self.snapshots.serve_pool()
