"""Why a run does not learn: rules that read what it stored, and name the setting to change.

They are in the order of cause and effect: a symptom, such as groups of equal rewards, comes after
what brings it about. Torch is not imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pstdev

from agentrl.config import RunConfig
from agentrl.config import policies as team
from agentrl.config.load import from_store
from agentrl.errors import NotFound
from agentrl.failures import brief
from agentrl.store.base import Store
from agentrl.types import EMPTY, FailureCount, Purpose, StepRow, Transition

SOME, MOST = 0.2, 0.5  # shares from which a reason is given, and comes before lesser ones
CERTAIN = 0.02  # nats per token, of a policy that says one thing
MOVED = 2e-5  # sum of the learning rates of a run that moved its weights; of an adapter ten times
LOOKED_AT = 24  # rollouts of the first and of the last trained step whose calls are read


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a policy does not learn. share: of the run that it concerns, from 0 (not at all) to 1."""

    text: str
    change: str  # settings, and how
    share: float
    evidence: str


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """What a run stored about one of its policies."""

    config: RunConfig  # as that policy sees it
    steps: Sequence[Mapping[str, float]]  # metrics of committed steps, the policy's own unprefixed
    failure: FailureCount | None  # of the commonest kind
    silent: Sequence[str]  # roles that it plays and in which no call was made
    early: Sequence[Transition]  # calls of the first trained step
    late: Sequence[Transition]

    def values(self, name: str) -> list[float]:
        return [x for step in self.steps if math.isfinite(x := step.get(name, math.nan))]

    def mean(self, name: str) -> float:
        """Over the steps that measured it; 0 if none did."""
        return fmean(self.values(name) or [0.0])

    def share(self, name: str, of: str, without: str = "") -> float:
        """A total, less another one, as a share of a third."""
        part = sum(self.values(name)) - sum(self.values(without))
        return part / max(part, sum(self.values(of)), 1.0)


async def read(store: Store, run: str) -> dict[str, PolicyRun]:
    """The record of each trained policy. Raises NotFound for an unknown run."""
    state = await store.run(run)
    if state is None:
        raise NotFound(f"there is no run {run!r} in {store.url}; it has {await store.runs()}")
    config, failures = from_store(state.config), await store.failures(run)
    rows = [row for row in await store.steps(run) if row.committed]
    taught = [row.step for row in rows if EMPTY not in row.metrics]
    calls: list[list[Transition]] = [[], []]
    for found, step in zip(calls, (taught[:1], taught[-1:]), strict=True):
        if step:
            trained = await store.rollouts(
                run, purpose=Purpose.TRAIN, trained=step[0], limit=LOOKED_AT
            )
            traces = [await store.trace(row.id) for row in trained]
            found += [call for trace in traces if trace for call in trace.transitions]
    heard = {call.role for call in (*calls[0], *calls[1])}
    return {
        name: PolicyRun(
            team.view(config, name),
            [own_metrics(row.metrics, name) for row in rows],
            max(failures, key=lambda row: row.attempts, default=None),
            [
                role
                for role, player in team.policy_by_role(config).items()
                if player == name and heard and role not in heard
            ],
            *([call for call in found if call.policy == name] for found in calls),
        )
        for name in team.trained_policies(config)
    }


def own_metrics(metrics: Mapping[str, float], policy: str) -> dict[str, float]:
    """The metrics of a step, those of the policy as if it were the only one."""
    prefix = f"{policy}/"
    own = {key.removeprefix(prefix): x for key, x in metrics.items() if key.startswith(prefix)}
    return {**metrics, **own}


def reasons(run: PolicyRun) -> list[Reason]:
    """The likeliest first: those of most of the run in the order of the rules, then by share."""
    found = [reason for rule in RULES if (reason := rule(run)).share >= SOME]
    return sorted(found, key=lambda reason: -min(reason.share, MOST))


def has_improved(rows: Sequence[StepRow]) -> bool:
    """Whether the last fifth of the held-out scores, or else of the steps' mean outcomes, is above
    the first, by more than these differ from step to step. True of games without held-out scores,
    in which what one seat wins another loses."""
    found = [row.metrics["eval/score"] for row in rows if "eval/score" in row.metrics]
    noise = 0.0
    if len(found) < 2:
        found = [row.metrics["reward/mean"] for row in rows if "reward/mean" in row.metrics]
        if len(found) < 3 or any("selfplay/games" in row.metrics for row in rows):
            return True
        noise = pstdev(b - a for a, b in pairwise(found))
    fifth = math.ceil(len(found) / 5)
    return fmean(found[-fifth:]) - fmean(found[:fifth]) > noise


Rule = Callable[[PolicyRun], tuple[float, str]]
RULES: list[Callable[[PolicyRun], Reason]] = []
"""Causes before what they bring about."""


def rule(text: str, change: str) -> Callable[[Rule], Rule]:
    """Adds a function from the record to the share and the evidence of a reason."""

    def add(function: Rule) -> Rule:
        RULES.append(lambda run: Reason(text, change, *function(run)))
        return function

    return add


@rule("the prompt is too long", "policy.model, engine.max_context: more; sampling.max_tokens: less")
def long_prompts(run: PolicyRun) -> tuple[float, str]:
    share, refused = run.share("calls/too_long", "calls"), ""
    if run.failure and "context" in run.failure.message:
        share, refused = run.share("rollouts/failed", "rollouts"), brief(run.failure.message)
    return share, f"{share:.0%} of the calls or rollouts exceeded the model's context. {refused}"


