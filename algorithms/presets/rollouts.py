"""Presets whose credit is the same for all calls of a rollout."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any, Literal

from agentrl.algorithms.credit.baselines import Ema, NonzeroAdvantage
from agentrl.algorithms.credit.core import (
    CriticValues,
    Gae,
    GroupRelative,
    NonzeroVariance,
    NonzeroVarianceReward,
    RescaledByValid,
    RewardToGo,
    Whiten,
    ZeroAdvantage,
    map_parts,
    response_lengths,
    weighted_sum,
)
from agentrl.algorithms.credit.outcomes import (
    AllFilters,
    BestOverSecond,
    GreedyBaseline,
    NotTruncated,
    OverlongPenalty,
    PassAtKBaseline,
    PassAtKReward,
    SampledRewards,
    TokenKLPenalty,
)
from agentrl.algorithms.credit.turns import TurnDiscount
from agentrl.algorithms.objective.core import Algo, Average, Gate, KLPenalty
from agentrl.algorithms.objective.ratios import (
    Clip,
    ClipLog,
    DivergenceGate,
    Ratio,
    SoftGate,
    TopKDivergenceGate,
    Truncate,
    TrustRegion,
    VespoWeight,
)
from agentrl.algorithms.presets.registry import Cap, Discount, Mix, Num, modifier, preset
from agentrl.config import Count, Natural, Positive
from agentrl.errors import ConfigError

TOKENS = Average(("all",))
ROW_SUMS = Average(("row",), "sum")
PROMPTS = Average(("group",))
ROLLOUTS = Average(("rollout",))
OUTCOME = {"outcome": 1.0}


def ppo_clip(low: float, high: float, dual: float = inf) -> tuple[Gate, ...]:
    """PPO's clip of current against old policy."""
    return (Gate(Clip(low, high, dual)),)


def kl_loss(beta: float) -> tuple[KLPenalty, ...]:
    """The KL penalty to the reference, if any."""
    return (KLPenalty("k3", beta),) if beta else ()


def kl_in_reward(beta: float) -> TokenKLPenalty | None:
    """The same penalty as part of the rewards, if any."""
    return TokenKLPenalty(beta) if beta else None


@preset("reinforce")
def reinforce(*, reward: str = "outcome") -> Algo:
    """Reward times log-prob, no baseline. Williams 1992."""
    return Algo(GroupRelative(reward, base="none"), agg=ROW_SUMS)


@modifier("ema")
def with_ema(algo: Algo, *, ema_decay: Discount = 0.95, ema_key: str = "") -> Algo:
    """Every comparison is with the running mean of earlier rewards, of each role and, with
    `ema_key`, of each value of that field of the task. arXiv 2506.24119."""

    def change(part: Any) -> Any:
        if not isinstance(part, GroupRelative):
            return part
        return replace(part, base=Ema(part.reward, ema_decay, ema_key, part.at))

    credit = map_parts(algo.credit, change)
    if credit == algo.credit:
        raise ConfigError(
            "algorithm.preset: +ema changes the baseline of a comparison, and this preset makes "
            "none; leave +ema out or choose another preset"
        )
    return replace(algo, credit=credit)


@preset("spiral")
def spiral(
    *,
    reward: str = "role:outcome",
    decay: Discount = 0.95,
    key: str = "",
    gamma: Discount = 1.0,
    clip_low: Num = 0.2,
    clip_high: Num = 0.2,
    length: Count = 1024,
) -> Algo:
    """Each role against the running mean of what it got before (of each value of the task's field
    `key`), fading with every call that follows; what is as good as that is left out. arXiv
    2506.24119."""
    credit = TurnDiscount(GroupRelative(reward, base=Ema(reward, decay, key)), gamma)
    agg = Average(("row",), "const", length)
    return Algo(credit, ppo_clip(clip_low, clip_high), agg=agg, keep=NonzeroAdvantage(credit))


@preset("reinforce++")
def reinforce_pp(
    *,
    reward: str = "outcome",
    gamma: Num = 1.0,
    clip_low: Num = 0.2,
    clip_high: Num = 0.2,
    kl_reward: Num = 0.0,
) -> Algo:
    """Reward-to-go whitened over all tokens; needs no groups. `kl_reward`: what every token pays
    for leaving the reference. arXiv 2501.03262."""
    credit = Whiten(RewardToGo(reward, gamma, kl_in_reward(kl_reward)))
    return Algo(credit, ppo_clip(clip_low, clip_high), agg=TOKENS)


