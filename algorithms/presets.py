"""Algorithms by name: each is a few answers to the five questions of `objective`.

`make("grpo+tis", {"clip_high": 0.28, "tis_cap": 3.0})` builds one: a preset, then any modifiers,
with the keyword options of all of them.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from agentrl.algorithms.credit import (
    Alive,
    Compensated,
    Rel,
    Survivors,
    Togo,
    Whiten,
    lengths,
    plus,
)
from agentrl.algorithms.gates import Band, Clip, Div, Inside, Opsm, Ratio, Soft, Trunc, Trust, Vespo
from agentrl.algorithms.objective import Algo, Average, Gate, Reg
from agentrl.algorithms.registry import Cap, Mix, Num, make, modifier, modifiers, preset, presets
from agentrl.config import Count

__all__ = ["make", "modifiers", "presets"]

TOKENS = Average(("all",))
ROW_SUMS = Average(("row",), "sum")
PROMPTS = Average(("group",))
ROLLOUTS = Average(("rollout",))
OUTCOME = {"outcome": 1.0}


def _clip(low: float, high: float, dual: float = inf) -> tuple[Gate, ...]:
    return (Gate(Clip(low, high, dual)),)


def _kl(beta: float) -> tuple[Reg, ...]:
    return (Reg("k3", beta),) if beta else ()


def _with(algo: Algo, *gates: Gate) -> Algo:
    return replace(algo, gates=algo.gates + gates)


@preset("reinforce")
def reinforce(*, reward: str = "outcome") -> Algo:
    """Reward times log-prob, no baseline. Williams 1992."""
    return Algo(Rel(reward, base="none"), agg=ROW_SUMS)


@preset("reinforce++")
def reinforce_pp(
    *, reward: str = "outcome", gamma: Num = 1.0, clip_low: Num = 0.2, clip_high: Num = 0.2
) -> Algo:
    """Reward-to-go whitened over all tokens; needs no groups. arXiv 2501.03262."""
    return Algo(Whiten(Togo(reward, gamma)), _clip(clip_low, clip_high), agg=TOKENS)


@preset("reinforce++-baseline")
def baseline(*, reward: str = "outcome", clip_low: Num = 0.2, clip_high: Num = 0.2) -> Algo:
    """Group mean as baseline, whitened over all tokens. arXiv 2501.03262."""
    return Algo(Whiten(Rel(reward)), _clip(clip_low, clip_high), agg=TOKENS)


@preset("rloo")
def rloo(*, reward: str = "outcome") -> Algo:
    """Mean of the others as baseline, no clip. arXiv 2402.14740."""
    return Algo(Rel(reward, base="loo"), agg=ROW_SUMS)


@preset("opo")
def opo(*, reward: str = "outcome") -> Algo:
    """Length-weighted group mean as baseline, for exact on-policy training. arXiv 2505.23585."""
    return Algo(Rel(reward, bw=lengths), agg=TOKENS)


@preset("gpg")
def gpg(*, reward: str = "outcome") -> Algo:
    """Group mean as baseline, scaled up for groups without a gradient. arXiv 2504.02546."""
    return Algo(Rel(Compensated(reward)), agg=TOKENS)


@preset("grpo")
def grpo(
    *,
    reward: str = "outcome",
    std: bool = True,
    clip_low: Num = 0.2,
    clip_high: Num = 0.2,
    clip_dual: Cap = inf,
    kl: Num = 0.0,
) -> Algo:
    """Group mean and (std) deviation, PPO clip, mean of row means. arXiv 2402.03300."""
    credit = Rel(reward, norm="std" if std else "none")
    return Algo(credit, _clip(clip_low, clip_high, clip_dual), _kl(kl))


@preset("dr-grpo")
def dr_grpo(
    *, reward: str = "outcome", clip_low: Num = 0.2, clip_high: Num = 0.2, length: Count = 1024
) -> Algo:
    """GRPO without deviation, rows divided by a constant length. arXiv 2503.20783."""
    agg = Average(("row",), "const", length)
    return Algo(Rel(reward), _clip(clip_low, clip_high), agg=agg)


@preset("dapo")
def dapo(*, reward: str = "outcome", clip_low: Num = 0.2, clip_high: Num = 0.28) -> Algo:
    """Clip-higher, token mean, groups of equal rewards left out. arXiv 2503.14476."""
    credit = Rel(reward, norm="std")
    return Algo(credit, _clip(clip_low, clip_high), agg=TOKENS, keep=Alive(reward))


@preset("maxrl")
def maxrl(*, reward: str = "outcome", clip_low: Num = 0.2, clip_high: Num = 0.2) -> Algo:
    """Group mean as baseline and as scale, for rewards >= 0. arXiv 2602.02710."""
    return Algo(Rel(reward, norm="mean"), _clip(clip_low, clip_high), agg=TOKENS)


@preset("liteppo")
def liteppo(*, reward: str = "outcome", clip_low: Num = 0.2, clip_high: Num = 0.2) -> Algo:
    """Group mean, deviation of the whole batch, token mean. arXiv 2508.08221."""
    credit = Rel(reward, norm="std", norm_by=("all",))
    return Algo(credit, _clip(clip_low, clip_high), agg=TOKENS)


@preset("scalerl")
def scalerl(*, reward: str = "outcome", cap: Cap = 5.0) -> Algo:
    """Truncated weight against the sampler, batch deviation over groups whose rewards differ, mean
    over prompts. arXiv 2510.13786."""
    credit = Rel(Survivors(reward), norm="std", norm_by=("all",))
    return Algo(credit, (Gate(Trunc(0.0, cap), den="b"),), agg=PROMPTS)


@preset("gdpo")
def gdpo(*, rewards: Mix = OUTCOME, clip_low: Num = 0.2, clip_high: Num = 0.2) -> Algo:
    """Several rewards (name to weight), each compared on its own, then mixed. arXiv 2601.05242."""
    mixed = plus(*((Rel(name, norm="std"), weight) for name, weight in rewards.items()))
    return Algo(Whiten(mixed), _clip(clip_low, clip_high))


@preset("gspo")
def gspo(*, reward: str = "outcome", clip_low: Num = 3e-4, clip_high: Num = 4e-4) -> Algo:
    """GRPO with one ratio per row, the geometric mean of its tokens'. arXiv 2507.18071."""
    return Algo(Rel(reward, norm="std"), (Gate(Clip(clip_low, clip_high), by="row"),))


