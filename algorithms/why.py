"""Rules that find reasons why a run does not learn, from its stored metrics and calls. Rules check
the inputs of training (calls, tasks, verifier, sampler) and the training itself. Causes come before
their effects, such as groups of equal rewards. A success has some of the same effects (a
deterministic policy, groups that are all right), so these are not reasons in a run that has clearly
improved. Does not import torch. A run itself reports why its steps trained nothing, or that it did
not improve.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, variance
from typing import Any

from agentrl.algorithms import hacking
from agentrl.algorithms.run_record import PolicyRun, read
from agentrl.algorithms.verdict import (
    HELD_OUT,
    LOOKS_Z,
    SAMPLED,
    TRAINING,
    not_improved,
    task_input,
)
from agentrl.core.config import RunConfig
from agentrl.core.types import (
    EMPTY,
    LOOPS,
    TOO_LONG,
    ErrorKind,
    Json,
    Rollout,
    RolloutState,
    StepRow,
    one_line,
)
from agentrl.store.base import Store


async def findings(store: Store, run: str) -> list[dict[str, Any]]:
    """For each trained policy its `name`, number of `steps`, whether it `improved`, `said`: the
    verdict as a sentence, and `reasons` (text, change), most likely first. Raises NotFound for an
    unknown run."""
    records, results = await read(store, run), []
    for name, record in records.items():
        why = reasons(record)
        results.append(
            {
                "name": name if len(records) > 1 else "",
                "steps": len(record.steps),
                "improved": bool(learned(record)),
                "said": opening(record, why),
                "reasons": [(reason.text, reason.change) for reason in why],
            }
        )
    return results


# Least shares to report a reason, and to rank it by the order of the rules.
REPORTED_SHARE, RANKED_SHARE = 0.2, 0.5


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason why a policy does not learn. share: the affected share of the run, 0 to 1."""

    share: float
    text: str  # the reason with its evidence
    change: str  # settings, and how to change them
    example: str = ""  # id of a rollout that shows it


NO_REASON = Reason(0.0, "", "")


def reasons(run: PolicyRun) -> list[Reason]:
    """Reasons, most likely first: shares above RANKED_SHARE in the order of RULES, then others by
    share. For a run that has clearly improved only its losses, such as failed rollouts."""
    left_out = {*(EFFECTS if run.risen else ()), *(CAUSES if learned(run) else ())}
    left_out |= {*EFFECTS} - {constant_verifier} if run.solved else set()
    active = [r for rule in RULES if rule not in left_out and (r := rule(run)).text]
    active = [reason for reason in active if reason.share >= REPORTED_SHARE]
    worst = lowest(run)  # a typical bad rollout among the newest
    active = [
        replace(reason, change=own_settings(run, reason.change), example=reason.example or worst)
        for reason in active
    ]
    return sorted(active, key=lambda reason: -min(reason.share, RANKED_SHARE))


def own_settings(run: PolicyRun, change: str) -> str:
    """A suggestion in terms of the run's settings: an environment replaces agent, tasks and
    verifier, and a model that is given is not built."""
    if run.config.environment:
        for name in ("verifier.path", "tasks.train", "tasks.heldout", AGENT_SETTINGS, "agent.path"):
            change = change.replace(name, f"environment {run.config.environment}")
    return change if run.config.policy.build else change.replace("policy.build", "policy.model")


def learned(run: PolicyRun) -> str:
    """The values that rose in a run that improved; empty for others. Scores on trained tasks, the
    training reward alone, and rewards that rose by hacking are not evidence."""
    held_out = any(change.risen for name, change in run.changes.items() if name != TRAINING)
    leaked = leaked_tasks(run).share >= REPORTED_SHARE and not run.untouched
    if leaked or not held_out or any(rule(run).text for rule in HACKS):
        return ""
    risen = [f"{name} {change.text}" for name, change in run.changes.items() if change.risen]
    return f"it learned: {', '.join(risen)}"