@preset("reinforce++-baseline")
def baseline(*, reward: str = "outcome", clip_low: Num = 0.2, clip_high: Num = 0.2) -> Algo:
    """Group mean as baseline, whitened over all tokens. arXiv 2501.03262."""
    return Algo(Whiten(GroupRelative(reward)), ppo_clip(clip_low, clip_high), agg=TOKENS)


@preset("rloo")
def rloo(*, reward: str = "outcome") -> Algo:
    """Mean of the others as baseline, no clip. arXiv 2402.14740."""
    return Algo(GroupRelative(reward, base="loo"), agg=ROW_SUMS)


@preset("opo")
def opo(*, reward: str = "outcome") -> Algo:
    """Length-weighted group mean as baseline, for exact on-policy training. arXiv 2505.23585."""
    return Algo(GroupRelative(reward, bw=response_lengths), agg=TOKENS)


@preset("gpg")
def gpg(*, reward: str = "outcome") -> Algo:
    """Group mean as baseline, scaled up for groups without a gradient. arXiv 2504.02546."""
    return Algo(GroupRelative(RescaledByValid(reward)), agg=TOKENS)


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
    credit = GroupRelative(reward, norm="std" if std else "none")
    return Algo(credit, ppo_clip(clip_low, clip_high, clip_dual), kl_loss(kl))


@preset("dr-grpo")
def dr_grpo(
    *, reward: str = "outcome", clip_low: Num = 0.2, clip_high: Num = 0.2, length: Count = 1024
) -> Algo:
    """GRPO without deviation, rows divided by a constant length. arXiv 2503.20783."""
    agg = Average(("row",), "const", length)
    return Algo(GroupRelative(reward), ppo_clip(clip_low, clip_high), agg=agg)


@preset("dapo")
def dapo(
    *,
    reward: str = "outcome",
    clip_low: Num = 0.2,
    clip_high: Num = 0.28,
    overlong_limit: Natural = 0,
    overlong_cache: Count = 4096,
    drop_truncated: bool = False,
) -> Algo:
    """Clip-higher, token mean, groups of equal rewards replaced by others, and if asked a penalty
    on the last `overlong_cache` of `overlong_limit` tokens, or no truncated rollouts. arXiv
    2503.14476."""
    shaped = OverlongPenalty(reward, overlong_limit, overlong_cache) if overlong_limit else reward
    # Groups are judged by the raw reward: a length penalty would make each of them differ.
    keep = (
        AllFilters((NonzeroVariance(reward), NotTruncated()))
        if drop_truncated
        else NonzeroVariance(reward)
    )
    credit = GroupRelative(shaped, norm="std")
    gates = ppo_clip(clip_low, clip_high)
    return Algo(credit, gates, agg=TOKENS, keep=keep, resample=reward)


@preset("maxrl")
def maxrl(*, reward: str = "outcome", clip_low: Num = 0.2, clip_high: Num = 0.2) -> Algo:
    """Group mean as baseline and as scale, for rewards >= 0. arXiv 2602.02710."""
    return Algo(GroupRelative(reward, norm="mean"), ppo_clip(clip_low, clip_high), agg=TOKENS)


@preset("liteppo")
def liteppo(*, reward: str = "outcome", clip_low: Num = 0.2, clip_high: Num = 0.2) -> Algo:
    """Group mean, deviation of the whole batch, token mean. arXiv 2508.08221."""
    credit = GroupRelative(reward, norm="std", norm_by=("all",))
    return Algo(credit, ppo_clip(clip_low, clip_high), agg=TOKENS)


@preset("scalerl")
def scalerl(*, reward: str = "outcome", cap: Cap = 5.0) -> Algo:
    """Truncated weight against the sampler, batch deviation over groups whose rewards differ, mean
    over prompts. arXiv 2510.13786."""
    credit = GroupRelative(NonzeroVarianceReward(reward), norm="std", norm_by=("all",))
    return Algo(credit, (Gate(Truncate(0.0, cap), den="b"),), agg=PROMPTS)


