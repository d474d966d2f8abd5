"""A reward for every call of a turn: what the user says after it."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.algorithms.objective.prepare import TrainedPolicy, with_call_rewards
from agentrl.algorithms.preferences.turns import turn_values, turns
from agentrl.types import Group, Rollout

TURN = "transition:turn"  # the reward that `add_turns` adds


def add_turns(groups: list[Group], policy: TrainedPolicy) -> list[Group]:
    """Add to every call a reward `turn`, the mean of what is said about its turn: a tool call is
    judged by what the user says about the answer that it led to. Calls of turns about which nothing
    is said get none."""
    rollouts = (rollout for group in groups for rollout in group.rollouts)
    values = {id: value for rollout in rollouts for id, value in _by_call(rollout)}
    return with_call_rewards(groups, TURN, values)


def _by_call(rollout: Rollout) -> Iterator[tuple[str, float]]:
    calls = rollout.transitions
    for turn, value in zip(turns(calls), turn_values(calls, rollout.rewards), strict=True):
        if value is not None:
            yield from ((calls[index].id, value) for index in turn)
