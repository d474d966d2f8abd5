"""Credit from a function of the run's own, for any preset."""

from __future__ import annotations

from dataclasses import replace

from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.presets.declare import CreditFunction, modifier, outcome_of


@modifier("credit", usual=True)
def with_credit(algo: Algo, *, credit: CreditFunction, credit_reward: str = "") -> Algo:
    """Replaces the host's credit by your function "file.py:name", which takes a batch and returns
    one advantage per token, NaN if missing (arXiv 2402.03300). credit_reward: the reward to put
    into the batch for it; default: the host's."""
    return replace(algo, credit=credit, rewards=(credit_reward or outcome_of(algo),))
