"""PPO over tokens, over calls, or over both; with a critic, a reward or a table as values."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import torch
from torch import Tensor

from agentrl.algorithms.credit.baselines import RunningMean, remembered_column
from agentrl.algorithms.credit.core import (
    Column,
    Credit,
    CriticValues,
    Gae,
    GroupRelative,
    Whiten,
    gae,
)
from agentrl.algorithms.credit.turns import Returns, StepGae, value_of
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level, next_same
from agentrl.algorithms.data.rewards import last_observation
from agentrl.algorithms.data.state import CountedMeans
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.presets.registry import (
    PPO_CLIP,
    TOKENS,
    Discount,
    Num,
    kl_in_reward,
    modifier,
    outcome_of,
    preset,
)
from agentrl.types import Rollout


@dataclass(frozen=True, slots=True)
class BiLevelGae:
    """[N] GAE over calls, whose returns end a GAE over the tokens within each. RAGEN, arXiv
    2504.20073.

    value: V [N] per token. gamma_high counts calls, gamma tokens."""

    value: Column
    reward: str | Column = "outcome"
    gamma_high: float = 0.95
    gamma: float = 1.0
    lam: float = 1.0

    def __call__(self, batch: Batch) -> Tensor:
        return self._solved(batch)[0]

    def returns(self, batch: Batch) -> Tensor:
        """What `value` should have said, float64 [N], NaN = missing."""
        return self._solved(batch)[1]

    def _solved(self, batch: Batch) -> tuple[Tensor, Tensor]:
        v, call = self.value(batch).double(), batch.token_transition
        following = next_same(call)
        last = following < 0
        v_end = torch.full((len(batch.transitions),), torch.nan, dtype=torch.float64)
        v_end[call[last]] = v[last]
        steps = StepGae(lambda _: v_end, self.reward, self.gamma_high, self.lam)
        returns = steps(batch) + v_end
        r = torch.where(last, returns[call].nan_to_num(nan=0.0), 0.0)
        missing = returns[call].isnan()
        advantage, targets = gae(r, v, following, self.gamma, self.lam)
        return advantage.masked_fill(missing, torch.nan), targets.masked_fill(missing, torch.nan)


@dataclass(frozen=True, slots=True)
class Tabular(RunningMean):
    """[S] the mean return that earlier steps saw from the state before a call, 0 for one never
    seen: a critic for tasks with few states."""

    reward: str | Column = "outcome"
    gamma: float = 1.0

    @property
    def level(self) -> Level:
        return "transition"

    def part(self, seed: int) -> CountedMeans:
        return CountedMeans()

    def names(self, batch: Batch, rollouts: Sequence[Rollout]) -> list[str]:
        calls = {call.id: call for rollout in rollouts for call in rollout.transitions}
        tasks = (rollouts[rollout].task for rollout in batch.transition_rollout.tolist())
        seen = (last_observation(calls[name]) for name in batch.transitions)
        return [_digest(task, state) for task, state in zip(tasks, seen, strict=True)]

    def observed(self, batch: Batch) -> Tensor:
        return Returns(self.reward, self.gamma)(batch)

    def __call__(self, batch: Batch) -> Tensor:
        return remembered_column(batch, self.name)


def _digest(*parts: object) -> str:
    """Of a state within its task."""
    whole = msgspec.msgpack.encode(parts, order="sorted")
    return hashlib.blake2b(whole, digest_size=12).hexdigest()


def step_gae_credit(value: str, reward: str, gamma: float, lam: float) -> Credit:
    """GAE over calls, whitened over calls."""
    return GroupRelative(StepGae(value_of(value), reward, gamma, lam), by=("all",), norm="std")


@preset("ppo", clip=PPO_CLIP, kl=True)
def ppo(reward: str, *, gamma: Discount = 1.0, lam: Discount = 0.95, kl_reward: Num = 0.0) -> Algo:
    """GAE over tokens with a critic, whitened, PPO clip. The penalty on leaving the reference is
    in the loss (`kl`) or in the rewards (`kl_reward`, arXiv 1909.08593). arXiv 1707.06347."""
    credit = Whiten(Gae(CriticValues(), reward, gamma, lam, kl_in_reward(kl_reward)))
    return Algo(credit, agg=TOKENS)


@preset("agent-r1", clip=PPO_CLIP, kl=True)
def agent_r1(reward: str, *, value: str = "", gamma: Discount = 1.0, lam: Discount = 0.95) -> Algo:
    """PPO with calls as actions: GAE over calls, whitened over calls. `value`: a reward that holds
    V of each call; default: the critic. arXiv 2511.14460."""
    credit = step_gae_credit(value, reward, gamma, lam)
    return Algo(credit)


@preset("turn-ppo", clip=PPO_CLIP)
def turn_ppo(reward: str, *, value: str = "", gamma: Discount = 0.99, lam: Discount = 0.95) -> Algo:
    """Agent-R1 with a discount per turn, token mean. arXiv 2512.17008."""
    credit = step_gae_credit(value, reward, gamma, lam)
    return Algo(credit, agg=TOKENS)


@preset("pspo", clip=(3e-4, 4e-4, 10.0), clip_by="transition", kl=True)
def pspo(reward: str, *, value: str = "", gamma: Discount = 1.0, lam: Discount = 0.95) -> Algo:
    """GAE over calls, and one clipped ratio per call. arXiv 2601.10029."""
    return Algo(step_gae_credit(value, reward, gamma, lam))


@modifier("step-gae")
def with_step_gae(
    algo: Algo, *, step_value: str = "", step_gamma: Discount = 1.0, step_lam: Discount = 0.95
) -> Algo:
    """Puts GAE over calls in the place of the host's credit. arXiv 2511.14460."""
    return replace(algo, credit=step_gae_credit(step_value, outcome_of(algo), step_gamma, step_lam))


@modifier("table")
def with_table(algo: Algo, *, table_gamma: Discount = 1.0, table_lam: Discount = 0.95) -> Algo:
    """Puts GAE over calls in the place of the host's credit, the value of a state being the mean
    return that earlier steps saw from it: for tasks with few states. arXiv 1506.02438."""
    reward = outcome_of(algo)
    advantage = StepGae(Tabular(reward, table_gamma), reward, table_gamma, table_lam)
    return replace(algo, credit=GroupRelative(advantage, by=("all",), norm="std"))


@preset("ragen", clip=PPO_CLIP)
def ragen(
    reward: str, *, gamma_high: Discount = 0.95, gamma: Discount = 1.0, lam: Discount = 1.0
) -> Algo:
    """GAE over calls whose returns end a GAE over the tokens of each. arXiv 2504.20073."""
    credit = Whiten(BiLevelGae(CriticValues(), reward, gamma_high, gamma, lam))
    return Algo(credit, agg=TOKENS)
