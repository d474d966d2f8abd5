"""Merge stored model calls to rows: one row per branch of an attempt's token tree.

A call extends a row whose tokens are an exact prefix of its prompt. Every other call (a sub-agent,
a second sample of one prompt, a compacted history) starts a new row. Invariant: each sampled token
is an action exactly once, after exactly the tokens it was sampled from; elsewhere it is context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import torch
from msgspec import structs
from torch import Tensor

from agentrl.algorithms.data.batch import Batch, TokenRow
from agentrl.algorithms.data.rewards import (
    chosen_action,
    dense_ids,
    has_reward,
    last_observation,
    reward_column,
)
from agentrl.types import POLICY, Group, Purpose, Rollout, RolloutState, Transition


def trainable(transition: Transition, policy: str = POLICY) -> bool:
    """Whether `policy` sampled the call, with known tokens and log-probs and a nonempty prompt."""
    return (
        transition.policy == policy
        and transition.exact
        and len(transition.prompt) > 0
        and len(transition.logprobs) == len(transition.completion)
        and all(map(math.isfinite, transition.logprobs))
    )


def valid(
    rollout: Rollout, reward_names: Sequence[str] = ("outcome",), policy: str = POLICY
) -> bool:
    """Whether `policy` may learn from a rollout: it is a training rollout and not counterfactual,
    has a trainable call, and succeeded or has a reward (`agent.error_reward`)."""
    return valid_for_any(rollout, (policy,), reward_names)


def valid_for_any(
    rollout: Rollout,
    policies: Collection[str],
    reward_names: Sequence[str] = ("outcome",),
    *,
    retokenized: bool = False,
) -> bool:
    """Whether any of the policies may learn from a rollout. retokenized: count inexact calls too,
    which get token ids before training (`algorithm.inexact`)."""
    return (
        rollout.purpose is Purpose.TRAIN
        and not rollout.counterfactual
        and (rollout.state is RolloutState.SUCCEEDED or has_reward(rollout, reward_names))
        and any(
            trainable(call, call.policy) or (retokenized and not call.exact)
            for call in rollout.transitions
            if call.policy in policies
        )
    )


def merge(transitions: Sequence[Transition]) -> list[TokenRow]:
    """Rows of one attempt, in the order of their first call. `TokenRow.transition` indexes
    `transitions`, which must all be `trainable`.

    Each call, shortest prompt first, continues the longest row that is a prefix of it. This
    forwards the fewest tokens: the rows that a call can continue are prefixes of one another, so
    every call that could have continued one of the others still can. A call without sampled tokens
    is in no row, nor is one that repeats another rollout's call, which is trained there."""
    branches: list[_Branch] = []
    by_length = sorted(range(len(transitions)), key=lambda i: (len(transitions[i].prompt), i))
    for index in by_length:
        if len(transitions[index].completion) == 0 or transitions[index].repeats is not None:
            continue
        prompt = transitions[index].prompt.tobytes()
        open_branches = (branch for branch in branches if prompt.startswith(branch.tokens))
        branch = max(open_branches, key=lambda branch: len(branch.tokens), default=None)
        if branch is None:
            branch = _Branch()
            branches.append(branch)
        branch.tokens = prompt + transitions[index].completion.tobytes()
        branch.calls.append(index)
    branches.sort(key=lambda branch: min(branch.calls))
    return [_row(branch, transitions) for branch in branches]


