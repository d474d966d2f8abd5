"""The record of a run that `agentrl why` analyses: metrics, the newest rollouts with their calls,
and tasks and rewards of more rollouts.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from msgspec.structs import replace

from agentrl.algorithms.hack_signs import (
    NOT_AUDITED,
    STEPS,
    Audited,
    Sign,
    known_of,
    played,
    signs,
)
from agentrl.algorithms.verdict import (
    EVALUATIONS,
    HELD_OUT,
    SAMPLED,
    Change,
    change_of,
    changes_of,
    evaluation,
    paired,
    task_input,
)
from agentrl.core.config import RunConfig, derived
from agentrl.core.config.run_file import from_store
from agentrl.core.errors import NotFound
from agentrl.core.types import (
    FailureCount,
    Purpose,
    Rollout,
    RolloutState,
    StepRow,
    are_shares,
    score_text,
)
from agentrl.store.base import Store

ROLLOUTS_READ, SEARCH_SECONDS = 32, 5.0  # rollouts to read with calls; seconds to search for a role
ROLLOUTS_LISTED = 2048  # rollouts whose tasks, results and rewards are read
NEARLY_ALL = 0.9  # share that counts as nearly all sampled rollouts
EARLY = 20  # steps within which a run without improvement may just need more time
LATEST_STEPS = 4  # last steps whose rollouts are always read
ENDS_READ = 64  # rollouts to read with calls, at the start and at the end of a run
ALIKE_READ, ALIKE_EACH = 24, 4  # sets of equal rollouts with calls, and rollouts of each set


@dataclass(frozen=True, slots=True)
class Alike:
    """Rollouts of equal tasks in which everything was equal, calls included, but not the reward."""

    rollouts: tuple[str, str]  # two of them
    share: float  # share of the variance of rewards between equal rollouts


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """The stored data of one policy of a run."""

    config: RunConfig  # the policy's view of the run
    # Metrics of committed steps, those of the policy without prefix.
    steps: Sequence[Mapping[str, float]]
    scores: Sequence[float]  # held-out, from before the first step to after the last
    failure: FailureCount | None  # the most frequent kind of failure
    silent: Sequence[str]  # roles of the policy without a call
    logprobs: Sequence[float]  # log-probs of the most recently sampled tokens
    newest: Sequence[Rollout] = ()  # the most recent rollouts, with calls
    changes: Mapping[str, Change] = field(default_factory=dict)
    trained: Change | None = None  # change of the trained reward, if that is not the outcome
    listed: Sequence[Rollout] = ()  # training rollouts from the first on, without calls
    heldout: Sequence[Rollout] = ()  # rollouts of the last evaluation
    alike: Alike | None = None
    # Rollouts of the first and the last evaluation, or of training; some with their calls.
    before: Sequence[Rollout] = ()
    after: Sequence[Rollout] = ()
    start: Mapping[str, float] = field(default_factory=dict)  # metrics of the first step
    untouched: int = 0  # untrained held-out tasks if others were trained; scores use only these
    audited: Audited = NOT_AUDITED
    hacked: Sequence[Sign] = ()  # signs that have crossed their limit in the newest rollouts

    @property
    def early(self) -> bool:
        """Whether the run may just need more steps."""
        return len(self.steps) < min(self.config.steps, EARLY)

    @property
    def risen(self) -> bool:
        """Whether the trained reward or a score rose."""
        more = [self.trained] if self.trained else []
        return any(change.risen for change in (*self.changes.values(), *more))

    @property
    def solved(self) -> bool:
        """Whether nothing was left to learn: every held-out task succeeded at first and at last,
        and nearly all of the last training rollouts did."""
        held, trained = self.changes.get(HELD_OUT), self.values("reward/mean")[-3:]
        solved = held is not None and held.share and held.first == held.last == 1.0
        return solved and all(mean >= NEARLY_ALL for mean in trained)

    @property
    def improved(self) -> bool:
        """Whether held-out scores rose; without any, the training reward."""
        held = [self.changes[name] for name in (HELD_OUT, SAMPLED) if name in self.changes]
        return any(change.risen for change in held or self.changes.values())

    @property
    def outcome(self) -> str:
        """The reference of the reward that the algorithm maximises."""
        return derived.trained_reward(self.config)

    @property
    def counted(self) -> Sequence[Mapping[str, float]]:
        """The metrics of the steps. Before the first step: the failures of the evaluation, because
        they may have ended the run."""
        failed = Counter(
            f"rollouts/failed/{row.failure.kind}" for row in self.heldout if row.failure
        )
        of = {"rollouts": float(len(self.heldout)), "rollouts/failed": float(failed.total())}
        return self.steps or [{**of, **failed}]

    def format(self, score: float) -> str:
        """A score of the run in words."""
        held = [{"eval/score": score} for score in self.scores]
        return score_text(score, are_shares([*self.steps, *held]))

    def values(self, name: str) -> list[float]:
        return [x for step in self.counted if math.isfinite(x := step.get(name, math.nan))]

    def mean(self, name: str) -> float:
        """Mean of a metric over the steps that have it; 0 if none has."""
        return fmean(self.values(name) or [0.0])

    def share(self, name: str, of: str, without: str = "") -> float:
        """(total of `name` - total of `without`) / total of `of`, at most 1."""
        part = sum(self.values(name)) - sum(self.values(without))
        return part / max(part, sum(self.values(of)), 1.0)


async def read(store: Store, run: str, last: int = 0) -> dict[str, PolicyRun]:
    """Read the record of each trained policy. last: number of steps; 0: all. Raises NotFound for an
    unknown run."""
    state = await store.run(run)
    if state is None:
        raise NotFound(f"there is no run {run!r} in {store.url}; it has {await store.runs()}")
    config = from_store(state.config)
    measured = await store.steps(run)
    rows = [row for row in measured if row.committed][-last:]
    steps = {
        HELD_OUT: [row.step for row in measured if "eval/score" in row.metrics],
        SAMPLED: [row.step for row in measured if "eval/sampled" in row.metrics],
    }
    listed = await store.rollouts(run, purpose=Purpose.TRAIN, limit=ROLLOUTS_LISTED)
    latest = await _latest(store, run, rows, listed)
    trained = {task_input(row) for row in (*listed, *latest)}
    changes = changes_of([row.metrics for row in measured], config)
    changes = await paired(store, run, changes, steps, without=trained)

    def weight(failed: FailureCount) -> tuple[float, int]:
        rollouts = (row.metrics.get(f"rollouts/failed/{failed.kind}", 0.0) for row in rows)
        return sum(rollouts), failed.attempts

    failure = max(await store.failures(run), key=weight, default=None)
    heldout = await evaluation(store, run, next(iter(steps[HELD_OUT]), 0), "score")
    before, after = await _ends(store, run, steps, listed, latest)
    held = {task_input(row) for row in heldout}
    alike = await _alike(store, listed)
    audit = await known_of(store, config)
    newly = await _last_played(store, run, rows)
    policies = derived.trained_policies(config)
    records = {}
    for name in policies:
        roles = [role for role, player in derived.policy_by_role(config).items() if player == name]
        pages = {
            role: await store.search(run, role=role, limit=1, budget=SEARCH_SECONDS)
            for role in roles
        }
        # A search that ran out of time has not seen every rollout.
        silent = [role for role, page in pages.items() if not (page.rows or page.cursor)]
        newest = await _newest(store, run, name if len(policies) > 1 else None)
        view = derived.view(config, name)
        metrics = [own_metrics(row.metrics, name) for row in rows]
        records[name] = PolicyRun(
            config=view,
            steps=metrics,
            scores=[row.metrics["eval/score"] for row in measured if "eval/score" in row.metrics],
            failure=failure,
            silent=silent,
            logprobs=[
                x for row in newest for call in row.transitions if call.policy == name
                for x in call.logprobs
            ],
            newest=newest,
            changes=changes,
            trained=_trained(view, metrics),
            listed=listed,
            heldout=heldout,
            alike=alike,
            before=before,
            after=after,
            start=own_metrics(measured_first(measured), name),
            untouched=len(held - trained) if held & trained else 0,
            audited=audit,
            hacked=[sign for sign in signs(played(newly, view, audit), audit) if sign.crossed],
        )  # fmt: skip
    return records


def measured_first(measured: Sequence[StepRow]) -> Mapping[str, float]:
    """The metrics of the first committed step; empty before it."""
    return next((row.metrics for row in measured if row.committed), {})


async def _latest(
    store: Store, run: str, rows: Sequence[StepRow], listed: Sequence[Rollout]
) -> list[Rollout]:
    """Training rollouts of the last steps, if the run has more rollouts than `listed`."""
    if len(listed) < ROLLOUTS_LISTED:
        return []
    steps = [row.step for row in rows[-LATEST_STEPS:]]
    read = [await store.rollouts(run, purpose=Purpose.TRAIN, trained=step) for step in steps]
    return [row for rollouts in read for row in rollouts]


async def _last_played(store: Store, run: str, rows: Sequence[StepRow]) -> list[Rollout]:
    """Rollouts that the last steps trained. If any has stored calls, only those that have."""
    read = [
        await store.rollouts(run, purpose=Purpose.TRAIN, trained=row.step) for row in rows[-STEPS:]
    ]
    rollouts = await _with_calls(store, [row for step in read for row in step])
    return [row for row in rollouts if row.transitions] or rollouts


async def _ends(
    store: Store,
    run: str,
    steps: Mapping[str, Sequence[int]],
    listed: Sequence[Rollout],
    latest: Sequence[Rollout],
) -> tuple[list[Rollout], list[Rollout]]:
    """Rollouts of the first and last evaluation, or of the first and last steps of training."""
    name = HELD_OUT if steps[HELD_OUT][1:] else SAMPLED
    if len(steps[name]) > 1:
        ends = [
            await evaluation(store, run, step, EVALUATIONS[name])
            for step in (steps[name][0], steps[name][-1])
        ]
    else:
        succeeded = [row for row in (*listed, *latest) if row.state is RolloutState.SUCCEEDED]
        fifth = len(succeeded) // 5
        ends = [succeeded[:fifth], succeeded[-fifth:] if fifth else []]
    before, after = [await _with_calls(store, rows) for rows in ends]
    return before, after


async def _with_calls(store: Store, rows: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts, with calls for ENDS_READ of them, evenly spread."""
    stride = max(1, len(rows) // ENDS_READ)
    traces = [await store.trace(row.id) for row in rows[::stride][:ENDS_READ]]
    calls_of = {trace.rollout.id: trace.transitions for trace in traces if trace}
    return [replace(row, transitions=calls_of.get(row.id, [])) for row in rows]


async def _newest(store: Store, run: str, policy: str | None) -> list[Rollout]:
    """The newest rollouts that have ended, with their calls. policy: only rollouts with calls of
    it; None: all."""
    page = await store.search(run, policy=policy, purpose=Purpose.TRAIN, limit=ROLLOUTS_READ)
    traces = [await store.trace(row.id) for row in page.rows]
    return [replace(trace.rollout, transitions=trace.transitions) for trace in traces if trace]


def _trained(config: RunConfig, steps: Sequence[Mapping[str, float]]) -> Change | None:
    name = derived.trained_reward(config)
    key, groups = f"reward/{name}", max(float(config.algorithm.groups), 1.0)
    measured = [
        (step[f"{key}/mean"], step.get(f"{key}/std", math.inf) ** 2 / groups)
        for step in steps
        if f"{key}/mean" in step
    ]
    if name == "outcome" or not measured[1:]:
        return None
    share = are_shares(
        {f"reward/{end}": step.get(f"{key}/{end}", math.nan) for end in ("mean", "std")}
        for step in steps
    )
    return change_of(measured, same_tasks=False, share=share)


async def _alike(store: Store, listed: Sequence[Rollout]) -> Alike | None:
    """Rollouts of the same task with the same result and calls, if their rewards differ."""
    equal: dict[str, list[Rollout]] = defaultdict(list)
    for row in listed:
        if row.state is RolloutState.SUCCEEDED and math.isfinite(row.reward()):
            equal[repr((row.task, row.result))].append(row)
    pairs = [rows for rows in equal.values() if len(rows) > 1]
    rewards = [x.reward() for rows in pairs for x in rows]
    if not rewards or not (spread := _squares(rewards)):
        return None
    within = sum(_squares([row.reward() for row in rows]) for rows in pairs)
    # Each set of equal rollouts has one degree of freedom less.
    share = min(1.0, within / (len(rewards) - len(pairs)) / (spread / (len(rewards) - 1)))
    differ = (rows for rows in pairs if len({row.reward() for row in rows}) > 1)
    for rows in [*differ][:ALIKE_READ]:
        by_content: dict[str, Rollout] = {}
        for row in rows[:ALIKE_EACH]:
            trace = await store.trace(row.id)
            calls = trace.transitions if trace else []
            content = json.dumps([([*c.prompt], [*c.completion], c.images) for c in calls])
            earlier = by_content.setdefault(content, row)
            if calls and earlier.reward() != row.reward():
                return Alike((earlier.id, row.id), share)
    return None


def _squares(values: Sequence[float]) -> float:
    mean = fmean(values)
    return sum((x - mean) ** 2 for x in values)


def own_metrics(metrics: Mapping[str, float], policy: str) -> dict[str, float]:
    """The metrics of a step, with those of the policy also without its prefix."""
    prefix = f"{policy}/"
    of_policy = {
        key.removeprefix(prefix): x for key, x in metrics.items() if key.startswith(prefix)
    }
    return {**metrics, **of_policy}
