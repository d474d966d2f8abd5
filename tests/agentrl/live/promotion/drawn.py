"""Sessions of two lanes, drawn as a gateway draws them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from agentrl.core.types import Reward
from agentrl.live.records import MARK, SOURCE, Mark

Array = np.ndarray[Any, np.dtype[Any]]


def drawn(
    rng: np.random.Generator,
    sessions: int,
    *,
    share: float,
    base: float | Callable[[Array], Array],
    better: float,
    graded: bool = False,
) -> tuple[Array, Array, Array]:
    """The columns of `comparison.Counted`, up to `sessions` of the candidate. base: the serving
    version's success, or a function of the time in sessions; better: how much is added to it."""
    n = int(sessions / share * 1.5) + 50
    candidate = rng.random(n) < share
    success = base(np.arange(n)) if callable(base) else np.full(n, base)
    success = success + better * candidate
    if graded:
        outcome = rng.beta(4 * success, 4 * (1 - success))
    else:
        outcome = (rng.random(n) < success).astype(float)
    end = int(np.searchsorted(np.cumsum(candidate), sessions)) + 1
    return candidate[:end], outcome[:end], np.full(end, share)[:end]


def mark(ended: float, **known: Any) -> Reward:
    """The label of a session that ended then, in unix seconds."""
    note = msgspec.json.encode(Mark(ended=ended, day="", **known)).decode()
    return Reward(name=MARK, value=1.0, source=SOURCE, note=note)