@preset("gdpo")
def gdpo(*, rewards: Mix = OUTCOME, clip_low: Num = 0.2, clip_high: Num = 0.2) -> Algo:
    """Several rewards (name to weight), each compared on its own, then mixed. arXiv 2601.05242."""
    mixed = weighted_sum(
        *((GroupRelative(name, norm="std"), weight) for name, weight in rewards.items())
    )
    return Algo(Whiten(mixed), ppo_clip(clip_low, clip_high))


@preset("gspo")
def gspo(*, reward: str = "outcome", clip_low: Num = 3e-4, clip_high: Num = 4e-4) -> Algo:
    """GRPO with one ratio per row, the geometric mean of its tokens'. arXiv 2507.18071."""
    return Algo(GroupRelative(reward, norm="std"), (Gate(Clip(clip_low, clip_high), by="row"),))


@preset("gspo-token")
def gspo_token(*, reward: str = "outcome", clip_low: Num = 3e-4, clip_high: Num = 4e-4) -> Algo:
    """GSPO's ratio with credit that may differ inside a row: calls compared by a reward of their
    own, as in `reward = "transition:name"`. arXiv 2507.18071."""
    return gspo(reward=reward, clip_low=clip_low, clip_high=clip_high)


@preset("gmpo")
def gmpo(*, reward: str = "outcome", log_low: Num = 0.4, log_high: Num = 0.4) -> Algo:
    """GRPO with the geometric mean of a row's ratios, clipped per token. arXiv 2507.20673."""
    gate = Gate(Ratio(), by="row", pre=ClipLog(log_low, log_high))
    return Algo(GroupRelative(reward, norm="std"), (gate,))


@preset("luspo")
def luspo(*, reward: str = "outcome", clip_low: Num = 3e-4, clip_high: Num = 4e-4) -> Algo:
    """GSPO with row sums, free of the bias to short answers. arXiv 2602.05261."""
    return replace(gspo(reward=reward, clip_low=clip_low, clip_high=clip_high), agg=ROW_SUMS)


@preset("cispo")
def cispo(*, reward: str = "outcome", low: Num = 0.0, cap: Cap = 5.0) -> Algo:
    """GRPO with ratios truncated instead of dropped; bounds are absolute. arXiv 2506.13585."""
    return Algo(GroupRelative(reward, norm="std"), (Gate(Truncate(low, cap)),), agg=TOKENS)


@preset("sapo")
def sapo(*, reward: str = "outcome", tau_up: Num = 1.0, tau_down: Num = 1.05) -> Algo:
    """GRPO with a smooth gate around ratio 1. arXiv 2511.20347."""
    return Algo(GroupRelative(reward, norm="std"), (Gate(SoftGate(tau_up, tau_down)),))


@preset("vespo")
def vespo(*, reward: str = "outcome") -> Algo:
    """GRPO with a smooth gate on the product of a row's ratios. arXiv 2602.10693."""
    return Algo(GroupRelative(reward, norm="std"), (Gate(VespoWeight(), by="row", how="sum"),))


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
    gate = Gate(DivergenceGate("tv", low, high, cap), den="b")
    return Algo(GroupRelative(reward), (gate,), agg=Average(("row",), "const", length))


@preset("dppo-kl")
def dppo_kl(
    *,
    reward: str = "outcome",
    low: Num = 0.05,
    high: Num = 0.05,
    cap: Cap = 20.0,
    length: Count = 1024,
) -> Algo:
    """Trust region on the KL divergence of a token's probability. arXiv 2602.04879."""
    gate = Gate(DivergenceGate("kl", low, high, cap), den="b")
    return Algo(GroupRelative(reward), (gate,), agg=Average(("row",), "const", length))


@preset("dppo-topk")
def dppo_topk(
    *,
    reward: str = "outcome",
    k: Count = 20,
    kind: Literal["tv", "kl"] = "tv",
    low: Num | None = None,
    high: Num | None = None,
    cap: Cap = 20.0,
    length: Count = 1024,
) -> Algo:
    """Trust region on how far the probabilities of the sampled and the likeliest tokens, k in all,
    and of the rest have moved from the old policy: total variation (0.15) or KL (0.05). Without
    minibatches or epochs nothing has moved. arXiv 2602.04879."""
    bound = 0.15 if kind == "tv" else 0.05
    down, up = (bound if given is None else given for given in (low, high))
    gate = Gate(TopKDivergenceGate(kind, down, up, cap, k))
    return Algo(GroupRelative(reward), (gate,), agg=Average(("row",), "const", length))


