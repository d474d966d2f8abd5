"""More losses of pairs: see `pairs`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.preferences.completions import CompletionLoss, LogProbSums
from agentrl.algorithms.preferences.pairs import Smoothing, log_loss, pairs_preset
from agentrl.algorithms.presets.declare import Num, modifier
from agentrl.config import Positive
from agentrl.errors import ConfigError


@pairs_preset("cdpo")
def cdpo(
    a: LogProbSums, b: LogProbSums, *, beta: Positive = 0.1, label_smoothing: Smoothing = 0.1
) -> Tensor:
    """DPO with smoothed labels, for noisy labels. ericmitchell.ai/cdpo.pdf, of arXiv 2305.18290."""
    return log_loss(beta * (a.log_ratio - b.log_ratio), label_smoothing)


@pairs_preset("robust")
def robust(
    a: LogProbSums, b: LogProbSums, *, beta: Positive = 0.1, label_smoothing: Smoothing = 0.1
) -> Tensor:
    """DPO with a loss that is unbiased under noisy labels. arXiv 2403.00409."""
    d, e = beta * (a.log_ratio - b.log_ratio), label_smoothing
    return (e * logsigmoid(-d) - (1 - e) * logsigmoid(d)) / (1 - 2 * e)


@pairs_preset("ipo")
def ipo(a: LogProbSums, b: LogProbSums, *, beta: Positive = 0.1) -> Tensor:
    """Squared loss on the difference of log-ratios per token. arXiv 2310.12036."""
    return (a.log_ratio / a.tokens - b.log_ratio / b.tokens - 1 / (2 * beta)).square()


@pairs_preset("hinge")
def hinge(a: LogProbSums, b: LogProbSums, *, beta: Positive = 0.1) -> Tensor:
    """SLiC's hinge on DPO's margin. arXiv 2305.10425."""
    return relu(1 - beta * (a.log_ratio - b.log_ratio))


@pairs_preset("simpo", reference=False)
def simpo(a: LogProbSums, b: LogProbSums, *, beta: Positive = 2.0, gamma: Num = 1.0) -> Tensor:
    """Mean log-probs per token with a margin gamma, no reference. arXiv 2405.14734."""
    return log_loss(beta * (a.current / a.tokens - b.current / b.tokens) - gamma)


@pairs_preset("cpo", reference=False, nll=1.0)
def cpo(a: LogProbSums, b: LogProbSums, *, beta: Positive = 0.1) -> Tensor:
    """DPO without a reference, plus the likelihood of the better completion. arXiv 2401.08417."""
    return log_loss(beta * (a.current - b.current))


@pairs_preset("orpo", reference=False, nll=1.0)
def orpo(a: LogProbSums, b: LogProbSums, *, beta: Positive = 0.1) -> Tensor:
    """The odds ratio per token, plus the likelihood of the better completion. arXiv 2403.07691."""
    x, y = a.current / a.tokens, b.current / b.tokens
    return -beta * logsigmoid(x - y - _log1mexp(x) + _log1mexp(y))


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - e^x) for x < 0."""
    x = x.clamp(max=-1e-12)
    return torch.where(x > -0.6931, (-x.expm1()).log(), (-x.exp()).log1p())


@pairs_preset("apo-zero")
def apo_zero(a: LogProbSums, b: LogProbSums, *, beta: Positive = 0.1) -> Tensor:
    """Better completions up, worse ones down, each against the reference. arXiv 2408.06266."""
    return 1 - (beta * a.log_ratio).sigmoid() + (beta * b.log_ratio).sigmoid()


@pairs_preset("apo-down")
def apo_down(a: LogProbSums, b: LogProbSums, *, beta: Positive = 0.1) -> Tensor:
    """Both completions down, the worse one further: for completions worse than the policy. arXiv
    2408.06266."""
    return (beta * a.log_ratio).sigmoid() + 1 - (beta * (a.log_ratio - b.log_ratio)).sigmoid()


@pairs_preset("nca")
def nca(a: LogProbSums, b: LogProbSums, *, beta: Positive = 0.1) -> Tensor:
    """Noise contrastive alignment. arXiv 2402.05369."""
    x, y = beta * a.log_ratio, beta * b.log_ratio
    return -logsigmoid(x) - 0.5 * logsigmoid(-x) - 0.5 * logsigmoid(-y)


@pairs_preset("bco")
def bco(a: LogProbSums, b: LogProbSums, *, beta: Positive = 0.1) -> Tensor:
    """Binary classification of each completion against the reference. arXiv 2404.04656."""
    return -logsigmoid(beta * a.log_ratio) - logsigmoid(-beta * b.log_ratio)


@pairs_preset("exo")
def exo(
    a: LogProbSums,
    b: LogProbSums,
    *,
    beta: Positive = 0.1,
    label_smoothing: Annotated[float, msgspec.Meta(gt=0, lt=0.5)] = 1e-3,
) -> Tensor:
    """Reverse KL between the policy's preference and smoothed labels. arXiv 2402.00856."""
    d, e = beta * (a.log_ratio - b.log_ratio), torch.tensor(label_smoothing, dtype=a.current.dtype)
    up, down = logsigmoid(d), logsigmoid(-d)
    return up.exp() * (up - (-e).log1p()) + down.exp() * (down - e.log())


@pairs_preset("sppo")
def sppo(a: LogProbSums, b: LogProbSums, *, beta: Positive = 0.1) -> Tensor:
    """Squared loss of each completion's h to +-1 / (2 beta), a win or a loss. arXiv 2405.00675."""
    return (a.log_ratio - 0.5 / beta).square() + (b.log_ratio + 0.5 / beta).square()


@pairs_preset("aot", whole=True)
def aot(
    a: LogProbSums, b: LogProbSums, *, beta: Positive = 0.1, label_smoothing: Smoothing = 0.0
) -> Tensor:
    """Sorted margins of all pairs of the step, compared with the reference's. arXiv 2406.05882."""
    d = (a.current - b.current).sort().values - (a.reference - b.reference).sort().values
    return log_loss(beta * d, label_smoothing)


@modifier("nll", host="dpo")
def with_nll(algo: Algo, *, nll_share: Num = 1.0) -> Algo:
    """Adds the mean negative log-prob of the better completions' tokens to a loss of pairs, which
    keeps their likelihood from falling. RPO, arXiv 2404.19733."""
    if not isinstance(algo.side, CompletionLoss) or not algo.side.paired:
        raise ConfigError("algorithm.preset: +nll is for losses of pairs, such as dpo+nll")
    return replace(algo, side=replace(algo.side, nll=nll_share))
