"""Trust regions and off-policy corrections: clips, masks and weights of the ratios of policies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar, Literal

import torch
from torch import Tensor

from agentrl.algorithms.credit import core
from agentrl.algorithms.credit.core import GroupRelative, rewards
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.objective import ratios
from agentrl.algorithms.objective.core import TOKENS, Algo, Average, Gate, KLPenalty, with_rest
from agentrl.algorithms.objective.ratios import (
    InRange,
    LogProbs,
    Ratio,
    RatioInRange,
    Truncate,
    ratio,
)
from agentrl.algorithms.presets.declare import Cap, Discount, Num, modifier, preset
from agentrl.core.config import Count, Natural
from agentrl.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NonzeroVarianceReward:
    """The reward; missing if the rewards of the group do not differ."""

    reward: str = "outcome"

    def __call__(self, batch: Batch) -> Tensor:
        return torch.where(
            core.has_variance(batch, self.reward), rewards(batch, self.reward), torch.nan
        )


@preset("scalerl")
def scalerl(reward: str, *, cap: Cap = 5.0) -> Algo:
    """Truncated weight against the sampler, batch standard deviation over groups whose rewards
    differ, mean over prompts. For its other settings see `algorithms/README.md`. arXiv 2510.13786.
    """
    credit = GroupRelative(NonzeroVarianceReward(reward), norm="std", norm_by=("all",))
    return Algo(credit, (Gate(Truncate(0.0, cap), den="sampler"),), agg=Average(("group",)))


@preset("cispo")
def cispo(reward: str, *, low: Num = 0.0, cap: Cap = 5.0) -> Algo:
    """GRPO with ratios truncated instead of dropped; bounds are absolute. arXiv 2506.13585."""
    gate = Gate(Truncate(low, cap))
    return Algo(GroupRelative(reward, norm="std"), (gate,), agg=TOKENS)


@dataclass(frozen=True, slots=True)
class SoftGate:
    """4 s (1 - s) r, s = sigmoid(tau (r - 1)), tau = tp if A > 0 else tn. SAPO, 2511.20347."""

    tp: float = 1.0
    tn: float = 1.05

    def __call__(self, lr: Tensor, advantage: Tensor, logprobs: LogProbs) -> Tensor:
        r = ratio(lr)
        s = torch.where(advantage > 0, self.tp * (r - 1), self.tn * (r - 1)).sigmoid()
        return 4 * s * (1 - s) * r


@dataclass(frozen=True, slots=True)
class VespoWeight:
    """r^k e^{c (1 - r)} with (k, c) by the sign of A; pool lr as a row sum. VESPO, 2602.10693."""

    positive: tuple[float, float] = (2.0, 3.0)
    negative: tuple[float, float] = (3.0, 2.0)

    def __call__(self, lr: Tensor, advantage: Tensor, logprobs: LogProbs) -> Tensor:
        lr = lr.clamp(-ratios.LOG_LIMIT, ratios.LOG_LIMIT)
        up, down = (c * (1 - lr.exp()) + k * lr for k, c in (self.positive, self.negative))
        return torch.where(advantage >= 0, up, down).exp()


@dataclass(frozen=True, slots=True)
class ClipLog:
    """lr clamped to at most hi if A >= 0, else to at least -lo: GMPO's clip per token (arXiv
    2507.20673). For `Gate.pre`: returns log-ratios, not factors."""

    lo: float = 0.4
    hi: float = 0.4

    def __call__(self, lr: Tensor, advantage: Tensor, logprobs: LogProbs) -> Tensor:
        return torch.where(advantage >= 0, lr.clamp(max=self.hi), lr.clamp(min=-self.lo))


@preset("sapo")
def sapo(reward: str, *, tau_up: Num = 1.0, tau_down: Num = 1.05) -> Algo:
    """GRPO with a smooth gate around ratio 1. arXiv 2511.20347."""
    return Algo(GroupRelative(reward, norm="std"), (Gate(SoftGate(tau_up, tau_down)),))


@preset("vespo")
def vespo(reward: str) -> Algo:
    """GRPO with a smooth gate on the product of a row's ratios. arXiv 2602.10693."""
    return Algo(GroupRelative(reward, norm="std"), (Gate(VespoWeight(), by="row", how="sum"),))


@preset("minirl")
def minirl(reward: str, *, clip_low: Num = 0.2, clip_high: Num = 0.2) -> Algo:
    """Weight against the sampler, PPO's clip as a mask against the old policy. arXiv 2512.01374."""
    gates = (Gate(Ratio(), den="sampler"), Gate(ratios.TrustRegion(clip_low, clip_high)))
    return Algo(GroupRelative(reward), gates, agg=TOKENS)


