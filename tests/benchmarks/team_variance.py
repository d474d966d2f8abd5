"""The variance of a role's policy gradient by scheme of team credit, on a task whose gradient is
known; part of `tests.benchmarks.credit`.

Four roles say one of two things each, at random. The team is paid 1 for every role that says 1, one
more where the first two both do, and noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import torch
from torch import Tensor

from agentrl.algorithms.credit.core import Credit, GroupRelative
from agentrl.algorithms.data.batch import Batch

ROLES, GROUPS, GROUP, NOISE = 4, 4000, 8, 0.5
BY = ("group", "role")
SCHEMES: dict[str, Credit] = {
    "shared": GroupRelative("outcome", at="transition", by=BY, base="loo"),
    "own": GroupRelative("role:own", by=BY, base="loo"),
    "difference": GroupRelative("role:difference", by=BY, base="loo"),
    "shapley": GroupRelative("role:shapley", by=BY, base="loo"),
    "counterfactual": GroupRelative("transition:coma", base="none"),
}


def paid(actions: Tensor) -> Tensor:
    """[...]: what joint actions [..., 4] are worth."""
    return actions.sum(-1) + actions[..., 0] * actions[..., 1]


def task(draw: torch.Generator) -> tuple[Batch, Tensor]:
    """Groups of rollouts of one call per role, with every reward that the schemes read, and the
    actions [U, 4]. Each role's own reward and each coalition's value have noise of their own."""
    count = GROUPS * GROUP
    actions = torch.randint(0, 2, (count, ROLES), generator=draw).double()

    def noisy(x: Tensor) -> Tensor:
        return x + NOISE * torch.randn(x.shape, generator=draw, dtype=torch.float64)

    def worth(members: list[int]) -> Tensor:
        return paid(actions * torch.tensor([float(role in members) for role in range(ROLES)]))

    everyone = list(range(ROLES))
    values = {(): torch.zeros(count, dtype=torch.float64)}
    values |= {members: noisy(worth(list(members))) for members in coalitions()}
    rewards = {
        "outcome": values[tuple(everyone)],
        "role:own": noisy(actions).flatten(),
        "role:difference": torch.stack(
            [
                values[tuple(everyone)] - values[tuple(r for r in everyone if r != role)]
                for role in everyone
            ],
            1,
        ).flatten(),
        "role:shapley": shares(values).flatten(),
        "transition:coma": torch.stack(
            [(actions[:, role] - 0.5) * marginal(actions, role) for role in everyone], 1
        ).flatten(),
    }
    calls = torch.arange(count * ROLES)
    return Batch(
        rows=[],
        token_row=calls,
        token_transition=calls,
        sampler_logprobs=torch.full((calls.numel(),), 0.5).log(),
        transition_rollout=calls // ROLES,
        transition_role=calls % ROLES,
        row_rollout=calls // ROLES,
        rollout_group=torch.arange(count) // GROUP,
        rewards=rewards,
        roles=[str(role) for role in everyone],
        groups=[str(g) for g in range(GROUPS)],
        rollouts=[str(u) for u in range(count)],
        transitions=[str(s) for s in range(count * ROLES)],
    ), actions


def coalitions() -> Iterator[tuple[int, ...]]:
    for mask in range(1, 2**ROLES):
        yield tuple(role for role in range(ROLES) if mask >> role & 1)


def marginal(actions: Tensor, role: int) -> Tensor:
    """[U]: by how much saying 1 instead of 0 changes what the team is paid."""
    one, zero = actions.clone(), actions.clone()
    one[:, role], zero[:, role] = 1.0, 0.0
    return paid(one) - paid(zero)


def shares(values: dict[tuple[int, ...], Tensor]) -> Tensor:
    """Shapley values [U, 4] of coalition values."""
    total = torch.zeros(len(values[()]), ROLES, dtype=torch.float64)
    orders = list(permutations(range(ROLES)))
    for order in orders:
        for place, role in enumerate(order):
            before = tuple(sorted(order[:place]))
            total[:, role] += values[tuple(sorted((*before, role)))] - values[before]
    return total / len(orders)


def gradients(credit: Credit, data: Batch, actions: Tensor) -> Tensor:
    """Estimates of d (expected pay) / d logit of every role by group [M, 4]."""
    score = (actions - 0.5) * credit(data).view(-1, ROLES)
    return score.view(GROUPS, GROUP, ROLES).mean(1)


def team_variance() -> dict[str, float]:
    """How much smaller the variance of a group's gradient is than with the shared return, summed
    over roles, and the largest bias of a role's in standard errors, and as a share of the truth."""
    data, actions = task(torch.Generator().manual_seed(0))
    truth = 0.25 * torch.tensor([1.5, 1.5, 1.0, 1.0], dtype=torch.float64)
    found = {name: gradients(credit, data, actions) for name, credit in SCHEMES.items()}
    cost = {name: float(gradient.var(0).sum()) for name, gradient in found.items()}
    result = {}
    for name, gradient in found.items():
        off, error = (gradient.mean(0) - truth).abs(), gradient.std(0) / GROUPS**0.5
        result[f"team variance reduction {name}"] = cost["shared"] / cost[name]
        result[f"team bias {name}"] = float((off / error.clamp(min=1e-12))[error > 1e-12].max())
        result[f"team relative bias {name}"] = float((off / truth).max())
    return result
