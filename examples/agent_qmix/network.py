"""The utility network of arXiv 2604.00344: two rounds of messages along the last round's graph, a
recurrent state over rounds, and a head."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Talk(nn.Module):
    """Utilities [B, T, n, a] of observations [B, T, n, o], whose last n values mark the agents that
    were heard."""

    def __init__(self, observation: int, agents: int, actions: int, hidden: int = 64) -> None:
        super().__init__()
        self.agents = agents
        self.enter = nn.Linear(observation - agents, hidden)
        self.speak = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2))
        self.listen = nn.ModuleList(nn.GRUCell(hidden, hidden) for _ in range(2))
        self.memory = nn.GRU(hidden, hidden, batch_first=True)
        self.leave = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, actions))

    def forward(self, observations: Tensor) -> Tensor:
        count, _, agents, _ = observations.shape
        own, heard = observations.split([observations.shape[-1] - self.agents, self.agents], -1)
        share = heard / heard.sum(-1, keepdim=True).clamp(min=1)  # mean over the agents heard
        h = self.enter(own).relu()
        for speak, listen in zip(self.speak, self.listen, strict=True):
            messages = share @ speak(h).relu()
            h = listen(messages.flatten(0, -2), h.flatten(0, -2)).view_as(h)
        each = h.transpose(1, 2).flatten(0, 1)  # a sequence per agent [B * n, T, h]
        kept = self.memory(each)[0].unflatten(0, (count, agents)).transpose(1, 2)
        out: Tensor = self.leave(torch.relu(kept))
        return out
