"""Trust regions and off-policy corrections: clips, masks and weights of the ratios of policies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from agentrl.algorithms.credit import core
from agentrl.algorithms.credit.core import GroupRelative, rewards
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.objective import ratios
from agentrl.algorithms.objective.core import ROW_SUMS, TOKENS, Algo, Average, Gate, KLPenalty
from agentrl.algorithms.objective.distill import with_rest
from agentrl.algorithms.objective.ratios import (
    InRange,
    LogProbs,
    Ratio,
    RatioInRange,
    Truncate,
    ratio,
)
from agentrl.algorithms.presets.declare import Cap, Num, modifier, preset
from agentrl.config import Count
from agentrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NonzeroVarianceReward:
    """The reward; missing if the rewards of the group do not differ."""

    reward: str = "outcome"

    def __call__(self, batch: Batch) -> Tensor:
        return torch.where(
            core.has_variance(batch, self.reward), rewards(batch, self.reward), torch.nan
        )


@preset("scalerl", usual=True)
def scalerl(reward: str, *, cap: Cap = 5.0) -> Algo:
    """Truncated weight against the sampler, batch standard deviation over groups whose rewards
    differ, mean over prompts. For its other settings see `algorithms/README.md`. arXiv 2510.13786.
    """
    credit = GroupRelative(NonzeroVarianceReward(reward), norm="std", norm_by=("all",))
    return Algo(credit, (Gate(Truncate(0.0, cap), den="sampler"),), agg=Average(("group",)))


SEQUENCE_CLIP = (3e-4, 4e-4)  # for a mean ratio of a row


@preset("gspo", usual=True, clip=SEQUENCE_CLIP, clip_by="row")
def gspo(reward: str) -> Algo:
    """GRPO with one ratio per row, the geometric mean of its tokens'; with a reward of calls,
    `reward = "transition:name"`, credit differs inside a row. arXiv 2507.18071."""
    return Algo(GroupRelative(reward, norm="std"))


@preset("cispo", usual=True)
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


@preset("luspo", clip=SEQUENCE_CLIP, clip_by="row")
def luspo(reward: str) -> Algo:
    """GSPO with row sums, which removes the bias towards short answers. arXiv 2602.05261."""
    return Algo(GroupRelative(reward, norm="std"), agg=ROW_SUMS)


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
    "current", den "old", with these log-probs as candidates. In the first step these two are one
    and the factor is 1. DPPO, arXiv 2602.04879."""

    k: int = 20

    @property
    def symbols(self) -> int:
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


def _dppo(reward: str, gate: Gate, length: int) -> Algo:
    return Algo(GroupRelative(reward), (gate,), agg=Average(("row",), "const", length))


@preset("dppo-tv")
def dppo_tv(
    reward: str, *, low: Num = 0.15, high: Num = 0.15, cap: Cap = 20.0, length: Count = 1024
) -> Algo:
    """Trust region on the change of probability instead of its ratio. arXiv 2602.04879."""
    return _dppo(reward, Gate(DivergenceGate("tv", low, high, cap), den="sampler"), length)


@preset("dppo-kl")
def dppo_kl(
    reward: str, *, low: Num = 0.05, high: Num = 0.05, cap: Cap = 20.0, length: Count = 1024
) -> Algo:
    """Trust region on the KL divergence of a token's probability. arXiv 2602.04879."""
    return _dppo(reward, Gate(DivergenceGate("kl", low, high, cap), den="sampler"), length)


@preset("dppo-topk")
def dppo_topk(
    reward: str,
    *,
    k: Count = 20,
    kind: Literal["tv", "kl"] = "tv",
    low: Num | None = None,
    high: Num | None = None,
    cap: Cap = 20.0,
    length: Count = 1024,
) -> Algo:
    """Trust region on the total variation (0.15) or KL divergence (0.05) between current and old
    policy over the sampled and the most probable tokens, k in all, and the rest. No effect without
    minibatches or epochs. arXiv 2602.04879."""
    bound = 0.15 if kind == "tv" else 0.05
    down, up = (bound if given is None else given for given in (low, high))
    return _dppo(reward, Gate(TopKDivergenceGate(kind, down, up, cap, k)), length)


