"""Builds the batch from stored groups: calls are merged to rows of tokens, and their other data
becomes columns of ids and of rewards.

One row per branch of an attempt's token tree: a call extends a row whose tokens are an exact prefix
of its prompt. Every other call (a sub-agent, a second sample of one prompt, a compacted history)
starts a new row. Invariant: each sampled token is an action exactly once, after exactly the tokens
it was sampled from; elsewhere it is context. An observation follows an action of its attempt, and
is counted once, however many branches continue it.

A reward reference is `name` (scope rollout), `role:name` or `transition:name`. A column of rewards
has one number per rollout, role or call; NaN if there is no row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from types import MappingProxyType

import msgspec
import torch
from msgspec import structs
from torch import Tensor

from agentrl.algorithms.data.batch import Batch, TokenRow
from agentrl.core.errors import TrainingError, nearest
from agentrl.core.types import (
    POLICY,
    Group,
    Json,
    Purpose,
    Reward,
    Rollout,
    RolloutState,
    Scope,
    Transition,
    step_number,
)


def trainable(call: Transition, policy: str = POLICY) -> bool:
    """Whether `policy` sampled the call, with known tokens and log-probs and a nonempty prompt."""
    return (
        call.policy == policy
        and call.exact
        and len(call.prompt) > 0
        and len(call.logprobs) == len(call.completion)
        and all(map(math.isfinite, call.logprobs))
    )


def counterfactual(rollout: Rollout) -> bool:
    """Whether it replays another rollout without some roles."""
    return rollout.branch is not None and bool(rollout.branch.without)


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
) -> bool:
    """Whether any of the policies may learn from a rollout."""
    return (
        rollout.purpose is Purpose.TRAIN
        and not counterfactual(rollout)
        and (rollout.state is RolloutState.SUCCEEDED or has_reward(rollout, reward_names))
        and any(
            trainable(call, call.policy) for call in rollout.transitions if call.policy in policies
        )
    )


def own_calls(groups: Iterable[Group], policy: str = POLICY) -> list[Transition]:
    """Calls that `policy` sampled, without calls that a branch replays (they count in the rollout
    that sampled them) and calls of counterfactual rollouts."""
    rows = [row for group in groups for row in group.rollouts if not counterfactual(row)]
    calls = [call for row in rows for call in row.transitions]
    return [call for call in calls if call.policy == policy and call.repeats is None]


def map_calls(
    groups: list[Group], change: Callable[[Transition], Transition | None]
) -> list[Group]:
    """Apply `change` to every call of the groups; drops calls for which it returns None."""

    def changed(rollout: Rollout) -> Rollout:
        calls = [new for call in rollout.transitions if (new := change(call)) is not None]
        return structs.replace(rollout, transitions=calls)

    return [structs.replace(group, rollouts=list(map(changed, group.rollouts))) for group in groups]


def new_messages(call: Transition) -> list[dict[str, Json]]:
    """The messages after the agent's latest answer: its newest observation."""
    newest = len(call.messages)
    while newest and call.messages[newest - 1].get("role") != "assistant":
        newest -= 1
    return call.messages[newest:]


def last_observation(call: Transition) -> Hashable:
    """A call's state: the messages after the agent's latest answer, or the whole prompt if the
    messages are unknown. Tool call ids are left out, because they differ between equal states."""
    observation = [(m.get("role"), m.get("content")) for m in new_messages(call)]
    return msgspec.json.encode(observation) if observation else call.prompt.tobytes()


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


Observations = Callable[[Transition, Transition], Iterable[tuple[int, str]]]
"""(a call, an earlier one whose prompt and completion its prompt begins with) -> positions in the
prompt, ascending, of what tools and the environment answered to the earlier one, with their
sources."""


