"""Credit of single calls without a critic, from calls in the same state: peer values."""

from __future__ import annotations

import math

from agentrl.algorithms.credit.core import GroupRelative
from agentrl.algorithms.credit.peers import LAMBDA, PeerAdvantages
from agentrl.algorithms.credit.scale import GrpoScale, ReturnScale
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.presets import declare
from agentrl.algorithms.presets.declare import PPO_CLIP, Discount, preset


@declare.as_modifier("peers", usual=True, prefix="peers_")
@preset("peers", usual=True, clip=PPO_CLIP, kl=True)
def peers(reward: str, *, gamma: Discount = 1.0, lam: Discount = LAMBDA) -> Algo:
    """Compares each call with other rollouts that came to the same state, as far as this batch and
    those before show that states tell what calls did; without such states it is `rloo`. Needs no
    critic. GAE over calls as in arXiv 2511.14460, states as in 2505.10978."""
    return Algo(GroupRelative(PeerAdvantages(reward, gamma, lam), base="none"))


@preset("auto", usual=True, clip=(0.2, 0.2, math.inf), kl=True)
def auto(reward: str, *, std: bool = True, gamma: Discount = 1.0, lam: Discount = LAMBDA) -> Algo:
    """`grpo`, with the credit of `peers` where states recur and tell what earlier calls did; on the
    scale of `grpo`, with or without `std`, which is that of the batches before, too. arXiv
    2402.03300."""
    credit = peers(reward=reward, gamma=gamma, lam=lam).credit
    return Algo(GrpoScale(credit, reward, ReturnScale(reward)) if std else credit)
