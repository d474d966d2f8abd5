"""How the value of a team is made of the utilities of its agents.

A mixer turns utilities q [..., n], one of each agent, and the team's state [..., s] into the value
of their joint action [...]. Each is monotone in every utility, so the joint action that it values
most is the one that every agent chooses for itself: what the team learns together, its agents can
do apart.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

Kind = Literal["vdn", "qmix"]


class VdnMixer(nn.Module):
    """Q_tot = sum of the utilities. VDN, arXiv 1706.05296."""

    def forward(self, q: Tensor, state: Tensor) -> Tensor:
        return q.sum(-1)


class QmixMixer(nn.Module):
    """Q_tot = w2^T elu(W1^T q + b1) + v, all of them functions of the state, W1 and w2 never
    negative. QMIX, arXiv 1803.11485, with its single-layer hypernetworks."""

    def __init__(self, agents: int, state: int, embed: int = 32) -> None:
        super().__init__()
        self.agents, self.embed = agents, embed
        self.w1 = nn.Linear(state, agents * embed)
        self.b1 = nn.Linear(state, embed)
        self.w2 = nn.Linear(state, embed)
        self.v = nn.Sequential(nn.Linear(state, embed), nn.ReLU(), nn.Linear(embed, 1))

    def forward(self, q: Tensor, state: Tensor) -> Tensor:
        w1 = self.w1(state).unflatten(-1, (self.agents, self.embed))
        return qmix_value(q, w1, self.b1(state), self.w2(state), self.v(state).squeeze(-1))


def qmix_value(q: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, v: Tensor) -> Tensor:
    """QMIX's mixing of q [..., n] by w1 [..., n, e], b1 [..., e], w2 [..., e], v [...], the
    weights by their absolute values."""
    hidden = functional.elu((q.unsqueeze(-1) * w1.abs()).sum(-2) + b1)
    return (hidden * w2.abs()).sum(-1) + v


def build_mixer(kind: Kind, agents: int, state: int, embed: int = 32) -> VdnMixer | QmixMixer:
    """state: its size."""
    return VdnMixer() if kind == "vdn" else QmixMixer(agents, state, embed)


def best_action(q: Tensor, available: Tensor) -> Tensor:
    """int64 [...]: the action [..., a] of the highest value among those available."""
    return q.masked_fill(~available, -torch.inf).argmax(-1)


def one_step_targets(reward: Tensor, following: Tensor, terminated: Tensor, gamma: float) -> Tensor:
    """Targets r + gamma * (1 - terminated) * V(next). An episode that was cut off has not
    terminated: what would have followed still counts."""
    return reward + gamma * torch.where(terminated, 0.0, following)


def lambda_returns(
    reward: Tensor, following: Tensor, terminated: Tensor, last: Tensor, gamma: float, lam: float
) -> Tensor:
    """TD(lambda) targets [B, T]: G_t = r_t + gamma * ((1 - lam) * V(next) + lam * G_{t+1}).

    following [B, T]: V of the state after each step; terminated, last bool [B, T]: which steps end
    an episode for good, and which are the last that were made. arXiv 1705.08926."""
    out = torch.zeros_like(reward)
    after = torch.zeros_like(reward[:, 0])
    for t in reversed(range(reward.shape[1])):
        v = torch.where(terminated[:, t], 0.0, following[:, t])
        carried = torch.where(last[:, t], v, (1 - lam) * v + lam * after)
        out[:, t] = after = reward[:, t] + gamma * carried
    return out
