"""Self-play: a policy plays against itself or a pool of its snapshots, and is rated.

Owns the pool, a part of the run's state: snapshots of one policy, its scores against each of them
by seat, and Elo ratings. Changes once per trained step. Always true: the policy in each seat is a
function of seed, group, index and the pool at the time of the request; all rollouts of a group have
the same opponent, in every seat but the learner's, and the learner plays each seat equally often,
so rewards of one seat are compared under equal conditions. `snapshots` saves and serves the
weights.

A score is 1 if the learner's return is above the mean of the other seats' returns, 1/2 if it is
equal, which also covers general-sum games.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

import msgspec

from agentrl.algorithms.credit.core import GroupRelative, Whiten
from agentrl.algorithms.credit.records import nested_records
from agentrl.algorithms.credit.running_means import Ema
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.selfplay.ratings import elo, game_score, priorities, returns, win_rate
from agentrl.config.learning import PfspOpponents, SelfplayConfig, SnapshotOpponents
from agentrl.errors import ConfigError, TrainingError, nearest
from agentrl.types import Group, Json, Rollout, RolloutState, Scope

SELFPLAY = "selfplay"  # name of the pool in the state of the run
FIRST = 1000.0  # Elo rating of the initial policy
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
        other = self.opponent(group)
        learner = roles[index % len(roles)]
        return {role: self.policy if role == learner else other for role in roles}

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
            weights = priorities([snapshot.rate() for snapshot in snapshots], settings.pfsp)
        return rng.choices(snapshots, weights)[0].name

    def record_games(self, groups: Sequence[Group]) -> dict[str, float]:
        """Record the results of a step's games; returns metrics. Raises TrainingError for a seat
        that the games do not have."""
        every = (rollout for group in groups for rollout in group.rollouts)
        rollouts = [rollout for rollout in every if rollout.branch is None]
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
        own = [role for role in roles if rollout.seats.get(role, self.policy) == self.policy]
        others = {rollout.seats[role] for role in roles if role not in own}
        scores = {role: game_score(by_role, role, roles) for role in own}
        return ScoredGame(others.pop() if others else self.policy, scores)

    def game_metrics(self, games: Sequence[ScoredGame], unscored: int) -> dict[str, float]:
        """Metrics of one step's games and of the pool."""
        metrics = {"selfplay/games": float(len(games)), "selfplay/unscored": float(unscored)}
        if every := [score for game in games for score in game.scores.values()]:
            metrics["selfplay/draws"] = fmean(score == 0.5 for score in every)
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
        assert isinstance(self.settings, SnapshotOpponents)  # other kinds have no snapshots
        for seat, score in game.scores.items():
            snapshot.records.setdefault(seat, SeatRecord()).add(score)
            mine, theirs = self.now.rating, snapshot.rating
            self.now.rating = elo(mine, theirs, score, self.settings.elo_k)
            snapshot.rating = elo(theirs, mine, 1 - score, self.settings.elo_k)

    def _check_seats(self, rollouts: Sequence[Rollout]) -> None:
        """Raise TrainingError for a seat that was never played. A role without a call counts if it
        has a reward: it may have lost before its first move."""
        done = [rollout for rollout in rollouts if rollout.state is RolloutState.SUCCEEDED]
        rows = (row for rollout in done for row in rollout.rewards)
        self.seen.update(row.target for row in rows if row.scope is Scope.ROLE and row.target)
        self.seen.update(call.role for rollout in done for call in rollout.transitions)
        for role in self.settings.seats:
            if self.seen and role not in self.seen:
                raise TrainingError(
                    f"selfplay.seats: nobody played {role!r} in any of {len(done)} games, whose "
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
    """Raise ConfigError for an algorithm that compares the returns of different seats, of which the
    one that moves first may win more often with any player, or that adds up what all seats earn."""
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
        else:  # later rewards of a rollout, whoever received them
            reward = getattr(part, "reward", None)
            alone, fair = False, not (isinstance(reward, str) and reward.startswith("role:"))
        if not (alone or fair):
            raise ConfigError(
                f"algorithm.preset = {algo.name!r} compares the seats of a game with each other, "
                "or adds up what they earn; choose spiral, or grpo+per-role with "
                "algorithm.options.reward = 'role:outcome'"
            )
