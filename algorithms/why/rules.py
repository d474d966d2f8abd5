"""Rules that find reasons why a run does not learn, from its stored metrics and calls.

Causes come before their effects, such as groups of equal rewards. A success has some of the same
effects (a certain policy, groups that are all right), so these are no reasons in a run that has
clearly improved. Does not import torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

from agentrl.base.failures import one_line
from agentrl.config import RunConfig
from agentrl.config import policies as team
from agentrl.config.run_file import from_store
from agentrl.errors import NotFound
from agentrl.store.base import Store
from agentrl.types import EMPTY, ErrorKind, FailureCount, Purpose, Rollout, RolloutState

# Least shares to report a reason, and to rank it by the order of RULES.
REPORTED_SHARE, RANKED_SHARE = 0.2, 0.5
DETERMINISTIC_ENTROPY = 0.02  # nats per token, entropy of a deterministic policy
# Least sum of learning rates that moves weights; ten times that for an adapter.
LEAST_RATE_SUM = 2e-5
RARE_SUCCESS = 0.1  # share of rollouts below which most groups of eight have no success
ROLLOUTS_READ, SEARCH_SECONDS = 16, 5.0  # number of rollouts to read; seconds to search for a role
HELD_OUT, SAMPLED, TRAINING = "held-out", "sampled held-out", "training reward"
# What the embedded server, vLLM, SGLang, OpenAI and Anthropic say of a prompt that is too long.
TOO_LONG = re.compile(r"context[ _-](length|window|size)|model's context|prompt is too long", re.I)
AGENT_CURE = "agent.path, agent.command or agent.harness: correct the agent"
TEACH = (
    "warmup.data: demonstrations of success (agentrl demonstrate); tasks.train: easier ones, then "
    'tasks.order: "difficulty"'
)
CURES = {
    ErrorKind.TIMEOUT: "agent.timeout: more",
    ErrorKind.LIMIT: "agent.max_calls, agent.max_tokens: more",
    ErrorKind.VERIFIER: "verifier.path: correct the verifier",
    ErrorKind.MODEL: "policy, engine, upstreams: the model's server, which failed",
    ErrorKind.WORKSPACE: "workspace: its source and commands",
    ErrorKind.LOST_RUNNER: "runner: its machine and its sandbox, which was lost",
}


@dataclass(frozen=True, slots=True)
class Change:
    """What was measured in the first and in the last fifth of all measurements, as means."""

    first: float
    last: float
    best: float  # of all fifths
    noise: float  # the largest difference to expect by chance; infinite if unknown

    @property
    def risen(self) -> bool:
        """Whether it clearly rose, and has not lost most of that again."""
        gain = self.last - self.first
        return gain > self.noise and gain >= self.best - self.last


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason why a policy does not learn. share: the affected share of the run, 0 to 1."""

    share: float
    text: str  # with the evidence
    change: str  # settings, and how to change them


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """The stored data of one policy of a run."""

    config: RunConfig  # the policy's view of it
    steps: Sequence[Mapping[str, float]]  # metrics of committed steps, the policy's own unprefixed
    scores: Sequence[float]  # held-out, from before the first step to after the last
    failure: FailureCount | None  # the kind of most failed rollouts
    silent: Sequence[str]  # roles of the policy without a call
    logprobs: Sequence[float]  # of its most recently sampled tokens
    newest: Sequence[Rollout] = ()  # its most recent rollouts
    changes: Mapping[str, Change] = field(default_factory=dict)

    @property
    def improved(self) -> bool:
        return any(change.risen for change in self.changes.values())

    @property
    def outcome(self) -> str:
        """The reference of the reward that the algorithm maximises."""
        return str(self.config.algorithm.options.get("reward", "outcome"))

    def values(self, name: str) -> list[float]:
        return [x for step in self.steps if math.isfinite(x := step.get(name, math.nan))]

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
    scores = [row.metrics["eval/score"] for row in measured if "eval/score" in row.metrics]
    rows = [row for row in measured if row.committed][-last:]
    changes = changes_of([row.metrics for row in measured], config)

    def weight(failed: FailureCount) -> tuple[float, int]:
        rollouts = (row.metrics.get(f"rollouts/failed/{failed.kind}", 0.0) for row in rows)
        return sum(rollouts), failed.attempts

    failure = max(await store.failures(run), key=weight, default=None)
    records = {}
    for name in team.trained_policies(config):
        own = [role for role, player in team.policy_by_role(config).items() if player == name]
        found = {
            role: await store.search(run, role=role, limit=1, budget=SEARCH_SECONDS) for role in own
        }
        newest = await store.search(run, policy=name, purpose=Purpose.TRAIN, limit=ROLLOUTS_READ)
        traces = [await store.trace(row.id) for row in newest.rows]
        calls = [call for trace in traces if trace for call in trace.transitions]
        # A search that ran out of time has not seen every rollout.
        silent = [role for role, page in found.items() if not (page.rows or page.cursor)]
        records[name] = PolicyRun(
            config=team.view(config, name),
            steps=[own_metrics(row.metrics, name) for row in rows],
            scores=scores,
            failure=failure,
            silent=silent,
            logprobs=[x for call in calls if call.policy == name for x in call.logprobs],
            newest=[trace.rollout for trace in traces if trace],
            changes=changes,
        )
    return records


