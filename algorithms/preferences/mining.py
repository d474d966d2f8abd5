"""Mining of pairs and labels, with exact tokens, from the rollouts of a finished or running run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from math import isnan
from statistics import fmean
from typing import Any, Literal, cast

import msgspec
from msgspec.structs import replace

from agentrl.algorithms.preferences.draft import MIN_DIFFERENCE, Draft, How, choose_pairs
from agentrl.algorithms.preferences.turns import reasked, written
from agentrl.core.types import (
    CORRECTION,
    POLICY,
    SESSION,
    Purpose,
    Record,
    Reward,
    Rollout,
    RolloutState,
    Scope,
    Transition,
    step_number,
)
from agentrl.store.base import Store
from agentrl.store.records import without_tokens

ROLLOUTS_PER_READ = 256  # rollouts per read
Found = tuple[Rollout, float, list[Transition]]  # rollout, its reward, the policy's calls
Place = tuple[Found, int]  # a rollout and the index of one of its calls


class MineSpec(Record, frozen=True):
    """What to mine, by `how`.

    extremes, all, best-of: pairs of rollouts of a group, see `choose_pairs`. expert: pairs of the
    best rollout of the run `expert` on a task and worse rollouts on it. branch: pairs of calls at
    which branches of a rollout diverge. turn: pairs of calls of a group with the same prompt.
    label: a label for every rollout, and for every call with a reward of that name: 1 if the reward
    is at least `threshold`. mc: step labels, the mean reward of the rollouts that share each call,
    arXiv 2312.08935. correction: pairs of a person's correction and the call. reasked: pairs at the
    prompt of a call: the answer after the user had asked again, and the call's answer.
    demonstration: rollouts with a reward of at least `threshold`."""

    run: str
    how: (
        How
        | Literal[
            "expert", "branch", "turn", "correction", "reasked", "label", "mc", "demonstration"
        ]
    ) = "extremes"
    reward: str = "outcome"
    least: float = 0.0  # minimum difference of rewards in a pair
    per_group: int = 0  # maximum pairs per group; 0: all
    steps: tuple[int, int] | None = None  # first and last step of the rollouts, counted from 1
    expert: str = ""
    threshold: float = 0.5
    policy: str = POLICY  # the policy whose calls are mined
    since: float = 0.0  # unix seconds, the earliest start of a call
    least_version: int = 0  # oldest policy version of a call
    inexact: bool = False  # include calls without token ids, as text that a run renders


async def mine(store: Store, draft: Draft, spec: MineSpec) -> None:
    """Add the items that a spec describes, group by group in order."""
    experts: dict[bytes, Found] = {}
    if spec.expert:
        async for group in _groups(store, draft, spec, spec.expert):
            best = max(group, key=lambda member: member[1])
            if best[1] >= experts.get(_task(best[0]), best)[1]:
                experts[_task(best[0])] = best
    async for group in _groups(store, draft, spec, spec.run):
        if spec.how in ("branch", "turn"):
            _calls(draft, spec, group)
        elif spec.how in ("label", "mc", "demonstration"):
            _labels(draft, spec, group)
        elif spec.how == "correction":
            _corrections(draft, spec, group)
        elif spec.how == "reasked":
            _reasked(draft, group)
        elif spec.how == "expert":
            expert = experts.get(_task(group[0][0]))
            with_expert = [expert, *group] if expert else group
            gaps = enumerate(with_expert[0][1] - value for _, value, _ in with_expert)
            worse = [(0, i) for i, gap in gaps if gap >= max(spec.least, MIN_DIFFERENCE)]
            _pairs(draft, with_expert, worse[: spec.per_group or None] if expert else [])
        else:
            values = [value for _, value, _ in group]
            seed = group[0][0].group
            how = cast(How, spec.how)
            chosen = choose_pairs(values, how, spec.least, spec.per_group, seed)
            _pairs(draft, group, chosen)
        await draft.flush()


async def _groups(
    store: Store, draft: Draft, spec: MineSpec, run: str
) -> AsyncIterator[list[Found]]:
    """The usable rollouts of each group; see `_judged`."""
    waiting: list[Rollout] = []
    after = None
    while True:
        page = await store.rollouts(run, after=after, limit=ROLLOUTS_PER_READ)
        after = page[-1].id if page else None
        waiting += [row for row in page if row.purpose is Purpose.TRAIN or row.step == SESSION]
        last = page[-1].group if page else None
        complete = [row for row in waiting if row.group != last]
        waiting = [row for row in waiting if row.group == last]
        calls = await store.calls([row.id for row in complete])
        groups: dict[str, list[Found]] = {}
        for row in complete:
            if judged := _judged(draft, spec, row, calls.get(row.id, [])):
                groups.setdefault(row.group, []).append(judged)
        for group in groups.values():
            yield group
        if not page:
            return


def _judged(
    draft: Draft, spec: MineSpec, rollout: Rollout, calls: Sequence[Transition]
) -> Found | None:
    """None for a rollout that has not ended, lacks the reward, has calls older than requested, or
    has unknown tokens; the reason is counted."""
    value = rollout.reward(spec.reward)
    number = step_number(rollout.step)
    if spec.steps is not None and not spec.steps[0] <= number <= spec.steps[1]:
        return None
    policy_calls = [call for call in calls if _is_of(call, spec.policy)]
    ended = rollout.state in (RolloutState.SUCCEEDED, RolloutState.FAILED)
    ended &= not (rollout.branch and rollout.branch.without)  # repeats another rollout
    defects = {
        "rollouts that have not ended": not ended,
        "rollouts without the reward": isnan(value)
        and not _judged_calls(spec, rollout, policy_calls),
        "rollouts with calls of other policies": not policy_calls or len(policy_calls) < len(calls),
        "older rollouts": any(
            call.started < spec.since or (call.version or 0) < spec.least_version
            for call in policy_calls
        ),
        "rollouts with calls without token ids": not (
            spec.inexact or all(c.exact for c in policy_calls)
        ),
    }
    if why := next((why for why, applies in defects.items() if applies), ""):
        draft.counts[why] += 1
        return None
    return rollout, value, policy_calls


def _is_of(call: Transition, policy: str) -> bool:
    """Whether a call belongs to the policy, or to a version of it that `agentrl live` served."""
    return call.policy in (policy, f"{policy}@{call.version}")


def _judged_calls(spec: MineSpec, rollout: Rollout, calls: list[Transition]) -> bool:
    """Whether the rollout has calls that the spec uses independently of the rollout's reward."""
    if spec.how == "reasked":
        return bool(reasked(calls, rollout.rewards))
    return bool(_rewarded(spec, rollout, calls))