@rule(
    "rollouts fail",
    "agent.timeout, agent.max_calls, agent.max_tokens: more; agent.path, verifier.path: mend it",
)
def failed_rollouts(run: PolicyRun) -> tuple[float, str]:
    share, what = run.share("rollouts/failed", "rollouts", without="rollouts/cancelled"), ""
    if run.failure:
        what = f", such as {run.failure.rollout}: {run.failure.kind}, {brief(run.failure.message)}"
    return share, f"{share:.0%} of them{what}"


@rule("a role is silent", "policies.NAME.roles, roles: the names that the agent uses")
def silent_roles(run: PolicyRun) -> tuple[float, str]:
    heard = ", ".join(sorted({call.role for call in (*run.early, *run.late)})) or "none of its own"
    return float(bool(run.silent)), f"no call was made in {', '.join(run.silent)}, calls were made in {heard}"


@rule("calls are inexact", 'engine.kind: one that gives token ids; algorithm.inexact: "retokenize"')
def inexact_calls(run: PolicyRun) -> tuple[float, str]:
    share = run.share("calls/refused", "calls", without="calls/too_long")
    return share, f"{share:.0%} of the calls came without token ids and were not trained"


@rule("rewards are missing", "verifier.path: a number of the name that the algorithm reads")
def missing_rewards(run: PolicyRun) -> tuple[float, str]:
    names = {name for step in run.steps for name in step if name.endswith("/frac_missing")}
    unused = run.share(EMPTY, "rollouts", without="rollouts/failed")
    empty = 0.0 if any(run.values("calls/refused")) else unused
    share = max([empty, *map(run.mean, names)])
    return share, f"{share:.0%} of the rollouts have none"


@rule("rollouts of a group are sampled greedily", "sampling.temperature: 1.0")
def greedy_sampling(run: PolicyRun) -> tuple[float, str]:
    temperature = run.config.sampling.temperature
    return float(temperature == 0), f"sampling.temperature is {temperature:g}"


@rule("the learning rate is too high", "algorithm.lr: a tenth; algorithm.warmup: more steps")
def high_lr(run: PolicyRun) -> tuple[float, str]:
    entropy, bad = run.values("policy/entropy"), run.share("update/bad", "update/steps")
    jumps = [abs(b - a) / max(entropy[0], 10 * CERTAIN) for a, b in pairwise(entropy)]
    jump = max(jumps, default=0.0)
    return max(bad, float(jump > MOST)), (
        f"in one step the entropy changed by {jump:.0%} of what it was at first; {bad:.0%} of the "
        "optimizer steps were not finite"
    )


@rule(
    "entropy is gone",
    "algorithm.options.entropy: 0.01; algorithm.lr: less; policy.model: one that is less certain",
)
def entropy_gone(run: PolicyRun) -> tuple[float, str]:
    sampled = ([-x for call in calls for x in call.logprobs] for calls in (run.early, run.late))
    first, last = (fmean(found or [math.inf]) for found in sampled)
    return float(last < CERTAIN), (
        f"the mean -log prob of sampled tokens was {first:.3f} nats at first and {last:.3f} at last"
    )


@rule(
    "the verifier gives one reward to all", "verifier.path: what it compares; tasks.train: others"
)
def constant_verifier(run: PolicyRun) -> tuple[float, str]:
    means = run.values("reward/mean") or [0.0, 1.0]
    same = min(means) == max(means) and not any(run.values("reward/std"))
    return float(same), f"all rollouts of {len(means)} steps got {means[0]:g}"


@rule(
    "groups are flat",
    'tasks.order: "difficulty"; algorithm.dynamic_sampling: true; algorithm.group_size: more',
)
def flat_groups(run: PolicyRun) -> tuple[float, str]:
    share = run.mean("reward/outcome/frac_zero_std")
    return share, f"in {share:.0%} of them all rollouts got the same reward"


@rule("the lag is too high", "algorithm.max_staleness: less; algorithm.lr: less")
def lag(run: PolicyRun) -> tuple[float, str]:
    old, ess = run.mean("staleness/version_mean"), fmean(run.values("sampler/ess") or [1.0])
    withheld = run.share("staleness/withheld", "tokens/completion")
    return max(withheld, 2 * (1 - ess) if old > SOME else 0.0), (
        f"tokens were {old:.1f} updates old, with an effective sample size of {ess:.0%}; "
        f"{withheld:.0%} were withheld"
    )


@rule("sampler and learner disagree", "policy.dtype, learner.fp32_head; algorithm.preset: +tis")
def mismatch(run: PolicyRun) -> tuple[float, str]:
    gap = 0.0 if run.mean("staleness/version_mean") else run.mean("logprob_difference/mean")
    return min(1.0, 5 * gap), f"about weights of one version by {gap:.3f} nats per token"


@rule("ratios are clipped", "algorithm.epochs, algorithm.minibatches, algorithm.lr: less")
def clipped_ratios(run: PolicyRun) -> tuple[float, str]:
    share, kl = run.mean("policy/clip_fraction"), run.mean("old/kl")
    return share, f"those of {share:.0%} of the tokens; a step moved the policy by {kl:.2f} nats"


@rule("the learning rate is too low, or steps are too few", "algorithm.lr, steps: more")
def low_lr(run: PolicyRun) -> tuple[float, str]:
    """An optimizer step of Adam moves a weight by about the learning rate."""
    moved = sum(step.get("lr", 0.0) * step.get("update/steps", 0.0) for step in run.steps)
    enough = MOVED * (10 if run.config.policy.lora.rank else 1)
    return float(0 < moved < enough), f"no weight can have moved by more than about {moved:.1g}"


@rule("completions are cut off", "sampling.max_tokens: more")
def cut_completions(run: PolicyRun) -> tuple[float, str]:
    share = run.mean("completion/truncated")
    return share * SOME / MOST, f"a token limit ended {share:.0%} of the calls"