def opening(run: PolicyRun, reasons_found: Sequence[Reason]) -> str:
    """The first sentence about a run: whether it learned; changes within chance count as
    neither."""
    more = "; the most likely reasons:" if reasons_found else "."
    if learned(run):
        return "It learned, but:" if reasons_found else "It learned."
    if run.improved and TRAINING in run.changes and len(run.changes) == 1:
        return f"The training reward rose, and no score of held-out tasks was measured{more}"
    if run.improved:
        return f"The scores rose, but they are no evidence{more}"
    if not (run.steps or run.changes):
        return f"No step is trained yet{more}"
    if any(change.fallen for change in run.changes.values()):
        return f"It got worse{more}"
    if run.solved and not reasons_found:
        return "Nothing was left to learn: it solved every held-out task before the first step."
    if risen := [name for name, change in run.changes.items() if change.risen]:
        not_risen = [name for name in run.changes if name not in risen]
        others = f", {' and '.join(not_risen)} did not" if not_risen else ""
        text = f"{' and '.join(risen)} rose{others}{more}"
        return text[0].upper() + text[1:]
    if run.early:
        few = "It is too early to say: no difference is larger than chance"
        return f"It has not learned so far{more}" if reasons_found else f"{few}."
    return f"It did not learn{more}" if reasons_found else "No difference is larger than chance."


async def cause(store: Store, run: str, steps: int) -> str:
    """The most likely reason why the last `steps` steps trained nothing."""
    record, *_ = (await read(store, run, last=steps)).values()
    reason, *_ = reasons(record) or [missing_rewards(record)]
    return f"{reason.text.rstrip('. ')}. Look at {reason.change}"


def verdict(config: RunConfig, steps: Sequence[StepRow]) -> str:
    """The evidence that a finished run did not improve, and a command; empty if it improved."""
    sentence = not_improved([row.metrics for row in steps]) if config.steps else ""
    return f"{sentence}; agentrl why {config.name}" if sentence else ""


MIN_COMPARED = 4  # rollouts of each kind needed to compare rewards
# Nats between sampler and learner at the same weights, from which log-probs cannot be trusted.
LARGE_MISMATCH = 0.2
ROUNDING_NATS = {"float32": 0.04}  # difference per token that rounding alone causes
COARSE_ROUNDING_NATS = 0.1  # nats, in dtypes shorter than float32
# Updates since sampling, up to which sampler and learner count as having the same weights.
FRESH = 0.2
MIN_UPDATES = 5  # steps after which no improvement is a finding


def no_calls(run: PolicyRun) -> Reason:
    """Rollouts that failed because the gateway got no call of theirs."""
    if run.failure is None or run.failure.kind is not ErrorKind.NO_CALL:
        return NO_REASON
    share = run.share(f"rollouts/failed/{ErrorKind.NO_CALL}", "rollouts")
    text = f"the agent makes no call at the gateway in {share:.0%} of the rollouts, which train "
    text += "nothing: it calls another address, or answers without its model"
    fix = "agent.path: take base_url and key from OPENAI_BASE_URL and OPENAI_API_KEY, and call "
    return Reason(share, text, fix + "the model in every rollout", run.failure.rollout)


def cut_answers(run: PolicyRun) -> Reason:
    """Only if truncated answers are worse than others, or if all are truncated and none ever
    succeeded."""
    share = run.mean("completion/truncated")
    if share < REPORTED_SHARE:
        return NO_REASON
    scored = [row for row in run.newest if math.isfinite(row.reward(run.outcome))]
    cut = [row for row in scored if any(call.finish == "length" for call in row.transitions)]
    complete = [row for row in scored if row not in cut]
    cut_rewards = [row.reward(run.outcome) for row in cut]
    others = [row.reward(run.outcome) for row in complete]
    text = f"answers are cut off: {share:.0%} of the calls end at the token limit"
    if min(len(cut_rewards), len(others)) >= MIN_COMPARED:
        error = math.sqrt(variance(cut_rewards) / len(cut_rewards) + variance(others) / len(others))
        if fmean(others) - fmean(cut_rewards) <= max(LOOKS_Z * error, 0.0):
            return NO_REASON
        cut_text, complete_text = run.format(fmean(cut_rewards)), run.format(fmean(others))
        text += f", and their rollouts get {cut_text}, others {complete_text}"
    else:
        means, spread = run.values("reward/mean"), run.values("reward/std")
        if any(spread) or not means or max(means) > 0 or min(means) < max(means):
            return NO_REASON
        text += (
            f", and the verifier gives one reward to all: {run.format(means[0])} in all "
            f"{len(means)} steps"
        )
    limit = run.config.sampling.max_tokens
    fix = f"sampling.max_tokens: more than {limit or 'the context leaves'}; or ask the agent's "
    example = min(cut, key=lambda row: row.reward(run.outcome), default=None)
    return Reason(share, text, fix + "model for less", example.id if example else "")