def _pairs(draft: Draft, group: Sequence[Found], chosen: Sequence[tuple[int, int]]) -> None:
    draft.counts["groups without a pair"] += not chosen
    for better, worse in chosen:
        (a, high, better_calls), (b, low, worse_calls) = group[better], group[worse]
        if _prompt(better_calls[0]) != _prompt(worse_calls[0]):
            draft.counts["pairs whose completions begin with different prompts"] += 1
            continue
        sides = [draft.side(calls, row.id) for row, calls in ((a, better_calls), (b, worse_calls))]
        fields = {"rejected": sides[1], "margin": high - low, "source": f"{a.id} {b.id}"}
        draft.add("pair", _prompt(better_calls[0]), sides[0], **fields)


def _corrections(draft: Draft, spec: MineSpec, group: Sequence[Found]) -> None:
    for member in group:
        for index, reward in _rewarded(spec, member[0], member[2]):
            better = replace(without_tokens(member[2][index]), answer=written(reward.note))
            _pair_of_calls(draft, draft.side([better]), (member, index))


def _reasked(draft: Draft, group: Sequence[Found]) -> None:
    for member in group:
        row, _, calls = member
        pairs = reasked(calls, row.rewards)
        draft.counts["sessions in which nothing was asked again"] += not pairs
        for first, second in pairs:
            call, later = calls[first], calls[second]
            better = replace(call, completion=later.completion, logprobs=later.logprobs,
                             answer=later.answer, finish=later.finish)  # fmt: skip
            _pair_of_calls(draft, draft.side([better]), (member, first))