@preset("gmpo")
def gmpo(reward: str, *, log_low: Num = 0.4, log_high: Num = 0.4) -> Algo:
    """GRPO with the geometric mean of a row's ratios, clipped per token. arXiv 2507.20673."""
    gate = Gate(Ratio(), by="row", pre=ClipLog(log_low, log_high))
    return Algo(GroupRelative(reward, norm="std"), (gate,))


@dataclass(frozen=True, slots=True)
class DivergenceGate:
    """min(r, cap), but 0 if the probability is already more than `hi` above or `lo` below the
    sampler's and the update would move it further away. For num "current", den "sampler". DPPO,
    arXiv 2602.04879."""

    kind: Literal["tv", "kl"] = "tv"
    lo: float = 0.15
    hi: float = 0.15
    cap: float = 20.0

    def __call__(self, lr: Tensor, advantage: Tensor, logprobs: LogProbs) -> Tensor:
        mu, pi = logprobs.sampler.exp(), logprobs.current.exp()
        distance = (pi - mu).abs()
        if self.kind == "kl":
            rest_mu, rest_pi = (1 - mu).clamp(min=1e-8), (1 - pi).clamp(min=1e-8)
            distance = rest_mu * (rest_mu / rest_pi).log() - mu * lr
        return self.factor(lr, advantage * (pi - mu), distance)

    def factor(self, lr: Tensor, onward: Tensor, distance: Tensor) -> Tensor:
        """Factors [n] from the `distance` that each probability has moved. onward > 0: the update
        would move it further in the same direction."""
        bound = torch.where(lr > 0, self.hi, self.lo)
        return ratio(lr).clamp(max=self.cap) * ~((onward > 0) & (distance > bound))


@dataclass(frozen=True, slots=True)
class TopKDivergenceGate(DivergenceGate):
    """As `DivergenceGate`, with the distance between distributions over k tokens (the sampled one
    and the most probable others before the first update) and one symbol for the rest. For num
    "current", den "old", with these log-probs as candidates. In the first step these two are the
    same and the factor is 1. DPPO, arXiv 2602.04879."""

    k: int = 20

    @property
    def topk(self) -> int:
        return self.k

    def __call__(self, lr: Tensor, advantage: Tensor, logprobs: LogProbs) -> Tensor:
        old, now = logprobs.candidates.old, logprobs.candidates.current
        if old is None or now is None:
            return ratio(lr).clamp(max=self.cap)
        mu_K, pi_K = with_rest(old), with_rest(now)
        distance = (mu_K.exp() - pi_K.exp()).abs().sum(-1) / 2
        if self.kind == "kl":
            distance = (mu_K.exp() * (mu_K - pi_K)).sum(-1)
        return self.factor(lr, advantage * lr, distance)


@preset("dppo")
def dppo(
    reward: str,
    *,
    kind: Literal["tv", "kl"] = "tv",
    k: Natural = 0,
    low: Num | None = None,
    high: Num | None = None,
    cap: Cap = 20.0,
    length: Count = 1024,
) -> Algo:
    """Trust region on the change of a token's probability ("tv": 0.15) or its KL divergence (0.05)
    instead of its ratio. k: between current and old policy, over the sampled and the most probable
    tokens, k in all, and the rest, which has no effect without minibatches or epochs. arXiv
    2602.04879."""
    bound = 0.15 if kind == "tv" else 0.05
    down, up = (bound if setting is None else setting for setting in (low, high))
    if k:
        gate = Gate(TopKDivergenceGate(kind, down, up, cap, k))
    else:
        gate = Gate(DivergenceGate(kind, down, up, cap), den="sampler")
    return Algo(GroupRelative(reward), (gate,), agg=Average(("row",), "const", length))


@preset("kimi")
def kimi(reward: str, *, beta: Num = 0.1) -> Algo:
    """Group mean with a squared penalty on the log-ratio to the old policy. arXiv 2501.12599."""
    return Algo(GroupRelative(reward), penalties=(KLPenalty("k2", beta, "old"),), agg=TOKENS)


RatioBy = Literal["token", "row"]


def with_gates(algo: Algo, *gates: Gate) -> Algo:
    return replace(algo, gates=algo.gates + gates)