def _task(row: Rollout) -> str:
    """A task without its identifiers."""
    task: dict[str, Json] = {key: x for key, x in row.task.items() if key not in ("id", "name")}
    return json.dumps(task, sort_keys=True)


def leaked_tasks(run: PolicyRun) -> Reason:
    """Compares inputs of tasks; not if all inputs are equal, as in a game."""
    trained = {task_input(row) for row in run.listed}
    held = {task_input(row): row.id for row in run.heldout}
    leaked = [id for task, id in held.items() if task in trained]
    if len(held) < MIN_COMPARED or not leaked:
        return NO_REASON
    text = f"held-out tasks are training tasks: {len(leaked)} of {len(held)} were trained, so the "
    text += "held-out score shows memory too"
    if run.untouched and run.changes:
        scores = ", ".join(f"{n} {x.text}" for n, x in run.changes.items() if n != TRAINING)
        text += f"; of the {run.untouched} others alone: {scores}"
    fix = "tasks.heldout: tasks that are not in tasks.train"
    return Reason(len(leaked) / len(held), text, fix, leaked[0])


def repeated_tasks(run: PolicyRun) -> Reason:
    """A file without duplicates yields each task once before any is repeated."""
    order: dict[str, str] = {}
    for row in run.listed:
        order.setdefault(row.group, _task(row))
    if not run.config.plays_rollouts:  # tasks of sessions depend on users
        return NO_REASON
    if run.config.tasks.order == "difficulty" or any("." in g.rpartition("/")[2] for g in order):
        return NO_REASON
    drawn = [*order.values()]
    distinct = len({*drawn})
    if distinct < 2 or len({*map(task_input, run.listed)}) < 2:
        return NO_REASON
    first_epoch = drawn[: max(distinct, 2)]
    share = 1 - len({*first_epoch}) / len(first_epoch)
    most = max(map(drawn.count, {*drawn})) / len(drawn)
    text = f"training tasks repeat: {len(drawn)} groups had {distinct} different tasks, and "
    text += f"{share:.0%} of the first {len(first_epoch)} were there before (the most frequent: "
    text += f"{most:.0%})"
    return Reason(2 * share, text, "tasks.train: different tasks; remove duplicates")


def exploited_reward(run: PolicyRun) -> Reason:
    """The trained reward rises while the outcome falls."""
    changes = run.changes
    trained = run.trained or changes.get(TRAINING)
    wanted = [HELD_OUT, SAMPLED, *([TRAINING] if run.trained else [])]
    fell = next((name for name in wanted if name in changes and changes[name].fallen), None)
    if trained is None or not trained.risen or fell is None:
        return NO_REASON
    name = repr(run.outcome) if run.trained else "training"
    text = f"the reward is exploited: {name} rises, {trained.text}, and the {fell} score falls, "
    fix = "verifier.path: close what the best training rollouts make use of"
    fix += "; algorithm.options.reward" if run.trained else ""
    return Reason(1.0, text + changes[fell].text, fix, _best_of(run))


def hacked_reward(run: PolicyRun) -> Reason:
    """Answers of the newest steps that are paid without being right."""
    if not run.hacked:
        return NO_REASON
    text = f"the reward is hacked: {'; '.join(sign.text for sign in run.hacked)}"
    fix = "verifier.path: pay for the right answer alone; agentrl rescore shows what that changes"
    rollouts = [id for sign in run.hacked for id in sign.rollouts]
    if rollouts[1:]:
        text += f", as in {', '.join(dict.fromkeys(rollouts[:4]))}"
    return Reason(1.0, text, fix, rollouts[0] if rollouts else "")


