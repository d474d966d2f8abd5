"""Reward rows of every scope, states and tree nodes as columns of a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from msgspec.structs import replace

from agentrl.algorithms.credit.core import GroupRelative, was_truncated
from agentrl.algorithms.data.ids import lift, owner, units
from agentrl.algorithms.data.merge import (
    build_batch,
    check_rewards,
    last_observation,
    split_reference,
)
from agentrl.core.errors import TrainingError
from agentrl.core.types import (
    Group,
    Json,
    Reward,
    Rollout,
    RolloutState,
    Sampling,
    Scope,
    Transition,
    int32,
)
from tests import factories

NAN = math.nan


def call(name: str, role: str = "agent", **fields: object) -> Transition:
    return factories.call(name, **{"prompt": (1, 2), "completion": (3, 4), "role": role, **fields})


def rollout(
    index: int, calls: Sequence[Transition], rewards: Sequence[Reward] = (), group: str = "g"
) -> Rollout:
    return factories.rollout(
        f"{group}/{index}", calls, rewards, group=group, index=index, step=7, attempt="a"
    )


def of_call(value: float, target: str, name: str = "quality") -> Reward:
    return Reward(value=value, name=name, scope=Scope.TRANSITION, target=target)


def of_role(value: float, target: str, name: str = "tact") -> Reward:
    return Reward(value=value, name=name, scope=Scope.ROLE, target=target)


def step(*rollouts: Rollout) -> list[Group]:
    return [factories.group(*rollouts, step=7)]


def team() -> list[Group]:
    """Two rollouts; the second has no critic."""
    first = [call("a", "planner"), call("b", "critic"), call("c", "planner")]
    rewards = [Reward(value=1.0), of_role(0.5, "planner"), of_role(0.2, "critic"), of_call(3, "c")]
    return step(
        rollout(0, first, rewards),
        rollout(1, [call("d", "planner")], [Reward(value=0.0), of_role(0.1, "planner")]),
    )


NAMES = ("outcome", "role:tact", "transition:quality")


def test_a_reference_names_a_scope() -> None:
    assert (
        split_reference("outcome")
        == split_reference("rollout:outcome")
        == (Scope.ROLLOUT, "outcome")
    )
    assert split_reference("role:tact") == (Scope.ROLE, "tact")
    assert split_reference("transition:a:b") == (Scope.TRANSITION, "a:b")
    assert split_reference("cost:total") == (Scope.ROLLOUT, "cost:total")


def test_rewards_of_every_scope_are_columns_of_their_level() -> None:
    batch = build_batch(team(), reward_names=NAMES)
    assert batch.roles == ["critic", "planner"]
    assert batch.step == 8  # counted from 1
    assert batch.rewards["outcome"].tolist() == [1, 0]
    assert batch.rewards["role:tact"].tolist() == pytest.approx([0.2, 0.5, NAN, 0.1], nan_ok=True)
    assert batch.rewards["transition:quality"].tolist() == pytest.approx(
        [NAN, NAN, 3, NAN], nan_ok=True
    )


def test_a_role_is_compared_with_itself_once_per_rollout() -> None:
    credit = GroupRelative("role:tact", by=("group", "role"))
    batch = build_batch(team(), reward_names=NAMES)
    # Planner .5 and .1, in two calls of the first rollout; the critic has nobody to compare with.
    assert credit(batch)[::2].tolist() == pytest.approx([0.2, 0, 0.2, -0.2])
    assert batch.transitions == ["a", "b", "c", "d"]


def test_a_call_without_a_row_is_missing() -> None:
    credit = GroupRelative("transition:quality", base="none")(
        build_batch(team(), reward_names=NAMES)
    )
    assert credit[::2].tolist() == pytest.approx([NAN, NAN, 3, NAN], nan_ok=True)


def test_a_value_is_read_at_lower_levels_only() -> None:
    batch = build_batch(team(), reward_names=NAMES)
    outcome = batch.rewards["outcome"]
    as_roles = lift(batch, outcome, "rollout", "role")
    assert as_roles.tolist() == pytest.approx([1, 1, NAN, 0], nan_ok=True)
    assert lift(batch, as_roles, "role", "transition").tolist() == [1, 1, 1, 0]
    assert lift(batch, outcome, "rollout", "token").tolist() == [1, 1, 1, 1, 1, 1, 0, 0]
    assert owner(batch, "role").tolist() == [1, 1, 0, 0, 1, 1, 3, 3]
    with pytest.raises(TrainingError, match="a value per transition is not one per rollout"):
        GroupRelative("transition:quality", at="rollout")(batch)


def test_turns_trees_and_what_was_cut_off() -> None:
    same = call("d", "planner", finish="length")
    other = call("e", completion=int32([9, 9]))
    batch = build_batch(step(rollout(0, [call("a"), call("b")]), rollout(1, [same]),
                             rollout(2, [other, call("f")])))  # fmt: skip
    assert batch.transition_turn.tolist() == [0, 1, 0, 0, 1]
    assert units(batch, "transition", "node").tolist() == [0, 0, 0, 1, 0]
    assert units(batch, "rollout", "tree").tolist() == [0, 0, 1]
    assert was_truncated(batch).tolist() == [False, True, False]


def test_a_rollout_is_greedy_where_all_its_calls_are() -> None:
    cold = Sampling(temperature=0.0)
    calls = [call("a", sampling=cold), call("b"), call("c", sampling=cold)]
    batch = build_batch(step(rollout(0, calls[:2]), rollout(1, calls[2:])))
    assert batch.rollout_greedy.tolist() == [False, True]


def test_the_state_of_a_call_is_what_the_agent_saw_last() -> None:
    start = [{"role": "system", "content": "play"}, {"role": "user", "content": "north?"}]
    asked = {"role": "assistant", "content": None, "tool_calls": [{"id": "x1"}]}
    wall = {"role": "tool", "tool_call_id": "x1", "content": "a wall"}
    again = {"role": "tool", "tool_call_id": "y7", "content": "a wall"}
    first = call("a", messages=start)
    after = call("b", messages=[*start, asked, wall])
    later = call("c", messages=[*start, asked, {**wall, "content": "grass"}, asked, again])
    silent = call("d")
    assert last_observation(after) == last_observation(later) != last_observation(first)
    batch = build_batch(step(rollout(0, [first, after, later, silent])))
    assert batch.transition_state.tolist() == [0, 1, 1, 2]
    keyed = build_batch(step(rollout(0, [first, after, silent])), state=lambda call: call.role)
    assert keyed.transition_state.tolist() == [0, 0, 0]


def test_the_action_of_a_call_is_its_tools_or_else_its_text() -> None:
    def asked(id: str, city: str, content: str | None) -> dict[str, Json]:
        function: Json = {"name": "weather", "arguments": city}
        return {"content": content, "tool_calls": [{"id": id, "function": function}]}

    one, two = asked("x1", "Rome", "let me see"), asked("y2", "Rome", None)
    three = asked("x1", "Oslo", "let me see")
    said = {"content": "let me see"}
    calls = [call("abcdef"[n], answer=m) for n, m in enumerate((one, two, three, said, said, None))]
    batch = build_batch(step(rollout(0, calls)))
    assert batch.transition_action.tolist() == [0, 0, 1, 2, 2, 3]


def test_a_comparison_that_the_batch_cannot_make_is_refused() -> None:
    batch = build_batch(team())
    with pytest.raises(TrainingError, match="a rollout belongs to no single role"):
        units(batch, "rollout", "role")
    with pytest.raises(TrainingError, match="a role belongs to no single state"):
        units(batch, "role", "state")


# -- what is refused -------------------------------------------------------------------------------


def test_what_only_some_miss_is_not_refused() -> None:
    check_rewards(team(), NAMES)
    check_rewards(
        step(rollout(0, [call("a")], [Reward(value=1.0)]), rollout(1, [call("b")])), ["outcome"]
    )


def test_a_reward_that_nobody_has_is_refused() -> None:
    message = r"none of the 2 rollouts of step 7, 2 of .*'qualty'; valid: outcome, "
    with pytest.raises(TrainingError, match=message):
        check_rewards(team(), ["qualty"], 7)
    with pytest.raises(TrainingError, match=r"'transition:qualty'; did you mean 'transition:qual"):
        check_rewards(team(), ["transition:qualty"])
    with pytest.raises(TrainingError, match="they have no reward at all"):
        check_rewards(step(rollout(0, [call("a")])), ["outcome"])


def test_a_step_whose_rollouts_all_failed_is_not_a_wrong_name() -> None:
    failed = replace(rollout(0, [call("a")]), state=RolloutState.FAILED)
    check_rewards(step(failed), ["outcome"])
    check_rewards([], ["outcome"])


def test_a_target_that_no_transition_carries_is_refused() -> None:
    row = rollout(0, [call("a", "planner")], [of_role(1, "plannr"), of_call(1, "z")])
    with pytest.raises(
        TrainingError, match=r"1 rewards 'role:tact' .* role .*'plannr'; did you mean 'planner'\?"
    ):
        check_rewards(step(row), ["role:tact"])
    with pytest.raises(TrainingError, match=r"1 rewards 'transition:quality' of the 1 .*such as"):
        check_rewards(step(row), ["transition:quality"])
    check_rewards(step(replace(row, rewards=[*row.rewards, Reward(value=1.0)])), ["outcome"])


def test_a_seat_that_nobody_asked_may_have_a_reward() -> None:
    lost = rollout(0, [call("a", "planner")], [of_role(-1, "planner"), of_role(1, "critic")])
    check_rewards(
        step(replace(lost, seats=dict.fromkeys(("planner", "critic"), "policy"))), ["role:tact"]
    )


def test_a_frozen_role_may_have_a_reward_that_is_not_ours() -> None:
    judge = call("b", "judge", policy="judge")
    groups = step(rollout(0, [call("a"), judge], [of_role(1, "judge"), of_call(2, "b")]))
    check_rewards(groups, ["role:tact", "transition:quality"])
    batch = build_batch(groups, reward_names=("role:tact", "transition:quality"))
    assert all(torch.isnan(x).all() for x in batch.rewards.values())
