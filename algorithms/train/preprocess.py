"""Preprocessing of collected groups before credit: adds token ids and rewards that only the
learning side can compute, and drops calls longer than the model's context."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Protocol

from msgspec.structs import replace

from agentrl.algorithms.data.ids import reduce_by
from agentrl.algorithms.data.merge import build_batch, trainable
from agentrl.algorithms.data.rewards import split_reference
from agentrl.algorithms.diagnostics.metrics import Metrics, own_calls
from agentrl.algorithms.learners.base import Learner
from agentrl.algorithms.learners.reward_models import ImplicitTrainer
from agentrl.algorithms.model.chat import Chat, RequestError, tool_names
from agentrl.algorithms.model.load import Tokenizer
from agentrl.algorithms.model.text import Codec
from agentrl.algorithms.objective.sides import MISMATCHED
from agentrl.algorithms.presets.zoo.turns import HINDSIGHT
from agentrl.types import (
    POLICY,
    Group,
    Json,
    Reward,
    Rollout,
    StepReward,
    Transition,
    float32,
    int32,
)

TOLD = "\n\n(In the end, this attempt was rewarded with {outcome:g}.)"


class Completer(Protocol):
    """Adds data to groups that only the learning side can compute: token ids of inexact calls, or
    rewards, after the existing ones."""

    def complete(self, groups: list[Group]) -> list[Group]: ...


@dataclass(frozen=True, slots=True)
class Preprocessor:
    """Prepares collected groups for credit."""

    completers: tuple[Completer, ...] = ()  # in this order
    trainers: tuple[ImplicitTrainer, ...] = ()  # of reward models that learn after scoring
    context: int | None = None  # most tokens that the model can read; longer calls are dropped
    policy: str = POLICY  # whose calls are trained on
    step_rewards: list[StepReward] = field(default_factory=list)  # of completers, to be committed
    decode: Callable[[Sequence[int]], str] | None = None  # None: unseen tools are not counted

    def process(self, groups: list[Group]) -> tuple[list[Group], Metrics]:
        """The groups ready for credit, and metrics: calls/inexact (before completion),
        calls/too_long, calls/tools_unseen, calls/processed."""
        calls = own_calls(groups, self.policy)
        metrics: Metrics = {
            "calls/inexact": sum(not call.exact for call in calls),
            "calls/processed": sum(bool(call.processors) for call in calls),
            "calls/tools_unseen": count_unseen_tools(calls, self.decode) if self.decode else 0,
        }
        before = {row.id: len(row.rewards) for group in groups for row in group.rollouts}
        for completer in self.completers:
            groups = completer.complete(groups)
        self.step_rewards[:] = [
            StepReward(rollout=row.id, reward=reward)
            for group in groups
            for row in group.rollouts
            for reward in row.rewards[before[row.id] :]
        ]
        for trainer in self.trainers:
            metrics |= trainer.learn(groups)
        groups, metrics["calls/too_long"] = without_long_calls(groups, self.context, self.policy)
        return groups, metrics


def count_unseen_tools(calls: Iterable[Transition], decode: Callable[[Sequence[int]], str]) -> int:
    """The number of calls with tools whose prompt contains no tool's name, because the chat
    template renders no tools. Decodes only the first call of each role."""
    seen: dict[str, bool] = {}
    unseen = 0
    for call in calls:
        names = tool_names(call.tools)
        if call.exact and call.prompt and names:
            if call.role not in seen:
                text = decode(call.prompt)
                seen[call.role] = any(name in text for name in names)
            unseen += not seen[call.role]
    return unseen


def without_long_calls(
    groups: list[Group], context: int | None, policy: str = POLICY
) -> tuple[list[Group], int]:
    """Mark the policy's calls that exceed the model's context as inexact, which excludes them from
    training; returns the groups and the number of those calls."""
    long = {
        call.id
        for call in own_calls(groups, policy)
        if context is not None and call.exact and len(call.prompt) + len(call.completion) > context
    }
    if not long:
        return groups, 0
    warnings.warn(
        f"{len(long)} calls are longer than the {context} tokens that the model can read and are "
        "left out; lower sampling.max_tokens or engine.max_context",
        RuntimeWarning,
        stacklevel=2,
    )
    marked = map_calls(groups, lambda c: replace(c, exact=False) if c.id in long else c)
    return marked, len(long)


def map_calls(
    groups: list[Group], change: Callable[[Transition], Transition | None]
) -> list[Group]:
    """Apply `change` to every call of the groups; drops calls for which it returns None."""

    def changed(rollout: Rollout) -> Rollout:
        calls = [new for call in rollout.transitions if (new := change(call)) is not None]
        return replace(rollout, transitions=calls)

    return [replace(group, rollouts=list(map(changed, group.rollouts))) for group in groups]


def with_mismatched(groups: list[Group]) -> list[Group]:
    """Add to each group, for every rollout, one with the completions of the previous rollout, from
    which KTO estimates the KL divergence; unchanged if there are some already."""
    rows = [row for group in groups for row in group.rollouts if row.transitions]
    if any(reward.name == MISMATCHED for row in rows for reward in row.rewards):
        return groups
    added: dict[str, list[Rollout]] = {}
    for i, row in enumerate(rows):
        added.setdefault(row.group, []).append(mismatched_rollout(row, rows[i - 1]))
    return [replace(g, rollouts=[*g.rollouts, *added.get(g.id, [])]) for g in groups]


def mismatched_rollout(row: Rollout, other: Rollout) -> Rollout:
    """The first prompt of `row` with the completions of `other`. Drops calls that do not continue
    their rollout's first prompt."""
    prompt, start = row.transitions[0].prompt, other.transitions[0].prompt
    moved = [
        replace(call, prompt=prompt + call.prompt[len(start) :])
        for call in other.transitions
        if call.prompt[: len(start)] == start
    ]
    mark = [Reward(value=1.0, name=MISMATCHED)]
    return replace(row, id=f"{row.id}~{other.id}", rewards=mark, transitions=moved)


