"""Retokenization of calls whose token ids are unknown, so that they can be trained.

The policy's chat template and tokenizer usually, but not always, give the tokens that were sampled,
and the learner's log-probs stand in for the sampler's, as if the call were on-policy. Both are
approximations, so this is done only with `algorithm.inexact = "retokenize"`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.learners.base import Learner
from agentrl.algorithms.model.chat import Chat
from agentrl.algorithms.model.load import Tokenizer
from agentrl.algorithms.model.request_error import RequestError
from agentrl.algorithms.model.text import Codec
from agentrl.types import POLICY, Group, Json, Transition, float32, int32


@dataclass(slots=True)
class Retokenizer:
    """Adds token ids to the inexact calls of a trained policy. context: its length in tokens;
    reward_names: the rewards with which even a failed rollout is trained."""

    tokenizer: Tokenizer
    learner: Learner
    context: int | None = None
    reward_names: Sequence[str] = ("outcome",)
    policy: str = POLICY
    _chat: Chat = field(init=False)

    def __post_init__(self) -> None:
        self._chat = Chat(self.tokenizer, Codec(self.tokenizer))

    def complete(self, groups: list[Group]) -> list[Group]:
        """`groups`, with ids and the learner's log-probs for every inexact call that the template
        can render, fits the context and is of a rollout to learn from. The others stay inexact."""
        made = {
            call.id: call
            for old in _calls(groups)
            if not old.exact and old.policy == self.policy
            if (call := self._tokenized(old)) is not None
        }
        if not made:
            return groups
        batch = build_batch(
            [_only(group, made) for group in groups],
            reward_names=self.reward_names,
            policy=self.policy,
        )
        logprobs = self.learner.logprobs(batch).cpu()
        # What repeats another is trained there, so its log-probs are of no use to anybody.
        ready = {id: call for id, call in made.items() if call.repeats is not None}
        for index, id in enumerate(batch.transitions):
            if id in made and id not in ready:
                mine = logprobs[batch.token_transition == index]
                ready[id] = replace(made[id], logprobs=float32(mine.tolist()))
        return [_with(group, ready) for group in groups]

    def _tokenized(self, call: Transition) -> Transition | None:
        """With its token ids and log-probs of 0; None where the template tells no prefix."""
        if call.answer is None or not call.messages:
            return None
        try:
            prompt = self._render(call, call.messages, generation=True)
            whole = self._render(call, [*call.messages, call.answer], generation=False)
        except RequestError:
            return None
        if whole[: len(prompt)] != prompt:
            return None
        completion = self._sampled(whole[len(prompt) :], call.finish)
        if self.context is not None and len(prompt) + len(completion) > self.context:
            return None
        return replace(
            call,
            prompt=int32(prompt),
            completion=int32(completion),
            logprobs=float32([0.0] * len(completion)),
            exact=True,
        )

    def _render(
        self, call: Transition, messages: list[dict[str, Json]], *, generation: bool
    ) -> tuple[int, ...]:
        options = {"add_generation_prompt": generation}
        encode = msgspec.json.encode
        return self._chat.prompt(encode(messages), encode(call.tools or None), encode(options))

    def _sampled(self, tokens: tuple[int, ...], finish: str) -> tuple[int, ...]:
        """Up to the end of the turn, which the policy sampled too unless it was cut short."""
        end = self.tokenizer.eos_token_id
        if end not in tokens:
            return tokens
        return tokens[: tokens.index(end) + (finish not in ("length", "cut"))]


def _calls(groups: list[Group]) -> Iterator[Transition]:
    for group in groups:
        for rollout in group.rollouts:
            yield from rollout.transitions


def _only(group: Group, made: dict[str, Transition]) -> Group:
    """Those calls and no others, which may be longer than the model can read."""
    rollouts = [
        replace(rollout, transitions=[made[c.id] for c in rollout.transitions if c.id in made])
        for rollout in group.rollouts
    ]
    return replace(group, rollouts=rollouts)


def _with(group: Group, made: dict[str, Transition]) -> Group:
    rollouts = [
        replace(rollout, transitions=[made.get(call.id, call) for call in rollout.transitions])
        for rollout in group.rollouts
    ]
    return replace(group, rollouts=rollouts)
