"""A reward for every call of a turn: what the user says after it."""

from __future__ import annotations

from msgspec import structs

from agentrl.algorithms.data.turns import turn_values, turns
from agentrl.algorithms.objective.prepare import TrainedPolicy
from agentrl.types import Group, Reward, Rollout, Scope

TURN = "turn"  # name of the reward that `add_turns` adds


def add_turns(groups: list[Group], policy: TrainedPolicy) -> list[Group]:
    """Add to every call a reward `turn`, the mean of what is said about its turn: a tool call is
    judged by what the user says about the answer that it led to. Calls of turns about which nothing
    is said get none."""
    return [structs.replace(g, rollouts=[_with_turns(row) for row in g.rollouts]) for g in groups]


def _with_turns(rollout: Rollout) -> Rollout:
    values = turn_values(rollout.transitions, rollout.rewards)
    added = [
        Reward(value=value, name=TURN, scope=Scope.TRANSITION, source=TURN,
               target=rollout.transitions[call].id)
        for turn, value in zip(turns(rollout.transitions), values, strict=True)
        if value is not None
        for call in turn
    ]  # fmt: skip
    return structs.replace(rollout, rewards=[*rollout.rewards, *added])
