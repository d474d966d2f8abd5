"""Reward rows to columns: one number per rollout, role or call; NaN if there is no row.

A reward reference is `name` (scope rollout), `role:name` or `transition:name`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from math import isnan, nan

import msgspec
import torch
from torch import Tensor

from agentrl.errors import TrainingError, nearest
from agentrl.types import POLICY, Group, Json, Reward, Rollout, RolloutState, Scope, Transition


def split_reference(reference: str) -> tuple[Scope, str]:
    """Scope and name of a reward reference; the scope is rollout if none is given."""
    scope, colon, name = reference.partition(":")
    if colon and scope in (Scope.ROLLOUT, Scope.ROLE, Scope.TRANSITION):
        return Scope(scope), name
    return Scope.ROLLOUT, reference


def reward_reference(reward: Reward) -> str:
    """The reference of a reward row."""
    return reward.name if reward.scope is Scope.ROLLOUT else f"{reward.scope}:{reward.name}"


def has_reward(rollout: Rollout, references: Sequence[str]) -> bool:
    """Whether the rollout has any of the rewards, not NaN."""
    return any(
        reward_reference(row) in references and not isnan(row.value) for row in rollout.rewards
    )


def reward_column(
    name: str,
    rollouts: Sequence[Rollout],
    calls: Sequence[Transition],
    roles: Sequence[str],
    policy: str = POLICY,
) -> Tensor:
    """The values of a reward, float64: per rollout [U], role [U * K] (roles of one rollout are
    contiguous) or call [S]. The first of several rows for one target counts. A role's reward is
    missing if another policy played the role: an opponent's return is no baseline."""
    rows = [_rows(rollout, name) for rollout in rollouts]
    scope, _ = split_reference(name)
    values: Iterable[float]
    if scope is Scope.ROLLOUT:
        values = (next(iter(row.values()), nan) for row in rows)
    elif scope is Scope.ROLE:
        taken = (roles_of_others(rollout, policy) for rollout in rollouts)
        values = (
            nan if role in others else row.get(role, nan)
            for row, others in zip(rows, taken, strict=True)
            for role in roles
        )
    else:
        by_id = {target: value for row in rows for target, value in row.items()}
        values = (by_id.get(call.id, nan) for call in calls)
    return torch.tensor(list(values), dtype=torch.float64)


def roles_of_others(rollout: Rollout, policy: str) -> set[str]:
    """The roles of a rollout that were not played by `policy`."""
    own = {call.role for call in rollout.transitions if call.policy == policy}
    seated = {role for role, name in rollout.seats.items() if name != policy}
    return seated.union(call.role for call in rollout.transitions) - own


def check_rewards(groups: Sequence[Group], references: Iterable[str]) -> None:
    """Raise TrainingError for a reward that no rollout has although some succeeded, and for rows
    with an unknown role or call as target. A reward that only some rollouts have is no error."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    done = sum(rollout.state is RolloutState.SUCCEEDED for rollout in rollouts)
    where = f"of the {len(rollouts)} rollouts of step {groups[0].step}" if groups else ""
    present = {reward_reference(row) for rollout in rollouts for row in rollout.rewards}
    for name in references:
        if name not in present and done:
            hint = nearest(name, present) if present else "they have no reward at all"
            raise TrainingError(
                f"algorithm.options: none {where}, {done} of which succeeded, has a reward "
                f"{name!r}; {hint}. Let the verifier return it, or name another reward"
            )
        _check_targets(rollouts, name, where)


def _check_targets(rollouts: Sequence[Rollout], name: str, where: str) -> None:
    scope, _ = split_reference(name)
    if scope is Scope.ROLLOUT:
        return
    roles = {call.role for rollout in rollouts for call in rollout.transitions}
    roles.update(seat for rollout in rollouts for seat in rollout.seats)
    lost: list[str] = []
    for rollout in rollouts:
        calls = {call.id for call in rollout.transitions}
        known = roles if scope is Scope.ROLE else calls
        lost += [target for target in _rows(rollout, name) if target not in known]
    if lost:
        what = "role" if scope is Scope.ROLE else "call"
        hint = f"; {nearest(lost[0], roles)}" if what == "role" and roles else ""
        raise TrainingError(
            f"{len(lost)} rewards {name!r} {where} name a {what} that no transition has, "
            f"such as {lost[0]!r}{hint}"
        )


def _rows(rollout: Rollout, name: str) -> dict[str, float]:
    """Values of a reward by target."""
    rows: dict[str, float] = {}
    for row in rollout.rewards:
        if reward_reference(row) == name:
            rows.setdefault(row.target or "", row.value)
    return rows


def new_messages(call: Transition) -> list[dict[str, Json]]:
    """The messages after the agent's latest answer: its newest observation."""
    newest = len(call.messages)
    while newest and call.messages[newest - 1].get("role") != "assistant":
        newest -= 1
    return call.messages[newest:]


def last_observation(call: Transition) -> Hashable:
    """A call's state: the messages after the agent's latest answer, or the whole prompt if the
    messages are unknown. Tool call ids are left out, because they differ between equal states."""
    seen = [(m.get("role"), m.get("content")) for m in new_messages(call)]
    return msgspec.json.encode(seen) if seen else call.prompt.tobytes()


def chosen_action(call: Transition) -> Hashable:
    """A call's action: its tool calls with their arguments but no ids, else its text, else (the
    message is unknown) its tokens."""
    answer = call.answer or {}
    calls = answer.get("tool_calls")
    items = calls if isinstance(calls, list) else []
    tools = [item.get("function") for item in items if isinstance(item, dict)]
    action = tools or answer.get("content")
    return msgspec.json.encode(action) if action else call.completion.tobytes()


def dense_ids(values: Iterable[Hashable]) -> Tensor:
    """Ids of the values, int64, numbered by first appearance."""
    ids: dict[Hashable, int] = {}
    return torch.tensor([ids.setdefault(value, len(ids)) for value in values], dtype=torch.int64)
