"""Preparations: changes of the claimed groups that an algorithm makes before its credit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from msgspec import structs
from torch import Tensor

from agentrl.algorithms.data.merge import split_reference
from agentrl.algorithms.model.chat import Chat, Codec, Tokenizer
from agentrl.core.errors import TrainingError
from agentrl.core.types import POLICY, Group, Reward, Rollout


@dataclass(frozen=True)
class TrainedPolicy:
    """The policy that a step trains, before its update. context: maximum tokens of a call, prompt
    and completion; None: unlimited. state: parts of the algorithm's state, by name."""

    # Log-probs of every action token, float32 [N]; with a second argument, those of another model.
    logprobs: Callable[..., Tensor]
    tokenizer: Tokenizer | None = None
    context: int | None = None
    name: str = POLICY
    state: Mapping[str, object] = field(default_factory=dict)

    @cached_property
    def chat(self) -> Chat:
        """Its chat template. Raises TrainingError without a tokenizer."""
        if self.tokenizer is None:
            raise TrainingError(f"policy {self.name!r} has no tokenizer to render prompts with")
        return Chat(self.tokenizer, Codec(self.tokenizer))

    def fits(self, size: int) -> bool:
        return self.context is None or size <= self.context


Prepare = Callable[[list[Group], TrainedPolicy], list[Group]]
"""Returns the groups with further rewards, or rollouts that are in no store. Does not change its
argument. Rewards of stored rollouts are committed with the step."""
KEEPS_PROMPTS: set[Prepare] = set()
"""Those that rewrite no prompt, so what a prompt has besides text is not lost."""


def with_call_rewards(
    groups: list[Group], reference: str, values: Mapping[str, float]
) -> list[Group]:
    """The groups with a reward for each call that has a value. reference: "transition:NAME"."""
    scope, name = split_reference(reference)

    def rewarded(rollout: Rollout) -> Rollout:
        more = [
            Reward(value=values[call.id], name=name, scope=scope, target=call.id, source=name)
            for call in rollout.transitions
            if call.id in values
        ]
        return structs.replace(rollout, rewards=[*rollout.rewards, *more])

    return [structs.replace(g, rollouts=list(map(rewarded, g.rollouts))) for g in groups]
