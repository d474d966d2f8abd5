"""PPO over calls, and a table of states as a critic."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import msgspec
import torch
from torch import Tensor

from agentrl.algorithms.credit import core
from agentrl.algorithms.credit.call_credit import Returns
from agentrl.algorithms.credit.core import Column, CriticValues, GroupRelative, Whiten
from agentrl.algorithms.credit_blocks.calls import StepGae, value_of
from agentrl.algorithms.credit_blocks.running_means import CountedMeans, RunningMean
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level, next_same
from agentrl.algorithms.data.merge import last_observation
from agentrl.algorithms.objective.core import TOKENS, Algo
from agentrl.algorithms.presets import declare
from agentrl.algorithms.presets.declare import PPO_CLIP, Discount, modifier, preset
from agentrl.types import Rollout


def whitened_gae(value: Column, reward: str, gamma: float, lam: float) -> GroupRelative:
    """GAE over calls, whitened over calls."""
    return GroupRelative(StepGae(value, reward, gamma, lam), by=("all",), norm="std")


@preset("turn-ppo", usual=True, clip=PPO_CLIP)
def turn_ppo(reward: str, *, value: str = "", gamma: Discount = 0.99, lam: Discount = 0.95) -> Algo:
    """Agent-R1 with a discount per turn, token mean. arXiv 2512.17008."""
    return Algo(whitened_gae(value_of(value), reward, gamma, lam), agg=TOKENS)


@dataclass(frozen=True, slots=True)
class BiLevelGae:
    """GAE over calls, whose returns are the final rewards of a GAE over each call's tokens, [N].
    RAGEN, arXiv 2504.20073.

    value: V [N] per token. gamma_high discounts per call, gamma per token."""

    value: Column
    reward: str | Column = "outcome"
    gamma_high: float = 0.95
    gamma: float = 1.0
    lam: float = 1.0

    def __call__(self, batch: Batch) -> Tensor:
        v, call = self.value(batch).double(), batch.token_transition
        following = next_same(call)
        last = following < 0
        v_end = torch.full((len(batch.transitions),), torch.nan, dtype=torch.float64)
        v_end[call[last]] = v[last]
        steps = StepGae(lambda _: v_end, self.reward, self.gamma_high, self.lam)
        returns = (steps(batch) + v_end)[call]
        r = torch.where(last, returns.nan_to_num(nan=0.0), 0.0)
        advantage, _ = core.gae(r, v, following, self.gamma, self.lam)
        return advantage.masked_fill(returns.isnan(), torch.nan)

    def returns(self, batch: Batch) -> Tensor:
        """The targets of `value`, float64 [N], NaN = missing."""
        return self(batch) + self.value(batch).double()


@dataclass(frozen=True, slots=True)
class Tabular(RunningMean):
    """The mean return of earlier steps from the state before a call, [S], 0 for a new state: a
    critic for tasks with few states."""

    reward: str | Column = "outcome"
    gamma: float = 1.0
    stored_as: ClassVar[str] = "mean-return"

    @property
    def level(self) -> Level:
        return "transition"

    def part(self, seed: int) -> CountedMeans:
        return CountedMeans()

    def names(self, batch: Batch, rollouts: Sequence[Rollout]) -> list[str]:
        """A hash of each state within its task."""
        calls = {call.id: call for rollout in rollouts for call in rollout.transitions}
        states = [
            (rollouts[rollout].task, last_observation(calls[name]))
            for rollout, name in zip(
                batch.transition_rollout.tolist(), batch.transitions, strict=True
            )
        ]
        packed = (msgspec.msgpack.encode(state, order="sorted") for state in states)
        return [hashlib.blake2b(whole, digest_size=12).hexdigest() for whole in packed]

    def observed(self, batch: Batch) -> Tensor:
        return Returns(self.reward, self.gamma)(batch)


@declare.as_modifier("step-gae", prefix="step_")
@preset("agent-r1", clip=PPO_CLIP, kl=True)
def agent_r1(reward: str, *, value: str = "", gamma: Discount = 1.0, lam: Discount = 0.95) -> Algo:
    """PPO with calls as actions: GAE over calls, whitened over calls. `value`: a reward that holds
    V of each call; default: the critic. arXiv 2511.14460."""
    return Algo(whitened_gae(value_of(value), reward, gamma, lam))


@preset("pspo", clip=(3e-4, 4e-4, 10.0), clip_by="transition", kl=True)
def pspo(reward: str, *, value: str = "", gamma: Discount = 1.0, lam: Discount = 0.95) -> Algo:
    """GAE over calls, and one clipped ratio per call. arXiv 2601.10029."""
    return Algo(whitened_gae(value_of(value), reward, gamma, lam))


@modifier("tabular", prefix="tabular_")
def with_tabular(algo: Algo, *, gamma: Discount = 1.0, lam: Discount = 0.95) -> Algo:
    """Replaces the host's credit by GAE over calls; the value of a state is the mean return of
    earlier steps from it, for tasks with few states. arXiv 1506.02438."""
    reward = declare.outcome_of(algo)
    return replace(algo, credit=whitened_gae(Tabular(reward, gamma), reward, gamma, lam))


@preset("ragen", clip=PPO_CLIP)
def ragen(
    reward: str, *, gamma_high: Discount = 0.95, gamma: Discount = 1.0, lam: Discount = 1.0
) -> Algo:
    """GAE over calls, whose returns are the final rewards of a GAE over each call's tokens. arXiv
    2504.20073."""
    return Algo(Whiten(BiLevelGae(CriticValues(), reward, gamma_high, gamma, lam)), agg=TOKENS)
