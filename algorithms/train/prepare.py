"""Prepares collected groups for credit: adds token ids and rewards that only the learning side can
compute, drops calls longer than the model's context, and runs the algorithm's own preparations. The
critic and other models score the resulting batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from msgspec import structs
from torch import Tensor

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.merge import (
    build_batch,
    check_rewards,
    map_calls,
    own_calls,
    trainable,
)
from agentrl.algorithms.learners.base import Learner, ReferenceElsewhere, Teacher
from agentrl.algorithms.model.chat import Chat, Codec, RequestError, Tokenizer, tool_names
from agentrl.algorithms.model.scaled import Inputs
from agentrl.algorithms.objective.core import (
    Algo,
    PrivilegedPrompts,
    TopKDistillation,
    old_policy_share,
)
from agentrl.algorithms.objective.prepare import TrainedPolicy
from agentrl.algorithms.objective.ratios import GivenLogProbs
from agentrl.algorithms.train.metrics import Metrics
from agentrl.core.types import POLICY, Group, Json, StepReward, Transition, float32, int32


class Completer(Protocol):
    """Adds data to groups that only the learning side can compute: log-probs of processed calls, or
    rewards, after the existing ones."""

    def complete(self, groups: list[Group]) -> list[Group]: ...


class GroupLearner(Protocol):
    """Learns from the complete groups of a step, before the policy does."""

    def learn(self, groups: Sequence[Group]) -> Metrics: ...


@dataclass(frozen=True, slots=True)
class PreparedGroups:
    """Groups ready for credit."""

    groups: list[Group]
    # Groups for `Preprocessor.learn`, with calls that are left out of training.
    complete: list[Group]
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class Preprocessor:
    """Prepares collected groups for credit."""

    completers: tuple[Completer, ...] = ()  # in this order
    # Trainers of auxiliary models, which learn from complete groups.
    trainers: tuple[GroupLearner, ...] = ()
    context: int | None = None  # maximum tokens of the model; longer calls are dropped
    policy: str = POLICY  # the policy whose calls are trained
    step_rewards: list[StepReward] = field(default_factory=list)  # added, to be committed
    tokenizer: Tokenizer | None = None  # None: unseen tools are not counted

    def prepare(
        self, groups: list[Group], algo: Algo, trained: TrainedPolicy, step: int
    ) -> PreparedGroups:
        """The groups ready for the algorithm's credit. step: counted from 1, for errors.
        Raises TrainingError for a reward that it reads and no rollout has."""
        stored = {
            rollout.id: len(rollout.rewards) for group in groups for rollout in group.rollouts
        }
        complete, metrics = self.process(groups)
        groups, metrics["calls/too_long"] = without_long_calls(complete, self.context, self.policy)
        for change in algo.prepare:
            groups = change(groups, trained)
        self.step_rewards[:] = [
            StepReward(rollout=rollout.id, reward=reward)
            for group in groups
            for rollout in group.rollouts
            if rollout.id in stored
            for reward in rollout.rewards[stored[rollout.id] :]
        ]
        check_rewards(groups, [name for name in algo.rewards if name not in algo.optional], step)
        return PreparedGroups(groups, complete, metrics)

    def process(self, groups: list[Group]) -> tuple[list[Group], Metrics]:
        """The complete groups, and metrics: calls/inexact (as they came), calls/tools_unseen,
        calls/processed."""
        calls, tokenizer = own_calls(groups, self.policy), self.tokenizer
        metrics: Metrics = {
            "calls/inexact": sum(not call.exact for call in calls),
            "calls/processed": sum(bool(call.processors) for call in calls),
            "calls/tools_unseen": count_unseen_tools(calls, tokenizer.decode) if tokenizer else 0,
        }
        for completer in self.completers:
            groups = completer.complete(groups)
        return groups, metrics

    def learn(self, groups: list[Group]) -> Metrics:
        """Train auxiliary models on the complete groups of a step."""
        return {name: x for trainer in self.trainers for name, x in trainer.learn(groups).items()}


def count_unseen_tools(calls: Iterable[Transition], decode: Callable[[Sequence[int]], str]) -> int:
    """The number of calls with tools whose prompt contains no tool's name, because the chat
    template renders no tools. Decodes only the first call of each role."""
    role_sees_tools: dict[str, bool] = {}
    unseen = 0
    for call in calls:
        names = tool_names(call.tools) if call.tools else []
        if call.exact and call.prompt and names:
            if call.role not in role_sees_tools:
                text = decode(call.prompt)
                role_sees_tools[call.role] = any(name in text for name in names)
            unseen += not role_sees_tools[call.role]
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
    marked = map_calls(groups, lambda c: structs.replace(c, exact=False) if c.id in long else c)
    return marked, len(long)


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
        processed = {
            call.id: call
            for call in own_calls(groups, self.policy)
            if call.processors and trainable(call, self.policy)
            if self.context is None or len(call.prompt) + len(call.completion) <= self.context
        }
        if not processed:
            return groups
        return _scored(groups, processed, self.learner, self.reward_names, self.policy)


def _scored(
    groups: list[Group],
    calls: Mapping[str, Transition],
    learner: Learner,
    reward_names: Sequence[str],
    policy: str,
) -> list[Group]:
    """The groups with calls replaced by `calls` (by id), if they are trained, with the learner's
    log-probs."""
    # Other calls are left out, because they may be longer than the model's context.
    batch = build_batch(
        map_calls(groups, lambda call: calls.get(call.id)), reward_names=reward_names, policy=policy
    )
    logprobs = learner.logprobs(batch).cpu()
    # A call that repeats another is not trained, so it needs no log-probs.
    ready = {id: call for id, call in calls.items() if call.repeats is not None}
    for index, id in enumerate(batch.transitions):
        if id not in ready:
            of_call = logprobs[batch.token_transition == index]
            ready[id] = structs.replace(calls[id], logprobs=float32(of_call.tolist()))
    return map_calls(groups, lambda call: ready.get(call.id, call))


@dataclass(slots=True)
class Retokenizer:
    """Adds token ids to the calls of a data set that have none.

    The policy's chat template and tokenizer usually, but not always, reproduce the sampled tokens,
    and the learner's log-probs replace the sampler's, as if the call were on-policy. Both are
    approximations, so calls of rollouts are never trained in this way. reward_names: the
    rewards with which even a failed rollout is trained. context: as in `ProcessedScorer`."""

    tokenizer: Tokenizer
    learner: Learner
    context: int | None = None
    policy: str = POLICY
    reward_names: Sequence[str] = ("outcome",)
    inputs: Inputs | None = None  # reader of images, for an image-text model
    _chat: Chat = field(init=False)

    def __post_init__(self) -> None:
        codec = Codec(self.tokenizer)
        self._chat = (self.inputs.chat if self.inputs else Chat)(self.tokenizer, codec)

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
        """The call with token ids and log-probs of 0; None if the ids cannot be determined."""
        if call.answer is None or not call.messages:
            return None
        try:
            prompt = self._chat.encode(call.messages, call.tools, add_generation_prompt=True)
            messages: list[dict[str, Json]] = [*call.messages, call.answer]
            conversation = self._chat.encode(messages, call.tools, add_generation_prompt=False)
        except RequestError:
            return None
        completion, end = conversation[len(prompt) :], self.tokenizer.eos_token_id
        if end in completion:  # the policy sampled the end token, unless the call was truncated
            ended = call.finish not in ("length", "cut")
            completion = completion[: completion.index(end) + ended]
        size = len(prompt) + len(completion)
        if conversation[: len(prompt)] != prompt or (
            self.context is not None and size > self.context
        ):
            return None
        return structs.replace(
            call,
            prompt=int32(prompt),
            completion=int32(completion),
            logprobs=float32([0.0] * len(completion)),
            exact=True,
        )


# -- scores of a batch -----------------------------------------------------------------------------


class ScoredBatch(NamedTuple):
    """A batch with `values`, `reference` and the `topk_tokens` of a distillation over several
    tokens; and the log-probs of other models, float64."""

    batch: Batch
    given: GivenLogProbs


@dataclass(frozen=True)
class BatchScorer:
    """Adds values of the critic and log-probs of other models, which credit and loss read, to a
    batch."""

    learner: Learner
    trained: TrainedPolicy
    reference: ReferenceElsewhere | None  # None: the learner's
    teacher: Teacher | None  # None: the learner's

    def score(
        self,
        algo: Algo,
        batch: Batch,
        version: int | None,
        groups: list[Group],
    ) -> ScoredBatch:
        """The critic's values and the log-probs of other models that the algorithm reads. version:
        the policy's, if it is about to be trained. groups: of the batch, for an algorithm that puts
        privileged text of the groups into prompts."""
        learner, teacher, logprobs = self.learner, self.teacher, GivenLogProbs()
        if "reference" in algo.needs:
            elsewhere = self.reference
            reference = elsewhere(batch) if elsewhere else learner.logprobs(batch, "reference")
            batch = replace(batch, reference=reference.double())
            logprobs = replace(logprobs, reference=batch.reference)
        telling = algo.telling
        if telling is not None and telling.by_token and batch.n_tokens:
            gap = telling.token_gap(batch, groups, self.trained)
            batch = replace(batch, told=gap)
        if algo.distill is not None and algo.distill.told and telling is not None:
            batch, told_logprobs = self.told_topk(algo.distill, telling, batch, groups)
            logprobs = replace(logprobs, teacher_candidates=told_logprobs)
        elif algo.distill is not None and batch.n_tokens:
            taught = teacher.top(batch) if teacher else _taught(algo.distill, learner, batch)
            batch = replace(batch, topk_tokens=taught[0])
            first = taught[1][:, 0].double()
            logprobs = replace(logprobs, teacher=first, teacher_candidates=taught[1])
        elif "teacher" in algo.needs:
            of_teacher = (
                teacher.top(batch)[1][:, 0] if teacher else learner.logprobs(batch, "teacher")
            )
            logprobs = replace(logprobs, teacher=of_teacher.double())
        if algo.reads_critic:
            batch = replace(batch, values=learner.values(batch))
        if version is not None and algo.old_from_versions:
            logprobs = replace(logprobs, weight_of_current=old_policy_share(batch.lag(version)))
        return ScoredBatch(batch, logprobs)

    def told_topk(
        self,
        distill: TopKDistillation,
        telling: PrivilegedPrompts,
        batch: Batch,
        groups: list[Group],
    ) -> tuple[Batch, Tensor]:
        """The batch with `topk_tokens`, and their log-probs [N, K] by the policy given the
        privileged text; NaN for tokens without it."""
        if not batch.n_tokens:
            return batch, torch.empty(0, distill.k)
        told, at, told_at = telling.told(batch, groups, self.trained)
        sampled = torch.cat([row.tokens[row.actions] for row in batch.rows])[:, None]
        if not told.n_tokens:
            return replace(batch, topk_tokens=sampled), torch.full(sampled.shape, torch.nan)
        if distill.of == "teacher":
            ids, logprobs = self.learner.top(told, distill.k, telling.teacher)
            # Without privileged text these have no weight.
            topk_tokens = sampled.repeat(1, ids.shape[1])
            topk_tokens[at] = ids[told_at]
        else:
            topk_tokens, _ = self.learner.top(batch, distill.k)
            asked_tokens = torch.zeros((told.n_tokens, topk_tokens.shape[1]), dtype=torch.int64)
            asked_tokens[told_at] = topk_tokens[at]
            told = replace(told, topk_tokens=asked_tokens)
            logprobs = self.learner.topk_logprobs(told, telling.teacher)
        aligned = logprobs.new_full(topk_tokens.shape, torch.nan)
        aligned[at] = logprobs[told_at]
        return replace(batch, topk_tokens=topk_tokens), aligned


def _taught(distill: TopKDistillation, learner: Learner, batch: Batch) -> tuple[Tensor, Tensor]:
    """The tokens [N, K] on which teacher and policy are compared, and the teacher's log-probs."""
    if distill.of == "teacher":
        return learner.top(batch, distill.k, "teacher")
    topk_tokens, _ = learner.top(batch, distill.k)
    return topk_tokens, learner.topk_logprobs(replace(batch, topk_tokens=topk_tokens), "teacher")
