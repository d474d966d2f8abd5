"""Every preset against its published loss: padded arrays, Python loops and autograd."""

from __future__ import annotations

import inspect
import itertools
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.algorithms.credit.core import GroupRelative
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.objective.core import Algo, compute_advantages, loss_terms, psi
from agentrl.algorithms.objective.ratios import Clip, GivenLogProbs
from agentrl.algorithms.presets.catalogue import make, modifiers, presets
from agentrl.errors import ConfigError, TrainingError
from tests.algorithms.credit.test_baselines import CASES as MEMORY_CASES
from tests.algorithms.multiagent.test_critics import CASES as CRITIC_CASES
from tests.algorithms.objective.test_sides import PUBLISHED as SIDE_CASES
from tests.algorithms.objective.test_symbols import CASES as SYMBOL_CASES
from tests.algorithms.presets.test_turns import CASES as AGENT_CASES
from tests.algorithms.worlds import Call, Play, world


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


# -- naive advantages: {rollout: A}, without the missing -------------------------------------------


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


def imitated(least: float, best: int = 12) -> Callable[[Padded], dict[int, float]]:
    """1 for the `best` best rollouts of each group whose reward is at least `least`."""

    def advantage(data: Padded) -> dict[int, float]:
        ranked = (sorted(group, key=lambda row: -row[1])[:best] for group in members(data))
        return {u: 1.0 for group in ranked for u, r in group if r >= least}

    return advantage


def zscore(data: Padded, reward: list[float] | None = None) -> dict[int, float]:
    mean = centred(data, reward)
    return {
        u: mean[u] / (statistics.stdev(x for _, x in group) + 1e-6) if differs(group) else 0.0
        for group in members(data, reward)
        for u, _ in group
    }


def leave_one_out(data: Padded) -> dict[int, float]:
    return {
        u: r - statistics.fmean(x for v, x in group if v != u) if len(group) > 1 else 0.0
        for group in members(data)
        for u, r in group
    } | {u: 0.0 for group in members(data) if not differs(group) for u, _ in group}


def length_weighted(data: Padded) -> dict[int, float]:
    result = {}
    for group in members(data):
        total = sum(tokens_of(data, u) for u, _ in group)
        base = sum(tokens_of(data, u) * r for u, r in group) / total
        result |= {u: r - base if differs(group) else 0.0 for u, r in group}
    return result


def over_mean(data: Padded) -> dict[int, float]:
    mean = centred(data)
    return {
        u: mean[u] / statistics.fmean(x for _, x in group) if mean[u] else 0.0
        for group in members(data)
        for u, _ in group
    }


def gpg(data: Padded) -> dict[int, float]:
    known = sum(len(group) for group in members(data))
    alive = sum(len(group) for group in members(data) if differs(group))
    return {u: a * known / alive for u, a in centred(data).items()}


def over_batch(data: Padded, *, survivors: bool = False) -> dict[int, float]:
    keep = {u for g in members(data) if differs(g) or not survivors for u, _ in g}
    mean = {u: a for u, a in centred(data).items() if u in keep}
    return {u: a / (statistics.stdev(mean.values()) + 1e-6) for u, a in mean.items()}


def alive_only(data: Padded) -> dict[int, float]:
    keep = {u for group in members(data) if differs(group) for u, _ in group}
    return {u: a for u, a in zscore(data).items() if u in keep}


def raw(data: Padded) -> dict[int, float]:
    return {u: r for group in members(data) for u, r in group}


def whiten(advantage: Callable[[Padded], dict[int, float]]) -> Callable[[Padded], dict[int, float]]:
    def whitened(data: Padded) -> dict[int, float]:
        a = advantage(data)
        per_token = [a[data.rollout[r]] for r, _ in data.tokens if data.rollout[r] in a]
        mean, std = statistics.fmean(per_token), statistics.stdev(per_token)
        return {u: (x - mean) / (std + 1e-8) for u, x in a.items()}

    return whitened