@preset("luspo")
def luspo(*, reward: str = "outcome", clip_low: Num = 3e-4, clip_high: Num = 4e-4) -> Algo:
    """GSPO with row sums, free of the bias to short answers. arXiv 2602.05261."""
    return replace(gspo(reward=reward, clip_low=clip_low, clip_high=clip_high), agg=ROW_SUMS)


@preset("cispo")
def cispo(*, reward: str = "outcome", low: Num = 0.0, cap: Cap = 5.0) -> Algo:
    """GRPO with ratios truncated instead of dropped; bounds are absolute. arXiv 2506.13585."""
    return Algo(Rel(reward, norm="std"), (Gate(Trunc(low, cap)),), agg=TOKENS)


@preset("sapo")
def sapo(*, reward: str = "outcome", tau_up: Num = 1.0, tau_down: Num = 1.05) -> Algo:
    """GRPO with a smooth gate around ratio 1. arXiv 2511.20347."""
    return Algo(Rel(reward, norm="std"), (Gate(Soft(tau_up, tau_down)),))


@preset("vespo")
def vespo(*, reward: str = "outcome") -> Algo:
    """GRPO with a smooth gate on the product of a row's ratios. arXiv 2602.10693."""
    return Algo(Rel(reward, norm="std"), (Gate(Vespo(), by="row", how="sum"),))