@dataclass(slots=True)
class _PromptCompleter:
    """Renders calls of a trained policy with its chat template and asks the learner for log-probs.
    context: the policy's context length in tokens."""

    tokenizer: Tokenizer
    learner: Learner
    context: int | None = None
    policy: str = POLICY
    _chat: Chat = field(init=False)

    def __post_init__(self) -> None:
        self._chat = Chat(self.tokenizer, Codec(self.tokenizer))

    def _fits(self, size: int) -> bool:
        return self.context is None or size <= self.context


@dataclass(slots=True)
class ProcessedScorer:
    """Replaces the sampler's log-probs of calls with `Transition.processors` by the learner's, as
    if the call were on-policy: a ratio to log-probs of another distribution would be meaningless.
    context: the policy's context length in tokens. reward_names: as in `Retokenizer`."""

    learner: Learner
    context: int | None = None
    policy: str = POLICY
    reward_names: Sequence[str] = ("outcome",)

    def complete(self, groups: list[Group]) -> list[Group]:
        """Score every call with processors that is trained."""
        found = {
            call.id: call
            for call in own_calls(groups, self.policy)
            if call.processors and trainable(call, self.policy)
            if self.context is None or len(call.prompt) + len(call.completion) <= self.context
        }
        if not found:
            return groups
        return _scored(groups, found, self.learner, self.reward_names, self.policy)


def _scored(
    groups: list[Group],
    calls: Mapping[str, Transition],
    learner: Learner,
    reward_names: Sequence[str],
    policy: str,
) -> list[Group]:
    """The groups with `calls`, by id, in the place of their own, if they are trained. Their
    log-probs are the learner's."""
    # Without other calls, which may be longer than the model can read.
    batch = build_batch(
        map_calls(groups, lambda call: calls.get(call.id)), reward_names=reward_names, policy=policy
    )
    logprobs = learner.logprobs(batch).cpu()
    # A call that repeats another is not trained, so it needs no log-probs.
    ready = {id: call for id, call in calls.items() if call.repeats is not None}
    for index, id in enumerate(batch.transitions):
        if id not in ready:
            own = logprobs[batch.token_transition == index]
            ready[id] = replace(calls[id], logprobs=float32(own.tolist()))
    return map_calls(groups, lambda call: ready.get(call.id, call))


