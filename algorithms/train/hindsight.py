"""Hindsight rewards: how probable each call is to the current policy once it knows the outcome.

The prompt of a call is rendered again with the outcome at its end, and the learner computes the
log-probs of the sampled tokens after it. Nothing is sampled. The rewards are stored with the step
that computed them. Used by HCAPO, arXiv 2603.08754.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isnan

import msgspec
from msgspec.structs import replace

from agentrl.algorithms.data import rewards as columns
from agentrl.algorithms.data.ids import reduce_by
from agentrl.algorithms.data.merge import build_batch, trainable
from agentrl.algorithms.learners.base import Learner
from agentrl.algorithms.model.chat import Chat
from agentrl.algorithms.model.load import Tokenizer
from agentrl.algorithms.model.request_error import RequestError
from agentrl.algorithms.model.text import Codec
from agentrl.algorithms.presets.zoo.turns import HINDSIGHT
from agentrl.types import POLICY, Group, Reward, Rollout, Transition, int32

SCOPE, NAME = columns.split_reference(HINDSIGHT)
TOLD = "\n\n(In the end, this attempt was rewarded with {outcome:g}.)"


@dataclass(slots=True)
class HindsightRewards:
    """Adds hindsight rewards to the calls of a trained policy. context: its length in tokens."""

    tokenizer: Tokenizer
    learner: Learner
    context: int | None = None
    policy: str = POLICY
    _chat: Chat = field(init=False)

    def __post_init__(self) -> None:
        self._chat = Chat(self.tokenizer, Codec(self.tokenizer))

    def complete(self, groups: list[Group]) -> list[Group]:
        """`groups` with a reward `hindsight` for every call: the mean log-prob of its tokens where
        the prompt tells the outcome. Calls of rollouts without an outcome, and those whose last
        message is no text or which do not fit the context then, get none."""
        asked = [
            replace(group, rollouts=[self._told(rollout) for rollout in group.rollouts])
            for group in groups
        ]
        batch = build_batch(asked, policy=self.policy)
        if not batch.n_tokens:
            return groups
        call, n = batch.token_transition, len(batch.transitions)
        total = reduce_by(self.learner.logprobs(batch).cpu(), call, n)
        mean = (total / reduce_by(call >= 0, call, n)).tolist()
        scores = {id: x for id, x in zip(batch.transitions, mean, strict=True) if not isnan(x)}
        return [
            replace(group, rollouts=[_scored(rollout, scores) for rollout in group.rollouts])
            for group in groups
        ]

    def _told(self, rollout: Rollout) -> Rollout:
        """With the outcome at the end of every prompt, and the calls alone that can be told."""
        outcome = rollout.reward()
        calls = [] if isnan(outcome) else list(self._calls(rollout, TOLD.format(outcome=outcome)))
        return replace(rollout, transitions=calls)

    def _calls(self, rollout: Rollout, told: str) -> Iterator[Transition]:
        encode = msgspec.json.encode
        for call in rollout.transitions:
            *before, last = call.messages or [{}]
            if not trainable(call, self.policy) or call.repeats is not None:
                continue
            if not isinstance(last.get("content"), str):
                continue
            messages = encode([*before, {**last, "content": last["content"] + told}])
            try:
                prompt = self._chat.prompt(messages, encode(call.tools or None), encode({}))
            except RequestError:
                continue
            if self.context is None or len(prompt) + len(call.completion) <= self.context:
                yield replace(call, prompt=int32(prompt))


def _scored(rollout: Rollout, scores: dict[str, float]) -> Rollout:
    more = [
        Reward(value=scores[call.id], name=NAME, scope=SCOPE, target=call.id, source=NAME)
        for call in rollout.transitions
        if call.id in scores
    ]
    return replace(rollout, rewards=[*rollout.rewards, *more])
