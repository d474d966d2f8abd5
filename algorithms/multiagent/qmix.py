"""VDN and QMIX: mixers of agents' utilities into a team value, and Q-learning on it.

A mixer maps the agents' utilities q [..., n] and the team's state [..., s] to the value of the
joint action [...]. It is monotone in every utility, so the best joint action consists of each
agent's best action: agents trained together can act separately.

The learner chooses among discrete actions without a trained policy, for example which frozen
language models talk to each other (Agent Q-Mix, arXiv 2604.00344). It has utilities, mixer, target
copies of both, optimizer, and a count of learned episodes. Invariant: learners with the same seed
and episodes are equal.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from agentrl.algorithms.multiagent.episodes import Episodes, TeamEpisode, pad_episodes

Kind = Literal["vdn", "qmix"]


class VdnMixer(nn.Module):
    """Q_tot = sum of the utilities. VDN, arXiv 1706.05296."""

    def forward(self, q: Tensor, state: Tensor) -> Tensor:
        return q.sum(-1)


class QmixMixer(nn.Module):
    """Q_tot = w2^T elu(W1^T q + b1) + v with weights that are functions of the state, W1 and w2
    nonnegative. QMIX, arXiv 1803.11485, with its single-layer hypernetworks."""

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
    """QMIX's value of q [..., n] for |w1| [..., n, e], b1 [..., e], |w2| [..., e], v [...]."""
    hidden = functional.elu((q.unsqueeze(-1) * w1.abs()).sum(-2) + b1)
    return (hidden * w2.abs()).sum(-1) + v


def build_mixer(kind: Kind, agents: int, state: int, embed: int = 32) -> VdnMixer | QmixMixer:
    """The mixer of a kind. state: size of the state."""
    return VdnMixer() if kind == "vdn" else QmixMixer(agents, state, embed)


def of_action(x: Tensor, actions: Tensor) -> Tensor:
    """The entries of x [..., n, a] at the actions [..., n]; [..., n]."""
    return x.gather(-1, actions[..., None]).squeeze(-1)


def best_action(q: Tensor, available: Tensor) -> Tensor:
    """The available action with the highest value q [..., a], int64 [...]."""
    return q.masked_fill(~available, -torch.inf).argmax(-1)


def one_step_targets(reward: Tensor, following: Tensor, terminated: Tensor, gamma: float) -> Tensor:
    """Targets r + gamma * (1 - terminated) * V(next); a truncated episode is not terminated."""
    return reward + gamma * torch.where(terminated, 0.0, following)


def lambda_returns(
    reward: Tensor, following: Tensor, terminated: Tensor, last: Tensor, gamma: float, lam: float
) -> Tensor:
    """TD(lambda) targets [B, T]: G_t = r_t + gamma * ((1 - lam) * V(next) + lam * G_{t+1}).

    following [B, T]: V of the state after each step. terminated, last: bool [B, T], steps at which
    an episode terminates, and the last step of each episode. arXiv 1705.08926."""
    out = torch.zeros_like(reward)
    after = torch.zeros_like(reward[:, 0])
    for t in reversed(range(reward.shape[1])):
        v = torch.where(terminated[:, t], 0.0, following[:, t])
        mixed = torch.where(last[:, t], v, (1 - lam) * v + lam * after)
        out[:, t] = after = reward[:, t] + gamma * mixed
    return out


class Utilities(nn.Module):
    """A recurrent network from observations [B, T, n, o] to utilities [B, T, n, a], shared by all
    agents, with the agent's index as input. As in pymarl."""

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
        each = seen.transpose(1, 2).flatten(0, 1)  # one sequence per agent, [B * n, T, h]
        kept = self.memory(each)[0].unflatten(0, (count, agents)).transpose(1, 2)
        out: Tensor = self.leave(kept)
        return out


class FactoredQLearner:
    """Double Q-learning on the factored value of a team, with pymarl's settings.

    network: builds the module from observations [B, T, n, o] to utilities [B, T, n, a]; default
    `Utilities`. every: number of episodes between updates of the target."""

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
            utilities = network() if network else Utilities(agents, observation, actions, hidden)
            parts = {"utilities": utilities, "mixer": build_mixer(self.kind, agents, state, embed)}
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
        """Epsilon-greedy actions of all agents after the observations so far, [t, n, o].
        available: bool [n, a]; None: all actions."""
        allowed = torch.ones(self.agents, self.actions).bool() if available is None else available
        with torch.no_grad():
            q = self.online["utilities"](observations[None])[0, -1]
        chosen = best_action(q, allowed).tolist()
        explored = [rng.choice(row.nonzero().squeeze(1).tolist()) for row in allowed]
        return [e if rng.random() < epsilon else c for e, c in zip(explored, chosen, strict=True)]

    def learn(self, episodes: Sequence[TeamEpisode]) -> dict[str, float]:
        """Take one optimizer step on the episodes; returns metrics."""
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
        """Double Q-learning targets [B, T]: the online utilities choose the next actions, the
        target copy evaluates them."""
        chosen = best_action(self.online["utilities"](data.observations), data.available)
        following = self.value(self.target, data, chosen[:, 1:], first=1)
        return one_step_targets(data.rewards, following, data.terminated, self.gamma)

    def value(
        self, parts: nn.ModuleDict, data: Episodes, actions: Tensor, first: int = 0
    ) -> Tensor:
        """Values [B, T] of the joint actions [B, T, n] in the states from step `first` on. An agent
        that does not act has utility 0."""
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
    """Learner whose team value is the sum of the agents' utilities. arXiv 1706.05296."""

    kind = "vdn"


class QMix(FactoredQLearner):
    """Learner whose team value is a state-dependent monotone function of the agents' utilities.
    arXiv 1803.11485."""

    kind = "qmix"
