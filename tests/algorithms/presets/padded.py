"""Losses as other frameworks publish them: padded arrays, Python loops and autograd, and checks of
a preset against one."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, nan
from typing import Any

import torch
from torch import Tensor

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.objective.core import Algo, loss_coefficients, loss_terms
from agentrl.algorithms.objective.ratios import GivenLogProbs
from agentrl.algorithms.presets.registry import make


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
        behaviour=data.b[data.mask],
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


def members(data: Padded, reward: list[float] | None = None) -> list[list[tuple[int, float]]]:
    """Known rewards by group."""
    rewards = reward or data.reward
    return [
        [
            (u, rewards[u])
            for u in range(len(rewards))
            if data.group[u] == g and rewards[u] == rewards[u]
        ]
        for g in sorted(set(data.group))
    ]


def differs(group: list[tuple[int, float]]) -> bool:
    return len({r for _, r in group}) > 1


def tokens_of(data: Padded, u: int) -> int:
    return sum(data.rollout[r] == u for r, _ in data.tokens)


def centred(data: Padded, reward: list[float] | None = None) -> dict[int, float]:
    return {
        u: r - statistics.fmean(x for _, x in group) if differs(group) else 0.0
        for group in members(data, reward)
        for u, r in group
    }


def zscore(data: Padded, reward: list[float] | None = None) -> dict[int, float]:
    mean = centred(data, reward)
    return {
        u: mean[u] / (statistics.stdev(x for _, x in group) + 1e-6) if differs(group) else 0.0
        for group in members(data, reward)
        for u, _ in group
    }


def over_batch(data: Padded, *, survivors: bool = False) -> dict[int, float]:
    keep = {u for g in members(data) if differs(g) or not survivors for u, _ in g}
    mean = {u: a for u, a in centred(data).items() if u in keep}
    return {u: a / (statistics.stdev(mean.values()) + 1e-6) for u, a in mean.items()}


def raw(data: Padded) -> dict[int, float]:
    return {u: r for group in members(data) for u, r in group}


def whiten(advantage: Callable[[Padded], dict[int, float]]) -> Callable[[Padded], dict[int, float]]:
    def whitened(data: Padded) -> dict[int, float]:
        a = advantage(data)
        per_token = [a[data.rollout[r]] for r, _ in data.tokens if data.rollout[r] in a]
        mean, std = statistics.fmean(per_token), statistics.stdev(per_token)
        return {u: (x - mean) / (std + 1e-8) for u, x in a.items()}

    return whitened


Surrogate = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def plain(p: Tensor, o: Tensor, b: Tensor, a: float) -> Tensor:
    return -a * p


def clip(lo: float, hi: float, dual: float = inf) -> Surrogate:
    def loss(p: Tensor, o: Tensor, b: Tensor, a: float) -> Tensor:
        rho = (p - o).exp()
        value = torch.maximum(-rho * a, -rho.clamp(1 - lo, 1 + hi) * a)
        return value.clamp(max=-a * dual) if a < 0 else value

    return loss


def sequence_clip(lo: float, hi: float) -> Surrogate:
    def loss(p: Tensor, o: Tensor, b: Tensor, a: float) -> Tensor:
        s = (p - o).mean().exp()
        return torch.maximum(-s * a, -s.clamp(1 - lo, 1 + hi) * a).expand(p.numel())

    return loss


def weighted(surrogate: Surrogate, weight: Callable[[Tensor], Any]) -> Surrogate:
    """Times a detached weight of the log-ratios old / sampler of the row."""
    return lambda p, o, b, a: weight(o - b) * surrogate(p, o, b, a)


Losses = dict[int, Tensor]


def tokens(data: Padded, losses: Losses) -> Tensor:
    return torch.cat(list(losses.values())).mean()


def row_means(data: Padded, losses: Losses) -> Tensor:
    return torch.stack([x.mean() for x in losses.values()]).mean()


def row_sums(data: Padded, losses: Losses) -> Tensor:
    return torch.stack([x.sum() for x in losses.values()]).mean()


def constant(data: Padded, losses: Losses) -> Tensor:
    return row_sums(data, losses) / 1024


PPO = clip(0.2, 0.2)


Case = tuple[Any, Surrogate, Any, dict[str, Any]]
"""Naive advantages, surrogate, average, options."""


def build(name: str, case: Case) -> Algo:
    return make(name.split()[0], case[3], streams=("old", "sampler", "reference", "teacher"))


def current(algo: Algo, data: Padded) -> Tensor:
    """psi in token order."""
    batch = flat(data)
    o = data.o[data.mask]
    terms = loss_terms(algo, batch, GivenLogProbs(old=o, reference=o - 0.1, teacher=o - 0.2))
    return loss_coefficients(algo, terms, data.p[data.mask], torch.arange(batch.n_tokens))


def published(case: Case, data: Padded) -> Tensor:
    """-gradient of the published loss in the log-probs, in token order, summed over tokens."""
    advantage, surrogate, average, _ = case
    a = advantage(data)
    p = data.p.clone().requires_grad_()
    losses = {}
    for r, u in enumerate(data.rollout):
        if u in a:
            n = int(data.mask[r].sum())
            losses[r] = surrogate(p[r, :n], data.o[r, :n], data.b[r, :n], a[u])
    average(data, losses).backward()
    assert p.grad is not None
    return -p.grad[data.mask]


def psi_is_minus_the_gradient_of_the_published_loss(name: str, case: Case) -> None:
    algo = build(name, case)
    for seed in range(3):
        data = padded(seed)
        assert torch.allclose(current(algo, data), published(case, data), rtol=1e-10, atol=1e-10)


def the_first_step_is_reinforce_with_the_same_weights(name: str, case: Case) -> None:
    data = padded(0)
    batch = flat(data)
    algo = build(name, case)
    b = batch.behaviour.double()
    terms = loss_terms(algo, batch, GivenLogProbs(old=b, reference=b, teacher=b))
    assert torch.equal(
        loss_coefficients(algo, terms, b, torch.arange(batch.n_tokens)),
        terms.weight * terms.advantage,
    )


def micro_batches_of_rows_in_any_order_add_up(name: str, case: Case) -> None:
    data = padded(1)
    batch = flat(data)
    algo = build(name, case)
    o = data.o[data.mask]
    terms = loss_terms(algo, batch, GivenLogProbs(old=o, reference=o - 0.1, teacher=o - 0.2))
    p = data.p[data.mask]
    whole = loss_coefficients(algo, terms, p, torch.arange(batch.n_tokens))
    rows = list(range(len(data.rollout)))
    random.Random(name).shuffle(rows)
    for part in (rows[:3], rows[3:4], rows[4:]):
        index = torch.cat([(batch.token_row == row).nonzero().squeeze(1) for row in part])
        assert torch.allclose(
            loss_coefficients(algo, terms, p[index], index), whole[index], rtol=1e-14, atol=0
        )


def hopeless_batches_give_no_nan(name: str, case: Case) -> None:
    for reward in ([nan] * 12, [0.0] * 12, [0.7] * 12):
        data = padded(2, spread=30.0)
        data = Padded(**{**vars(data), "reward": reward, "style": reward})
        assert current(build(name, case), data).isfinite().all()


Check = Callable[[str, Case], None]
CHECKS: list[Check] = [
    psi_is_minus_the_gradient_of_the_published_loss,
    the_first_step_is_reinforce_with_the_same_weights,
    micro_batches_of_rows_in_any_order_add_up,
    hopeless_batches_give_no_nan,
]
