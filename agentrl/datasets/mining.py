"""Pairs and labels from the rollouts of a finished or running run, by their exact tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from math import isnan
from statistics import fmean
from typing import Literal, cast

import msgspec

from agentrl.datasets.draft import Draft
from agentrl.datasets.pairing import How, choose_pairs
from agentrl.store.base import Store
from agentrl.types import POLICY, Purpose, Record, Rollout, RolloutState, Scope, Transition

PAGE = 256  # rollouts that are read at once
Found = tuple[Rollout, float, list[Transition]]  # with its reward and the policy's calls


class MineSpec(Record, frozen=True):
    """What to look for.

    extremes, all, best-of: pairs of rollouts of a group, see `choose_pairs`. expert: the best
    rollout of the run `expert` on a task against worse ones on it. branch: calls at which branches
    of a rollout part. turn: any calls of a group with the same prompt. label: every rollout, 1 from
    `threshold` on. mc: every rollout with the mean reward of those that share each of its calls,
    arXiv 2312.08935."""

    run: str
    how: How | Literal["expert", "branch", "turn", "label", "mc"] = "extremes"
    reward: str = "outcome"
    least: float = 0.0  # difference of rewards
    per_group: int = 0  # pairs; 0: all
    steps: tuple[int, int] | None = None  # the first and the last that asked for the rollouts
    expert: str = ""
    threshold: float = 0.5
    policy: str = POLICY  # whose calls are judged


async def mine(store: Store, draft: Draft, spec: MineSpec) -> None:
    """Add what the spec finds in its run, group by group, in order."""
    experts: dict[bytes, Found] = {}
    if spec.expert:
        async for group in _groups(store, draft, spec, spec.expert):
            best = max(group, key=lambda found: found[1])
            if best[1] >= experts.get(_task(best[0]), best)[1]:
                experts[_task(best[0])] = best
    async for group in _groups(store, draft, spec, spec.run):
        if spec.how in ("branch", "turn"):
            _calls(draft, spec, group)
        elif spec.how in ("label", "mc"):
            _labels(draft, spec, group)
        elif spec.how == "expert":
            known = experts.get(_task(group[0][0]))
            some = [known, *group] if known else group
            worse = [i for i, row in enumerate(some) if i and row[1] + spec.least < some[0][1]]
            _pairs(draft, some, [(0, i) for i in worse if known][: spec.per_group or None])
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
    """The rollouts of each group that can be judged."""
    waiting: list[Rollout] = []
    after = None
    while True:
        page = await store.rollouts(run, purpose=Purpose.TRAIN, after=after, limit=PAGE)
        after = page[-1].id if page else None
        waiting += page
        last = waiting[-1].group if page else None
        whole = [row for row in waiting if row.group != last]
        waiting = [row for row in waiting if row.group == last]
        calls = await store.calls([row.id for row in whole])
        groups: dict[str, list[Found]] = {}
        for row in whole:
            if found := _judged(draft, spec, row, calls.get(row.id, [])):
                groups.setdefault(row.group, []).append(found)
        for group in groups.values():
            yield group
        if not page:
            return


def _judged(
    draft: Draft, spec: MineSpec, row: Rollout, calls: Sequence[Transition]
) -> Found | None:
    """None, and counted, for a rollout without the reward, one that failed without it, and one of
    which not all tokens are known."""
    value = row.reward(spec.reward)
    if spec.steps is not None and not spec.steps[0] <= row.step <= spec.steps[1]:
        return None
    own = [call for call in calls if call.policy == spec.policy]
    done = row.state in (RolloutState.SUCCEEDED, RolloutState.FAILED) and not row.counterfactual
    defects = {
        "rollouts without the reward": not done or isnan(value),
        "rollouts with calls of other policies": not own or len(own) < len(calls),
        "rollouts with calls without token ids": not all(call.exact for call in own),
    }
    if why := next((why for why, found in defects.items() if found), ""):
        draft.counts[why] += 1
        return None
    return row, value, own


def _pairs(draft: Draft, group: Sequence[Found], chosen: Sequence[tuple[int, int]]) -> None:
    draft.counts["groups without a pair"] += not chosen
    for better, worse in chosen:
        (a, high, own), (b, low, other) = group[better], group[worse]
        if own[0].prompt != other[0].prompt:
            draft.counts["pairs whose sides begin with different prompts"] += 1
            continue
        sides = [draft.side(calls, row.id) for row, calls in ((a, own), (b, other))]
        fields = {"rejected": sides[1], "margin": high - low, "source": f"{a.id} {b.id}"}
        draft.add("pair", own[0].prompt.tobytes(), sides[0], **fields)


def _calls(draft: Draft, spec: MineSpec, group: Sequence[Found]) -> None:
    """Pairs of calls with the same prompt, each worth the mean of the rollouts that made it."""
    values = _values(group)
    forks: dict[bytes, dict[bytes, tuple[Rollout, int]]] = {}
    branched = set()
    for row, _, calls in group:
        for index, call in enumerate(calls):
            prompt = call.prompt.tobytes()
            forks.setdefault(prompt, {}).setdefault(call.completion.tobytes(), (row, index))
            if row.branch is not None and index == row.branch.calls:
                branched.add(prompt)
    made = {row.id: calls for row, _, calls in group}
    for prompt, said in forks.items():
        if len(said) < 2 or (spec.how == "branch" and prompt not in branched):
            continue
        keys = list(said)
        means = [values[prompt, key] for key in keys]
        chosen = choose_pairs(means, "all", spec.least, spec.per_group, "")
        draft.counts["calls without a pair"] += not chosen
        for two in chosen:
            sides = []
            for row, index in (said[keys[i]] for i in two):
                part = {"first": index, "calls": 1}
                sides.append(draft.side([made[row.id][index]], row.id, **part))
            source = " ".join(said[keys[i]][0].id for i in two)
            fields = {"rejected": sides[1], "margin": means[two[0]] - means[two[1]]}
            draft.add("pair", prompt, sides[0], source=source, **fields)


def _labels(draft: Draft, spec: MineSpec, group: Sequence[Found]) -> None:
    values = _values(group)
    for row, value, calls in group:
        side, prompt = draft.side(calls, row.id), calls[0].prompt.tobytes()
        if spec.how == "label":
            draft.add("label", prompt, side, label=float(value >= spec.threshold), source=row.id)
        elif row.branch is None:
            steps = [values[call.prompt.tobytes(), call.completion.tobytes()] for call in calls]
            draft.add("steps", prompt, side, steps=steps, source=row.id)


def _values(group: Sequence[Found]) -> Mapping[tuple[bytes, bytes], float]:
    """Of each call, by its tokens: the mean over rollouts of the reward, and of the rewards of the
    calls from this one on."""
    found: dict[tuple[bytes, bytes], list[float]] = {}
    for row, value, calls in group:
        own = {r.target: r.value for r in row.rewards if r.scope is Scope.TRANSITION}
        ahead = value
        for call in reversed(calls):
            ahead += own.get(call.id, 0.0)
            found.setdefault((call.prompt.tobytes(), call.completion.tobytes()), []).append(ahead)
    return {key: fmean(values) for key, values in found.items()}


def _task(row: Rollout) -> bytes:
    return msgspec.json.encode(row.task, order="sorted")
