"""GAE over calls whose values are the returns of other rollouts in the same state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from agentrl.algorithms.credit.core import Column, Credit, GroupRelative
from agentrl.algorithms.credit.turns import Returns, StepGae
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level, Unit, key, reduce_by, units
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.presets.registry import PPO_CLIP, Discount, modifier, outcome_of, preset


@dataclass(frozen=True, slots=True)
class PeerValues:
    """[S] value of the state before each call: the mean return of the calls that other rollouts of
    the group made in the same state; missing where none did. With `StepGae` a critic without
    parameters, unbiased where equal states are equal."""

    reward: str | Column = "outcome"
    gamma: float = 1.0
    by: tuple[Unit, ...] = ("group", "state")
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        x = Returns(self.reward, self.gamma)(batch)
        ids = units(batch, "transition", *self.by)
        own = key(ids, batch.transition_rollout)
        known, x = ~x.isnan(), x.nan_to_num(nan=0.0)
        total, count = (reduce_by(y, ids)[ids] - reduce_by(y, own)[own] for y in (x, known))
        return torch.where(count > 0, total / count, torch.nan)


def peer_gae_credit(reward: str, gamma: float, lam: float) -> Credit:
    """GAE over calls, from what other rollouts came to in the same state."""
    turns = PeerValues(reward, gamma, by=("group", "turn"))
    return GroupRelative(StepGae(PeerValues(reward, gamma), reward, gamma, lam, turns), base="none")


@preset("peers", clip=PPO_CLIP, kl=True)
def peers(reward: str, *, gamma: Discount = 0.95, lam: Discount = 0.5) -> Algo:
    """GAE over calls without a critic: the value of a state is what the group's other rollouts came
    to from there. States as in arXiv 2505.10978, GAE as in 2511.14460."""
    return Algo(peer_gae_credit(reward, gamma, lam))


@modifier("peers")
def with_peers(algo: Algo, *, peers_gamma: Discount = 0.95, peers_lam: Discount = 0.5) -> Algo:
    """Puts GAE over calls, with values from the group's other rollouts, in the place of the host's
    credit. States as in arXiv 2505.10978, GAE as in 2511.14460."""
    return replace(algo, credit=peer_gae_credit(outcome_of(algo), peers_gamma, peers_lam))
