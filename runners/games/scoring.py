"""The verifier of a game: what each player that a model played got, and the learner as a whole."""

from __future__ import annotations

from statistics import fmean

from agentrl.errors import ConfigError
from agentrl.runners.games.match import GameResult
from agentrl.runners.games.rules import role_of
from agentrl.types import Reward, Scope, Task, Trace


def verify(task: Task, result: GameResult, trace: Trace) -> list[Reward]:
    """For each player that a model plays, by its calls or its seat in the rollout, `outcome`, its
    return, and `invalid`, minus the number of its answers that were no legal move; for the rollout
    `outcome`, the learner's return.

    The learner is the player that the task's field `learner` names. Without one it is the mean of
    all that a model plays which is being trained: not a snapshot, whose name has an "@", and not an
    endpoint, which has no versions."""
    returns = {role_of(player): value for player, value in enumerate(result["returns"])}
    playing = {call.role for call in trace.transitions}.union(trace.rollout.seats)
    playing -= set(task["input"].get("players", ()))
    rows = []
    for role, value in returns.items():
        if role in playing:
            bad = float(-result["invalid"].get(role, 0))
            rows.append(Reward(value=value, scope=Scope.ROLE, target=role))
            rows.append(Reward(value=bad, name="invalid", scope=Scope.ROLE, target=role))
    learners = _learners(task, list(returns), trace)
    return [*rows, Reward(value=fmean(returns[role] for role in learners))]


def _learners(task: Task, players: list[str], trace: Trace) -> list[str]:
    """Where nobody learns, everybody is meant. Who never answered is known by its seat alone."""
    if "learner" in task:
        if task["learner"] not in players:
            known = ", ".join(players)
            raise ConfigError(f"the task's learner is {task['learner']!r:.80}; there are {known}")
        return [task["learner"]]
    others = {call.role for call in trace.transitions if call.version is None}
    seated = trace.rollout.seats | {call.role: call.policy for call in trace.transitions}
    others |= {role for role, policy in seated.items() if "@" in policy}
    others |= set(task["input"].get("players", ()))
    return [role for role in players if role not in others] or players