def exploitable_verifier(run: PolicyRun) -> Reason:
    """The findings of the audit before the run."""
    audit = run.audited
    if audit.verdict != "exploitable":
        return NO_REASON
    text = f"the verifier can be exploited, by its audit: {audit.finding}"
    return Reason(audit.share, text, f"verifier.path: {audit.change}")


def _or_lowest(reward: float) -> float:
    return reward if math.isfinite(reward) else -math.inf


def noisy_verifier(run: PolicyRun) -> Reason:
    if run.alike is None:
        return NO_REASON
    first, second = run.alike.rollouts
    text = f"the verifier is noisy: {run.alike.share:.0%} of the differences in reward are between "
    text += f"rollouts in which everything else is equal, such as {first} and {second}"
    fix = "verifier.path: the same reward for the same rollout (a mean of several opinions); "
    return Reason(run.alike.share, text, fix + "algorithm.group_size: more", first)


def other_sampler(run: PolicyRun) -> Reason:
    """Only of tokens that the weights sampled which were then trained."""
    if run.mean("staleness/version_mean") >= FRESH:
        return NO_REASON
    gap, dtype = run.mean("logprob_difference/mean"), run.config.policy.dtype
    rounding = ROUNDING_NATS.get(dtype, COARSE_ROUNDING_NATS)
    if gap < rounding:
        return NO_REASON
    text = f"sampler and learner differ: by {gap:.2g} nats per token at the same weights (from "
    text += f"{rounding} on it is not rounding in {dtype})"
    fix = "engine: the same weights, dtype and chat template as the learner's; +tis in "
    fix += "algorithm.preset corrects small differences"
    return Reason(min(1.0, gap / LARGE_MISMATCH), text, fix)


def collapsed(run: PolicyRun) -> Reason:
    fell = next((name for name, change in run.changes.items() if change.fallen), None)
    if fell is None:
        return NO_REASON
    change = run.changes[fell]
    text = f"the policy collapsed: {fell} {change.text}, at best {change.format(change.best)}"
    fix = "algorithm.lr: a third; algorithm.max_kl: its default; agentrl train RUN_FILE --from "
    return Reason(1.0, text, fix + "STEPS goes back to a checkpoint")


def not_better(run: PolicyRun) -> Reason:
    """Weights changed for long enough, but nothing improved."""
    updates = sum(step.get("update/steps", 0.0) > 0 for step in run.steps)
    fallen = any(change.fallen for change in run.changes.values())  # another reason reports it
    if updates < MIN_UPDATES or not run.changes or fallen or run.risen or run.solved:
        return NO_REASON
    name, change = next(iter(run.changes.items()))
    kl = sum(run.values("update/kl"))
    text = f"the model does not get better: {name} {change.text} in {updates} updates, although "
    text += f"the policy moved ({kl:.2g} nats per token in all)"
    fix = "policy.model: a larger one, or warmup.data: demonstrations; if it may only need time, "
    fix += "steps: more"
    if run.early:
        fix = f"nothing yet: these are {len(run.steps)} of {run.config.steps} steps. Later, {fix}"
    return Reason(REPORTED_SHARE, text, fix)


HACK_FIX = (
    "verifier.path: no reward for what an answer contains beside the right one, and full rewards "
    "for right answers alone (agentrl show its best rollouts)"
)


def partial_rewards(run: PolicyRun) -> Reason:
    text = hacking.partial_rewards(run)
    return Reason(float(bool(text)), text, HACK_FIX, _best_of(run) if text else "")


def one_answer(run: PolicyRun) -> Reason:
    reported = any(sign.metric == "reward/same_answer" for sign in run.hacked)  # `hacked_reward`
    text = "" if reported else hacking.one_answer(run)
    fix = f"{HACK_FIX}; tasks.train: as many of each answer"
    return Reason(float(bool(text)), text, fix, _best_of(run) if text else "")