@preset("kimi")
def kimi(reward: str, *, beta: Num = 0.1) -> Algo:
    """Group mean with a squared penalty on the log-ratio to the old policy. arXiv 2501.12599."""
    return Algo(GroupRelative(reward), penalties=(KLPenalty("k2", beta, "old"),), agg=TOKENS)


def with_gates(algo: Algo, *gates: Gate) -> Algo:
    return replace(algo, gates=algo.gates + gates)


@modifier("tis", usual=True)
def tis(algo: Algo, *, tis_cap: Cap = 2.0) -> Algo:
    """Truncated weight per token of trainer against sampler. fengyao.notion.site/off-policy-rl."""
    return with_gates(algo, Gate(Truncate(0.0, tis_cap), "old", "sampler"))


@modifier("icepop", usual=True)
def icepop(algo: Algo, *, icepop_low: Num = 0.5, icepop_high: Cap = 5.0) -> Algo:
    """Drops tokens whose weight of trainer against sampler is out of range. arXiv 2510.18855."""
    return with_gates(algo, Gate(RatioInRange(icepop_low, icepop_high), "old", "sampler"))


@modifier("decoupled", usual=True)
def decoupled(algo: Algo, *, decoupled_old: Literal["exact", "versions"] = "exact") -> Algo:
    """The uncapped weight of old policy against sampler. arXiv 2110.00641, 2505.24298. versions:
    interpolates the old policy between sampler and current policy by the number of updates between
    them instead of computing it (A-3PO, arXiv 2512.06547)."""
    found = with_gates(algo, Gate(Ratio(), "old", "sampler"))
    return replace(found, old_from_versions=decoupled_old == "versions")


@modifier("behaviour", usual=True)
def behaviour(algo: Algo) -> Algo:
    """Takes ratios against the sampler instead of the old policy, so that clips are relative to the
    policy that sampled the tokens, however old it is (verl's bypass mode)."""
    if algo.symbols or not any((g.num, g.den) == ("current", "old") for g in algo.gates):
        raise ConfigError(
            "algorithm.preset: +behaviour changes token ratios against the old policy, which this "
            "preset does not have; remove it, or add +tis instead"
        )
    gates = (
        replace(g, den="sampler") if (g.num, g.den) == ("current", "old") else g for g in algo.gates
    )
    return replace(algo, gates=tuple(gates))


@dataclass(frozen=True, slots=True)
class OffPolicyMask:
    """0 if A < 0 and -lr > delta, else 1: masks failures that the policy has moved away from. Pool
    lr as a row mean of p against b. DeepSeek-V3.2, arXiv 2512.02556."""

    delta: float = 0.1
    is_mask: ClassVar[bool] = True

    def __call__(self, lr: Tensor, advantage: Tensor, logprobs: LogProbs) -> Tensor:
        return (~((advantage < 0) & (-lr > self.delta))).double()


@modifier("seq-tis")
def seq_tis(algo: Algo, *, seq_tis_cap: Cap = 2.0) -> Algo:
    """Truncated product of a row's weights. verl `rollout_corr_helper`."""
    return with_gates(algo, Gate(Truncate(0.0, seq_tis_cap), "old", "sampler", "row", "sum"))


@modifier("mis")
def mis(algo: Algo, *, mis_cap: Cap = 3.0) -> Algo:
    """Drops rows whose product of weights is above the cap. TRL `sequence_mask`."""
    return with_gates(algo, Gate(RatioInRange(0.0, mis_cap), "old", "sampler", "row", "sum"))


@modifier("seq-mask-tis", prefix="seq_mask_")
def seq_mask_tis(algo: Algo, *, low: Num = 0.99, high: Cap = 1.01, cap: Cap = 2.0) -> Algo:
    """TIS within rows whose geometric mean weight is near 1. OpenRLHF `seq-mask-tis`."""
    mask = Gate(InRange(low, high), "old", "sampler", "row")
    return with_gates(algo, Gate(Truncate(0.0, cap), "old", "sampler"), mask)


@modifier("opsm")
def opsm(algo: Algo, *, opsm_delta: Num = 0.1) -> Algo:
    """Drops failed rows that the policy has moved away from. arXiv 2512.02556."""
    return with_gates(algo, Gate(OffPolicyMask(opsm_delta), "current", "sampler", "row"))