@dataclass(slots=True)
class Retokenizer(_PromptCompleter):
    """Adds token ids to the inexact calls of a trained policy, which makes them trainable.

    The policy's chat template and tokenizer usually, but not always, reproduce the sampled tokens,
    and the learner's log-probs replace the sampler's, as if the call were on-policy. Both are
    approximations, so `algorithm.inexact = "retokenize"` must be set. reward_names: the rewards
    with which even a failed rollout is trained."""

    reward_names: Sequence[str] = ("outcome",)

    def complete(self, groups: list[Group]) -> list[Group]:
        """Add ids and the learner's log-probs to every inexact call that the template can render,
        that fits the context and whose rollout is trained. The others stay inexact."""
        tokenized = {
            call.id: call
            for group in groups
            for rollout in group.rollouts
            for old in rollout.transitions
            if not old.exact and old.policy == self.policy
            if (call := self.tokenized(old)) is not None
        }
        if not tokenized:
            return groups
        return _scored(groups, tokenized, self.learner, self.reward_names, self.policy)

    def tokenized(self, call: Transition) -> Transition | None:
        """The call with token ids and log-probs of 0; None if they cannot be found."""
        if call.answer is None or not call.messages:
            return None
        try:
            prompt = self._chat.encode(call.messages, call.tools, add_generation_prompt=True)
            messages: list[dict[str, Json]] = [*call.messages, call.answer]
            whole = self._chat.encode(messages, call.tools, add_generation_prompt=False)
        except RequestError:
            return None
        completion, end = whole[len(prompt) :], self.tokenizer.eos_token_id
        if end in completion:  # the policy sampled it, unless the call was cut short
            ended = call.finish not in ("length", "cut")
            completion = completion[: completion.index(end) + ended]
        if whole[: len(prompt)] != prompt or not self._fits(len(prompt) + len(completion)):
            return None
        return replace(
            call,
            prompt=int32(prompt),
            completion=int32(completion),
            logprobs=float32([0.0] * len(completion)),
            exact=True,
        )


@dataclass(slots=True)
class HindsightRewards(_PromptCompleter):
    """Hindsight rewards: the log-prob of each call if its prompt tells the outcome.

    The prompt is rendered again with the outcome at its end, and the learner computes the log-probs
    of the sampled tokens after it. Samples nothing. HCAPO, arXiv 2603.08754."""

    def complete(self, groups: list[Group]) -> list[Group]:
        """Add to every call a reward `hindsight`, the mean log-prob of its tokens if its prompt
        tells the outcome. Excludes calls of rollouts without an outcome, calls whose last message
        is not text, and those that then exceed the context."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        told = {call.id: call for rollout in rollouts for call in self._told(rollout)}
        batch = build_batch(map_calls(groups, lambda c: told.get(c.id)), policy=self.policy)
        if not batch.n_tokens:
            return groups
        call, n = batch.token_transition, len(batch.transitions)
        total = reduce_by(self.learner.logprobs(batch).cpu(), call, n)
        mean = (total / reduce_by(call >= 0, call, n)).tolist()
        scores = {id: x for id, x in zip(batch.transitions, mean, strict=True) if not isnan(x)}
        scope, name = split_reference(HINDSIGHT)

        def scored(rollout: Rollout) -> Rollout:
            more = [
                Reward(value=scores[call.id], name=name, scope=scope, target=call.id, source=name)
                for call in rollout.transitions
                if call.id in scores
            ]
            return replace(rollout, rewards=[*rollout.rewards, *more])

        return [replace(group, rollouts=list(map(scored, group.rollouts))) for group in groups]

    def _told(self, rollout: Rollout) -> Iterator[Transition]:
        """The calls of a rollout with prompts that tell its outcome, where that is possible."""
        outcome = rollout.reward()
        for call in [] if isnan(outcome) else rollout.transitions:
            *before, last = call.messages or [{}]
            if not trainable(call, self.policy) or call.repeats is not None:
                continue
            if not isinstance(last.get("content"), str):
                continue
            text = last["content"] + TOLD.format(outcome=outcome)
            try:
                prompt = self._chat.encode([*before, {**last, "content": text}], call.tools)
            except RequestError:
                continue
            if self._fits(len(prompt) + len(call.completion)):
                yield replace(call, prompt=int32(prompt))