@preset("minirl")
def minirl(*, reward: str = "outcome", clip_low: Num = 0.2, clip_high: Num = 0.2) -> Algo:
    """Weight against the sampler, PPO's clip as a mask against the old policy. arXiv 2512.01374."""
    gates = (Gate(Ratio(), den="b"), Gate(TrustRegion(clip_low, clip_high)))
    return Algo(GroupRelative(reward), gates, agg=TOKENS)


@preset("kimi")
def kimi(*, reward: str = "outcome", beta: Num = 0.1) -> Algo:
    """Group mean with a squared penalty on leaving the old policy (DRO). arXiv 2501.12599."""
    return Algo(GroupRelative(reward), penalties=(KLPenalty("k2", beta, "o"),), agg=TOKENS)


@preset("dro")
def dro(*, reward: str = "outcome", beta: Num = 0.1) -> Algo:
    """The same as kimi, by its name in verl: log-prob times advantage, squared penalty. arXiv
    2501.12599."""
    return kimi(reward=reward, beta=beta)


@preset("distill")
def distill(*, beta: Positive = 1.0) -> Algo:
    """On-policy distillation: reverse KL to a teacher on the policy's own rollouts, no rewards.
    arXiv 2306.13649."""
    return Algo(ZeroAdvantage(), penalties=(KLPenalty("k2", beta, "t"),), agg=TOKENS)


@preset("remax")
def remax(*, reward: str = "outcome") -> Algo:
    """A greedy rollout as baseline: the first of each group, which is not trained. arXiv
    2310.10505."""
    return Algo(GroupRelative(SampledRewards(reward), base=GreedyBaseline(reward)), agg=ROW_SUMS)


@preset("best-of")
def best_of(
    *, reward: str = "outcome", std: bool = True, clip_low: Num = 0.2, clip_high: Num = 0.2
) -> Algo:
    """Pass@k by the gap of the best rollout to the second (verl's grpo_passk). arXiv 2503.19595."""
    credit = GroupRelative(BestOverSecond(reward, std), base="none")
    return Algo(credit, ppo_clip(clip_low, clip_high))


@preset("pass-at-k")
def pass_at_k(
    *, reward: str = "outcome", k: Count = 2, clip_low: Num = 0.2, clip_high: Num = 0.2
) -> Algo:
    """Unbiased pass@k of a reward that is positive on success (PKPO), k below the size of groups.
    arXiv 2505.15201."""
    credit = GroupRelative(PassAtKReward(reward, k), base=PassAtKBaseline(reward, k))
    return Algo(credit, ppo_clip(clip_low, clip_high))


@preset("ppo")
def ppo(
    *,
    reward: str = "outcome",
    gamma: Discount = 1.0,
    lam: Discount = 0.95,
    clip_low: Num = 0.2,
    clip_high: Num = 0.2,
    kl: Num = 0.0,
    kl_reward: Num = 0.0,
) -> Algo:
    """GAE over tokens with a critic, whitened, PPO clip. The penalty on leaving the reference is
    in the loss (`kl`) or in the rewards (`kl_reward`, arXiv 1909.08593). arXiv 1707.06347."""
    credit = Whiten(Gae(CriticValues(), reward, gamma, lam, kl_in_reward(kl_reward)))
    return Algo(credit, ppo_clip(clip_low, clip_high), kl_loss(kl), TOKENS)


@preset("agl-v0")
def agl_v0(*, reward: str = "outcome", clip_low: Num = 0.2, clip_high: Num = 0.2) -> Algo:
    """LightningRL as first released: every call with the final reward, compared over calls, token
    mean. arXiv 2508.03680."""
    credit = GroupRelative(reward, at="transition", norm="std")
    return Algo(credit, ppo_clip(clip_low, clip_high), agg=TOKENS)


@preset("agl-v1")
def agl_v1(*, reward: str = "outcome", clip_low: Num = 0.2, clip_high: Num = 0.2) -> Algo:
    """GRPO averaged over rollouts, however many calls they took. arXiv 2608.17528."""
    return Algo(GroupRelative(reward, norm="std"), ppo_clip(clip_low, clip_high), agg=ROLLOUTS)
