"""Preprocessing of collected groups before credit: rewards and token ids that only the learning
side can compute are added, and calls longer than the model's context are left out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from agentrl.algorithms.diagnostics.metrics import Metrics, own_calls
from agentrl.algorithms.learners.reward_models import ImplicitTrainer
from agentrl.algorithms.model.chat import tool_names
from agentrl.types import POLICY, Group, Judgement, Rollout, Transition


class Completer(Protocol):
    """Adds data to groups that only the learning side can compute: token ids of inexact calls, or
    rewards of reward models, after the rewards that are there."""

    def complete(self, groups: list[Group]) -> list[Group]: ...


@dataclass(frozen=True, slots=True)
class Preprocessor:
    """Prepares collected groups for credit. `judgements` are the rewards that it added in the
    current step, for the step's commit."""

    completers: tuple[Completer, ...] = ()  # in this order
    trainers: tuple[ImplicitTrainer, ...] = ()  # of reward models that learn what they have scored
    context: int | None = None  # tokens the model can read; longer calls are left out
    policy: str = POLICY  # whose calls are learned from
    judgements: list[Judgement] = field(default_factory=list)  # rewards that completers gave
    decode: Callable[[Sequence[int]], str] | None = None  # none: what prompts say is not looked at

    def process(self, groups: list[Group]) -> tuple[list[Group], Metrics]:
        """The groups ready for credit, and metrics: calls/inexact (before completion),
        calls/too_long, calls/tools_unseen."""
        calls = own_calls(groups, self.policy)
        inexact = sum(not call.exact for call in calls)
        unseen = 0 if self.decode is None else count_unseen_tools(calls, self.decode)
        collected = groups
        for completer in self.completers:
            groups = completer.complete(groups)
        self.judgements[:] = added_rewards(collected, groups)
        learned = {k: v for trainer in self.trainers for k, v in trainer.learn(groups).items()}
        groups, too_long = without_long_calls(groups, self.context, self.policy)
        counts = {
            "calls/inexact": inexact,
            "calls/too_long": too_long,
            "calls/tools_unseen": unseen,
        }
        return groups, {**learned, **counts}


def count_unseen_tools(calls: Iterable[Transition], decode: Callable[[Sequence[int]], str]) -> int:
    """The number of calls with tools whose prompt contains the name of none of them, because the
    chat template renders no tools. Only the first call of each role is decoded."""
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


def added_rewards(collected: list[Group], completed: list[Group]) -> Iterator[Judgement]:
    """The rewards that completion added to the collected rollouts."""
    before = {row.id: len(row.rewards) for group in collected for row in group.rollouts}
    for rollout in (row for group in completed for row in group.rollouts):
        for reward in rollout.rewards[before[rollout.id] :]:
            yield Judgement(rollout=rollout.id, reward=reward)


def without_long_calls(
    groups: list[Group], context: int | None, policy: str = POLICY
) -> tuple[list[Group], int]:
    """The groups, with the policy's calls that exceed the model's context marked as inexact, so
    that they are not trained; and the number of those calls. Nothing else changes."""
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

    def refused(rollout: Rollout) -> Rollout:
        calls = [replace(c, exact=c.exact and c.id not in long) for c in rollout.transitions]
        return replace(rollout, transitions=calls)

    return [replace(g, rollouts=[refused(row) for row in g.rollouts]) for g in groups], len(long)
