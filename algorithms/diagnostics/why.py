"""Rules that find reasons why a run does not learn, from its stored metrics and calls.

Causes come before their effects, such as groups of equal rewards. Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from agentrl.config import RunConfig
from agentrl.config import policies as team
from agentrl.config.load import from_store
from agentrl.errors import NotFound
from agentrl.failures import brief
from agentrl.store.base import Store
from agentrl.types import EMPTY, FailureCount, Purpose, StepRow

SOME, MOST = 0.2, 0.5  # least shares to report a reason, and to rank it by the order of RULES
CERTAIN = 0.02  # nats per token, entropy of a deterministic policy
MOVED = 2e-5  # least sum of learning rates that moves weights; ten times that for an adapter
LOOKED_AT, BUDGET = 16, 5.0  # number of rollouts to read; seconds to search for a role


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
    failure: FailureCount | None  # the most frequent kind
    silent: Sequence[str]  # roles of the policy without a call
    logprobs: Sequence[float]  # of its most recently sampled tokens

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
    failure = max(await store.failures(run), key=lambda row: row.attempts, default=None)
    records = {}
    for name in team.trained_policies(config):
        own = [role for role, player in team.policy_by_role(config).items() if player == name]
        found = {role: await store.search(run, role=role, limit=1, budget=BUDGET) for role in own}
        newest = await store.search(run, policy=name, purpose=Purpose.TRAIN, limit=LOOKED_AT)
        traces = [await store.trace(row.id) for row in newest.rows]
        calls = [call for trace in traces if trace for call in trace.transitions]
        records[name] = PolicyRun(
            config=team.view(config, name),
            steps=[own_metrics(row.metrics, name) for row in rows],
            scores=scores,
            failure=failure,
            silent=[role for role, page in found.items() if not page.rows],
            logprobs=[x for call in calls if call.policy == name for x in call.logprobs],
        )
    return records


def own_metrics(metrics: Mapping[str, float], policy: str) -> dict[str, float]:
    """The metrics of a step, those of the policy also without its prefix."""
    prefix = f"{policy}/"
    own = {key.removeprefix(prefix): x for key, x in metrics.items() if key.startswith(prefix)}
    return {**metrics, **own}


def reasons(run: PolicyRun) -> list[Reason]:
    """Reasons, likeliest first: shares above MOST in the order of RULES, then others by share."""
    found = [reason for rule in RULES if (reason := rule(run)).share >= SOME]
    return sorted(found, key=lambda reason: -min(reason.share, MOST))


def has_improved(rows: Sequence[StepRow]) -> bool:
    """Whether the mean of the last fifth of the held-out scores, or without any of the rewards, is
    above that of the first. True for games without scores: one seat's win is another's loss."""
    game = any("selfplay/games" in row.metrics for row in rows)
    for name in ("eval/score",) if game else ("eval/score", "reward/mean"):
        found = [row.metrics[name] for row in rows if name in row.metrics]
        if len(found) > 1:
            fifth = math.ceil(len(found) / 5)
            return fmean(found[-fifth:]) > fmean(found[:fifth])
    return True


def long_prompts(run: PolicyRun) -> Reason:
    share, refused = run.share("calls/too_long", "calls"), ""
    if run.failure and "context" in run.failure.message:
        share, refused = run.share("rollouts/failed", "rollouts"), brief(run.failure.message)
    text = f"the prompt is too long: {share:.0%} exceeded the model's context. {refused}"
    return Reason(share, text, "policy.model, engine.max_context: more; sampling.max_tokens: less")


def failed_rollouts(run: PolicyRun) -> Reason:
    share, text = run.share("rollouts/failed", "rollouts", without="rollouts/cancelled"), ""
    if (last := run.failure) is not None:
        text = f"rollouts fail: {share:.0%}, as {last.rollout}: {last.kind}, {brief(last.message)}"
    cure = "agent.timeout, agent.max_calls, agent.max_tokens: more; agent.path, verifier.path: fix"
    return Reason(share if text else 0.0, text, cure)


def silent_roles(run: PolicyRun) -> Reason:
    text = f"a role is silent: no call was made in {', '.join(run.silent)}"
    return Reason(float(bool(run.silent)), text, "policies.NAME.roles, roles: the agent's names")


def inexact_calls(run: PolicyRun) -> Reason:
    share = run.share("calls/refused", "calls", without="calls/too_long")
    text = f"calls are inexact: {share:.0%} came without token ids and are not trained"
    return Reason(share, text, 'engine.kind: one with ids; algorithm.inexact: "retokenize"')


def missing_rewards(run: PolicyRun) -> Reason:
    names = {name for step in run.steps for name in step if name.endswith("/frac_missing")}
    unused = run.share(EMPTY, "rollouts", without="rollouts/failed")
    share = max([0.0 if any(run.values("calls/refused")) else unused, *map(run.mean, names)])
    text = f"rewards are missing: in {share:.0%} of rollouts, or groups lack algorithm.min_group"
    return Reason(share, text, "verifier.path: return a number by the name the algorithm reads")


def high_lr(run: PolicyRun) -> Reason:
    entropy, bad = run.values("policy/entropy"), run.share("update/bad", "update/steps")
    if entropy and run.logprobs and "policy/entropy" not in run.steps[-1]:  # a step without update
        entropy.append(-fmean(run.logprobs))
    jumps = (abs(b - a) / max(entropy[0], 25 * CERTAIN) for a, b in pairwise(entropy))
    jump, what = max(jumps, default=0.0), f"{bad:.0%} of the optimizer steps were not finite"
    if jump > MOST:
        bad, what = 1.0, f"in one step the entropy changed by {jump:.0%} of its first value"
    text = f"the learning rate is too high: {what}"
    return Reason(bad, text, "algorithm.lr: a tenth; algorithm.warmup: more steps")


def entropy_gone(run: PolicyRun) -> Reason:
    left = -fmean(run.logprobs or [-math.inf])
    text = f"entropy is gone: the last sampled tokens have a mean -log prob of {left:.3f} nats"
    cure = "algorithm.options.entropy: 0.01; algorithm.lr: less; policy.model: one less certain"
    return Reason(float(left < CERTAIN), text, cure)


def constant_verifier(run: PolicyRun) -> Reason:
    means, spread = run.values("reward/mean") or [0.0, 1.0], run.values("reward/std")
    text = f"the verifier gives one reward to all: {means[0]:g} in all {len(means)} steps"
    same = min(means) == max(means) and not any(spread)
    return Reason(float(same), text, "verifier.path: its comparison; tasks.train: other tasks")


def flat_groups(run: PolicyRun) -> Reason:
    share = run.mean("reward/outcome/frac_zero_std")
    text = f"groups are flat: in {share:.0%} of them all rollouts got the same reward"
    cure = 'tasks.order: "difficulty"; algorithm.dynamic_sampling: true; algorithm.group_size: more'
    return Reason(share, text, cure)


def lag(run: PolicyRun) -> Reason:
    old, ess = run.mean("staleness/version_mean"), fmean(run.values("sampler/ess") or [1.0])
    text = f"the lag is too high: {old:.1f} updates, an effective sample size of {ess:.0%}"
    share = 2 * (1 - ess) if old > SOME else run.share("staleness/withheld", "tokens/completion")
    return Reason(share, text, "algorithm.max_staleness, algorithm.lr: less")


def clipped_ratios(run: PolicyRun) -> Reason:
    share, kl = run.mean("policy/clip_fraction"), run.mean("old/kl")
    text = f"ratios are clipped: for {share:.0%} of the tokens, at a KL divergence of {kl:.2g}"
    return Reason(share, text, "algorithm.epochs, algorithm.minibatches, algorithm.lr: less")


def low_lr(run: PolicyRun) -> Reason:
    """An optimizer step of Adam moves a weight by about the learning rate."""
    moved = sum(step.get("lr", 0.0) * step.get("update/steps", 0.0) for step in run.steps)
    enough = MOVED * (10 if run.config.policy.lora.rank else 1)
    text = f"the learning rate is too low, or steps too few: no weight moved by over {moved:.1g}"
    return Reason(float(0 < moved < enough), text, "algorithm.lr, steps: more")


def unlike_heldout(run: PolicyRun) -> Reason:
    rewards, share = run.values("reward/mean"), 0.0
    first, now = fmean(rewards[:3] or [0.0]), fmean(rewards[-3:] or [0.0])
    held_out = run.scores[-1] if run.scores else now
    if now > first and now > held_out and not run.values("selfplay/games"):
        share = (now - held_out) / max(abs(now), abs(held_out))
    text = f"training rises, held-out does not: {now:.2f} in training, {held_out:.2f} held-out"
    cure = "tasks.train: more, like tasks.heldout; policy.build: a model that knows their words"
    return Reason(share, text, cure)


RULES = (
    long_prompts, failed_rollouts, silent_roles, inexact_calls, missing_rewards, high_lr,
    entropy_gone, constant_verifier, flat_groups, lag, clipped_ratios, low_lr, unlike_heldout,
)  # fmt: skip