def two_rewards(data: Padded) -> dict[int, float]:
    first, second = zscore(data), zscore(data, data.style)
    return {u: first.get(u, 0.0) + 0.5 * second.get(u, 0.0) for u in first | second}


def per_call(data: Padded) -> dict[int, float]:
    """Every call counts."""
    result: dict[int, float] = {}
    for group in members(data):
        copies = [r for u, r in group for _ in range(data.rollout.count(u))]
        for u, r in group:
            if len(set(copies)) > 1:
                result[u] = (r - statistics.fmean(copies)) / (statistics.stdev(copies) + 1e-6)
            else:
                result[u] = 0.0
    return result


def against_greedy(data: Padded) -> dict[int, float]:
    result = {}
    for group in members(data):
        greedy = [r for u, r in group if u in GREEDY]
        result |= {u: r - statistics.fmean(greedy) for u, r in group if greedy and u not in GREEDY}
    return result


def best_of(data: Padded) -> dict[int, float]:
    result = {}
    for group in members(data):
        ranked = sorted((r for _, r in group), reverse=True)
        for u, r in group:
            result[u] = 0.0
            if len(ranked) > 1 and r == ranked[0] > ranked[1]:
                result[u] = (ranked[0] - ranked[1]) / (statistics.stdev(ranked) + 1e-6)
    return result


def pass_at_2(data: Padded) -> dict[int, float]:
    """By enumerating the pairs."""
    result = {}
    for group in members(data):
        n = len(group)
        if n < 3:
            continue
        for u, r in group:
            others = [x for v, x in group if v != u]
            won = sum(max(r, x) > 0 for x in others) / (n * (n - 1) / 2)
            without = [max(pair) > 0 for pair in itertools.combinations(others, 2)]
            result[u] = won - 2 / n * statistics.fmean(without)
            result[u] = 0.0 if abs(result[u]) < 1e-9 else result[u]
    return result


def dapo_shaped(data: Padded) -> dict[int, float]:
    """Length penalty from 4 to 6 tokens, no cut-off rollouts, judged by the raw reward."""
    lengths = [tokens_of(data, u) for u in range(len(data.group))]
    shaped = [r - min(max(n - 4, 0) / 2, 1.0) for r, n in zip(data.reward, lengths, strict=True)]
    last = {u: r for r, u in enumerate(data.rollout)}
    keep = {u for group in members(data) if differs(group) for u, _ in group}
    keep -= {u for u, r in last.items() if r in CUT}
    return {u: a for u, a in zscore(data, shaped).items() if u in keep}


def nothing(data: Padded) -> dict[int, float]:
    return dict.fromkeys(range(len(data.group)), 0.0)


# -- published surrogates: per-token losses of one row, differentiable in p ------------------------

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


def truncated(other: str, hi: float) -> Surrogate:
    def loss(p: Tensor, o: Tensor, b: Tensor, a: float) -> Tensor:
        rho = (p.detach() - (o if other == "o" else b)).exp()
        return -rho.clamp(max=hi) * a * p

    return loss


def sapo(p: Tensor, o: Tensor, b: Tensor, a: float) -> Tensor:
    tau = 1.0 if a > 0 else 1.05
    return -(4 / tau) * (tau * ((p - o).exp() - 1)).sigmoid() * a


def vespo(p: Tensor, o: Tensor, b: Tensor, a: float) -> Tensor:
    k, scale = (2, 3) if a >= 0 else (3, 2)
    w = (p - o).sum().detach().exp()
    return -(w**k) * math.e ** (scale * (1 - w)) * a * p


def dppo(p: Tensor, o: Tensor, b: Tensor, a: float) -> Tensor:
    losses = []
    for now, sampled in zip(p, b, strict=True):
        pi, mu = math.exp(now.item()), math.exp(sampled.item())
        far = abs(pi - mu) > 0.15 and (pi - mu) * a > 0
        losses.append(now * 0 if far else -min(pi / mu, 20.0) * a * now)
    return torch.stack(losses)


