"""SPIRAL, arXiv 2506.24119: running-mean baselines per role, and discount per call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from agentrl.algorithms.credit.baselines import Ema
from agentrl.algorithms.credit.core import Credit, GroupRelative, map_parts
from agentrl.algorithms.credit.turns import TurnDiscount
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.objective.core import Algo, Average
from agentrl.algorithms.presets.registry import PPO_CLIP, Discount, modifier, preset
from agentrl.config import Count
from agentrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NonzeroAdvantage:
    """bool [N]: tokens whose credit is not 0."""

    credit: Credit

    def __call__(self, batch: Batch) -> Tensor:
        return self.credit(batch) != 0


@preset("spiral", reward="role:outcome", clip=PPO_CLIP)
def spiral(
    reward: str,
    *,
    decay: Discount = 0.95,
    key: str = "",
    gamma: Discount = 1.0,
    length: Count = 1024,
) -> Algo:
    """Each role against the running mean of what it got before (of each value of the task's field
    `key`), fading with every call that follows; what is as good as that is left out. arXiv
    2506.24119."""
    credit = TurnDiscount(GroupRelative(reward, base=Ema(reward, decay, key)), gamma)
    agg = Average(("row",), "const", length)
    return Algo(credit, agg=agg, keep=NonzeroAdvantage(credit))


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


@modifier("fade")
def with_fade(algo: Algo, *, fade_gamma: Discount = 0.95) -> Algo:
    """Credit fades with every call that still follows in the rollout. arXiv 2506.24119."""
    return replace(algo, credit=TurnDiscount(algo.credit, fade_gamma))
