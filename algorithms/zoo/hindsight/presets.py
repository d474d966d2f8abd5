"""Credit of single calls in hindsight: how probable a call is once the outcome is known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isnan
from typing import ClassVar

import torch
from msgspec import structs
from torch import Tensor

from agentrl.algorithms.credit import call_credit
from agentrl.algorithms.credit.core import Column, GroupRelative, weighted_sum
from agentrl.algorithms.credit_blocks.calls import CallRewards, GatedByOutcome
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level, known_mean, reduce_by
from agentrl.algorithms.data.merge import build_batch, map_calls, trainable
from agentrl.algorithms.model.chat import RequestError
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.objective.prepare import TrainedPolicy, with_call_rewards
from agentrl.algorithms.presets import declare
from agentrl.algorithms.presets.declare import PPO_CLIP, Discount, Share, modifier, preset
from agentrl.types import Group, Rollout, Transition, int32

HINDSIGHT = "transition:hindsight"  # the reward that `add_hindsight` adds


TOLD = "\n\n(In the end, this attempt was rewarded with {outcome:g}.)"


def add_hindsight(groups: list[Group], policy: TrainedPolicy) -> list[Group]:
    """Add to every call a reward `hindsight`, the mean log-prob of its tokens if its prompt tells
    the outcome. HCAPO, arXiv 2603.08754.

    The prompt is rendered again with the outcome at its end, and the learner computes the log-probs
    of the sampled tokens after it. Samples nothing. Excludes calls of rollouts without an outcome,
    calls whose last message is not text, and those that then exceed the context."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    told = {call.id: call for rollout in rollouts for call in _told(rollout, policy)}
    batch = build_batch(map_calls(groups, lambda c: told.get(c.id)), policy=policy.name)
    if not batch.n_tokens:
        return groups
    call, n = batch.token_transition, len(batch.transitions)
    total = reduce_by(policy.logprobs(batch).cpu(), call, n)
    mean = (total / reduce_by(call >= 0, call, n)).tolist()
    scores = {id: x for id, x in zip(batch.transitions, mean, strict=True) if not isnan(x)}
    return with_call_rewards(groups, HINDSIGHT, scores)


def _told(rollout: Rollout, policy: TrainedPolicy) -> Iterator[Transition]:
    """The calls of a rollout with prompts that tell its outcome, where that is possible."""
    outcome = rollout.reward()
    for call in [] if isnan(outcome) else rollout.transitions:
        *before, last = call.messages or [{}]
        if not trainable(call, policy.name) or call.repeats is not None:
            continue
        if not isinstance(last.get("content"), str):
            continue
        text = last["content"] + TOLD.format(outcome=outcome)
        try:
            prompt = policy.chat.encode([*before, {**last, "content": text}], call.tools)
        except RequestError:
            continue
        if policy.fits(len(prompt) + len(call.completion)):
            yield structs.replace(call, prompt=int32(prompt))


@dataclass(frozen=True, slots=True)
class HindsightReturns:
    """HCAPO, arXiv 2603.08754: the return of each call times its hindsight probability relative to
    the mean of its rollout's calls, clamped to [low, high]; [S].

    hindsight: mean log-prob of each call's tokens given a prompt with the outcome, [S]; a call
    without it keeps its return. temperature divides it."""

    hindsight: Column
    reward: str | Column = "outcome"
    gamma: float = 0.95
    temperature: float = 5.0
    low: float = 0.8
    high: float = 1.2
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        p = (self.hindsight(batch) / self.temperature).exp()
        rollout = batch.transition_rollout
        ratio = (p / known_mean(p, rollout)[rollout]).clamp(self.low, self.high)
        return torch.where(p.isnan(), 1.0, ratio) * call_credit.Returns(self.reward, self.gamma)(
            batch
        )


@modifier("hcapo", prefix="hcapo_")
def with_hcapo(
    algo: Algo, *, reward: str = HINDSIGHT, weight: Share = 1.0, gamma: Discount = 0.95
) -> Algo:
    """Adds HCAPO's hindsight credit of calls to the host's; negative only where the host's is
    negative. arXiv 2603.08754."""
    returns = HindsightReturns(CallRewards(reward), declare.outcome_of(algo), gamma)
    calls = GatedByOutcome(GroupRelative(returns, norm="std"), algo.credit, "negative")
    credit = weighted_sum((algo.credit, 1.0), (calls, weight))
    return replace(algo, credit=credit, optional=(*algo.optional, HINDSIGHT))


@preset("hcapo", clip=PPO_CLIP, kl=True)
def hcapo(
    reward: str, *, hindsight_reward: str = HINDSIGHT, weight: Share = 1.0, gamma: Discount = 0.95
) -> Algo:
    """Outcome over rollouts plus returns of calls, weighted by the probability of the call given
    the outcome. The learner computes that probability unless `hindsight_reward` names another
    reward of calls. arXiv 2603.08754."""
    host = Algo(GroupRelative(reward, norm="std"))
    return with_hcapo(host, reward=hindsight_reward, weight=weight, gamma=gamma)