def minirl(p: Tensor, o: Tensor, b: Tensor, a: float) -> Tensor:
    losses = []
    for now, old, sampled in zip(p, o, b, strict=True):
        rho = math.exp(now.item() - old.item())
        inside = rho <= 1.2 if a >= 0 else rho >= 0.8
        losses.append(-((now - sampled).exp()) * a * inside)
    return torch.stack(losses)


def kimi(p: Tensor, o: Tensor, b: Tensor, a: float) -> Tensor:
    return -(a * p - 0.05 * (p - o) ** 2)


def dppo_kl(p: Tensor, o: Tensor, b: Tensor, a: float) -> Tensor:
    losses = []
    for now, sampled in zip(p, b, strict=True):
        pi, mu = math.exp(now.item()), math.exp(sampled.item())
        kl = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
        far = kl > 0.01 and (pi - mu) * a > 0
        losses.append(now * 0 if far else -min(pi / mu, 20.0) * a * now)
    return torch.stack(losses)


def gmpo(p: Tensor, o: Tensor, b: Tensor, a: float) -> Tensor:
    held = torch.minimum((p - o) * (1 if a >= 0 else -1), torch.tensor(0.2, dtype=p.dtype))
    return -(held * (1 if a >= 0 else -1)).mean().exp().expand(p.numel()) * a


def to_teacher(p: Tensor, o: Tensor, b: Tensor, a: float) -> Tensor:
    return 0.5 * (p - (o - 0.2)) ** 2


def penalised(surrogate: Surrogate, beta: float) -> Surrogate:
    def loss(p: Tensor, o: Tensor, b: Tensor, a: float) -> Tensor:
        q = o - 0.1
        return surrogate(p, o, b, a) + beta * ((q - p).exp() - 1 - (q - p))

    return loss


def weighted(surrogate: Surrogate, weight: Callable[[Tensor], Any]) -> Surrogate:
    """Times a detached weight of the log-ratios old / sampler of the row."""
    return lambda p, o, b, a: weight(o - b) * surrogate(p, o, b, a)


def opsm(surrogate: Surrogate) -> Surrogate:
    def loss(p: Tensor, o: Tensor, b: Tensor, a: float) -> Tensor:
        drop = a < 0 and (b - p).mean().item() > 0.1
        return surrogate(p, o, b, a) * (not drop)

    return loss


# -- averages: how a list of (row, per-token losses) becomes one number ----------------------------

Losses = dict[int, Tensor]


def tokens(data: Padded, losses: Losses) -> Tensor:
    return torch.cat(list(losses.values())).mean()


def row_means(data: Padded, losses: Losses) -> Tensor:
    return torch.stack([x.mean() for x in losses.values()]).mean()


def row_sums(data: Padded, losses: Losses) -> Tensor:
    return torch.stack([x.sum() for x in losses.values()]).mean()


def constant(data: Padded, losses: Losses) -> Tensor:
    return row_sums(data, losses) / 1024


def per(unit: Callable[[Padded, int], int]) -> Callable[[Padded, Losses], Tensor]:
    def average(data: Padded, losses: Losses) -> Tensor:
        parts: dict[int, list[Tensor]] = {}
        for r, x in losses.items():
            parts.setdefault(unit(data, r), []).append(x)
        return torch.stack([torch.cat(part).mean() for part in parts.values()]).mean()

    return average


rollouts = per(lambda data, r: data.rollout[r])
prompts = per(lambda data, r: data.group[data.rollout[r]])

PPO = clip(0.2, 0.2)


def group_mean(batch: Batch) -> Tensor:
    """A credit function of the user's."""
    return GroupRelative()(batch)