def more_digits(run: PolicyRun) -> Reason:
    text = hacking.more_digits(run)
    return Reason(float(bool(text)), text, HACK_FIX, _best_of(run) if text else "")


def _best_of(run: PolicyRun) -> str:
    """The id of the newest rollout with the best reward."""
    best = max(run.newest, key=lambda row: _or_lowest(row.reward(run.outcome)), default=None)
    return best.id if best else ""


def lowest(run: PolicyRun) -> str:
    """The id of the newest rollout with the lowest reward, if any has one."""
    scored = [row for row in run.newest if math.isfinite(row.reward(run.outcome))]
    worst = min(scored, key=lambda row: row.reward(run.outcome), default=None)
    return worst.id if worst else ""


DETERMINISTIC_ENTROPY = 0.02  # nats per token, entropy of a deterministic policy
# Least sum of learning rates that moves weights; ten times that for an adapter.
MIN_RATE_SUM = 2e-5
RARE_SUCCESS = 0.1  # share of rollouts below which most groups of eight have no success
AGENT_SETTINGS = "agent.path, agent.command or agent.harness"
AGENT_FIX = f"{AGENT_SETTINGS}: correct the agent"
TEACH = (
    "warmup.data: demonstrations of success (agentrl demonstrate); tasks.train: easier ones, then "
    'tasks.order: "difficulty"'
)
LOOP_FIX = (
    "the agent: take words for an answer, or say in its prompt which form it needs; warmup.data:"
    " demonstrations of that form; agent.max_calls: less, so that a loop costs less"
)
FIXES = {
    ErrorKind.TIMEOUT: "agent.timeout: more",
    ErrorKind.LIMIT: "agent.max_calls, agent.max_tokens: more",
    ErrorKind.VERIFIER: "verifier.path: correct the verifier",
    ErrorKind.MODEL: "policy, engine, upstreams: the model's server, which failed",
    ErrorKind.WORKSPACE: "workspace: its source and commands",
    ErrorKind.LOST_RUNNER: "runner: its machine and its sandbox, which was lost",
}


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
        return Reason(0.0, "", AGENT_FIX)
    if looping_agent(run).text:
        return NO_REASON
    share = run.share("rollouts/failed", "rollouts", without="rollouts/cancelled")
    text = f"rollouts fail: {share:.0%}, as {last.rollout}: {last.kind}, {one_line(last.message)}"
    return Reason(share, text, FIXES.get(last.kind, AGENT_FIX))


def looping_agent(run: PolicyRun) -> Reason:
    """An agent that repeats its request until the answer has a format that the policy does not
    produce."""
    last = run.failure
    if last is None or last.kind is not ErrorKind.LIMIT or LOOPS not in last.message:
        return NO_REASON
    share = run.share(f"rollouts/failed/{ErrorKind.LIMIT}", "rollouts")
    text = f"the agent loops: {share:.0%} of rollouts ended at agent.max_calls; {last.message}"
    return Reason(share, text, LOOP_FIX)


def silent_roles(run: PolicyRun) -> Reason:
    text = f"a role is silent: no call was made in {', '.join(run.silent)}"
    return Reason(float(bool(run.silent)), text, "policies.NAME.roles, roles: the agent's names")


def inexact_calls(run: PolicyRun) -> Reason:
    share = run.share("calls/refused", "calls", without="calls/too_long")
    text = f"calls are inexact: {share:.0%} came without token ids and are not trained"
    return Reason(share, text, "engine.kind: one that answers with token ids")


