from __future__ import annotations

import itertools
import math
from array import array

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms.data.batch import TokenRow
from agentrl.algorithms.data.merge import build_batch, merge
from agentrl.core.types import (
    Purpose,
    Reward,
    Rollout,
    RolloutState,
    Sampling,
    Scope,
    Transition,
    float32,
)
from tests import factories
from tests.factories import group

NAN = float("nan")


def call(prompt: list[int], completion: list[int], **fields: object) -> Transition:
    logprobs = float32(-0.5 - k / 8 for k in range(len(completion)))
    return factories.call(
        prompt=prompt, completion=completion, **{"id": "call", "logprobs": logprobs, **fields}
    )


def rollout(
    transitions: list[Transition],
    reward: float = 1.0,
    *,
    state: RolloutState = RolloutState.SUCCEEDED,
    purpose: Purpose = Purpose.TRAIN,
    index: int = 0,
) -> Rollout:
    rewards = [] if math.isnan(reward) else [Reward(value=reward)]
    return factories.rollout(
        f"rollout-{index}",
        transitions,
        rewards,
        index=index,
        purpose=purpose,
        state=state,
        attempt="a",
    )


def shape(rows: list[TokenRow]) -> list[tuple[list[int], list[int], list[int]]]:
    return [(r.tokens.tolist(), r.actions.tolist(), r.transition.tolist()) for r in rows]


def test_every_token_has_the_version_that_sampled_it() -> None:
    calls = [
        call([1], [2, 3, 4], version=7, spans=[(0, 7), (1, 8)]),
        call([9], [5], version=6),
        call([1, 2, 3, 4, 5], [6], version=8),
        call([8], [5, 5]),
    ]
    batch = build_batch([group(rollout(calls))])
    assert batch.token_version.tolist() == [7, 8, 8, 8, 6, -1, -1]
    assert build_batch([]).token_version.numel() == 0


# Few distinct tokens, so that prefixes also coincide by chance.
tokens = st.lists(st.integers(0, 1), max_size=3)


@st.composite
def attempts(draw: st.DrawFn, *, most: int = 8) -> list[Transition]:
    """Calls that extend, repeat or ignore earlier calls, in any order of arrival."""
    calls: list[Transition] = []
    for number in range(draw(st.integers(1, most))):
        prompt = draw(st.lists(st.integers(0, 1), min_size=1, max_size=3))
        completion = draw(tokens)
        how = draw(st.sampled_from(["fresh", "repeat", "longer", "extend"]))
        if calls and how != "fresh":
            earlier = draw(st.sampled_from(calls))
            prompt = earlier.prompt.tolist()
            if how == "longer":
                completion = earlier.completion.tolist() + completion
            if how == "extend":
                prompt += earlier.completion.tolist() + draw(tokens)
        logprobs = float32(-number - k / 8 for k in range(len(completion)))
        temperature = 0.5 + number
        sampling = Sampling(temperature=temperature)
        calls.append(call(prompt, completion, logprobs=logprobs, sampling=sampling))
    return draw(st.permutations(calls))


@given(attempts())
@settings(deadline=None, max_examples=200)
def test_every_sampled_token_is_an_action_once(calls: list[Transition]) -> None:
    seen: list[tuple[int, int]] = []
    for row in merge(calls):
        assert row.actions.tolist() == sorted(set(row.actions.tolist()))
        columns = (row.actions, row.transition, row.logprobs, row.temperature)
        for action, index, logprob, temperature in zip(*(c.tolist() for c in columns), strict=True):
            source = calls[index]
            offset = action - len(source.prompt)
            whole = source.prompt.tolist() + source.completion.tolist()
            assert 0 <= offset < len(source.completion)
            assert row.tokens[: action + 1].tolist() == whole[: action + 1]
            assert logprob == source.logprobs[offset]
            assert temperature == source.sampling.temperature
            seen.append((index, offset))
    expected = [(i, k) for i, each in enumerate(calls) for k in range(len(each.completion))]
    assert sorted(seen) == expected