CASES: dict[str, tuple[Any, Surrogate, Any, dict[str, Any]]] = {
    "reinforce": (raw, plain, row_sums, {}),
    "reinforce++": (whiten(raw), PPO, tokens, {}),
    "reinforce++-baseline": (whiten(centred), PPO, tokens, {}),
    "rloo": (leave_one_out, plain, row_sums, {}),
    "opo": (length_weighted, plain, tokens, {}),
    "gpg": (gpg, plain, tokens, {}),
    "sft": (lambda data: dict.fromkeys(range(12), 1.0), plain, tokens, {}),
    "rft": (imitated(1.0), plain, tokens, {}),
    "rft best": (imitated(0.2, 2), plain, tokens, {"least": 0.2, "best": 2}),
    "grpo": (zscore, PPO, row_means, {}),
    "grpo mean-only": (centred, PPO, row_means, {"std": False}),
    "grpo dual": (zscore, clip(0.2, 0.3, 1.5), row_means, {"clip_high": 0.3, "clip_dual": 1.5}),
    "grpo kl": (zscore, penalised(PPO, 0.04), row_means, {"kl": 0.04}),
    "grpo style": (lambda data: zscore(data, data.style), PPO, row_means, {"reward": "style"}),
    "dr-grpo": (centred, PPO, constant, {}),
    "dapo": (alive_only, clip(0.2, 0.28), tokens, {}),
    "maxrl": (over_mean, PPO, tokens, {}),
    "liteppo": (over_batch, PPO, tokens, {}),
    "scalerl": (lambda data: over_batch(data, survivors=True), truncated("b", 5), prompts, {}),
    "gdpo": (whiten(two_rewards), PPO, row_means, {"rewards": {"outcome": 1, "style": 0.5}}),
    "gspo": (zscore, sequence_clip(3e-4, 4e-4), row_means, {}),
    "luspo": (zscore, sequence_clip(3e-4, 4e-4), row_sums, {}),
    "cispo": (zscore, truncated("o", 5), tokens, {}),
    "sapo": (zscore, sapo, row_means, {}),
    "vespo": (zscore, vespo, row_means, {}),
    "dppo-tv": (centred, dppo, constant, {}),
    "minirl": (centred, minirl, tokens, {}),
    "kimi": (centred, kimi, tokens, {}),
    "agl-v1": (zscore, PPO, rollouts, {}),
    "agl-v0": (per_call, PPO, tokens, {}),
    "remax": (against_greedy, plain, row_sums, {}),
    "best-of": (best_of, PPO, row_means, {}),
    "pass-at-k": (pass_at_2, PPO, row_means, {}),
    "gspo-token": (zscore, sequence_clip(3e-4, 4e-4), row_means, {}),
    "gmpo": (zscore, gmpo, row_means, {"log_low": 0.2, "log_high": 0.2}),
    "dppo-kl": (centred, dppo_kl, constant, {"low": 0.01, "high": 0.01}),
    "dro": (centred, kimi, tokens, {}),
    "distill": (nothing, to_teacher, tokens, {}),
    "grpo+distill": (
        zscore,
        lambda p, o, b, a: PPO(p, o, b, a) + 0.5 * to_teacher(p, o, b, a),
        row_means,
        {"distill_beta": 0.5},
    ),
    "dapo overlong": (
        dapo_shaped,
        clip(0.2, 0.28),
        tokens,
        {"overlong_limit": 6, "overlong_cache": 2, "drop_truncated": True},
    ),
    "grpo+tis": (zscore, weighted(PPO, lambda d: d.exp().clamp(max=2)), row_means, {}),
    "grpo+behaviour": (zscore, lambda p, o, b, a: PPO(p, b, b, a), row_means, {}),
    "grpo+seq-tis": (zscore, weighted(PPO, lambda d: min(d.sum().exp(), 2)), row_means, {}),
    "grpo+icepop": (
        zscore,
        weighted(PPO, lambda d: d.exp() * (d.exp() >= 0.9) * (d.exp() <= 1.1)),
        row_means,
        {"icepop_low": 0.9, "icepop_high": 1.1},
    ),
    "grpo+mis": (
        zscore,
        weighted(PPO, lambda d: d.sum().exp() * (d.sum().exp() <= 1.2)),
        row_means,
        {"mis_cap": 1.2},
    ),
    "grpo+seq-mask-tis": (
        zscore,
        weighted(PPO, lambda d: d.exp().clamp(max=2) * (0.95 <= d.mean().exp() <= 1.05)),
        row_means,
        {"seq_mask_low": 0.95, "seq_mask_high": 1.05},
    ),
    "grpo+credit": (centred, PPO, row_means, {"credit": f"{__name__}:group_mean"}),
    "rloo+decoupled": (leave_one_out, weighted(plain, lambda d: d.exp()), row_sums, {}),
    "reinforce+++tis+opsm": (
        whiten(raw),
        opsm(weighted(PPO, lambda d: d.exp().clamp(max=1.1))),
        tokens,
        {"tis_cap": 1.1},
    ),
}