def own_metrics(metrics: Mapping[str, float], policy: str) -> dict[str, float]:
    """The metrics of a step, those of the policy also without its prefix."""
    prefix = f"{policy}/"
    own = {key.removeprefix(prefix): x for key, x in metrics.items() if key.startswith(prefix)}
    return {**metrics, **own}


def reasons(run: PolicyRun) -> list[Reason]:
    """Reasons, likeliest first: shares above RANKED_SHARE in the order of RULES, then others by
    share. For a run that has clearly improved only what it loses, such as rollouts that fail."""
    rules = [rule for rule in RULES if not (run.improved and rule in EFFECTS)]
    found = [reason for rule in rules if (reason := rule(run)).share >= REPORTED_SHARE]
    return sorted(found, key=lambda reason: -min(reason.share, RANKED_SHARE))


def changes_of(rows: Sequence[Mapping[str, float]], config: RunConfig) -> dict[str, Change]:
    """How the held-out scores and the training reward changed. No training reward where it is no
    evidence: in games one seat's win is another's loss, tasks may be chosen by their reward, and
    the rewards of a data set do not change."""
    chosen = config.tasks.order == "difficulty" or not config.plays_rollouts
    game = any("selfplay/games" in row for row in rows)
    measured = {
        HELD_OUT: [_held_out(row, "eval/score") for row in rows if "eval/score" in row],
        SAMPLED: [_held_out(row, "eval/sampled") for row in rows if "eval/sampled" in row],
        TRAINING: [_trained(row) for row in rows if "reward/mean" in row and not (game or chosen)],
    }
    return {
        name: _change(values, same_tasks=name != TRAINING)
        for name, values in measured.items()
        if len(values) > 1
    }


def not_improved(rows: Sequence[Mapping[str, float]], config: RunConfig) -> str:
    """A sentence with the evidence that a run did not improve; empty without evidence, or if
    a score rose. The training reward is none: it is of other tasks at each step."""
    changes = changes_of(rows, config)
    known = {name: change for name, change in changes.items() if name != TRAINING}
    if any(x.last > x.first or x.first == x.last == 1.0 for x in known.values()):
        return ""
    found = [f"{name} {x.first:.3f} to {x.last:.3f}" for name, x in known.items()]
    return f"no improvement was measured ({', '.join(found)})" if found else ""


def _held_out(row: Mapping[str, float], name: str) -> tuple[float, float]:
    """A score, on the tasks that all evaluations share, and the variance of its error."""
    score = row.get("eval/common", row[name]) if name == "eval/score" else row[name]
    return score, ((row.get(f"{name}_high", math.inf) - row.get(f"{name}_low", 0.0)) / 4) ** 2


def _trained(row: Mapping[str, float]) -> tuple[float, float]:
    """The mean reward of all sampled rollouts, and the variance of its error: rollouts of a group
    have the same task."""
    mean = row.get("reward/sampled_mean", row["reward/mean"])
    return mean, row.get("reward/std", math.inf) ** 2 / max(row.get("groups", 1.0), 1.0)


def _change(measured: Sequence[tuple[float, float]], *, same_tasks: bool) -> Change:
    """measured: values with the variance of their errors, which repeated measurements on the same
    tasks share. On other tasks, a single one at each end is no evidence."""
    size = math.ceil(len(measured) / 5)
    means = [fmean(x for x, _ in measured[i : i + size]) for i in range(0, len(measured), size)]
    first, last = measured[:size], measured[-size:]
    error = sum(error for _, error in (*first, *last)) / size
    noise = 2 * math.sqrt(error if same_tasks else error / size if size > 1 else math.inf)
    return Change(means[0], fmean(x for x, _ in last), max(means), noise)


def long_prompts(run: PolicyRun) -> Reason:
    share, refused = run.share("calls/too_long", "calls"), ""
    if run.failure and TOO_LONG.search(run.failure.message):
        failed = f"rollouts/failed/{run.failure.kind}"
        share, refused = run.share(failed, "rollouts"), one_line(run.failure.message)
    text = f"the prompt is too long: {share:.0%} exceeded the model's context. {refused}"
    return Reason(share, text, "policy.model, engine.max_context: more; sampling.max_tokens: less")