@preset("dppo-tv")
def dppo_tv(
    *,
    reward: str = "outcome",
    low: Num = 0.15,
    high: Num = 0.15,
    cap: Cap = 20.0,
    length: Count = 1024,
) -> Algo:
    """Trust region on the change of probability instead of its ratio. arXiv 2602.04879."""
    gate = Gate(Div("tv", low, high, cap), den="b")
    return Algo(Rel(reward), (gate,), agg=Average(("row",), "const", length))


@preset("minirl")
def minirl(*, reward: str = "outcome", clip_low: Num = 0.2, clip_high: Num = 0.2) -> Algo:
    """Weight against the sampler, PPO's clip as a mask against the old policy. arXiv 2512.01374."""
    gates = (Gate(Ratio(), den="b"), Gate(Trust(clip_low, clip_high)))
    return Algo(Rel(reward), gates, agg=TOKENS)


@preset("kimi")
def kimi(*, reward: str = "outcome", beta: Num = 0.1) -> Algo:
    """Group mean with a squared penalty on leaving the old policy (DRO). arXiv 2501.12599."""
    return Algo(Rel(reward), regs=(Reg("k2", beta, "o"),), agg=TOKENS)


@preset("agl-v1")
def agl_v1(*, reward: str = "outcome", clip_low: Num = 0.2, clip_high: Num = 0.2) -> Algo:
    """GRPO averaged over rollouts, however many calls they took. arXiv 2608.17528."""
    return Algo(Rel(reward, norm="std"), _clip(clip_low, clip_high), agg=ROLLOUTS)


@modifier("tis")
def tis(algo: Algo, *, tis_cap: Cap = 2.0) -> Algo:
    """Truncated weight per token for sampler against trainer. fengyao.notion.site/off-policy-rl."""
    return _with(algo, Gate(Trunc(0.0, tis_cap), "o", "b"))


@modifier("seq-tis")
def seq_tis(algo: Algo, *, seq_tis_cap: Cap = 2.0) -> Algo:
    """Truncated product of a row's weights. verl `rollout_corr_helper`."""
    return _with(algo, Gate(Trunc(0.0, seq_tis_cap), "o", "b", "row", "sum"))


@modifier("icepop")
def icepop(algo: Algo, *, icepop_low: Num = 0.5, icepop_high: Cap = 5.0) -> Algo:
    """Tokens that sampler and trainer disagree about are dropped. arXiv 2510.18855."""
    return _with(algo, Gate(Band(icepop_low, icepop_high), "o", "b"))


@modifier("mis")
def mis(algo: Algo, *, mis_cap: Cap = 3.0) -> Algo:
    """Rows whose product of weights is above the cap are dropped. TRL `sequence_mask`."""
    return _with(algo, Gate(Band(0.0, mis_cap), "o", "b", "row", "sum"))


@modifier("seq-mask-tis")
def seq_mask_tis(
    algo: Algo,
    *,
    seq_mask_low: Num = 0.99,
    seq_mask_high: Cap = 1.01,
    seq_mask_cap: Cap = 2.0,
) -> Algo:
    """TIS within rows whose geometric mean weight is near 1. OpenRLHF `seq-mask-tis`."""
    mask = Gate(Inside(seq_mask_low, seq_mask_high), "o", "b", "row")
    return _with(algo, Gate(Trunc(0.0, seq_mask_cap), "o", "b"), mask)


@modifier("decoupled")
def decoupled(algo: Algo) -> Algo:
    """The uncapped weight of old policy against sampler. arXiv 2110.00641, 2505.24298."""
    return _with(algo, Gate(Ratio(), "o", "b"))


@modifier("opsm")
def opsm(algo: Algo, *, opsm_delta: Num = 0.1) -> Algo:
    """Failed rows that the policy has moved away from are dropped. arXiv 2512.02556."""
    return _with(algo, Gate(Opsm(opsm_delta), "p", "b", "row"))