def build_batch(
    groups: Iterable[Group],
    *,
    reward_names: Sequence[str] = ("outcome",),
    min_group: int = 0,
    policy: str = POLICY,
    state: Callable[[Transition], Hashable] = last_observation,
) -> Batch:
    """The batch of one training step of `policy`.

    reward_names: reward references; empty: rollouts need no reward. state: returns the state of a
    call; calls with equal states are comparable. Leaves out failed rollouts without a reward,
    inexact calls, calls of other policies, and groups with fewer than `min_group` scored rollouts.
    Keeps rollouts with a missing reward (NaN), and rollouts without sampled tokens (no rows),
    because their reward counts."""
    step, names, rollouts, rollout_group = 0, list[str](), list[Rollout](), list[int]()
    for group in groups:
        step = group.step
        found = [rollout for rollout in group.rollouts if valid(rollout, reward_names, policy)]
        known = sum(not reward_names or has_reward(rollout, reward_names) for rollout in found)
        if found and known >= min_group:
            rollouts += found
            rollout_group += [len(names)] * len(found)
            names.append(group.id)
    own = [[call for call in row.transitions if trainable(call, policy)] for row in rollouts]
    calls = [call for some in own for call in some]
    rows, row_rollout = _merge_each(own)
    prompts = [blake2b(call.prompt).digest() for call in calls]
    completions = [blake2b(call.completion).digest() for call in calls]
    roles = sorted({call.role for call in calls})
    warm = [any(call.sampling.temperature > 0 for call in some) for some in own]
    return Batch(
        rows=rows,
        token_row=_ids(range(len(rows))).repeat_interleave(_ids(len(r.actions) for r in rows)),
        token_transition=_cat([row.transition for row in rows], torch.int64),
        behaviour=_cat([row.logprobs for row in rows], torch.float32),
        transition_rollout=_ids(number for number, some in enumerate(own) for _ in some),
        transition_role=_ids(roles.index(call.role) for call in calls),
        row_rollout=_ids(row_rollout),
        rollout_group=_ids(rollout_group),
        rewards={
            name: reward_column(name, rollouts, calls, roles, policy) for name in reward_names
        },
        roles=roles,
        groups=names,
        rollouts=[rollout.id for rollout in rollouts],
        transitions=[call.id for call in calls],
        step=step,
        transition_state=dense_ids(map(state, calls)),
        transition_action=dense_ids(map(chosen_action, calls)),
        transition_prompt=dense_ids(prompts),
        transition_node=dense_ids(zip(prompts, completions, strict=True)),
        transition_repeats=torch.tensor([call.repeats is not None for call in calls]).bool(),
        transition_truncated=torch.tensor([call.finish == "length" for call in calls]).bool(),
        rollout_greedy=~torch.tensor(warm).bool(),
        token_version=_token_version(rows, calls),
    )


def map_calls(
    groups: list[Group], change: Callable[[Transition], Transition | None]
) -> list[Group]:
    """Apply `change` to every call of the groups; drops calls for which it returns None."""

    def changed(rollout: Rollout) -> Rollout:
        calls = [new for call in rollout.transitions if (new := change(call)) is not None]
        return structs.replace(rollout, transitions=calls)

    return [structs.replace(group, rollouts=list(map(changed, group.rollouts))) for group in groups]


def _token_version(rows: Iterable[TokenRow], calls: Sequence[Transition]) -> Tensor:
    """`token_versions` of all rows, int64 [N]."""
    in_order = [call for row in rows for call in dict.fromkeys(row.transition.tolist())]
    return _cat([token_versions(calls[call]) for call in in_order], torch.int64)


def token_versions(call: Transition) -> Tensor:
    """Version of the policy that sampled each token, int64 [C]; -1 if unknown."""
    spans = call.spans or [(0, -1 if call.version is None else call.version)]
    starts = _ids([*(start for start, _ in spans), len(call.completion)])
    return _ids(version for _, version in spans).repeat_interleave(starts.diff())


def _merge_each(attempts: Sequence[Sequence[Transition]]) -> tuple[list[TokenRow], list[int]]:
    """Rows of several attempts, with calls numbered consecutively, and the attempt of each row."""
    rows, numbers, first = list[TokenRow](), list[int](), 0
    for number, calls in enumerate(attempts):
        merged = merge(calls)
        rows += [replace(row, transition=row.transition + first) for row in merged]
        numbers += [number] * len(merged)
        first += len(calls)
    return rows, numbers


@dataclass(slots=True)
class _Branch:
    tokens: bytes = b""  # int32, compared as bytes: one memcmp per candidate
    calls: list[int] = field(default_factory=list)


def _row(branch: _Branch, transitions: Sequence[Transition]) -> TokenRow:
    calls = [transitions[index] for index in branch.calls]
    sizes = torch.tensor([len(call.completion) for call in calls])
    spans = [(len(call.prompt), len(call.prompt) + len(call.completion)) for call in calls]
    # Log-probs of greedy calls are those of the model itself (see engines.base).
    temperatures = [call.sampling.temperature or 1.0 for call in calls]
    return TokenRow(
        tokens=torch.frombuffer(bytearray(branch.tokens), dtype=torch.int32).long(),
        actions=torch.cat([torch.arange(*span) for span in spans]),
        logprobs=torch.cat([torch.frombuffer(c.logprobs, dtype=torch.float32) for c in calls]),
        temperature=torch.tensor(temperatures).repeat_interleave(sizes),
        transition=torch.tensor(branch.calls).repeat_interleave(sizes),
    )


def _ids(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def _cat(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=dtype)


def own_calls(groups: Iterable[Group], policy: str = POLICY) -> list[Transition]:
    """Calls that `policy` sampled, without those that a branch replays, which count where they were
    sampled, and those of counterfactual rollouts."""
    rows = [row for group in groups for row in group.rollouts if not row.counterfactual]
    calls = [call for row in rows for call in row.transitions]
    return [call for call in calls if call.policy == policy and call.repeats is None]
