"""What must hold for every input: laws of credit, gates, averages and psi."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.algorithms.credit.core import GroupRelative, RewardToGo, Whiten, standardise
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import key, reduce_by, scan
from agentrl.algorithms.objective.core import (
    Algo,
    Gate,
    Inner,
    KLPenalty,
    kl_gradient,
    loss_coefficients,
    loss_terms,
    weights,
)
from agentrl.algorithms.objective.ratios import (
    Clip,
    GateFn,
    GivenLogProbs,
    InRange,
    LogProbs,
    Ratio,
    RatioInRange,
    Truncate,
    TrustRegion,
)
from agentrl.algorithms.presets.registry import library_presets, make
from agentrl.algorithms.presets.trust_regions import (
    DivergenceGate,
    OffPolicyMask,
    SoftGate,
    VespoWeight,
)
from tests.algorithms.worlds import EVERY_OUTPUT, coefficients_of

law = settings(max_examples=30, deadline=None, derandomize=True)

# Eighths are exact in float64: laws hold to rounding, and equal means equal.
Value = st.integers(-16, 16).map(lambda x: x / 8)
Units = st.lists(st.tuples(Value, st.integers(0, 3)), min_size=1, max_size=24)
Seeds = st.integers(0, 2**31)

Advantage = Callable[..., Tensor]
GRPO: dict[str, Advantage] = {
    "mean": lambda x, by, **k: advantages(x, by, **k),
    "std": lambda x, by, **k: advantages(x, by, norm="std", **k),
    "loo": lambda x, by, **k: advantages(x, by, base="loo", **k),
    "batch": lambda x, by, **k: advantages(x, by, norm="std", norm_by=torch.zeros_like(by), **k),
    "maxrl": lambda x, by, **k: advantages(x, by, norm="mean", **k),
}
# Those that read nothing but the outcome of rollouts, each for itself.
PRESETS = [
    name
    for name in sorted(library_presets()[0].keys() - {"streams", "coma"})
    if (algo := make(name, {}, supplies=EVERY_OUTPUT)).rewards == ("outcome",)
    and not (algo.reads_critic or algo.needs_greedy or algo.side)
]
RELATIVE = ["mean", "std", "loo", "batch"]


def advantages(x: Tensor, by: Tensor, **options: Any) -> Tensor:
    return standardise(x, by, **options).advantage


def columns(units: list[tuple[float, int]]) -> tuple[Tensor, Tensor]:
    x, by = zip(*units, strict=True)
    return torch.tensor(x, dtype=torch.float64), torch.tensor(by)


def close(a: Tensor, b: Tensor, within: float = 1e-9) -> bool:
    return torch.allclose(a, b, rtol=within, atol=within)


def random_batch(seed: int, *, missing: float = 0.2) -> Batch:
    """Groups of rollouts of calls of tokens, every level of random size and empty at times."""
    draw = torch.Generator().manual_seed(seed)

    def sizes(n: int, high: int) -> Tensor:
        return torch.randint(0, high, (n,), generator=draw)

    rollout_group = torch.arange(3).repeat_interleave(sizes(3, 5))
    n_rollouts = rollout_group.numel()
    transition_rollout = torch.arange(n_rollouts).repeat_interleave(sizes(n_rollouts, 4))
    n_calls = transition_rollout.numel()
    token_transition = torch.arange(n_calls).repeat_interleave(sizes(n_calls, 5))
    reward = torch.randint(0, 3, (n_rollouts,), generator=draw) / 2
    lost = torch.rand(n_rollouts, generator=draw) < missing
    return Batch(
        rows=[],
        token_row=token_transition,
        token_transition=token_transition,
        sampler_logprobs=-3 * torch.rand(token_transition.numel(), generator=draw),
        transition_rollout=transition_rollout,
        transition_role=torch.randint(0, 2, (n_calls,), generator=draw),
        row_rollout=transition_rollout,
        rollout_group=rollout_group,
        rewards={"outcome": torch.where(lost, math.nan, reward.double())},
        roles=["a", "b"],
        groups=["0", "1", "2"],
        rollouts=[str(u) for u in range(n_rollouts)],
        transitions=[str(s) for s in range(n_calls)],
        transition_state=torch.randint(0, 2, (n_calls,), generator=draw),
        transition_action=torch.randint(0, 3, (n_calls,), generator=draw),
        transition_node=(node := torch.randint(0, 3, (n_calls,), generator=draw)),
        transition_prompt=node // 2,
        transition_repeats=torch.zeros(n_calls, dtype=torch.bool),
    )


def random_logprobs(batch: Batch, seed: int) -> tuple[GivenLogProbs, Tensor]:
    """Log-probs of the old policy, the reference and the current policy, all within a few clips of
    the sampler."""
    draw = torch.Generator().manual_seed(seed + 1)
    b = batch.sampler_logprobs.double()
    o, q, p = (b + 0.5 * torch.randn(b.shape, generator=draw) for _ in range(3))
    return GivenLogProbs(old=o, reference=q), p


def with_symbols(algo: Algo, given: GivenLogProbs, p: Tensor) -> tuple[GivenLogProbs, Tensor]:
    """The same for an algorithm that reads more tokens than the sampled ones."""
    if not algo.topk:
        return given, p
    assert given.old is not None
    o_NK, p_NK = (torch.stack((x, -1 - x.exp()), 1) for x in (given.old, p))
    return replace(given, old_candidates=o_NK), p_NK


# -- credit ----------------------------------------------------------------------------------------


@law
@given(st.sampled_from(sorted(GRPO)), Units, st.randoms())
def test_permuting_units_permutes_advantages(
    name: str, units: list[tuple[float, int]], random: object
) -> None:
    x, by = columns(units)
    order = list(range(len(units)))
    random.shuffle(order)
    assert close(GRPO[name](x[order], by[order]), GRPO[name](x, by)[order])


@law
@given(st.sampled_from(sorted(RELATIVE)), Units, Value)
def test_a_constant_per_group_changes_nothing(
    name: str, units: list[tuple[float, int]], shift: float
) -> None:
    x, by = columns(units)
    assert close(GRPO[name](x + shift * (1 + by), by), GRPO[name](x, by))


@law
@given(st.sampled_from(["std", "maxrl"]), Units)
def test_scaled_rewards_change_nothing_if_standardised(
    name: str, units: list[tuple[float, int]]
) -> None:
    x, by = columns(units)
    for scale in (5.0, 1e-3, 1e-6, 1e-9, 1e9):
        assert close(GRPO[name](scale * x, by), GRPO[name](x, by), within=2e-4)  # eps in part


@law
@given(
    st.sampled_from(["none", "std"]), Units, st.lists(st.floats(0.1, 9.0), min_size=24, max_size=24)
)
def test_weighted_advantages_sum_to_zero_per_group(
    norm: str, units: list[tuple[float, int]], w: list[float]
) -> None:
    x, by = columns(units)
    weight = torch.tensor(w[: len(units)], dtype=torch.float64)
    total = reduce_by(weight * advantages(x, by, norm=norm, w=weight), by)
    assert close(total, torch.zeros_like(total))


@law
@given(Units)
def test_leave_one_out_is_the_mean_scaled_by_the_group(units: list[tuple[float, int]]) -> None:
    x, by = columns(units)
    size = reduce_by(torch.ones_like(x), by)[by]
    expected = advantages(x, by) * size / (size - 1).clamp(min=1)
    assert close(advantages(x, by, base="loo"), expected)


@law
@given(st.sampled_from(sorted(GRPO)), Units, st.floats(-1e3, 1e3))
def test_degenerate_groups_are_exactly_zero(
    name: str, units: list[tuple[float, int]], constant: float
) -> None:
    x, by = columns(units)
    solo = torch.cat([x, torch.tensor([constant])])
    assert GRPO[name](solo, torch.cat([by, torch.tensor([9])]))[-1] == 0
    equal = torch.cat([x, torch.full((7,), constant)])
    assert (GRPO[name](equal, torch.cat([by, torch.full((7,), 9)]))[-7:] == 0).all()


@law
@given(st.sampled_from(sorted(GRPO)), Units, st.integers(0, 3))
def test_a_missing_reward_changes_no_other(
    name: str, units: list[tuple[float, int]], group: int
) -> None:
    x, by = columns(units)
    more = GRPO[name](
        torch.cat([x, torch.tensor([math.nan])]), torch.cat([by, torch.tensor([group])])
    )
    assert torch.equal(more[:-1], GRPO[name](x, by))
    assert more[-1] == 0


@law
@given(st.sampled_from(sorted(GRPO)), Units, st.integers(1, 5))
def test_copies_at_a_share_of_the_weight_change_nothing(
    name: str, units: list[tuple[float, int]], copies: int
) -> None:
    x, by = columns(units)
    w = torch.full((len(units) * copies,), 1 / copies, dtype=torch.float64)
    copied = GRPO[name](x.repeat(copies), by.repeat(copies), w=w)
    assert close(copied, GRPO[name](x, by).repeat(copies))


@law
@given(st.lists(st.tuples(Value, st.integers(1, 6)), min_size=2, max_size=12))
def test_token_statistics_are_unit_statistics_weighted_by_length(
    units: list[tuple[float, int]],
) -> None:
    x, length = columns(units)
    by = torch.zeros_like(length)
    per_unit = advantages(x, by, norm="std", w=length.double())
    per_token = advantages(x.repeat_interleave(length), by.repeat_interleave(length), norm="std")
    assert close(per_token, per_unit.repeat_interleave(length))


@law
@given(
    st.sampled_from(sorted(GRPO)),
    st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan)), max_size=20),
    Seeds,
)
def test_credit_is_finite_for_any_rewards(name: str, values: list[float], seed: int) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    by = torch.randint(0, 4, x.shape, generator=torch.Generator().manual_seed(seed))
    assert GRPO[name](x, by).isfinite().all()


@law
@given(Seeds)
def test_calls_between_that_say_nothing_change_nothing(seed: int) -> None:
    """Context is not in the token level; a call without tokens must not reset or leak credit."""
    batch = random_batch(seed)
    r = batch.rewards["outcome"]
    expected = []
    for rollout in batch.token_rollout.unique().tolist():
        n = int((batch.token_rollout == rollout).sum())
        expected += [float(r[rollout]) * 0.5 ** (n - 1 - t) for t in range(n)]
    assert torch.allclose(
        RewardToGo(gamma=0.5)(batch), torch.tensor(expected, dtype=torch.float64), equal_nan=True
    )


# -- ids -------------------------------------------------------------------------------------------


@law
@given(st.lists(st.integers(-1, 30), min_size=1, max_size=30), Seeds)
def test_scan_is_the_loop(jumps: list[int], seed: int) -> None:
    n = len(jumps)
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(n, generator=draw)  # links go forward in a hidden order: no cycles
    following = torch.full((n,), -1)
    for i, jump in enumerate(jumps):
        if jump >= 0 and i + 1 + jump < n:
            following[order[i]] = order[i + 1 + jump]
    x, decay = torch.randn(2, n, generator=draw, dtype=torch.float64)
    y = x.clone()
    for i in reversed(order.tolist()):
        if following[i] >= 0:
            y[i] += decay[i] * y[following[i]]
    assert close(scan(x, decay, following), y, within=1e-12)


@law
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=1, max_size=30))
def test_key_is_equal_exactly_where_the_tuples_are(pairs: list[tuple[int, int]]) -> None:
    first, second = torch.tensor(pairs).T
    ids = key(first, second).tolist()
    assert len(set(ids)) == len(set(pairs)) == max(ids) + 1
    assert len(set(zip(ids, pairs, strict=True))) == len(set(pairs))


# -- gates, averages, psi --------------------------------------------------------------------------

GATES: list[GateFn] = [
    Ratio(), Clip(0, 0), Clip(0.2, 0.2, 1), TrustRegion(0, 0), Truncate(1, 1), RatioInRange(1, 1),
    InRange(1, 1), SoftGate(), VespoWeight(), OffPolicyMask(0), DivergenceGate("tv", 0, 0, 1),
    DivergenceGate("kl", 0, 0, 1),
]  # fmt: skip


@law
@given(st.lists(st.tuples(st.floats(-20, 0), st.floats(-3, 3)), min_size=1, max_size=8))
def test_every_gate_is_one_on_policy(tokens: list[tuple[float, float]]) -> None:
    p, advantage = torch.tensor(tokens, dtype=torch.float64).T
    for gate in GATES:
        factor = gate(p - p, advantage, LogProbs(p, p, p))
        assert close(factor, torch.ones_like(p), within=1e-12), gate


@law
@given(
    st.sampled_from(["mean", "sum", "const"]),
    st.lists(st.integers(0, 5), min_size=1, max_size=30),
    Seeds,
)
def test_weights_of_an_average_sum_to_what_it_is(inner: Inner, unit: list[int], seed: int) -> None:
    ids = torch.tensor(unit)
    mask = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.7
    u = weights(ids, inner, 4.0, mask)
    kept = [i for i, keep in zip(unit, mask.tolist(), strict=True) if keep]
    per_unit = len(kept) / max(len(set(kept)), 1)
    expected = {"mean": float(bool(kept)), "sum": per_unit, "const": per_unit / 4}[inner]
    assert u.sum().item() == pytest.approx(expected, abs=1e-12)
    assert (u[~mask] == 0).all()


@law
@given(
    st.sampled_from(["mean", "sum", "const"]),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans()), min_size=1),
)
def test_a_unit_is_averaged_over_its_parts(
    inner: Inner, tokens: list[tuple[int, int, bool]]
) -> None:
    unit, part = (torch.tensor([token[i] for token in tokens]) for i in (0, 1))
    mask = torch.tensor([token[2] for token in tokens])
    u = weights(unit, inner, 4.0, mask, 3 * unit + part)
    live = [(a, b) for a, b, kept in tokens if kept]
    for (a, b, kept), share in zip(tokens, u.tolist(), strict=True):
        of_unit = {other for one, other in live if one == a}
        within = {"mean": live.count((a, b)), "sum": 1, "const": 4}[inner]
        whole = len({one for one, _ in live}) * len(of_unit) * within
        assert share == pytest.approx(1 / whole if kept else 0, abs=1e-12)


@law
@given(st.sampled_from(PRESETS), Seeds, st.integers(1, 5))
def test_psi_does_not_depend_on_how_rows_are_cut(name: str, seed: int, parts: int) -> None:
    batch = random_batch(seed)
    given, p = random_logprobs(batch, seed)
    opsm = "+opsm" if "opsm" in library_presets()[1] else ""
    algo = make(f"{name}{opsm}", {}, supplies=EVERY_OUTPUT)
    given, p = with_symbols(algo, given, p)
    terms = loss_terms(algo, batch, given)
    whole = loss_coefficients(algo, terms, p, torch.arange(batch.n_tokens))
    assert whole.isfinite().all()
    draw = torch.Generator().manual_seed(seed)
    part_of_row = torch.randint(0, parts, (len(batch.transitions),), generator=draw)
    cut = torch.full_like(whole, math.nan)
    for part in range(parts):
        index = (part_of_row[batch.token_row] == part).nonzero().squeeze(1)
        cut[index] = loss_coefficients(algo, terms, p[index], index)
    assert close(cut, whole, within=1e-15)  # vectorised sigmoids differ by an ulp


@law
@given(st.sampled_from(PRESETS), Seeds)
def test_tokens_without_a_reward_are_as_if_they_were_not_there(name: str, seed: int) -> None:
    """psi of the other tokens, denominators included, is that of the batch without them."""
    batch = random_batch(seed)
    given, p = random_logprobs(batch, seed)
    algo = make(name, {}, supplies=EVERY_OUTPUT)
    given, p = with_symbols(algo, given, p)
    every = loss_coefficients(algo, loss_terms(algo, batch, given), p, torch.arange(batch.n_tokens))
    present = ~batch.rewards["outcome"].isnan()[batch.token_rollout]
    less = replace(
        batch,
        token_row=batch.token_row[present],
        token_transition=batch.token_transition[present],
        sampler_logprobs=batch.sampler_logprobs[present],
    )
    given = given.at(present)
    rest = loss_coefficients(
        algo, loss_terms(algo, less, given), p[present], torch.arange(less.n_tokens)
    )
    assert (every[~present] == 0).all()
    assert close(every[present], rest, within=1e-12)


@law
@given(Seeds)
def test_psi_is_the_gradient_of_the_surrogate(seed: int) -> None:
    batch = random_batch(seed)
    given, p = random_logprobs(batch, seed)
    algo = Algo(
        GroupRelative(norm="std"),
        (Gate(Clip(0.1, 0.2)),),
        (KLPenalty("k3", 0.3), KLPenalty("k2", 0.2, "sampler")),
    )
    terms = loss_terms(algo, batch, given)
    assert given.old is not None
    old, reference = given.old, given.reference

    def loss(now: Tensor) -> Tensor:
        rho, a = (now - old).exp(), terms.advantage
        d, e = now - reference, now - batch.sampler_logprobs
        policy = torch.minimum(rho * a, rho.clamp(0.9, 1.2) * a)
        return -(terms.weight * (policy - 0.3 * ((-d).exp() + d) - 0.1 * e**2)).sum()

    assert close(
        loss_coefficients(algo, terms, p, torch.arange(batch.n_tokens)),
        coefficients_of(loss, p),
        within=1e-12,
    )


@law
@given(st.sampled_from(PRESETS), Seeds)
def test_on_policy_all_losses_are_alike_up_to_the_average(name: str, seed: int) -> None:
    batch = random_batch(seed)
    algo = make(name, {}, supplies=EVERY_OUTPUT)
    terms = loss_terms(algo, batch, GivenLogProbs(), fresh=True)
    at_b = loss_coefficients(
        algo, terms, batch.sampler_logprobs.double(), torch.arange(batch.n_tokens)
    )
    assert torch.equal(at_b, terms.weight * terms.advantage)


@law
@given(st.lists(st.floats(-3, 3), min_size=2, max_size=6), Seeds)
def test_k2_is_the_reverse_kl_gradient_and_k3_the_forward(logits: list[float], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    z = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    p, q = z.log_softmax(0), torch.randn(z.shape, generator=draw).double().log_softmax(0)
    for kind, kl in [("k2", (p.exp() * (p - q)).sum()), ("k3", (q.exp() * (q - p)).sum())]:
        exact = torch.autograd.grad(kl, z, retain_graph=True)[0]
        coefficient = p.exp().detach() * kl_gradient((p - q).detach(), kind)
        sampled = torch.autograd.grad((coefficient * p).sum(), z, retain_graph=True)[0]
        assert close(sampled, exact)


@law
@given(Seeds)
def test_whitened_tokens_have_mean_zero_and_deviation_one(seed: int) -> None:
    advantage = Whiten(GroupRelative())(random_batch(seed))
    known = advantage[~advantage.isnan()]
    if known.any():
        assert known.mean().item() == pytest.approx(0, abs=1e-9)
        assert known.std().item() == pytest.approx(1, abs=1e-6)
