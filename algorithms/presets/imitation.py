"""Imitation of demonstrations, of the best sampled rollouts, of a teacher, or of what tools
answered."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Literal

import torch
from torch import Tensor

from agentrl.algorithms.credit.core import Imitated, ZeroAdvantage, rollout_rewards
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.objective.core import TOKENS, Algo, Echo, KLPenalty, TopKDistillation
from agentrl.algorithms.presets.declare import Names, Num, Share, modifier, preset
from agentrl.core.config import Natural, Positive
from agentrl.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Best:
    """Filter for tokens of rollouts with a reward of at least `least`, and of these only the `best`
    best of each group (0: all; the first of equal ones), bool [N]."""

    reward: str = "outcome"
    least: float = 1.0
    best: int = 0

    def __call__(self, batch: Batch) -> Tensor:
        x, group = rollout_rewards(batch, self.reward), batch.rollout_group
        selected = x >= self.least
        if self.best:
            rivals = (group[:, None] == group) & selected
            number = torch.arange(len(x))
            ahead = (x > x[:, None]) | ((x == x[:, None]) & (number < number[:, None]))
            selected &= (rivals & ahead).sum(1) < self.best
        return selected[batch.token_rollout]


@preset("sft")
def sft(reward: str, *, least: Share | None = None, best: Natural = 0) -> Algo:
    """Imitates every sampled token, mean over tokens: supervised fine-tuning, for demonstrations;
    or only the rollouts whose reward is at least `least`, or the `best` best of them in each group.
    arXiv 2203.02155."""
    if least is None and not best:
        return Algo(Imitated(), agg=TOKENS, rewards=())
    return Algo(Imitated(), agg=TOKENS, keep=Best(reward, -inf if least is None else least, best))


Whose = Literal["teacher", "policy"]


@preset("distill")
def distill(*, beta: Positive = 1.0, top: Natural = 0, of: Whose = "teacher") -> Algo:
    """On-policy distillation: reverse KL to a teacher on the policy's own rollouts, no rewards.
    top: 0: estimated from the sampled token; else over this many tokens and the rest: the most
    probable ones of the teacher (forward KL) or of the policy (reverse KL). arXiv 2306.13649."""
    return with_teacher(Algo(ZeroAdvantage(), agg=TOKENS, rewards=()), beta=beta, top=top, of=of)


@modifier("distill", prefix="distill_")
def with_teacher(
    algo: Algo, *, beta: Positive = 1.0, top: Natural = 0, of: Whose = "teacher"
) -> Algo:
    """Adds the KL to a teacher on the tokens of the host's policy gradient: see `distill`."""
    if not top:
        return replace(algo, penalties=(*algo.penalties, KLPenalty("k2", beta, "teacher")))
    if algo.topk or algo.side is not None:
        raise ConfigError(
            f"top = {top} imitates several tokens at every position, which cannot be combined with "
            f"the preference loss or the top-k gate of {algo.name!r}; set top = 0"
        )
    return replace(algo, distill=TopKDistillation(top, beta, of))


TOOL_MESSAGES, ALL_TOOLS = ["tool"], list[str]()


@modifier("echo", prefix="echo_")
def with_echo(
    algo: Algo, *, weight: Num = 0.1, roles: Names = TOOL_MESSAGES, tools: list[str] = ALL_TOOLS
) -> Algo:
    """Adds the cross-entropy of what tools answered to the policy's own actions, mean over these
    tokens, which are in the forward pass anyway; of groups without a difference and of failed
    rollouts, too. Not of tokens to which the policy gives less than half of 1 / vocabulary.
    roles: of the messages, "user" for environments that answer as the user; tools: only these.
    arXiv 2605.24517."""
    return replace(algo, echo=Echo(weight, tuple(roles), tuple(tools)))