def failed_rollouts(run: PolicyRun) -> Reason:
    if (last := run.failure) is None:
        return Reason(0.0, "", AGENT_CURE)
    share = run.share("rollouts/failed", "rollouts", without="rollouts/cancelled")
    text = f"rollouts fail: {share:.0%}, as {last.rollout}: {last.kind}, {one_line(last.message)}"
    return Reason(share, text, CURES.get(last.kind, AGENT_CURE))


def silent_roles(run: PolicyRun) -> Reason:
    text = f"a role is silent: no call was made in {', '.join(run.silent)}"
    return Reason(float(bool(run.silent)), text, "policies.NAME.roles, roles: the agent's names")


def inexact_calls(run: PolicyRun) -> Reason:
    share = run.share("calls/refused", "calls", without="calls/too_long")
    text = f"calls are inexact: {share:.0%} came without token ids and are not trained"
    return Reason(
        share, text, 'engine.kind: one with ids; algorithm.missing_token_ids: "retokenize"'
    )


def missing_rewards(run: PolicyRun) -> Reason:
    """Only the outcome's: a process reward may be for some roles or calls, or seldom earned. Groups
    with too few scored rollouts are in no metric of rewards, so the newest rollouts count too."""
    missing, every = 0.0, 0.0
    for step in run.steps:
        usable = step.get("rollouts/usable", step.get("rollouts", 0.0))
        missing += step.get(f"reward/{run.outcome}/frac_missing", 0.0) * usable
        every += usable
    done = [row for row in run.newest if row.state is RolloutState.SUCCEEDED]
    lost = [row.id for row in done if math.isnan(row.reward(run.outcome))]
    share, which = max(
        (missing / max(every, 1.0), f"{missing:.0f} of {every:.0f} rollouts"),
        (len(lost) / max(len(done), 1), f"{len(lost)} of the last {len(done)} rollouts"),
    )
    if ":" not in run.outcome and share >= REPORTED_SHARE:
        text = f"rewards are missing: {which} have no {run.outcome!r}"
        text += f", for example {lost[0]}" if lost else ""
        return Reason(share, text, "verifier.path: return a number by this name")
    share = run.share(EMPTY, "rollouts", without="rollouts/failed")
    text = f"{share:.0%} of the rollouts did not fail and could not be trained: they made no call "
    text += "of the policy, or too few rollouts of their group have a reward"
    if any(run.values("calls/refused")):
        share = 0.0  # `inexact_calls` says why
    return Reason(share, text, "agent.path: call the policy; algorithm.min_group: less")


def high_lr(run: PolicyRun) -> Reason:
    entropy, bad = run.values("policy/entropy"), run.share("update/bad", "update/steps")
    if entropy and run.logprobs and "policy/entropy" not in run.steps[-1]:  # a step without update
        entropy.append(-fmean(run.logprobs))
    jumps = (abs(b - a) / max(entropy[0], 25 * DETERMINISTIC_ENTROPY) for a, b in pairwise(entropy))
    jump, what = max(jumps, default=0.0), f"{bad:.0%} of the optimizer steps were not finite"
    if jump > RANKED_SHARE and not run.improved:
        bad, what = 1.0, f"in one step the entropy changed by {jump:.0%} of its first value"
    undone = fmean(map(bool, run.values("update/undone") or [0.0]))
    if (
        undone >= RANKED_SHARE and bad < REPORTED_SHARE and not run.improved
    ):  # did no harm: others come first
        bad, what = REPORTED_SHARE, f"{undone:.0%} of the steps were undone, see algorithm.max_kl"
    text = f"the learning rate is too high: {what}"
    return Reason(bad, text, "algorithm.lr: a tenth; algorithm.warmup: more steps")


def entropy_gone(run: PolicyRun) -> Reason:
    left = -fmean(run.logprobs or [-math.inf])
    text = f"entropy is gone: the last sampled tokens have a mean -log prob of {left:.3f} nats"
    cure = "algorithm.options.entropy: 0.01; algorithm.lr: less; policy.model: one less certain"
    return Reason(float(left < DETERMINISTIC_ENTROPY), text, cure)


def constant_verifier(run: PolicyRun) -> Reason:
    means, spread = run.values("reward/mean") or [0.0, 1.0], run.values("reward/std")
    text = f"the verifier gives one reward to all: {means[0]:g} in all {len(means)} steps"
    same = min(means) == max(means) and not any(spread) and {*run.scores} <= {*means}
    cure = "verifier.path: its comparison; tasks.train: easier ones; warmup.data: demonstrations"
    return Reason(float(same), text, cure)


