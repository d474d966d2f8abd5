"""Groups that the models can read: what no store can know, and what older stores did not refuse."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from agentrl.store.limits import LARGEST_REWARD, ROUNDING
from agentrl.types import Group, Transition

log = logging.getLogger(__name__)
Vocabulary = Mapping[str, int]  # token ids that a policy has, by its name


def split(groups: Sequence[Group], known: Vocabulary) -> tuple[list[Group], list[Group]]:
    """Those that can be read, and those that cannot, of which the log says why. One row of these
    would end every step that has it, and the step would begin again with it."""
    why = {group.id: unreadable(group, known) for group in groups}
    for id, reason in why.items():
        if reason:
            log.warning("group %s is discarded: %s", id, reason)
    good = [group for group in groups if why[group.id] is None]
    return good, [group for group in groups if why[group.id] is not None]


def unreadable(group: Group, known: Vocabulary) -> str | None:
    """What is wrong with the first row of a group that cannot be read."""
    for rollout in group.rollouts:
        for reward in rollout.rewards:
            if not abs(reward.value) <= LARGEST_REWARD:  # NaN neither
                return f"reward {reward.name!r} of rollout {rollout.id} is {reward.value:g}"
        for call in rollout.transitions:
            if wrong := call.exact and _wrong(call, known.get(call.policy)):
                return f"call {call.id} of rollout {rollout.id} has {wrong}"
    return None


def _wrong(call: Transition, size: int | None) -> str | None:
    for tokens in (call.prompt, call.completion):
        if tokens and size is not None and not 0 <= min(tokens) <= max(tokens) < size:
            worst = max(tokens) if max(tokens) >= size else min(tokens)
            return (
                f"the token id {worst}, and policy {call.policy!r} has those below {size}: whoever "
                "answered it has another tokenizer"
            )
    if not (math.isfinite(sum(call.logprobs)) and max(call.logprobs, default=0.0) <= ROUNDING):
        return "log-probs above 0, or none that is a number"
    return None
