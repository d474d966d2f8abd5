"""Preference losses, each a function of the completions of pairs: see `completions`.

a: the better completions, b: the worse: see `LogProbSums`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from agentrl.algorithms.credit.core import ZeroAdvantage
from agentrl.algorithms.objective.core import TOKENS, Algo
from agentrl.algorithms.preferences.completions import CompletionLoss, LogProbSums, with_mismatched
from agentrl.algorithms.preferences.pairing import How
from agentrl.algorithms.presets import declare
from agentrl.algorithms.presets.declare import (
    AlgoPreset,
    Build,
    Num,
    Option,
    add_preset,
    modifier,
    options_of_function,
    preset,
)
from agentrl.config import Natural, Positive
from agentrl.config.presets import find_preset
from agentrl.errors import ConfigError

Smoothing = Annotated[float, msgspec.Meta(ge=0, lt=0.5)]  # fraction of wrong labels


@dataclass(frozen=True, slots=True)
class PairsPreset(AlgoPreset):
    """A preset whose function is the loss of two completions with options of its own. It also has
    the options of `CompletionLoss` about pairs. nll: if not 0, it also imitates the better ones,
    with an option `nll` for the weight."""

    reference: bool = True
    whole: bool = False
    nll: float = 0.0

    def options(self) -> dict[str, Option]:
        pairs = {
            "how": Option(How, "extremes"),
            "least": Option(Num, 0.0),
            "per_group": Option(Natural, 0),
        }
        nll = {"nll": Option(Num, self.nll)} if self.nll else {}
        own = options_of_function(self.function)
        return {"reward": Option(str, self.reward)} | self._with_shared(own | nll | pairs)

    def build(self, **options: Any) -> Algo:
        own = {name: x.default for name, x in options_of_function(self.function).items()}
        given = own | {name: x for name, x in options.items() if name in own}
        rest: dict[str, Any] = {"reward": self.reward, "nll": self.nll}
        rest |= {name: x for name, x in options.items() if name not in (*own, "kl")}
        side = CompletionLoss(self.function, given, reference=self.reference, whole=self.whole)
        algo = Algo(ZeroAdvantage(), agg=TOKENS, side=replace(side, **rest))
        return self._shared(algo, options)


def pairs_preset(
    name: str, *, reference: bool = True, whole: bool = False, nll: float = 0.0, usual: bool = False
) -> Callable[[Build], Build]:
    """Register a loss of pairs as a preset, with an option kl, the coefficient of a k3 KL penalty
    to the reference. The loss stays as it is."""

    def register(loss: Build) -> Build:
        add_preset(
            PairsPreset(name, loss, kl=True, usual=usual, reference=reference, whole=whole, nll=nll)
        )
        return loss

    return register


def log_loss(x: Tensor, smoothing: float = 0.0) -> Tensor:
    return -(1 - smoothing) * logsigmoid(x) - smoothing * logsigmoid(-x)


@pairs_preset("dpo", usual=True)
def dpo(a: LogProbSums, b: LogProbSums, *, beta: Positive = 0.1) -> Tensor:
    """Direct preference optimization. arXiv 2305.18290."""
    return log_loss(beta * (a.log_ratio - b.log_ratio))


def kto_loss(
    s: LogProbSums, label: Tensor, kl: Tensor, beta: float, desirable: float, undesirable: float
) -> Tensor:
    good = desirable * (1 - (beta * (s.log_ratio - kl)).sigmoid())
    bad = undesirable * (1 - (beta * (kl - s.log_ratio)).sigmoid())
    return torch.where(label > 0.5, good, bad)


@preset("kto", usual=True)
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


@modifier("pairs", usual=True)
def with_pairs(
    algo: Algo,
    *,
    pairs_loss: str = "dpo",
    pairs_share: Num = 1.0,
    pairs_how: How = "extremes",
    pairs_least: Num = 0.0,
) -> Algo:
    """Adds a loss of pairs over each group's rollouts, with its default options, to the policy
    gradient of the host."""
    name, _ = find_preset(pairs_loss, declare.presets, declare.modifiers)
    loss = declare.preset_named(name)
    if algo.side is not None or not isinstance(loss, PairsPreset):
        raise ConfigError(
            f"algorithm.options.pairs_loss = {pairs_loss!r}: +pairs adds one of dpo and the other "
            "losses of pairs to a preset without such a loss"
        )
    side = loss.build(how=pairs_how, least=pairs_least, nll=0.0).side
    assert isinstance(side, CompletionLoss)
    return replace(algo, side=replace(side, share=pairs_share))