@given(attempts(most=5))
@settings(deadline=None, max_examples=200)
def test_fewest_possible_tokens_are_forwarded(calls: list[Transition]) -> None:
    sampled = [each for each in calls if len(each.completion)]
    whole = [array("i", [*each.prompt, *each.completion]) for each in sampled]
    per_call = sum(map(len, whole))
    saved = max(
        sum(len(whole[i]) for i in choice if i is not None)
        for choice in itertools.product([None, *range(len(sampled))], repeat=len(sampled))
        if len({i for i in choice if i is not None}) == sum(i is not None for i in choice)
        and all(
            i is None or sampled[j].prompt[: len(whole[i])] == whole[i]
            for j, i in enumerate(choice)
        )
    )
    assert sum(row.tokens.numel() for row in merge(calls)) == per_call - saved


def test_a_linear_chat_is_one_row() -> None:
    turns = [call([1, 2], [3]), call([1, 2, 3, 4], [5, 6]), call([1, 2, 3, 4, 5, 6, 7], [8])]
    row = ([1, 2, 3, 4, 5, 6, 7, 8], [2, 4, 5, 7], [0, 1, 1, 2])
    assert shape(merge(turns)) == [row]


def test_a_sub_agent_leaves_the_main_chat_whole() -> None:
    main, sub, back = call([1], [2]), call([9, 1], [7]), call([1, 2, 7], [3])
    assert shape(merge([main, sub, back])) == [
        ([1, 2, 7, 3], [1, 3], [0, 2]),
        ([9, 1, 7], [2], [1]),
    ]


def test_parallel_branches_train_their_common_call_once() -> None:
    root, left, right = call([1], [2]), call([1, 2, 3], [4]), call([1, 2, 5], [6])
    assert shape(merge([root, left, right])) == [
        ([1, 2, 3, 4], [1, 3], [0, 1]),
        ([1, 2, 5, 6], [3], [2]),
    ]


def test_a_prompt_sampled_twice_is_two_rows() -> None:
    assert len(merge([call([1, 2], [3]), call([1, 2], [3])])) == 2


def test_a_call_continues_the_longest_row_it_can() -> None:
    short, long, back = call([1], [2]), call([1], [2, 3]), call([1, 2, 3, 4], [5])
    assert shape(merge([short, long, back])) == [
        ([1, 2], [1], [0]),
        ([1, 2, 3, 4, 5], [1, 2, 4], [1, 1, 2]),
    ]


def test_a_rewritten_history_starts_a_new_row() -> None:
    assert len(merge([call([1, 2], [3]), call([1, 2, 4, 5], [6])])) == 2


def test_greedy_calls_are_scored_at_temperature_one() -> None:
    (row,) = merge([call([1], [2, 3], sampling=Sampling(temperature=0.0))])
    assert row.temperature.tolist() == [1.0, 1.0]


def test_the_tables_of_a_batch_point_at_each_other() -> None:
    first = rollout([call([1], [2], id="c0", role="main"), call([5], [6, 7], id="c1", role="sub")])
    second = rollout([call([1], [2, 3], id="c2", role="main")], 0.0, index=1)
    third = rollout([call([4], [4], id="c3", role="main")], 2.0, index=2)
    batch = build_batch([group(first, second, id="g0"), group(third, id="g1")])
    assert batch.groups == ["g0", "g1"]
    assert batch.rollouts == ["rollout-0", "rollout-1", "rollout-2"]
    assert batch.transitions == ["c0", "c1", "c2", "c3"]
    assert batch.roles == ["main", "sub"]
    assert batch.transition_role.tolist() == [0, 1, 0, 0]
    assert batch.transition_rollout.tolist() == [0, 0, 1, 2]
    assert batch.row_rollout.tolist() == [0, 0, 1, 2]
    assert batch.rollout_group.tolist() == [0, 0, 1]
    assert batch.token_row.tolist() == [0, 1, 1, 2, 2, 3]
    assert batch.token_transition.tolist() == [0, 1, 1, 2, 2, 3]
    assert batch.token_group.tolist() == [0, 0, 0, 0, 0, 1]
    assert batch.sampler_logprobs.tolist() == [-0.5, -0.5, -0.625, -0.5, -0.625, -0.5]
    assert batch.rewards["outcome"].tolist() == [1.0, 0.0, 2.0]
    assert batch.rewards["outcome"].dtype is torch.float64