def build(case: str) -> Algo:
    return make(case.split()[0], CASES[case][3], streams=("old", "sampler", "reference", "teacher"))


def current(algo: Algo, data: Padded) -> Tensor:
    """psi in token order."""
    batch = flat(data)
    o = data.o[data.mask]
    terms = loss_terms(algo, batch, GivenLogProbs(old=o, reference=o - 0.1, teacher=o - 0.2))
    return psi(algo, terms, data.p[data.mask], torch.arange(batch.n_tokens))


def published(case: str, data: Padded) -> Tensor:
    """-gradient of the published loss in the log-probs, in token order, summed over tokens."""
    advantage, surrogate, average, _ = CASES[case]
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


def test_every_preset_and_modifier_has_a_case() -> None:
    cases = [*CASES, *SIDE_CASES, *AGENT_CASES, *MEMORY_CASES, *SYMBOL_CASES, *CRITIC_CASES]
    names = {case.split()[0] for case in cases}
    assert presets.keys() == {name for name in names if name in presets}
    assert all(any(f"+{modifier}+" in f"{name}+" for name in names) for modifier in modifiers)


@pytest.mark.parametrize("case", CASES)
def test_psi_is_minus_the_gradient_of_the_published_loss(case: str) -> None:
    algo = build(case)
    for seed in range(3):
        data = padded(seed)
        assert torch.allclose(current(algo, data), published(case, data), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_the_first_step_is_reinforce_with_the_same_weights(case: str) -> None:
    data = padded(0)
    batch = flat(data)
    algo = build(case)
    b = batch.behaviour.double()
    terms = loss_terms(algo, batch, GivenLogProbs(old=b, reference=b, teacher=b))
    assert torch.equal(
        psi(algo, terms, b, torch.arange(batch.n_tokens)), terms.weight * terms.advantage
    )


@pytest.mark.parametrize("case", CASES)
def test_micro_batches_of_rows_in_any_order_add_up(case: str) -> None:
    data = padded(1)
    batch = flat(data)
    algo = build(case)
    o = data.o[data.mask]
    terms = loss_terms(algo, batch, GivenLogProbs(old=o, reference=o - 0.1, teacher=o - 0.2))
    p = data.p[data.mask]
    whole = psi(algo, terms, p, torch.arange(batch.n_tokens))
    rows = list(range(len(data.rollout)))
    random.Random(case).shuffle(rows)
    for part in (rows[:3], rows[3:4], rows[4:]):
        index = torch.cat([(batch.token_row == row).nonzero().squeeze(1) for row in part])
        assert torch.allclose(psi(algo, terms, p[index], index), whole[index], rtol=1e-14, atol=0)


@pytest.mark.parametrize("case", CASES)
def test_hopeless_batches_give_no_nan(case: str) -> None:
    for reward in ([nan] * 12, [0.0] * 12, [0.7] * 12):
        data = padded(2, spread=30.0)
        data = Padded(**{**vars(data), "reward": reward, "style": reward})
        assert current(build(case), data).isfinite().all()


# -- names and options -----------------------------------------------------------------------------


def test_every_preset_builds_with_its_defaults_and_says_where_it_is_from() -> None:
    streams = ("old", "sampler", "reference", "teacher", "values", "top_tokens")
    needed = {
        "streams": {"streams": {"outcome": {}}},
        "process": {"process_streams": {"p": {"scope": "transition"}}},
        "only": {"only_roles": ["agent"]},
        "equal": {"equal_units": ["role"]},
        "credit": {"credit": f"{__name__}:group_mean"},
        "coma": {"roles": ["agent"], "actions": ["yes"]},
    }
    for name, function in presets.items():
        assert make(name, needed.get(name, {}), streams=streams).name == name
        said = str(function.__doc__)
        assert any(source in said for source in ("arXiv", "OpenReview", "Williams"))
    for name in modifiers:
        host = "dpo" if name == "nll" else "grpo"
        options = needed.get(name, {})
        assert make(f"{host}+{name}", options, streams=streams).name == f"{host}+{name}"


def test_options_of_presets_and_modifiers_never_share_a_name() -> None:
    def options(function: Any) -> set[str]:
        kinds = inspect.signature(function).parameters.values()
        return {p.name for p in kinds if p.kind is p.KEYWORD_ONLY}

    of_modifiers = [name for function in modifiers.values() for name in options(function)]
    assert len(of_modifiers) == len(set(of_modifiers))
    assert not set(of_modifiers).intersection(*map(options, presets.values()))


def test_options_reach_the_preset_and_its_modifiers() -> None:
    algo = make("grpo+tis", {"clip_high": 0.28, "clip_low": 0, "tis_cap": 3})
    assert algo.gates[0].fn == Clip(0.0, 0.28)
    assert "hi=3.0" in repr(algo.gates[1].fn)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grop", {}, r"algorithm\.preset: no preset 'grop'; did you mean 'grpo'\?"),
        ("", {}, r"algorithm\.preset: no preset ''; valid: agent-r1"),
        ("grpo+tsi", {}, r"no modifier \+tsi for 'grpo'; did you mean 'tis'\?"),
        ("grpo+", {}, r"no modifier \+ for 'grpo'; valid"),
        ("grpo", {"clip_hihg": 0.3}, r"algorithm\.options\.clip_hihg: .* 'clip_high'\?"),
        (
            "rloo",
            {"clip_high": 0.3},
            r"options\.clip_high: no option of 'rloo'; valid: entropy, reward",
        ),
        ("grpo", {"tis_cap": 2.0}, r"options\.tis_cap: no option of 'grpo'"),
        ("grpo", {"clip_high": inf}, r"options\.clip_high = inf: .*<= 1000000"),
        ("grpo+decoupled+opsm", {"decoupled": 1}, r"options\.decoupled: no option of"),
        ("gdpo", {"rewards": {}}, r"options\.rewards = {}: .*length >= 1"),
        ("gdpo", {"rewards": {"outcome": nan}}, r"options\.rewards = "),
        ("grpo+tis", {"algo": 1}, r"algorithm\.options\.algo: "),
        ("grpo", {"clip_high": "0.3"}, r"algorithm\.options\.clip_high = '0\.3': Expected `float`"),
        ("grpo", {"std": 1}, r"algorithm\.options\.std = 1: Expected `bool`"),
        ("grpo", {"clip_low": -0.1}, r"algorithm\.options\.clip_low = -0\.1: .*>= 0"),
        ("grpo", {"kl": nan}, r"algorithm\.options\.kl = nan"),
        ("dr-grpo", {"length": 0}, r"algorithm\.options\.length = 0"),
        ("grpo", {"kl": 0.04}, r"'grpo' needs the log-probs of a reference model"),
        ("dppo-topk", {}, r"'dppo-topk' needs the most probable tokens .*choose dppo-tv"),
        ("dppo-topk", {"kind": "js"}, r"options\.kind = 'js': "),
        ("dppo-topk", {"k": 0}, r"options\.k = 0: "),
        ("scalerl+tis", {}, r"correct for the sampler twice, by Truncate\(lo=0\.0, hi=5\.0\) and"),
        ("grpo+tis+mis", {}, r"correct for the sampler twice"),
    ],
)
def test_what_is_not_understood_is_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(name, options)


