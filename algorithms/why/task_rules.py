"""Rules about what a run is made of: its agent's calls, its tasks, its verifier and its sampler."""

from __future__ import annotations

import json
import math
from statistics import fmean, variance

from agentrl.algorithms.why.reason import NO_REASON, REPORTED_SHARE, Reason
from agentrl.algorithms.why.record import PolicyRun
from agentrl.changes import HELD_OUT, LOOKS_Z, SAMPLED, TRAINING
from agentrl.types import ErrorKind, Json, Rollout

FEWEST_COMPARED = 4  # rollouts of each kind whose rewards are compared
LARGE_MISMATCH = 0.2  # nats between sampler and learner, at the same weights, that all trust loses
FRESH = 0.2  # updates since sampling, below which sampler and learner have the same weights
FEWEST_UPDATES = 5  # steps from which not to get better is a finding


def no_calls(run: PolicyRun) -> Reason:
    """Rollouts that failed because the gateway got no call of theirs."""
    if run.failure is None or run.failure.kind is not ErrorKind.NO_CALL:
        return NO_REASON
    share = run.share(f"rollouts/failed/{ErrorKind.NO_CALL}", "rollouts")
    text = f"the agent makes no call at the gateway in {share:.0%} of the rollouts, which train "
    text += "nothing: it calls another address, or answers without its model"
    cure = "agent.path: take base_url and key from OPENAI_BASE_URL and OPENAI_API_KEY, and call "
    return Reason(share, text, cure + "the model in every rollout", run.failure.rollout)


def cut_answers(run: PolicyRun) -> Reason:
    """Only if those that are cut off are worse than others; or all are, and nothing ever came of
    them."""
    share = run.mean("completion/truncated")
    if share < REPORTED_SHARE:
        return NO_REASON
    done = [row for row in run.newest if math.isfinite(row.reward(run.outcome))]
    cut = [row for row in done if any(call.finish == "length" for call in row.transitions)]
    whole = [row for row in done if row not in cut]
    known = [row.reward(run.outcome) for row in cut]
    others = [row.reward(run.outcome) for row in whole]
    text = f"answers are cut off: {share:.0%} of the calls end at the token limit"
    if min(len(known), len(others)) >= FEWEST_COMPARED:
        error = math.sqrt(variance(known) / len(known) + variance(others) / len(others))
        if fmean(others) - fmean(known) <= max(LOOKS_Z * error, 0.0):
            return NO_REASON
        theirs, rest = run.said(fmean(known)), run.said(fmean(others))
        text += f", and their rollouts get {theirs}, others {rest}"
    else:
        means, spread = run.values("reward/mean"), run.values("reward/std")
        if any(spread) or not means or max(means) > 0 or min(means) < max(means):
            return NO_REASON
        text += (
            f", and the verifier gives one reward to all: {run.said(means[0])} in all "
            f"{len(means)} steps"
        )
    most = run.config.sampling.max_tokens
    cure = f"sampling.max_tokens: more than {most or 'the context leaves'}; or ask the agent's "
    example = min(cut, key=lambda row: row.reward(run.outcome), default=None)
    return Reason(share, text, cure + "model for less", example.id if example else "")


def _task(row: Rollout) -> str:
    """A task without what only names it."""
    task: dict[str, Json] = {key: x for key, x in row.task.items() if key not in ("id", "name")}
    return json.dumps(task, sort_keys=True)


def _input(row: Rollout) -> str:
    return json.dumps(row.task.get("input", row.task), sort_keys=True)


def leaked_tasks(run: PolicyRun) -> Reason:
    """By what the agent reads; not where all tasks read alike, as those of a game."""
    trained = {_input(row) for row in run.listed}
    held = {_input(row): row.id for row in run.heldout}
    both = [id for task, id in held.items() if task in trained]
    if len(held) < FEWEST_COMPARED or not both:
        return NO_REASON
    text = f"held-out tasks are training tasks: {len(both)} of {len(held)} were trained, so the "
    text += "held-out score shows memory too"
    cure = "tasks.heldout: tasks that are not in tasks.train"
    return Reason(len(both) / len(held), text, cure, both[0])