def missing_rewards(run: PolicyRun) -> Reason:
    """Only missing outcomes: a process reward may apply to some roles or calls, or be rare. Groups
    with too few scored rollouts are not in metrics of rewards, so the newest rollouts count,
    too."""
    missing, usable_total = 0.0, 0.0
    for step in run.steps:
        usable = step.get("rollouts/usable", step.get("rollouts", 0.0))
        missing += step.get(f"reward/{run.outcome}/frac_missing", 0.0) * usable
        usable_total += usable
    succeeded = [row for row in run.newest if row.state is RolloutState.SUCCEEDED]
    without_reward = [row.id for row in succeeded if math.isnan(row.reward(run.outcome))]
    share, which = max(
        (missing / max(usable_total, 1.0), f"{missing:.0f} of {usable_total:.0f} rollouts"),
        (
            len(without_reward) / max(len(succeeded), 1),
            f"{len(without_reward)} of the last {len(succeeded)} rollouts",
        ),
    )
    if ":" not in run.outcome and share >= REPORTED_SHARE:
        text = f"rewards are missing: {which} have no {run.outcome!r}"
        text += f", for example {without_reward[0]}" if without_reward else ""
        return Reason(share, text, "verifier.path: return a number by this name")
    share = run.share(EMPTY, "rollouts", without="rollouts/failed")
    text = f"{share:.0%} of the rollouts did not fail and could not be trained: they made no call "
    text += "of the policy, or too few rollouts of their group have a reward"
    if any(run.values("calls/refused")):
        share = 0.0  # `inexact_calls` has the reason
    return Reason(share, text, "agent.path: call the policy")


def high_lr(run: PolicyRun) -> Reason:
    entropy, bad = run.values("policy/entropy"), run.share("update/bad", "update/steps")
    if entropy and run.logprobs and "policy/entropy" not in run.steps[-1]:  # a step without update
        entropy.append(-fmean(run.logprobs))
    jumps = (abs(b - a) / max(entropy[0], 25 * DETERMINISTIC_ENTROPY) for a, b in pairwise(entropy))
    jump, evidence = max(jumps, default=0.0), f"{bad:.0%} of the optimizer steps were not finite"
    if jump > RANKED_SHARE and not run.risen:
        bad, evidence = 1.0, f"in one step the entropy changed by {jump:.0%} of its first value"
    undone = fmean(map(bool, run.values("update/undone") or [0.0]))
    if (
        undone >= RANKED_SHARE and bad < REPORTED_SHARE and not run.risen
    ):  # did no harm, so other reasons come first
        bad, evidence = (
            REPORTED_SHARE,
            f"{undone:.0%} of the steps were undone, see algorithm.max_kl",
        )
    text = f"the learning rate is too high: {evidence}"
    return Reason(bad, text, "algorithm.lr: a tenth; algorithm.warmup: more steps")


def entropy_gone(run: PolicyRun) -> Reason:
    entropy = max(0.0, -fmean(run.logprobs or [-math.inf]))
    text = f"entropy is gone: the last sampled tokens have a mean -log prob of {entropy:.3f} nats"
    fix = "algorithm.options.entropy: 0.01; algorithm.lr: less; policy.model: one less certain"
    return Reason(float(entropy < DETERMINISTIC_ENTROPY), text, fix)


def certain_at_start(run: PolicyRun) -> Reason:
    """Nothing is explored by a policy that was certain before its first update."""
    entropy = run.start.get("policy/entropy", math.inf)
    by = " (after the warm-up)" if run.config.warmup.data else ""
    text = f"entropy was gone before the first update{by}: {entropy:.3f} nats per token"
    fix = "warmup.steps, warmup.lr: less" if by else "policy.model: one less certain"
    return Reason(float(entropy < DETERMINISTIC_ENTROPY), text, fix)


def constant_verifier(run: PolicyRun) -> Reason:
    means, spread = run.values("reward/mean") or [0.0, 1.0], run.values("reward/std")
    text = f"the verifier gives one reward to all: {run.format(means[0])} in all {len(means)} steps"
    same = min(means) == max(means) and not any(spread) and {*run.scores} <= {*means}
    if run.values("selfplay/games"):  # zero-sum: one seat's win is another's loss
        same = False
    fix = "verifier.path: its comparison; tasks.train: easier ones; warmup.data: demonstrations"
    return Reason(float(same), text, fix)


