"""Losses on pairs and on labels, as functions of the completions: see `completions`.

a: the better completions, b: the worse: see `LogProbSums`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Literal, get_args

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from agentrl.algorithms.credit.core import ZeroAdvantage, level_of, rewards_read
from agentrl.algorithms.objective.core import TOKENS, Algo
from agentrl.algorithms.preferences.completions import CompletionLoss, LogProbSums, with_mismatched
from agentrl.algorithms.preferences.draft import How
from agentrl.algorithms.presets import declare
from agentrl.algorithms.presets.declare import Num, modifier, preset
from agentrl.core.config import Natural, Positive
from agentrl.core.config.derived import find_preset
from agentrl.core.errors import ConfigError

LossName = Literal[
    "sigmoid", "robust", "ipo", "hinge", "simpo", "cpo", "orpo", "apo-zero", "apo-down", "nca",
    "bco", "exo", "sppo", "aot",
]  # fmt: skip
Smoothing = Annotated[float, msgspec.Meta(ge=0, lt=0.5)]  # fraction of wrong labels


def log_loss(x: Tensor, smoothing: float = 0.0) -> Tensor:
    return -(1 - smoothing) * logsigmoid(x) - smoothing * logsigmoid(-x)


def sigmoid(a: LogProbSums, b: LogProbSums, beta: float, label_smoothing: float) -> Tensor:
    return log_loss(beta * (a.log_ratio - b.log_ratio), label_smoothing)


def robust(a: LogProbSums, b: LogProbSums, beta: float, label_smoothing: float) -> Tensor:
    d, e = beta * (a.log_ratio - b.log_ratio), label_smoothing
    return (e * logsigmoid(-d) - (1 - e) * logsigmoid(d)) / (1 - 2 * e)


def ipo(a: LogProbSums, b: LogProbSums, beta: float) -> Tensor:
    return (a.log_ratio / a.tokens - b.log_ratio / b.tokens - 1 / (2 * beta)).square()


def hinge(a: LogProbSums, b: LogProbSums, beta: float) -> Tensor:
    return relu(1 - beta * (a.log_ratio - b.log_ratio))


def simpo(a: LogProbSums, b: LogProbSums, beta: float, gamma: float) -> Tensor:
    return log_loss(beta * (a.current / a.tokens - b.current / b.tokens) - gamma)


def cpo(a: LogProbSums, b: LogProbSums, beta: float) -> Tensor:
    return log_loss(beta * (a.current - b.current))


def orpo(a: LogProbSums, b: LogProbSums, beta: float) -> Tensor:
    x, y = a.current / a.tokens, b.current / b.tokens
    return -beta * logsigmoid(x - y - _log1mexp(x) + _log1mexp(y))


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - e^x) for x < 0."""
    x = x.clamp(max=-1e-12)
    return torch.where(x > -0.6931, (-x.expm1()).log(), (-x.exp()).log1p())


def apo_zero(a: LogProbSums, b: LogProbSums, beta: float) -> Tensor:
    return 1 - (beta * a.log_ratio).sigmoid() + (beta * b.log_ratio).sigmoid()


def apo_down(a: LogProbSums, b: LogProbSums, beta: float) -> Tensor:
    return (beta * a.log_ratio).sigmoid() + 1 - (beta * (a.log_ratio - b.log_ratio)).sigmoid()


def nca(a: LogProbSums, b: LogProbSums, beta: float) -> Tensor:
    x, y = beta * a.log_ratio, beta * b.log_ratio
    return -logsigmoid(x) - 0.5 * logsigmoid(-x) - 0.5 * logsigmoid(-y)


def bco(a: LogProbSums, b: LogProbSums, beta: float) -> Tensor:
    return -logsigmoid(beta * a.log_ratio) - logsigmoid(-beta * b.log_ratio)


def exo(a: LogProbSums, b: LogProbSums, beta: float, label_smoothing: float) -> Tensor:
    d, e = beta * (a.log_ratio - b.log_ratio), torch.tensor(label_smoothing, dtype=a.current.dtype)
    up, down = logsigmoid(d), logsigmoid(-d)
    return up.exp() * (up - (-e).log1p()) + down.exp() * (down - e.log())


def sppo(a: LogProbSums, b: LogProbSums, beta: float) -> Tensor:
    return (a.log_ratio - 0.5 / beta).square() + (b.log_ratio + 0.5 / beta).square()


def aot(a: LogProbSums, b: LogProbSums, beta: float, label_smoothing: float) -> Tensor:
    d = (a.current - b.current).sort().values - (a.reference - b.reference).sort().values
    return log_loss(beta * d, label_smoothing)


REFERENCE_FREE = (simpo, cpo, orpo)
FUNCTIONS: tuple[Callable[..., Tensor], ...] = (
    sigmoid, robust, ipo, hinge, *REFERENCE_FREE, apo_zero, apo_down, nca, bco, exo, sppo, aot,
)  # fmt: skip
LOSSES = dict(zip(get_args(LossName), FUNCTIONS, strict=True))