def test_the_rewards_it_reads_are_part_of_an_algorithm() -> None:
    assert make("rloo", {}).rewards == ("outcome",)
    assert make("rloo", {"reward": "style"}).rewards == ("style",)
    assert make("gdpo", {"rewards": {"a": 1, "b": -0.5}}).rewards == ("a", "b")


def test_a_mask_may_be_added_to_a_correction() -> None:
    assert len(make("scalerl+opsm", {}).gates) == 2
    assert len(make("grpo+tis+opsm", {}).gates) == 3


def test_a_reward_that_no_rollout_has_is_refused() -> None:
    algo = make("grpo", {"reward": "stile"})
    with pytest.raises(TrainingError, match=r"none of 12 rollouts has a reward 'stile'.*'style'"):
        current(algo, padded(0))


@pytest.mark.parametrize(
    "name",
    ["ppo", "reinforce++", "remax", "pass-at-k", "best-of", "rft", "vineppo", "mt-grpo", "dpo"],
)
@pytest.mark.parametrize("reward", ["role:tact", "transition:score"])
def test_rewards_of_roles_and_calls_are_not_taken_for_those_of_rollouts(
    name: str, reward: str
) -> None:
    """They were read at the places of rollouts: the number of another role or call."""
    algo = make(name, {"reward": reward}, streams=("old", "sampler", "reference", "values"))
    calls = [Call(role=role, rewards={"score": 1.0, "turn": 0.0}) for role in ("a", "b")]
    plays = [Play(calls, tact={"a": x, "b": -x}, greedy=x > 0) for x in (1.0, 0.0)]
    batch = world(*plays, values=[0.0] * 4)
    zeros = torch.zeros(4)
    with pytest.raises(TrainingError, match=f"one reward per rollout, and '{reward}' has 4 values"):
        loss_terms(algo, batch, GivenLogProbs(old=zeros, reference=zeros))


