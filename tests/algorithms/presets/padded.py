"""Losses as other frameworks publish them: padded arrays, Python loops and autograd, and checks of
a preset against one."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

import torch
from torch import Tensor

from agentrl.algorithms.data.batch import Batch


@dataclass(frozen=True)
class Padded:
    """What the other frameworks hold: [R, T] arrays with a mask, and Python lists."""

    mask: Tensor  # bool [R, T]
    p: Tensor  # float64 [R, T] each, garbage where masked
    o: Tensor
    b: Tensor
    rollout: list[int]  # [R]
    group: list[int]  # [U]
    reward: list[float]  # [U]
    style: list[float]  # [U], a second reward

    @property
    def tokens(self) -> list[tuple[int, int]]:
        return [tuple(rt) for rt in self.mask.nonzero().tolist()]


REWARD = [1, 0, 0, 0.5, 0.7, 0.7, 0.7, 0.3, 0, 1, nan, 0]


STYLE = [0, 1, nan, 1, 0, 0, 0.2, 1, nan, nan, nan, 0.4]


GROUP = [0, 0, 0, 0, 1, 1, 1, 2, 3, 3, 3, 3]  # one flat group, one solo, one missing


GREEDY = (3, 9, 11)  # rollouts; of groups 0 and 3


CUT = (2, 4, 7)  # calls that a token limit ended; 2 is the last of its rollout, 4 is not


ROWS = [2, 1, 1, 3, 1, 2, 1, 1, 1, 0, 1, 2]  # per rollout; rollout 9 sampled nothing


def padded(seed: int, *, spread: float = 0.4) -> Padded:
    torch.manual_seed(seed)
    rollout = [u for u, rows in enumerate(ROWS) for _ in range(rows)]
    lengths = torch.randint(1, 6, (len(rollout), 1))
    mask = torch.arange(6) < lengths
    shape = mask.shape
    o = torch.rand(shape, dtype=torch.float64).log()
    p = o + spread * torch.randn(shape, dtype=torch.float64)
    b = o + 0.5 * spread * torch.randn(shape, dtype=torch.float64)
    p, o, b = (torch.where(mask, x.clamp(max=-1e-3), 1e6) for x in (p, o, b))
    return Padded(mask, p, o, b, rollout, GROUP, REWARD, STYLE)


def flat(data: Padded) -> Batch:
    lengths = data.mask.sum(1)
    rows = torch.arange(len(data.rollout)).repeat_interleave(lengths)
    rollout = torch.tensor(data.rollout)
    return Batch(
        rows=[],
        token_row=rows,
        token_transition=rows,
        sampler_logprobs=data.b[data.mask],
        transition_rollout=rollout,
        transition_role=torch.zeros_like(rollout),
        row_rollout=rollout,
        rollout_group=torch.tensor(data.group),
        rewards={
            "outcome": torch.tensor(data.reward, dtype=torch.float64),
            "style": torch.tensor(data.style, dtype=torch.float64),
        },
        roles=["agent"],
        groups=["0", "1", "2", "3"],
        rollouts=[str(u) for u in range(len(data.group))],
        transitions=[str(r) for r in range(len(data.rollout))],
        rollout_greedy=torch.tensor([u in GREEDY for u in range(len(data.group))]),
        transition_truncated=torch.tensor([r in CUT for r in range(len(data.rollout))]),
    )