def build_batch(
    groups: Iterable[Group],
    *,
    reward_names: Sequence[str] = ("outcome",),
    min_group: int = 0,
    policy: str = POLICY,
    state: Callable[[Transition], Hashable] = last_observation,
    observations: Observations | None = None,
) -> Batch:
    """The batch of one training step of `policy`.

    reward_names: reward references; empty: rollouts need no reward. state: returns the state of a
    call; calls with equal states are comparable. observations: by default there are none. Leaves
    out failed rollouts without a reward, inexact calls, calls of other policies, and groups with
    fewer than `min_group` scored rollouts. Keeps rollouts with a missing reward (NaN), and rollouts
    without sampled tokens (no rows), because their reward counts."""
    step, names, rollouts, rollout_group = 0, list[str](), list[Rollout](), list[int]()
    for group in groups:
        step = step_number(group.step)
        usable = [rollout for rollout in group.rollouts if valid(rollout, reward_names, policy)]
        scored = sum(not reward_names or has_reward(rollout, reward_names) for rollout in usable)
        if usable and scored >= min_group:
            rollouts += usable
            rollout_group += [len(names)] * len(usable)
            names.append(group.id)
    calls_by_rollout = [
        [call for call in row.transitions if trainable(call, policy)] for row in rollouts
    ]
    calls = [call for rollout_calls in calls_by_rollout for call in rollout_calls]
    rows, row_rollout, observation_sources = _merge_each(calls_by_rollout, observations)
    sources = sorted(set(observation_sources))
    prompts = [blake2b(call.prompt).digest() for call in calls]
    completions = [blake2b(call.completion).digest() for call in calls]
    roles = sorted({call.role for call in calls})
    observation_row = _ids(range(len(rows))).repeat_interleave(
        _ids(len(row.observed) for row in rows)
    )
    warm = [
        any(call.sampling.temperature > 0 for call in rollout_calls)
        for rollout_calls in calls_by_rollout
    ]
    return Batch(
        rows=rows,
        token_row=_ids(range(len(rows))).repeat_interleave(_ids(len(r.actions) for r in rows)),
        token_transition=_cat([row.transition for row in rows], torch.int64),
        sampler_logprobs=_cat([row.logprobs for row in rows], torch.float32),
        transition_rollout=_ids(
            number for number, rollout_calls in enumerate(calls_by_rollout) for _ in rollout_calls
        ),
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
        observation_row=observation_row,
        observation_source=_ids(sources.index(source) for source in observation_sources),
        sources=sources,
    )


Observed = Mapping[int, list[tuple[int, str]]]
"""Observations by the index of the call in whose prompt they are: their positions and sources."""


def merge(calls: Sequence[Transition], observed: Observed = MappingProxyType({})) -> list[TokenRow]:
    """Rows of one attempt, in the order of their first call. `TokenRow.transition` indexes
    `calls`, which must all be `trainable`.

    Each call, shortest prompt first, continues the longest row that is a prefix of it. This
    forwards the fewest tokens: the rows that a call can continue are prefixes of one another, so
    choosing one of them never prevents another call from continuing a row. A call without sampled
    tokens is in no row, nor is a call that repeats another rollout's, because it is trained
    there."""
    branches: list[_Branch] = []
    by_length = sorted(range(len(calls)), key=lambda i: (len(calls[i].prompt), i))
    for index in by_length:
        if len(calls[index].completion) == 0 or calls[index].repeats is not None:
            continue
        prompt = calls[index].prompt.tobytes()
        open_branches = (branch for branch in branches if prompt.startswith(branch.tokens))
        branch = max(open_branches, key=lambda branch: len(branch.tokens), default=None)
        if branch is None:
            branch = _Branch()
            branches.append(branch)
        branch.tokens = prompt + calls[index].completion.tobytes()
        branch.calls.append(index)
    branches.sort(key=lambda branch: min(branch.calls))
    return [_row(branch, calls, observed) for branch in branches]


def _observed(calls: Sequence[Transition], observations: Observations) -> Observed:
    """The observations in the prompts of calls, by the call's index: tokens after the longest
    earlier call that is a prefix. Observations that branches share are counted once, and those
    after a repeated call of another rollout only there."""
    by_call: dict[int, list[tuple[int, str]]] = {}
    acted = {c.prompt.tobytes() + c.completion.tobytes(): c for c in calls if len(c.completion)}
    branches: dict[bytes, list[Sequence[int]]] = {}
    for index, call in enumerate(calls):
        if not len(call.completion) or call.repeats is not None:
            continue
        prompt = call.prompt.tobytes()
        before = max(
            (acted_prefix for acted_prefix in acted if prompt.startswith(acted_prefix)),
            key=len,
            default=b"",
        )
        if not before or acted[before].repeats is not None:
            continue
        earlier, start = acted[before], len(before) // call.prompt.itemsize
        new, others = call.prompt[start:], branches.setdefault(before, [])
        first = start + max((_common(new, other) for other in others), default=0)
        by_call[index] = [(at, name) for at, name in observations(call, earlier) if at >= first]
        others.append(new)
    return by_call


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, (x, y) in pairs if x != y), min(len(a), len(b)))


@dataclass(slots=True)
class _Branch:
    tokens: bytes = b""  # int32, compared as bytes: one memcmp per candidate
    calls: list[int] = field(default_factory=list)