def _rewarded(
    spec: MineSpec, rollout: Rollout, calls: Sequence[Transition]
) -> list[tuple[int, Reward]]:
    """(index, reward) of the calls with a call-level reward that the spec uses."""
    name = {"label": spec.reward, "correction": CORRECTION}.get(spec.how)
    indices = {call.id: index for index, call in enumerate(calls)}
    rewards = [r for r in rollout.rewards if r.name == name and r.scope is Scope.TRANSITION]
    return [(indices[r.target], r) for r in rewards if r.target in indices]


def _side(draft: Draft, place: Place) -> str:
    (row, _, calls), index = place
    return draft.side([calls[index]], row.id, first=index, calls=1)


def _pair_of_calls(draft: Draft, better: str, worse: Place, **fields: Any) -> None:
    (row, _, calls), index = worse
    fields = {"rejected": _side(draft, worse), "source": row.id} | fields
    draft.add("pair", _prompt(calls[index]), better, **fields)


def _prompt(call: Transition) -> bytes:
    if call.exact:
        return call.prompt.tobytes() + "".join(call.images).encode()
    return msgspec.json.encode((call.messages, call.tools), order="sorted")


def _key(call: Transition) -> tuple[bytes, bytes]:
    """A key that is equal for calls with the same prompt and completion."""
    answer = call.completion.tobytes() if call.exact else msgspec.json.encode(call.answer)
    return _prompt(call), answer


def _calls(draft: Draft, spec: MineSpec, group: Sequence[Found]) -> None:
    """Add pairs of calls with the same prompt, valued by the mean over rollouts that share them."""
    values = _values(group)
    forks: dict[bytes, dict[bytes, Place]] = {}
    branched = set()
    for member in group:
        for index, call in enumerate(member[2]):
            prompt, answer = _key(call)
            forks.setdefault(prompt, {}).setdefault(answer, (member, index))
            if member[0].branch is not None and index == member[0].branch.calls:
                branched.add(prompt)
    for prompt, answers in forks.items():
        if len(answers) < 2 or (spec.how == "branch" and prompt not in branched):
            continue
        keys = list(answers)
        means = [values[prompt, key] for key in keys]
        chosen = choose_pairs(means, "all", spec.least, spec.per_group, "")
        draft.counts["calls without a pair"] += not chosen
        for a, b in chosen:
            better, worse = answers[keys[a]], answers[keys[b]]
            source = f"{better[0][0].id} {worse[0][0].id}"
            fields = {"margin": means[a] - means[b], "source": source}
            _pair_of_calls(draft, _side(draft, better), worse, **fields)


def _labels(draft: Draft, spec: MineSpec, group: Sequence[Found]) -> None:
    values = _values(group) if spec.how == "mc" else {}
    for member in group:
        row, value, calls = member
        side, prompt = draft.side(calls, row.id), _prompt(calls[0])
        if spec.how == "label":
            judged = [] if isnan(value) else [(side, prompt, value)]
            for index, reward in _rewarded(spec, row, calls):
                judged.append((_side(draft, (member, index)), _prompt(calls[index]), reward.value))
            for side, prompt, worth in judged:
                label = float(worth >= spec.threshold)
                draft.add("label", prompt, side, label=label, source=row.id)
        elif spec.how == "demonstration" and value >= spec.threshold:
            draft.add("demonstration", prompt, side, source=row.id)
        elif spec.how == "mc" and row.branch is None:
            steps = [values[_key(call)] for call in calls]
            draft.add("steps", prompt, side, steps=steps, source=row.id)


def _values(group: Sequence[Found]) -> Mapping[tuple[bytes, bytes], float]:
    """Call key -> mean, over the rollouts with this call, of the rollout's reward plus the rewards
    of this and later calls."""
    totals: dict[tuple[bytes, bytes], list[float]] = {}
    for row, value, calls in group:
        call_rewards = {r.target: r.value for r in row.rewards if r.scope is Scope.TRANSITION}
        ahead = value
        for call in reversed(calls):
            ahead += call_rewards.get(call.id, 0.0)
            totals.setdefault(_key(call), []).append(ahead)
    return {key: fmean(values) for key, values in totals.items()}


def _task(rollout: Rollout) -> bytes:
    return msgspec.json.encode(rollout.task, order="sorted")