def repeated_tasks(run: PolicyRun) -> Reason:
    """A file without duplicates gives each of its tasks once before any comes again."""
    order: dict[str, str] = {}
    for row in run.listed:
        order.setdefault(row.group, _task(row))
    if not run.config.plays_rollouts:  # sessions come as people ask
        return NO_REASON
    if run.config.tasks.order != "shuffle" or any("." in g.rpartition("/")[2] for g in order):
        return NO_REASON
    drawn = [*order.values()]
    distinct = len({*drawn})
    if distinct < 2 or len({*map(_input, run.listed)}) < 2:
        return NO_REASON
    first_epoch = drawn[: max(distinct, 2)]
    share = 1 - len({*first_epoch}) / len(first_epoch)
    most = max(map(drawn.count, {*drawn})) / len(drawn)
    text = f"training tasks repeat: {len(drawn)} groups had {distinct} different tasks, and "
    text += f"{share:.0%} of the first {len(first_epoch)} were there before (the most frequent: "
    text += f"{most:.0%})"
    return Reason(2 * share, text, "tasks.train: different tasks; remove duplicates")


def exploited_reward(run: PolicyRun) -> Reason:
    """What is trained rises, and what is wanted falls."""
    changes = run.changes
    trained = run.trained or changes.get(TRAINING)
    wanted = [HELD_OUT, SAMPLED, *([TRAINING] if run.trained else [])]
    fell = next((name for name in wanted if name in changes and changes[name].fallen), None)
    if trained is None or not trained.risen or fell is None:
        return NO_REASON
    name = repr(run.outcome) if run.trained else "training"
    text = f"the reward is exploited: {name} rises, {trained.text}, and the {fell} score falls, "
    best = max(run.newest, key=lambda row: _or_lowest(row.reward(run.outcome)), default=None)
    cure = "verifier.path: close what the best training rollouts make use of"
    cure += "; algorithm.options.reward" if run.trained else ""
    return Reason(1.0, text + changes[fell].text, cure, best.id if best else "")


def _or_lowest(reward: float) -> float:
    return reward if math.isfinite(reward) else -math.inf


def noisy_verifier(run: PolicyRun) -> Reason:
    if run.alike is None:
        return NO_REASON
    one, other = run.alike.rollouts
    text = f"the verifier is noisy: {run.alike.share:.0%} of the differences in reward are between "
    text += f"rollouts in which everything else is equal, such as {one} and {other}"
    cure = "verifier.path: the same reward for the same rollout (a mean of several opinions); "
    return Reason(run.alike.share, text, cure + "algorithm.group_size: more", one)


def other_sampler(run: PolicyRun) -> Reason:
    """Only of tokens that the weights sampled which were then trained."""
    if run.mean("staleness/version_mean") >= FRESH:
        return NO_REASON
    gap = run.mean("logprob_difference/mean")
    text = f"sampler and learner differ: by {gap:.2g} nats per token at the same weights (above "
    text += "0.05 is not rounding)"
    cure = "engine: the same weights, dtype and chat template as the learner's; +tis in "
    cure += "algorithm.preset corrects small differences"
    return Reason(min(1.0, gap / LARGE_MISMATCH), text, cure)


def collapsed(run: PolicyRun) -> Reason:
    fell = next((name for name, change in run.changes.items() if change.fallen), None)
    if fell is None:
        return NO_REASON
    change = run.changes[fell]
    text = f"the policy collapsed: {fell} {change.text}, at best {change.said(change.best)}"
    cure = "algorithm.lr: a third; algorithm.max_kl: its default; agentrl train RUN_FILE --from "
    return Reason(1.0, text, cure + "STEPS goes back to a checkpoint")


def not_better(run: PolicyRun) -> Reason:
    """What is left where rewards differ and weights move, for long enough."""
    updates = sum(step.get("update/steps", 0.0) > 0 for step in run.steps)
    risen = any(change.risen for change in run.changes.values())
    if updates < FEWEST_UPDATES or not run.changes or risen:
        return NO_REASON
    name, change = next(iter(run.changes.items()))
    kl = sum(run.values("update/kl"))
    text = f"the model does not get better: {name} {change.text} in {updates} updates, although "
    text += f"groups have differences and the policy moved ({kl:.2g} nats per token in all)"
    cure = "policy.model: a larger one, or warmup.data: demonstrations; if it may only need time, "
    cure += "steps: more"
    if run.early:
        cure = f"nothing yet: these are {len(run.steps)} of {run.config.steps} steps. Later, {cure}"
    return Reason(REPORTED_SHARE, text, cure)


def lowest(run: PolicyRun) -> str:
    """The id of the newest rollout with the lowest reward, if any has one."""
    known = [row for row in run.newest if math.isfinite(row.reward(run.outcome))]
    found = min(known, key=lambda row: row.reward(run.outcome), default=None)
    return found.id if found else ""
