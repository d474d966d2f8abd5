"""Credit of agents per call, as loops, and checks of a preset against its published loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.objective.core import loss_coefficients, loss_terms
from agentrl.algorithms.objective.ratios import GivenLogProbs
from agentrl.algorithms.presets.registry import make
from tests.algorithms.naive import compare, naive_gae
from tests.algorithms.worlds import NAN, Play, random_plays, world

Plays = list[Play]


Naive = Callable[[Plays, list[float]], list[float]]
"""Rollouts and the critic's values per token to advantages per token; NaN: not in the loss."""


def tokens(per_call: Callable[[Plays], list[float]]) -> Naive:
    def spread(plays: Plays, values: list[float]) -> list[float]:
        sizes = [call.tokens for play in plays for call in play.calls]
        credit = per_call(plays)
        return [a for a, n in zip(credit, sizes, strict=True) for _ in range(n)]

    return spread


def copied(x: list[float], plays: Plays) -> list[float]:
    return [a for a, play in zip(x, plays, strict=True) for _ in play.calls]


def missing(a: list[float], x: list[float]) -> list[float]:
    return [NAN if value != value else credit for credit, value in zip(a, x, strict=True)]


def outcome(
    plays: Plays, std: bool = False, key: Callable[[Play, int], object] = lambda play, u: play.group
) -> list[float]:
    """Rollouts compared, per call."""
    x = [play.outcome for play in plays]
    keys = [key(play, u) for u, play in enumerate(plays)]
    return copied(missing(compare(keys, x, std), x), plays)


def calls(
    plays: Plays, x: list[float], key: Callable[[Play, int], object], std: bool = True
) -> list[float]:
    """Calls compared by a key of (rollout, number of the call)."""
    keys = [key(play, i) for play in plays for i in range(len(play.calls))]
    return missing(compare(keys, x, std), x)


def total(*terms: tuple[list[float], float]) -> list[float]:
    out = []
    for values in zip(*(a for a, _ in terms), strict=True):
        known = [(v, w) for v, (_, w) in zip(values, terms, strict=True) if v == v]
        out.append(sum(v * w for v, w in known) if known else NAN)
    return out


def white(a: list[float], eps: float = 1e-6) -> list[float]:
    known = [x for x in a if x == x]
    return [(x - fmean(known)) / (stdev(known) + eps) for x in a]


def per_outcome(plays: Plays) -> list[float]:
    return copied([play.outcome for play in plays], plays)


def process(plays: Plays) -> list[float]:
    return [call.rewards["p"] for play in plays for call in play.calls]


def gae(plays: Plays) -> list[float]:
    return white(naive_gae(plays, "outcome", 0.9, 0.8))


def role(play: Play, i: int) -> object:
    return play.group, play.calls[i].role


def others(plays: Plays) -> list[float]:
    def centred(play: Play) -> float:
        rest = [o.outcome for o in plays if o is not play and o.group == play.group]
        known = [x for x in rest if x == x]
        a = play.outcome - fmean(known) if known else 0.0 * play.outcome
        return 0.0 if abs(a) < 1e-9 else a

    return copied([centred(play) for play in plays], plays)


GAE = {"value": "transition:v", "gamma": 0.9, "lam": 0.8}


Case = tuple[Naive, str, str, Mapping[str, Any]]
"""Credit, clip (token, row, none), average (rows, tokens, sums), options."""


def sample(seed: int) -> tuple[Plays, Batch]:
    plays = random_plays(seed)
    for play in plays:
        for call in play.calls:
            call.node = call.node and f"{play.group}:{call.node}"
            call.rewards = {**call.rewards, "high": call.rewards["w"] if call.state == 0 else NAN}
    n = sum(call.tokens for play in plays for call in play.calls)
    values = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return plays, world(*plays, values=values.tolist())


def published(case: Case, plays: Plays, batch: Batch, p: Tensor, o: Tensor) -> Tensor:
    """-gradient of the loss in the log-probs; every call is a row."""
    naive, clip, average, options = case
    a = naive(plays, batch.values.tolist())
    leaf = p.clone().requires_grad_()
    rows: dict[int, list[Tensor]] = {}
    for t, call in enumerate(batch.token_transition.tolist()):
        if a[t] != a[t]:
            continue
        same = batch.token_transition == call
        lo, hi = (3e-4, 4e-4) if clip == "row" else (0.2, 0.2)
        lr = leaf[t] - o[t] if clip == "token" else (leaf - o)[same].mean()
        rho = lr.exp()
        if clip == "row":  # GSPO-token: the value of the row's ratio, the gradient of the token's
            rho = rho.detach() * (leaf[t] - leaf[t].detach()).exp()
        value = torch.minimum(rho * a[t], rho.clamp(1 - lo, 1 + hi) * a[t])
        rows.setdefault(call, []).append(leaf[t] * a[t] if clip == "none" else value)
    if average == "tokens":
        loss = torch.stack([x for row in rows.values() for x in row]).mean()
    elif average in ("pairs", "roles"):
        parts: dict[object, list[Tensor]] = {}
        for call, row in rows.items():
            role = int(batch.transition_role[call])
            pair = (int(batch.transition_rollout[call]), role)
            made = [torch.stack(row).mean()] if average == "pairs" else row
            parts.setdefault(pair if average == "pairs" else role, []).extend(made)
        loss = torch.stack([torch.stack(part).mean() for part in parts.values()]).mean()
    else:
        each = [torch.stack(row) for row in rows.values()]
        sums = average == "sums" or "length" in options
        loss = torch.stack([x.sum() if sums else x.mean() for x in each]).mean()
    loss.backward()
    assert leaf.grad is not None
    return leaf.grad


def psi_is_minus_the_gradient_of_the_published_loss(name: str, case: Case) -> None:
    for seed in range(3):
        plays, batch = sample(seed)
        algo = make(name.split()[0], case[3], streams=("old", "sampler", "reference", "values"))
        draw = torch.Generator().manual_seed(seed)
        p, o = -torch.rand(2, batch.n_tokens, generator=draw, dtype=torch.float64)
        terms = loss_terms(algo, batch, GivenLogProbs(old=o))
        actual = loss_coefficients(algo, terms, p, torch.arange(batch.n_tokens))
        expected = published(case, plays, batch, p, o)
        assert torch.allclose(actual, expected, rtol=1e-10, atol=1e-10)
        assert expected.abs().max() > 0


def hopeless_batches_give_no_nan(name: str, case: Case) -> None:
    for outcome in (NAN, 0.0, 0.7):
        _, batch = sample(1)
        flat = {
            key: torch.full_like(x, outcome) if key in ("outcome", "transition:p") else x
            for key, x in batch.rewards.items()
        }
        batch.rewards.update(flat)
        algo = make(name.split()[0], case[3], streams=("old", "sampler", "reference", "values"))
        terms = loss_terms(algo, batch, GivenLogProbs(), fresh=True)
        p = batch.behaviour.double()
        assert loss_coefficients(algo, terms, p, torch.arange(batch.n_tokens)).isfinite().all()


Check = Callable[[str, Case], None]
CHECKS: list[Check] = [
    psi_is_minus_the_gradient_of_the_published_loss,
    hopeless_batches_give_no_nan,
]


def checked(cases: Mapping[str, Any], checks: Sequence[Callable[[str, Any], None]] = CHECKS) -> Any:
    """A test of every case by every check."""

    @pytest.mark.parametrize("case", cases)
    @pytest.mark.parametrize("check", checks, ids=lambda check: check.__name__)
    def test(case: str, check: Callable[[str, Any], None]) -> None:
        check(case, cases[case])

    return test