def test_a_missing_reward_is_nan_and_not_zero() -> None:
    batch = build_batch([group(rollout([call([1], [2])], NAN), rollout([call([1], [2])], index=1))])
    rewards = batch.rewards["outcome"]
    assert rewards.isnan().tolist() == [True, False]
    assert batch.n_tokens == 2


def test_rewards_of_other_scopes_are_not_outcomes() -> None:
    process = Reward(value=5.0, name="outcome", scope=Scope.TRANSITION, target="call")
    style = Reward(value=0.25, name="style")
    row = rollout([call([1], [2])], NAN)
    row.rewards.extend([process, style])
    batch = build_batch([group(row)], reward_names=("outcome", "style"))
    assert math.isnan(batch.rewards["outcome"].item())
    assert batch.rewards["style"].item() == 0.25


def test_an_empty_response_counts_without_rows() -> None:
    batch = build_batch([group(rollout([call([1], [])], 0.0), rollout([call([1], [2])], index=1))])
    assert batch.rewards["outcome"].tolist() == [0.0, 1.0]
    assert batch.transition_rollout.tolist() == [0, 1]
    assert batch.row_rollout.tolist() == [1]


def test_what_cannot_be_learned_from_is_left_out() -> None:
    good = call([1], [2], id="good")
    refused = [
        call([1], [2], exact=False),
        call([], [2]),
        call([1], [2, 3], logprobs=float32([-1.0])),
        call([1], [2], logprobs=float32([NAN])),
        call([1], [2], logprobs=float32([-math.inf])),
    ]
    batch = build_batch(
        [
            group(
                rollout([good, *refused]),
                rollout(refused, index=1),
                rollout([], index=2),
                rollout([good], purpose=Purpose.EVAL, index=3),
                rollout([good], NAN, state=RolloutState.FAILED, index=4),
                rollout([good], NAN, state=RolloutState.CANCELLED, index=5),
            )
        ]
    )
    assert batch.rollouts == ["rollout-0"]
    assert batch.transitions == ["good"]


def test_a_failed_rollout_with_a_reward_is_learned_from() -> None:
    failed = rollout([call([1], [2])], -1.0, state=RolloutState.FAILED)
    assert build_batch([group(failed)]).rewards["outcome"].tolist() == [-1.0]


def test_a_group_needs_enough_scored_rollouts() -> None:
    pair = [rollout([call([1], [2])], index=0), rollout([call([1], [2])], NAN, index=1)]
    assert build_batch([group(*pair)], min_group=1).rollouts == ["rollout-0", "rollout-1"]
    empty = build_batch([group(*pair)], min_group=2)
    assert empty.groups == empty.rollouts == empty.rows == []
    assert empty.n_tokens == empty.sampler_logprobs.numel() == 0


def test_the_batch_of_some_groups_is_a_slice_of_the_batch_of_all() -> None:
    groups = [
        group(*(rollout([call([1, g], [i] * (g + i))], index=i) for i in range(1, 4)), id=str(g))
        for g in range(1, 4)
    ]
    whole, last = build_batch(groups), build_batch(groups[1:])
    assert torch.equal(whole.sampler_logprobs[-last.n_tokens :], last.sampler_logprobs)
    assert whole.rollouts[-len(last.rollouts) :] == last.rollouts


def test_calls_of_other_policies_are_not_trained() -> None:
    mine, judge = call([1], [2]), call([1], [3], policy="judge")
    batch = build_batch([group(rollout([mine, judge]))])
    assert batch.transitions == [mine.id]
    assert build_batch([group(rollout([judge]))]).n_tokens == 0