@modifier("tis", prefix="tis_")
def tis(
    algo: Algo,
    *,
    cap: Cap = 2.0,
    by: RatioBy = "token",
    drop: bool = False,
    low: Num = 0.0,
    high: Cap = inf,
    inside: RatioBy = "row",
) -> Algo:
    """Truncated weight per token, or product of a row's weights, of trainer against sampler; drop:
    weights above the cap are dropped instead. low, high: drops rows whose geometric mean weight is
    out of range or, by `inside`, tokens whose weight is. fengyao.notion.site/off-policy-rl."""
    fn = RatioInRange(0.0, cap) if drop else Truncate(0.0, cap)
    gate = Gate(fn, "old", "sampler")
    gated = with_gates(algo, gate if by == "token" else replace(gate, by="row", how="sum"))
    if low == 0 and high == inf:
        return gated
    unit: Literal["row"] | None = "row" if inside == "row" else None
    return with_gates(gated, Gate(InRange(low, high), "old", "sampler", unit))


@modifier("decoupled")
def decoupled(algo: Algo, *, decoupled_old: Literal["exact", "versions"] = "exact") -> Algo:
    """The uncapped weight of old policy against sampler. arXiv 2110.00641, 2505.24298. versions:
    interpolates the old policy between sampler and current policy by the number of updates between
    them instead of computing it (A-3PO, arXiv 2512.06547)."""
    gated = with_gates(algo, Gate(Ratio(), "old", "sampler"))
    return replace(gated, old_from_versions=decoupled_old == "versions")


@modifier("behaviour", prefix="behaviour_")
def behaviour(algo: Algo, *, quantile: Discount = 1.0) -> Algo:
    """Takes ratios against the sampler instead of the old policy, so that clips are relative to the
    policy that sampled the tokens, however old it is (verl's bypass mode). quantile: PPO's bound
    shrinks for tokens whose |log-ratio| is above this quantile of the step's; 1: for none."""
    if any(getattr(gate.fn, "topk", 0) for gate in algo.gates):
        raise ConfigError(
            "algorithm.preset: this preset compares the most probable tokens, of which +behaviour "
            "needs the sampler's log-probs, and the store has only that of the sampled token; "
            "choose dppo-tv or dppo-kl"
        )
    if not any((g.num, g.den) == ("current", "old") for g in algo.gates):
        raise ConfigError(
            "algorithm.preset: +behaviour changes token ratios against the old policy, which this "
            "preset does not have; remove it, or add +tis instead"
        )
    gates = (
        replace(g, den="sampler") if (g.num, g.den) == ("current", "old") else g for g in algo.gates
    )
    against_sampler = replace(algo, gates=tuple(gates))
    if quantile == 1:
        return against_sampler
    return with_clip(against_sampler, "sat", lambda gate, clip: replace(
        gate, fn=StaleClip(clip.lo, clip.hi, clip.dual, quantile)
    ))  # fmt: skip


@dataclass(frozen=True, slots=True)
class OffPolicyMask:
    """0 if A < 0 and -lr > delta, else 1: masks failures that the policy has moved away from. Pool
    lr as a row mean of p against b. DeepSeek-V3.2, arXiv 2512.02556."""

    delta: float = 0.1
    is_mask: ClassVar[bool] = True

    def __call__(self, lr: Tensor, advantage: Tensor, logprobs: LogProbs) -> Tensor:
        return (~((advantage < 0) & (-lr > self.delta))).double()


@dataclass(frozen=True, slots=True)
class StaleClip(ratios.TrustRegion):
    """PPO's clip whose bound shrinks for the stalest tokens of the step: above the quantile q of
    |lr|, the bound on the side that lr has left is multiplied by 1 / (1 + (|lr| / q)^2). The bound
    on the other side, and both bounds of all other tokens, stay PPO's. SAT, arXiv 2607.18722, which
    calls this factor a Hill kernel with exponent 2; its scale q, taken over the whole optimizer
    step, is our choice."""

    quantile: float = 0.9
    whole_step: ClassVar[bool] = True

    def __call__(self, lr: Tensor, advantage: Tensor, logprobs: LogProbs) -> Tensor:
        r, scale = ratio(lr), self.scale(lr)
        hi, lo = (torch.where(side, scale, 1.0) for side in (lr > 0, lr < 0))
        down = (r >= 1 - self.lo * lo) & (r <= self.dual)
        return r * torch.where(advantage >= 0, r <= 1 + self.hi * hi, down)

    def scale(self, lr: Tensor) -> Tensor:
        """The factor of each token's bound."""
        size = lr.abs()
        q = size.quantile(self.quantile) if size.numel() else size.new_zeros(())
        return torch.where((size > q) & (q > 0), 1 / (1 + (size / q).square()), 1.0)