def _row(branch: _Branch, all_calls: Sequence[Transition], observed: Observed) -> TokenRow:
    calls = [all_calls[index] for index in branch.calls]
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
        observed=_ids(at for index in branch.calls for at, _ in observed.get(index, ())),
    )


def _merge_each(
    attempts: Sequence[Sequence[Transition]], observations: Observations | None
) -> tuple[list[TokenRow], list[int], list[str]]:
    """Rows of several attempts, with calls numbered consecutively, the attempt of each row, and the
    source of each observation."""
    rows, numbers, sources, first = list[TokenRow](), list[int](), list[str](), 0
    for number, calls in enumerate(attempts):
        observed: Observed = {} if observations is None else _observed(calls, observations)
        for row in merge(calls, observed):
            rows.append(replace(row, transition=row.transition + first))
            numbers.append(number)
            row_calls = dict.fromkeys(row.transition.tolist())
            sources += [source for call in row_calls for _, source in observed.get(call, ())]
        first += len(calls)
    return rows, numbers, sources


def _token_version(rows: Iterable[TokenRow], calls: Sequence[Transition]) -> Tensor:
    """`token_versions` of all rows, int64 [N]."""
    in_order = [call for row in rows for call in dict.fromkeys(row.transition.tolist())]
    return _cat([token_versions(calls[call]) for call in in_order], torch.int64)


def token_versions(call: Transition) -> Tensor:
    """Version of the policy that sampled each token, int64 [C]; -1 if unknown."""
    if not call.spans:
        return torch.full((len(call.completion),), -1 if call.version is None else call.version)
    starts = _ids([*(start for start, _ in call.spans), len(call.completion)])
    return _ids(version for _, version in call.spans).repeat_interleave(starts.diff())


def _ids(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def _cat(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=dtype)


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
        reward_reference(row) in references and not math.isnan(row.value) for row in rollout.rewards
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
    missing if another policy played the role, because an opponent's return is not a valid
    baseline."""
    rows = [_by_target(rollout, name) for rollout in rollouts]
    scope, _ = split_reference(name)
    values: Iterable[float]
    if scope is Scope.ROLLOUT:
        values = (next(iter(row.values()), math.nan) for row in rows)
    elif scope is Scope.ROLE:
        taken = (roles_of_others(rollout, policy) for rollout in rollouts)
        values = (
            math.nan if role in others else row.get(role, math.nan)
            for row, others in zip(rows, taken, strict=True)
            for role in roles
        )
    else:
        by_id = {target: value for row in rows for target, value in row.items()}
        values = (by_id.get(call.id, math.nan) for call in calls)
    return torch.tensor(list(values), dtype=torch.float64)


def _by_target(rollout: Rollout, name: str) -> dict[str, float]:
    """Values of a reward by target."""
    rows: dict[str, float] = {}
    for row in rollout.rewards:
        if reward_reference(row) == name:
            rows.setdefault(row.target or "", row.value)
    return rows


def roles_of_others(rollout: Rollout, policy: str) -> set[str]:
    """The roles of a rollout that were not played by `policy`."""
    played = {call.role for call in rollout.transitions if call.policy == policy}
    seated = {role for role, name in rollout.seats.items() if name != policy}
    return seated.union(call.role for call in rollout.transitions) - played


def check_rewards(
    groups: Sequence[Group], references: Iterable[str], step: int | None = None
) -> None:
    """Raise TrainingError for a reward that no rollout has although some succeeded, and for rows
    with an unknown role or call as target. A reward that only some rollouts have is not an error.
    step: counted from 1, for messages."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    succeeded = sum(rollout.state is RolloutState.SUCCEEDED for rollout in rollouts)
    where = f"of the {len(rollouts)} rollouts{'' if step is None else f' of step {step}'}"
    present = {reward_reference(row) for rollout in rollouts for row in rollout.rewards}
    for name in references:
        if name not in present and succeeded:
            hint = nearest(name, present) if present else "they have no reward at all"
            raise TrainingError(
                f"algorithm.options: none {where}, {succeeded} of which succeeded, has a reward "
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
        targets = roles if scope is Scope.ROLE else calls
        lost += [target for target in _by_target(rollout, name) if target not in targets]
    if lost:
        kind = "role" if scope is Scope.ROLE else "call"
        hint = f"; {nearest(lost[0], roles)}" if kind == "role" and roles else ""
        raise TrainingError(
            f"{len(lost)} rewards {name!r} {where} name a {kind} that no call has, "
            f"such as {lost[0]!r}{hint}"
        )