def flat_groups(run: PolicyRun) -> Reason:
    """Not if other rewards of these groups differ, or tokens of flat groups have an advantage, as
    with a critic."""
    names = {name for step in run.steps for name in step if name.endswith("/frac_zero_std")}
    with_rewards = [x for x in names if run.mean(x.replace("zero_std", "missing")) < 1.0]
    share = min(map(run.mean, with_rewards), default=0.0)
    if any(
        step.get("advantage/std", 0.0) > 0 and all(step.get(name) == 1.0 for name in with_rewards)
        for step in run.steps
    ):
        share = 0.0
    text = f"groups are flat: in {share:.0%} of them all rollouts got the same reward"
    fix = 'tasks.order: "difficulty"; algorithm.dynamic_sampling: true; algorithm.group_size: more'
    if rare := _rarely(run):  # larger groups would be as flat
        text, fix = f"{rare}, so {text}", TEACH
    return Reason(share, text, fix)


def rare_success(run: PolicyRun) -> Reason:
    """Also if another value rose, or few groups are flat."""
    rare = _rarely(run)
    flat = flat_groups(run).share >= REPORTED_SHARE and not (run.risen or run.solved)
    return Reason(REPORTED_SHARE if rare and not flat else 0.0, rare, TEACH)


def _rarely(run: PolicyRun) -> str:
    successes = _successes(run)
    return f"success is rare: {successes:.1%} of the rollouts" * (0 < successes < RARE_SUCCESS)


def _successes(run: PolicyRun) -> float:
    """The share of rollouts with the better of two rewards. For two values, of which the worse is
    `low`, it follows from mean and standard deviation: p / (1 - p) = ((mean - low) / std)**2. For
    other rewards it returns the position of their mean above the lowest."""
    low = min((x for row in run.newest if math.isfinite(x := row.reward(run.outcome))), default=0.0)
    key = "reward" if run.outcome == "outcome" else f"reward/{run.outcome}"
    shares = []
    for step in (row for row in run.steps if f"{key}/mean" in row):
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
    enough = MIN_RATE_SUM * (10 if run.config.policy.lora.rank else 1)
    text = f"the learning rate is too low, or steps too few: no weight moved by over {moved:.1g}"
    return Reason(float(0 < moved < enough), text, "algorithm.lr, steps: more")


def unlike_heldout(run: PolicyRun) -> Reason:
    rewards, share = run.values("reward/mean"), 0.0
    first, now = fmean(rewards[:3] or [0.0]), fmean(rewards[-3:] or [0.0])
    before, after = (run.scores[0], run.scores[-1]) if len(run.scores) > 1 else (0.0, now)
    # Greedy answers start at a better score than sampled ones, and cannot rise as much.
    held = run.changes.get(SAMPLED, run.changes.get(HELD_OUT))
    noise, change = 0.0, run.changes.get(TRAINING)
    if held and change:  # the numbers on the console
        (first, now), (before, after) = (
            (change_of.first, change_of.last) for change_of in (change, held)
        )
        noise = math.hypot(change.noise, held.noise)
    elif change:
        noise = change.noise
    behind = now - first - max(after - before, 0.0)
    if now > first and now > after and behind > noise and not run.values("selfplay/games"):
        share = behind / (now - first)
    text = (
        f"training rises, held-out does not as much: {run.format(first)} to {run.format(now)} in "
        f"training, {run.format(before)} to {run.format(after)} held-out"
    )
    fix = "tasks.train: more, like tasks.heldout; policy.build: a model that knows their words"
    return Reason(share, text, fix)


# Causes before their effects.
RULES = (
    long_prompts, looping_agent, failed_rollouts, silent_roles, inexact_calls, no_calls,
    missing_rewards,
    leaked_tasks, cut_answers, exploited_reward, hacked_reward, exploitable_verifier,
    partial_rewards, one_answer, more_digits,
    repeated_tasks, noisy_verifier, other_sampler, lag,
    high_lr, collapsed, certain_at_start, entropy_gone, constant_verifier, flat_groups,
    rare_success, clipped_ratios, low_lr, unlike_heldout, not_better,
)  # fmt: skip
HACKS = (hacked_reward, partial_rewards, one_answer, more_digits)
# Also effects of success: no reasons where anything rose.
EFFECTS = (
    entropy_gone, constant_verifier, flat_groups, lag, clipped_ratios, low_lr,
)  # fmt: skip
# Faults that do not prevent learning: not reported if the run learned.
CAUSES = (cut_answers, repeated_tasks, noisy_verifier, collapsed)