def test_a_reward_of_the_only_role_is_one_of_rollouts() -> None:
    batch = world(*(Play([Call(), Call()], outcome=x, tact={"agent": x}) for x in (1.0, 0.0)))
    of_roles, of_rollouts = (
        compute_advantages(make("reinforce++", {"reward": reward}), batch)
        for reward in ("role:tact", "outcome")
    )
    assert of_roles.tolist() == of_rollouts.tolist()


def test_a_plain_credit_function_keeps_its_reward_beside_that_of_a_filter(tmp_path: Path) -> None:
    (tmp_path / "mine_credit.py").write_text("def mine(batch): return batch.rewards['style']\n")
    options = {"credit": "mine_credit.py:mine", "credit_reward": "style"}
    assert make("dapo+credit", options, root=tmp_path).rewards == ("style", "outcome")
    assert make("grpo+credit", options, root=tmp_path).rewards == ("style",)


def test_an_episode_of_one_answer_may_have_the_reward_of_its_rollout() -> None:
    algo = make("maporl", {"reward": "outcome"}, streams=("old", "sampler", "values"))
    calls = [Call(role="a"), Call(role="b")]
    batch = world(Play(calls, outcome=1.0), Play(calls, outcome=0.0), values=[0.0] * 4)
    up = 0.5**0.5
    assert compute_advantages(algo, batch).tolist() == pytest.approx([up, up, -up, -up], rel=1e-5)