@preset("dpo", kl=True)
def dpo(
    reward: str,
    *,
    loss: LossName = "sigmoid",
    beta: Positive = 0.1,
    label_smoothing: Smoothing = 0.0,
    gamma: Num = 0.0,
    nll: Num = 0.0,
    how: How = "extremes",
    least: Num = 0.0,
    per_group: Natural = 0,
) -> Algo:
    """Direct preference optimization, and other losses of pairs. label_smoothing: the fraction of
    wrong labels. gamma: the margin of simpo. nll: the weight of imitating the better completions.
    how, least, per_group: which pairs of a group. arXiv 2305.18290."""
    fn = LOSSES[loss]
    all_options = {"beta": beta, "label_smoothing": label_smoothing, "gamma": gamma}
    read = inspect.signature(fn).parameters
    for name, value in all_options.items():
        if value and name not in read:
            raise ConfigError(
                f"algorithm.options.{name} = {value}: the loss {loss!r} does not read it; remove it"
            )
    if loss == "exo" and not label_smoothing:
        raise ConfigError(
            "algorithm.options.label_smoothing = 0.0: the loss 'exo' takes its logarithm; set it "
            "above 0, such as 0.001"
        )
    options = {name: value for name, value in all_options.items() if name in read}
    side = CompletionLoss(
        fn,
        options,
        reward,
        reference=fn not in REFERENCE_FREE,
        whole=fn is aot,
        nll=nll,
        how=how,
        least=least,
        per_group=per_group,
    )
    return Algo(ZeroAdvantage(), agg=TOKENS, side=side)


def kto_loss(
    s: LogProbSums, label: Tensor, kl: Tensor, beta: float, desirable: float, undesirable: float
) -> Tensor:
    good = desirable * (1 - (beta * (s.log_ratio - kl)).sigmoid())
    bad = undesirable * (1 - (beta * (kl - s.log_ratio)).sigmoid())
    return torch.where(label > 0.5, good, bad)


@preset("kto")
def kto(
    reward: str,
    *,
    beta: Positive = 0.1,
    desirable: Positive = 1.0,
    undesirable: Positive = 1.0,
    threshold: float = 0.5,
) -> Algo:
    """Unpaired completions, desirable if the reward is at least `threshold`, compared with the mean
    KL to the reference, estimated from completions of other prompts. arXiv 2402.01306."""
    options = {"beta": beta, "desirable": desirable, "undesirable": undesirable}
    side = CompletionLoss(kto_loss, options, reward, paired=False, whole=True, threshold=threshold)
    return Algo(ZeroAdvantage(), agg=TOKENS, side=side, prepare=(with_mismatched,))


@modifier("pairs")
def with_pairs(algo: Algo, *, pairs_loss: str = "dpo", pairs_share: Num = 1.0) -> Algo:
    """Adds a loss of pairs, the best and worst rollout of each group, to the policy gradient of the
    host: `dpo` or a recipe of it, without its imitation, which +nll adds. They are ranked by the
    first reward of rollouts that the host reads, or else by the outcome. arXiv 2305.18290."""
    name, added = find_preset(pairs_loss, declare.presets, declare.modifiers)
    if added:
        raise ConfigError(
            f"algorithm.options.pairs_loss = {pairs_loss!r}: +pairs takes a loss without "
            f"modifiers; set pairs_loss = {name!r} and add +{' and +'.join(added)} to "
            "algorithm.preset, behind +pairs"
        )
    loss = declare.preset_named(name)
    if algo.side is not None or loss.function is not dpo:
        raise ConfigError(
            f"algorithm.options.pairs_loss = {pairs_loss!r}: +pairs adds one of dpo and the other "
            "losses of pairs to a preset without such a loss"
        )
    read = (name for name in rewards_read(algo.credit) if level_of(name) == "rollout")
    side = loss.build(nll=0.0, reward=next(read, "outcome")).side
    assert isinstance(side, CompletionLoss)
    return replace(algo, side=replace(side, share=pairs_share))


@modifier("nll", host="dpo")
def with_nll(algo: Algo, *, nll_share: Num = 1.0) -> Algo:
    """Adds the mean negative log-prob of the better completions' tokens to a loss of pairs, which
    keeps their likelihood from falling. RPO, arXiv 2404.19733."""
    if not isinstance(algo.side, CompletionLoss) or not algo.side.paired:
        raise ConfigError("algorithm.preset: +nll is for losses of pairs, such as dpo+nll")
    if algo.side.nll:
        raise ConfigError(
            "algorithm.preset: the loss of pairs imitates the better completions already, so +nll "
            "would replace its weight; set algorithm.options.nll instead, and remove +nll"
        )
    return replace(algo, side=replace(algo.side, nll=nll_share))
