"""The value of a team from the utilities of its agents, and Q-learning on it: VDN and QMIX.

A mixer turns utilities q [..., n], one of each agent, and the team's state [..., s] into the value
of their joint action [...]. Each is monotone in every utility, so the joint action of the highest
value is the one that every agent chooses for itself: agents that learned together can act apart.

The learner is for choosing among enumerable actions where no policy is trained, such as who talks
to whom among frozen language models (Agent Q-Mix, arXiv 2604.00344). It owns utilities, mixer,
target copies of both, the optimizer, and the count of learned episodes. Always true: two learners
of the same seed that learned the same episodes are the same.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from agentrl.algorithms.multiagent.episodes import Episode, Episodes, pad_episodes

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


def of_action(x: Tensor, actions: Tensor) -> Tensor:
    """[..., n]: of the numbers x [..., n, a] those of the actions [..., n]."""
    return x.gather(-1, actions[..., None]).squeeze(-1)


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


class Utilities(nn.Module):
    """q [B, T, n, a] of observations [B, T, n, o]: one recurrent network for all agents, which are
    told apart by their number. As in pymarl."""

    def __init__(self, agents: int, observation: int, actions: int, hidden: int = 64) -> None:
        super().__init__()
        self.agents = agents
        self.enter = nn.Linear(observation + agents, hidden)
        self.memory = nn.GRU(hidden, hidden, batch_first=True)
        self.leave = nn.Linear(hidden, actions)

    def forward(self, observations: Tensor) -> Tensor:
        count, steps, agents, _ = observations.shape
        names = torch.eye(agents).expand(count, steps, agents, agents)
        seen = self.enter(torch.cat([observations, names], -1)).relu()
        each = seen.transpose(1, 2).flatten(0, 1)  # a sequence per agent [B * n, T, h]
        kept = self.memory(each)[0].unflatten(0, (count, agents)).transpose(1, 2)
        out: Tensor = self.leave(kept)
        return out


class FactoredQLearner:
    """A team that learns by double Q-learning on its factored value, pymarl's settings.

    network: builds a module that gives the utilities [B, T, n, a] of observations [B, T, n, o];
    default `Utilities`. every: episodes between copies of the target."""

    kind: ClassVar[Kind]

    def __init__(
        self, agents: int, observation: int, actions: int, state: int, *,
        network: Callable[[], nn.Module] | None = None, hidden: int = 64, embed: int = 32,
        gamma: float = 0.99, lr: float = 5e-4, max_grad_norm: float = 10.0, every: int = 200,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.agents, self.actions = agents, actions
        self.gamma, self.max_grad_norm, self.every = gamma, max_grad_norm, every
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = network() if network else Utilities(agents, observation, actions, hidden)
            parts = {"utilities": made, "mixer": build_mixer(self.kind, agents, state, embed)}
        self.online = nn.ModuleDict(parts)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.optimizer = torch.optim.RMSprop(self.online.parameters(), lr, alpha=0.99, eps=1e-5)
        self.learned = self.copied = 0  # episodes

    def act(
        self,
        observations: Tensor,
        epsilon: float,
        rng: random.Random,
        available: Tensor | None = None,
    ) -> list[int]:
        """The action of every agent after the observations so far [t, n, o]: its best one, or with
        probability epsilon any. available: bool [n, a], now; None: all are."""
        allowed = torch.ones(self.agents, self.actions).bool() if available is None else available
        with torch.no_grad():
            q = self.online["utilities"](observations[None])[0, -1]
        chosen = best_action(q, allowed).tolist()
        explored = [rng.choice(row.nonzero().squeeze(1).tolist()) for row in allowed]
        free = [rng.random() < epsilon for _ in chosen]
        return [e if f else c for e, c, f in zip(explored, chosen, free, strict=True)]

    def learn(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """One optimizer step on all of the episodes; returns its metrics."""
        data = pad_episodes(episodes, self.actions)
        value = self.value(self.online, data, data.actions)
        with torch.no_grad():
            target = self.targets(data)
        error = torch.where(data.live, value - target, 0.0)
        loss = error.square().sum() / data.live.sum()
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.online.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.learned += len(episodes)
        if self.learned - self.copied >= self.every:
            self.target.load_state_dict(self.online.state_dict())
            self.copied = self.learned
        mean = value.detach()[data.live].mean()
        return {"loss": float(loss.detach()), "grad_norm": float(norm), "value": float(mean)}

    def targets(self, data: Episodes) -> Tensor:
        """[B, T]: the online utilities choose the next actions, the target copy values them."""
        chosen = best_action(self.online["utilities"](data.observations), data.available)
        following = self.value(self.target, data, chosen[:, 1:], first=1)
        return one_step_targets(data.rewards, following, data.terminated, self.gamma)

    def value(
        self, parts: nn.ModuleDict, data: Episodes, actions: Tensor, first: int = 0
    ) -> Tensor:
        """[B, T]: of the joint actions [B, T, n] in the states from `first` on. An agent that does
        not act has utility 0."""
        steps = slice(first, first + actions.shape[1])
        q = of_action(parts["utilities"](data.observations)[:, steps], actions)
        taken = torch.where(data.acting[:, steps], q, 0.0)
        value: Tensor = parts["mixer"](taken, data.states[:, steps])
        return value

    def state_dict(self) -> dict[str, Any]:
        return {
            "online": self.online.state_dict(),
            "target": self.target.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "episodes": (self.learned, self.copied),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.online.load_state_dict(state["online"])
        self.target.load_state_dict(state["target"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.learned, self.copied = state["episodes"]


class VDN(FactoredQLearner):
    """The team's value is the sum of its agents' utilities. arXiv 1706.05296."""

    kind = "vdn"


class QMix(FactoredQLearner):
    """The team's value is monotone in its agents' utilities, in a way that depends on its state.
    arXiv 1803.11485."""

    kind = "qmix"