def with_clip(algo: Algo, name: str, change: Callable[[Gate, ratios.Clip], Gate]) -> Algo:
    """The algorithm with its gate of PPO's clip changed. Raises ConfigError without one."""
    if not any(isinstance(gate.fn, ratios.Clip) for gate in algo.gates):
        raise ConfigError(
            f"algorithm.preset: +{name} changes PPO's clip, which this preset does not have; "
            "remove it, or choose grpo, dapo, gspo or ppo"
        )
    gates = [change(g, g.fn) if isinstance(g.fn, ratios.Clip) else g for g in algo.gates]
    return replace(algo, gates=tuple(gates))


def covariance(advantage: Tensor, logprobs: LogProbs) -> Tensor:
    """Each token's share of the covariance of advantage and log-prob, [n]: where it is large, the
    update makes a likely token likelier, and entropy falls. arXiv 2505.22617."""
    p = logprobs.current
    return (advantage - advantage.mean()) * (p - p.mean())


@dataclass(frozen=True, slots=True)
class CovarianceMask:
    """0 at a share of the step's tokens, at least one, drawn of those whose `covariance` is
    between `low` and `high` and that PPO's clip keeps, else 1. The draw is a function of the number
    of candidates. Clip-Cov, arXiv 2505.22617."""

    share: float
    low: float
    high: float
    clip: ratios.Clip | None = None
    is_mask: ClassVar[bool] = True
    whole_step: ClassVar[bool] = True

    def __call__(self, lr: Tensor, advantage: Tensor, logprobs: LogProbs) -> Tensor:
        covariances = covariance(advantage, logprobs) if lr.numel() else lr
        eligible = (covariances > self.low) & (covariances < self.high)
        if self.clip is not None:
            eligible &= (advantage == 0) | (self.clip(lr, advantage, logprobs) > 0)
        candidates = eligible.nonzero().flatten()
        draw = torch.Generator().manual_seed(len(candidates))
        chosen = torch.randperm(len(candidates), generator=draw)[: drawn(self.share, lr)]
        return torch.ones_like(lr).index_fill(0, candidates[chosen], 0.0)


@dataclass(frozen=True, slots=True)
class TopCovariance:
    """1 at the share of the step's tokens, at least one, with the largest `covariance`, else 0."""

    share: float
    whole_step: ClassVar[bool] = True

    def __call__(self, lr: Tensor, advantage: Tensor, logprobs: LogProbs) -> Tensor:
        if not lr.numel():
            return lr
        chosen = covariance(advantage, logprobs).topk(drawn(self.share, lr)).indices
        return torch.zeros_like(lr).index_fill(0, chosen, 1.0)


def drawn(share: float, tokens: Tensor) -> int:
    return min(max(int(share * tokens.numel()), 1), tokens.numel())


@modifier("clip-cov", prefix="clip_cov_")
def clip_cov(
    algo: Algo,
    *,
    share: Discount = 2e-4,
    low: Num = 1.0,
    high: Cap = 5.0,
    how: Literal["clip", "kl"] = "clip",
    beta: Num = 1.0,
) -> Algo:
    """Drops a share of the step's tokens, drawn of those that lower entropy most: whose covariance
    of advantage and log-prob is between `low` and `high`. how = "kl": the plain ratio in place of
    PPO's clip, and a penalty beta |log-ratio| to the old policy on the share with the largest
    covariance; it has no effect without minibatches or epochs. Needs the log-probs of the whole
    step at once. arXiv 2505.22617."""
    if how == "kl":
        unclipped = with_clip(algo, "kl-cov", lambda gate, clip: replace(gate, fn=Ratio()))
        penalty = KLPenalty("abs", beta, "old", TopCovariance(share))
        return replace(unclipped, penalties=(*unclipped.penalties, penalty))
    gate = next((g for g in algo.gates if isinstance(g.fn, ratios.Clip)), Gate(ratios.Ratio()))
    clip = gate.fn if isinstance(gate.fn, ratios.Clip) else None
    return with_gates(algo, replace(gate, fn=CovarianceMask(share, low, high, clip)))


@modifier("opsm")
def opsm(algo: Algo, *, opsm_delta: Num = 0.1) -> Algo:
    """Drops failed rows that the policy has moved away from. arXiv 2512.02556."""
    return with_gates(algo, Gate(OffPolicyMask(opsm_delta), "current", "sampler", "row"))
