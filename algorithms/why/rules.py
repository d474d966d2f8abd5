"""Rules that find reasons why a run does not learn, from its stored metrics and calls.

Causes come before their effects, such as groups of equal rewards. A success has some of the same
effects (a certain policy, groups that are all right), so these are no reasons in a run that has
clearly improved. Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

from agentrl.algorithms.why.reason import NO_REASON, RANKED_SHARE, REPORTED_SHARE, Reason
from agentrl.algorithms.why.record import PolicyRun
from agentrl.algorithms.why.task_rules import (
    collapsed,
    cut_answers,
    exploited_reward,
    leaked_tasks,
    lowest,
    no_calls,
    noisy_verifier,
    not_better,
    other_sampler,
    repeated_tasks,
)
from agentrl.base.failures import LOOPS, TOO_LONG, one_line
from agentrl.changes import HELD_OUT, SAMPLED, TRAINING
from agentrl.types import EMPTY, ErrorKind, RolloutState

DETERMINISTIC_ENTROPY = 0.02  # nats per token, entropy of a deterministic policy
# Least sum of learning rates that moves weights; ten times that for an adapter.
LEAST_RATE_SUM = 2e-5
RARE_SUCCESS = 0.1  # share of rollouts below which most groups of eight have no success
AGENT_CURE = "agent.path, agent.command or agent.harness: correct the agent"
TEACH = (
    "warmup.data: demonstrations of success (agentrl demonstrate); tasks.train: easier ones, then "
    'tasks.order: "difficulty"'
)
LOOP_CURE = (
    "the agent: take words for an answer, or say in its prompt which form it needs; warmup.data:"
    " demonstrations of that form; agent.max_calls: less, so that a loop costs less"
)
CURES = {
    ErrorKind.TIMEOUT: "agent.timeout: more",
    ErrorKind.LIMIT: "agent.max_calls, agent.max_tokens: more",
    ErrorKind.VERIFIER: "verifier.path: correct the verifier",
    ErrorKind.MODEL: "policy, engine, upstreams: the model's server, which failed",
    ErrorKind.WORKSPACE: "workspace: its source and commands",
    ErrorKind.LOST_RUNNER: "runner: its machine and its sandbox, which was lost",
}


def reasons(run: PolicyRun) -> list[Reason]:
    """Reasons, likeliest first: shares above RANKED_SHARE in the order of RULES, then others by
    share. For a run that has clearly improved only what it loses, such as rollouts that fail."""
    left_out = {*(EFFECTS if run.risen else ()), *(CAUSES if learned(run) else ())}
    left_out |= {*EFFECTS} - {constant_verifier} if run.solved else set()
    found = [r for rule in RULES if rule not in left_out and (r := rule(run)).text]
    found = [reason for reason in found if reason.share >= REPORTED_SHARE]
    if not found and not run.risen and not run.solved:
        found = [reason for reason in [not_better(run)] if reason.text]
    worst = lowest(run)  # of the newest: what most reasons can be seen in
    found = [replace(reason, example=reason.example or worst) for reason in found]
    return sorted(found, key=lambda reason: -min(reason.share, RANKED_SHARE))


def learned(run: PolicyRun) -> str:
    """What rose in a run that improved; empty for others. Held-out tasks that were trained are no
    evidence, nor are training tasks that repeat."""
    if not run.improved or leaked_tasks(run).share >= REPORTED_SHARE:
        return ""
    risen = [f"{name} {change.text}" for name, change in run.changes.items() if change.risen]
    held_out = any(run.changes[name].risen for name in run.changes if name != TRAINING)
    if not held_out and repeated_tasks(run).share >= RANKED_SHARE:
        return ""
    return f"it learned: {', '.join(risen)}"


def opening(run: PolicyRun, found: Sequence[Reason]) -> str:
    """The first sentence about a run: whether it learned. What chance explains is neither."""
    more = "; the likeliest reasons:" if found else "."
    if learned(run):
        return "It learned, but:" if found else "It learned."
    if run.improved:
        return f"The scores rose, but they are no evidence{more}"
    if not (run.steps or run.changes):
        return f"No step is trained yet{more}"
    if any(change.fallen for change in run.changes.values()):
        return f"It got worse{more}"
    if run.solved and not found:
        return "Nothing was left to learn: it solved every held-out task before the first step."
    if risen := [name for name, change in run.changes.items() if change.risen]:
        rest = [name for name in run.changes if name not in risen]
        others = f", {' and '.join(rest)} did not" if rest else ""
        text = f"{' and '.join(risen)} rose{others}{more}"
        return text[0].upper() + text[1:]
    if run.early:
        few = "It is too early to say: no difference is larger than chance"
        return f"It has not learned so far{more}" if found else f"{few}."
    return f"It did not learn{more}" if found else "No difference is larger than chance."


def long_prompts(run: PolicyRun) -> Reason:
    share, refused = run.share("calls/too_long", "calls"), ""
    if run.failure and TOO_LONG.search(run.failure.message):
        failed = f"rollouts/failed/{run.failure.kind}"
        share, refused = run.share(failed, "rollouts"), one_line(run.failure.message)
    text = f"the prompt is too long: {share:.0%} exceeded the model's context. {refused}"
    return Reason(share, text, "policy.model, engine.max_context: more; sampling.max_tokens: less")


def failed_rollouts(run: PolicyRun) -> Reason:
    last = run.failure
    if last is None or (last.kind is ErrorKind.NO_CALL and no_calls(run).text):
        return Reason(0.0, "", AGENT_CURE)
    if looping_agent(run).text:
        return NO_REASON
    share = run.share("rollouts/failed", "rollouts", without="rollouts/cancelled")
    text = f"rollouts fail: {share:.0%}, as {last.rollout}: {last.kind}, {one_line(last.message)}"
    return Reason(share, text, CURES.get(last.kind, AGENT_CURE))


def looping_agent(run: PolicyRun) -> Reason:
    """An agent that asks until it gets a form that the policy does not give."""
    last = run.failure
    if last is None or last.kind is not ErrorKind.LIMIT or LOOPS not in last.message:
        return NO_REASON
    share = run.share(f"rollouts/failed/{ErrorKind.LIMIT}", "rollouts")
    text = f"the agent loops: {share:.0%} of rollouts ended at agent.max_calls; {last.message}"
    return Reason(share, text, LOOP_CURE)


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
    if jump > RANKED_SHARE and not run.risen:
        bad, what = 1.0, f"in one step the entropy changed by {jump:.0%} of its first value"
    undone = fmean(map(bool, run.values("update/undone") or [0.0]))
    if (
        undone >= RANKED_SHARE and bad < REPORTED_SHARE and not run.risen
    ):  # did no harm: others come first
        bad, what = REPORTED_SHARE, f"{undone:.0%} of the steps were undone, see algorithm.max_kl"
    text = f"the learning rate is too high: {what}"
    return Reason(bad, text, "algorithm.lr: a tenth; algorithm.warmup: more steps")


def entropy_gone(run: PolicyRun) -> Reason:
    left = max(0.0, -fmean(run.logprobs or [-math.inf]))
    text = f"entropy is gone: the last sampled tokens have a mean -log prob of {left:.3f} nats"
    cure = "algorithm.options.entropy: 0.01; algorithm.lr: less; policy.model: one less certain"
    return Reason(float(left < DETERMINISTIC_ENTROPY), text, cure)


def constant_verifier(run: PolicyRun) -> Reason:
    means, spread = run.values("reward/mean") or [0.0, 1.0], run.values("reward/std")
    text = f"the verifier gives one reward to all: {run.said(means[0])} in all {len(means)} steps"
    same = min(means) == max(means) and not any(spread) and {*run.scores} <= {*means}
    if run.values("selfplay/games"):  # what one seat wins another loses
        same = False
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
        text = f"success is rare: {successes:.1%} of the rollouts, so {text}"
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
    # Greedy answers begin better than those of training, and cannot rise as much.
    held = run.changes.get(SAMPLED, run.changes.get(HELD_OUT))
    if held and TRAINING in run.changes:  # the numbers that the user has read
        known = run.changes[TRAINING], held
        (first, now), (before, after) = ((change.first, change.last) for change in known)
    if now > first and now > after and not run.values("selfplay/games"):
        share = 1 - max(after - before, 0.0) / (now - first)
        change = run.changes.get(TRAINING)
        if change is not None and now - first <= change.noise:
            share = 0.0
    text = (
        f"training rises, held-out does not as much: {run.said(first)} to {run.said(now)} in "
        f"training, {run.said(before)} to {run.said(after)} held-out"
    )
    cure = "tasks.train: more, like tasks.heldout; policy.build: a model that knows their words"
    return Reason(share, text, cure)


# Causes before their effects.
RULES = (
    long_prompts, looping_agent, failed_rollouts, silent_roles, inexact_calls, no_calls,
    missing_rewards,
    leaked_tasks, cut_answers, exploited_reward, repeated_tasks, noisy_verifier, other_sampler, lag,
    high_lr, collapsed, entropy_gone, constant_verifier, flat_groups, clipped_ratios, low_lr,
    unlike_heldout,
)  # fmt: skip
# What success looks like too: no reasons where anything rose.
EFFECTS = (
    entropy_gone, constant_verifier, flat_groups, lag, clipped_ratios, low_lr,
)  # fmt: skip
# Faults in spite of which a run may learn: no reasons where it did.
CAUSES = (cut_answers, repeated_tasks, noisy_verifier, collapsed)
