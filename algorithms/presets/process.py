"""Presets and modifiers for rewards of calls beside that of the rollout."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import msgspec

from agentrl.algorithms.credit.core import Credit, GroupRelative, Whiten, weighted_sum
from agentrl.algorithms.credit.mixtures import GatedByOutcome
from agentrl.algorithms.credit.turns import HINDSIGHT, CallRewards, HindsightReturns
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.presets.mixing import (
    RewardStream,
    Way,
    mixed_credit,
    optional_rewards,
    stream_advantage,
    with_streams,
)
from agentrl.algorithms.presets.registry import Discount, Num, Share, modifier, preset
from agentrl.algorithms.presets.rollouts import ROW_SUMS, TOKENS, kl_loss, ppo_clip
from agentrl.algorithms.presets.turns import Scale, outcome_of
from agentrl.types import Scope

Streams = Annotated[dict[str, RewardStream], msgspec.Meta(min_length=1)]


def hindsight_credit(
    outcome: Credit, reward: str, hindsight: str, gamma: float, weight: float
) -> Credit:
    """The outcome's credit plus that of calls in hindsight, bad only where the outcome is bad."""
    calls = GroupRelative(HindsightReturns(CallRewards(hindsight), reward, gamma), norm="std")
    return weighted_sum((outcome, 1.0), (GatedByOutcome(calls, outcome, "negative"), weight))


@preset("hcapo")
def hcapo(
    *,
    reward: str = "outcome",
    hindsight_reward: str = HINDSIGHT,
    weight: Share = 1.0,
    gamma: Discount = 0.95,
    clip_low: Num = 0.2,
    clip_high: Num = 0.2,
    kl: Num = 0.0,
) -> Algo:
    """Outcome over rollouts plus returns of calls, which weigh more where the call looks more
    probable once the outcome is known, which the learner says unless another reward of calls is
    named. arXiv 2603.08754."""
    credit = hindsight_credit(
        GroupRelative(reward, norm="std"), reward, hindsight_reward, gamma, weight
    )
    return Algo(credit, ppo_clip(clip_low, clip_high), kl_loss(kl), optional=(HINDSIGHT,))


@modifier("hcapo")
def with_hcapo(
    algo: Algo,
    *,
    hcapo_reward: str = HINDSIGHT,
    hcapo_weight: Share = 1.0,
    hcapo_gamma: Discount = 0.95,
) -> Algo:
    """Adds HCAPO's credit of calls in hindsight to the host's. arXiv 2603.08754."""
    reward = outcome_of(algo)
    credit = hindsight_credit(algo.credit, reward, hcapo_reward, hcapo_gamma, hcapo_weight)
    return replace(algo, credit=credit, optional=(*algo.optional, HINDSIGHT))


@preset("archer")
def archer(*, advantage: str = "transition:advantage") -> Algo:
    """REINFORCE with the advantage of each call that an utterance critic gave, as a reward. arXiv
    2402.19446."""
    return Algo(GroupRelative(advantage, base="none"), agg=ROW_SUMS)


@preset("prime")
def prime(
    *,
    reward: str = "outcome",
    process: str = "process",
    weight: Share = 1.0,
    scaled: bool = False,
    clip_low: Num = 0.2,
    clip_high: Num = 0.2,
) -> Algo:
    """Outcome and returns of a reward of calls, each against the other rollouts, whitened; `scaled`
    divides the process rewards by their largest return. arXiv 2502.01456."""
    stream = RewardStream(scope=Scope.TRANSITION, base="prime", norm="prime" if scaled else "none")
    steps = stream_advantage(process, {process: stream})
    credit = Whiten(weighted_sum((GroupRelative(reward, base="loo"), 1.0), (steps, weight)))
    return Algo(credit, ppo_clip(clip_low, clip_high), agg=TOKENS)


@preset("istar")
def istar(
    *,
    reward: str = "outcome",
    process: str = "transition:process",
    weight: Share = 1.0,
    clip_low: Num = 0.2,
    clip_high: Num = 0.2,
) -> Algo:
    """Outcome over rollouts plus a reward of calls over all calls of the task, each scaled. arXiv
    2509.19199."""
    credit = weighted_sum(
        (GroupRelative(reward, norm="std"), 1.0), (GroupRelative(process, norm="std"), weight)
    )
    return Algo(credit, ppo_clip(clip_low, clip_high))


@preset("streams")
def streams(
    *,
    streams: Streams,
    mix: Way = "advantages",
    gamma: Discount = 1.0,
    norm: Scale = "none",
    clip_low: Num = 0.2,
    clip_high: Num = 0.2,
    kl: Num = 0.0,
) -> Algo:
    """Any number of process and result rewards, each with answers of its own, and where they are
    mixed. arXiv 2509.19199; see CREDIT.md."""
    credit = mixed_credit(streams, mix, gamma=gamma, norm=norm)
    algo = Algo(credit, ppo_clip(clip_low, clip_high), kl_loss(kl))
    return replace(algo, optional=optional_rewards(streams))


@modifier("process")
def with_process(algo: Algo, *, process_streams: Streams) -> Algo:
    """Adds the advantages of more rewards to the host's. arXiv 2509.19199; see CREDIT.md."""
    credit = with_streams(algo.credit, process_streams)
    return replace(algo, credit=credit, optional=algo.optional + optional_rewards(process_streams))
