"""`agentrl ablate`: the contribution of each role's training to a team's score.

In each lineup, one role is played by its untrained policy, or by its policy in another checkpoint.
All lineups play the same held-out tasks, so the differences are paired by task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from rich.table import Table

from agentrl.checkpoints import saved as evaluation
from agentrl.config import RunConfig
from agentrl.config import policies as team
from agentrl.config.policies import Seats, initial_version
from agentrl.errors import ConfigError, nearest
from agentrl.evaluation.checkpoint.runs import last_checkpoint
from agentrl.evaluation.plans import play
from agentrl.evaluation.plans.plan import EvaluationPlan
from agentrl.scores import are_shares, gain_text, score_text
from agentrl.types import POLICY, Rollout

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
    config: RunConfig, roles: Sequence[str], replacement: Path | None, *, fresh: bool = False
) -> list[AblationRow]:
    """Score the team of the run's last checkpoint with and without the training of each role, by
    default of all roles of trained policies. fresh: play all games again.

    Raises ConfigError for a role that no policy plays, or a checkpoint without its policy."""
    known = trained_roles(config)
    for role in roles:
        if config.policies and role not in known:
            raise ConfigError(f"--role {role}: no trained policy plays it; {nearest(role, known)}")
    only = team.trained_policies(config)[0]  # plays roles that the run file does not name
    wanted = {role: known.get(role, only) for role in roles or known}
    if not wanted:
        raise ConfigError(
            "the run file names no role that the policy plays: name one, such as --role agent"
        )
    last = evaluation.checkpoint_at(last_checkpoint(config))
    other = evaluation.checkpoint_at(replacement) if replacement else None
    found = {
        role: play.frozen_policy(config, other, policy)
        if other
        else initial_version(config, policy)
        for role, policy in wanted.items()
    }
    players = {role: name for role, (name, _) in found.items()}
    lineups: dict[str, Seats] = {TEAM: {}}
    lineups |= {f"{role}={name}": {role: name} for role, name in players.items()}
    plan = EvaluationPlan(
        players=dict(found.values()),
        lineups=lineups,
        tasks=play.tasks_of(config, config.eval.tasks),
        temperature=config.eval.temperature,
        steps=last.steps,
    )
    played = play.run_plan(config, last, plan, "ablation", fresh=fresh)
    return [
        ablation_row(role, name, played[TEAM], played[f"{role}={name}"])
        for role, name in players.items()
    ]


def trained_roles(config: RunConfig) -> dict[str, str]:
    """Role -> the trained policy that plays it."""
    trained = team.trained_policies(config)
    roles = team.policy_by_role(config)
    return {role: name for role, name in roles.items() if name in trained} or (
        {} if config.policies else dict.fromkeys(config.selfplay.seats, POLICY)
    )


def ablation_row(
    role: str, player: str, whole: Sequence[Rollout], without: Sequence[Rollout]
) -> AblationRow:
    """Compare rollouts with and without one role, on the same tasks in the same order."""
    scores, rest = play.outcomes(whole), play.outcomes(without)
    gaps = [a - b for a, b in zip(scores, rest, strict=True)]
    loss, error = play.mean_and_error(gaps)
    means = [play.mean_and_error(values)[0] for values in (scores, rest)]
    pairs, share = sum(map(isfinite, gaps)), are_shares((), [*scores, *rest])
    return AblationRow(role, player, means[0], means[1], loss, error, pairs, share)


def table(rows: Sequence[AblationRow]) -> Table:
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
