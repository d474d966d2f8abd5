"""The same random rollouts as verl holds them, padded with a mask, and as a flat `Batch`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms.data.batch import Batch

GROUPS = (0, 0, 0, 0, 1, 1, 1, 2, 2, 2)
WIDTH = 9

# verl whitens by sqrt(variance + 1e-8) and adds 1e-8 to counts; we do neither.
WHITE = 1e-6


@dataclass(frozen=True)
class Rollouts:
    """R rollouts of one row each. Tool results are masked tokens between sampled ones; what stands
    at masked places is garbage that must not matter."""

    mask: Tensor  # float64 [R, WIDTH], 1: sampled by the policy
    p: Tensor  # float64 [R, WIDTH] each: log-probs now, before the update, of sampler, of reference
    o: Tensor
    b: Tensor
    q: Tensor
    advantage: Tensor  # float64 [R, WIDTH], of either sign, some 0
    values: Tensor  # float64 [R, WIDTH], a critic's
    reward: Tensor  # float64 [R], different inside each group
    style: Tensor  # float64 [R], a second reward
    group: tuple[int, ...] = GROUPS

    @property
    def sampled(self) -> Tensor:
        return self.mask.bool()

    @property
    def token_rewards(self) -> Tensor:
        """[R, WIDTH]: the reward at the last sampled token."""
        last = (self.mask * torch.arange(1, WIDTH + 1)).argmax(1)
        return torch.zeros_like(self.mask).scatter_(1, last[:, None], self.reward[:, None])

    def flat(self, greedy: tuple[int, ...] = ()) -> Batch:
        rows = torch.arange(len(self.group))
        token_row = rows.repeat_interleave(self.sampled.sum(1))
        return Batch(
            rows=[],
            token_row=token_row,
            token_transition=token_row,
            sampler_logprobs=self.b[self.sampled],
            transition_rollout=rows,
            transition_role=torch.zeros_like(rows),
            row_rollout=rows,
            rollout_group=torch.tensor(self.group),
            rewards={"outcome": self.reward, "style": self.style},
            roles=["agent"],
            groups=[str(group) for group in sorted(set(self.group))],
            rollouts=[str(row) for row in rows.tolist()],
            transitions=[str(row) for row in rows.tolist()],
            rollout_greedy=torch.tensor([row in greedy for row in rows.tolist()]),
            values=self.values[self.sampled],
        )


def rollouts(
    seed: int, *, group: tuple[int, ...] = GROUPS, reward: list[float] | None = None
) -> Rollouts:
    draw = torch.Generator().manual_seed(seed)
    size = len(group)
    shape = (size, WIDTH)

    def noise(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=draw, dtype=torch.float64)

    place = torch.arange(WIDTH)
    length = torch.randint(4, WIDTH + 1, (size, 1), generator=draw)
    tool = torch.randint(1, 3, (size, 1), generator=draw)  # a masked token after the first ones
    o = -torch.rand(shape, generator=draw, dtype=torch.float64).mul(3).add(0.01)
    drawn = (torch.randperm(64, generator=draw)[:size] + 0.5) / 16 - 2  # never 0: see GPG
    return Rollouts(
        mask=((place < length) & (place != tool)).double(),
        p=(o + noise(0.5)).clamp(max=-1e-3),
        o=o,
        b=(o + noise(0.4)).clamp(max=-1e-3),
        q=(o + noise(0.5)).clamp(max=-1e-3),
        advantage=noise() * (noise() > -1),
        values=noise(),
        reward=drawn.double() if reward is None else torch.tensor(reward, dtype=torch.float64),
        style=torch.rand(size, generator=draw, dtype=torch.float64),
        group=group,
    )
