"""Learning-rate schedule, order of minibatches, KL early stop. All are functions of the step, so
checkpoints hold no schedule state."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

from torch import Tensor

from agentrl.algorithms.objective.core import kl_value
from agentrl.config import AlgorithmConfig

T = TypeVar("T")


def learning_rate(config: AlgorithmConfig, step: int, steps: int) -> float:
    """Of one step of a run: the lower of a linear rise over `warmup` steps and the schedule, which
    falls from `lr` before the first step to `min_lr` after the last."""
    rise = min(1.0, (step + 1) / (config.warmup + 1))
    done = step / steps
    left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return min(
        config.lr * rise, config.min_lr + (config.lr - config.min_lr) * left[config.schedule]
    )


def minibatches(items: Sequence[T], count: int, seed: str) -> list[list[T]]:
    """The items once, in `count` shares of sizes that differ by one at most, in an order drawn from
    the seed; one share keeps their order."""
    order = list(items)
    if count > 1:
        random.Random(seed).shuffle(order)
    bounds = [len(order) * index // count for index in range(count + 1)]
    return [order[first:last] for first, last in pairwise(bounds)]


def mean_kl(old: Tensor, now: Tensor, weight: Tensor) -> float:
    """KL(old || now) in nats per token by the k3 estimate, over the tokens in the loss: how far the
    policy has moved on a batch. Schulman, http://joschu.net/blog/kl-approx.html"""
    d = (old.double() - now.double().cpu())[weight > 0]
    return float(kl_value(d, "k3").mean()) if d.numel() else 0.0