def flat_groups(run: PolicyRun) -> Reason:
    """Not if other rewards of these groups differ, or tokens of flat groups have an advantage, as
    with a critic."""
    names = {name for step in run.steps for name in step if name.endswith("/frac_zero_std")}
    known = [x for x in names if run.mean(x.replace("zero_std", "missing")) < 1.0]
    share = min(map(run.mean, known), default=0.0)
    if any(
        step.get("advantage/std", 0.0) > 0 and all(step.get(name) == 1.0 for name in known)
        for step in run.steps
    ):
        share = 0.0
    text = f"groups are flat: in {share:.0%} of them all rollouts got the same reward"
    cure = 'tasks.order: "difficulty"; algorithm.dynamic_sampling: true; algorithm.group_size: more'
    successes = _successes(run)
    if 0 < successes < RARE_SUCCESS:  # larger groups would be as flat
        text += f", for success is rare: {successes:.1%} of the rollouts"
        cure = TEACH
    return Reason(share, text, cure)


def _successes(run: PolicyRun) -> float:
    """The share of rollouts with the better of two rewards. For two values, of which the worse is
    `low`, it follows from mean and standard deviation: p / (1 - p) = ((mean - low) / std)**2. For
    other rewards it says how far their mean is above the lowest."""
    low = min((x for row in run.newest if math.isfinite(x := row.reward(run.outcome))), default=0.0)
    key = "reward" if run.outcome == "outcome" else f"reward/{run.outcome}"
    shares = []
    for step in (each for each in run.steps if f"{key}/mean" in each):
        above, spread = max(step[f"{key}/mean"] - low, 0.0), step.get(f"{key}/std", 0.0)
        shares.append(above**2 / (above**2 + spread**2) if above else 0.0)
    return fmean(shares or [0.0])


def lag(run: PolicyRun) -> Reason:
    old, ess = run.mean("staleness/version_mean"), fmean(run.values("sampler/ess") or [1.0])
    text = f"the lag is too high: {old:.1f} updates, an effective sample size of {ess:.0%}"
    share = (
        2 * (1 - ess)
        if old > REPORTED_SHARE
        else run.share("staleness/withheld", "tokens/completion")
    )
    return Reason(share, text, "algorithm.max_staleness, algorithm.lr: less")


def clipped_ratios(run: PolicyRun) -> Reason:
    share, kl = run.mean("policy/clip_fraction"), run.mean("old/kl")
    text = f"ratios are clipped: for {share:.0%} of the tokens, at a KL divergence of {kl:.2g}"
    return Reason(share, text, "algorithm.epochs, algorithm.minibatches, algorithm.lr: less")


def low_lr(run: PolicyRun) -> Reason:
    """An optimizer step of Adam moves a weight by about the learning rate."""
    moved = sum(step.get("lr", 0.0) * step.get("update/steps", 0.0) for step in run.steps)
    enough = LEAST_RATE_SUM * (10 if run.config.policy.lora.rank else 1)
    text = f"the learning rate is too low, or steps too few: no weight moved by over {moved:.1g}"
    return Reason(float(0 < moved < enough), text, "algorithm.lr, steps: more")


def unlike_heldout(run: PolicyRun) -> Reason:
    rewards, share = run.values("reward/mean"), 0.0
    first, now = fmean(rewards[:3] or [0.0]), fmean(rewards[-3:] or [0.0])
    before, after = (run.scores[0], run.scores[-1]) if len(run.scores) > 1 else (0.0, now)
    if HELD_OUT in run.changes and TRAINING in run.changes:  # the numbers that the user has read
        known = run.changes[TRAINING], run.changes[HELD_OUT]
        (first, now), (before, after) = ((change.first, change.last) for change in known)
    if now > first and now > after and not run.values("selfplay/games"):
        share = 1 - max(after - before, 0.0) / (now - first)
        change = run.changes.get(TRAINING)
        if change is not None and now - first <= change.noise:
            share = 0.0
    text = (
        f"training rises, held-out does not as much: {first:.2f} to {now:.2f} in training, "
        f"{before:.2f} to {after:.2f} held-out"
    )
    cure = "tasks.train: more, like tasks.heldout; policy.build: a model that knows their words"
    return Reason(share, text, cure)


RULES = (
    long_prompts, failed_rollouts, silent_roles, inexact_calls, missing_rewards, high_lr,
    entropy_gone, constant_verifier, flat_groups, lag, clipped_ratios, low_lr, unlike_heldout,
)  # fmt: skip
EFFECTS = (entropy_gone, constant_verifier, flat_groups, lag, clipped_ratios, low_lr)
