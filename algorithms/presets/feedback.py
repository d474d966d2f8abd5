"""Learning from what users write about answers: a reward of turns, and demonstrations in addition
to the policy gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace

from msgspec import structs
from torch import Tensor

from agentrl.algorithms.credit.core import rewards, weighted_sum
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.merge import build_batch, map_calls, trainable
from agentrl.algorithms.model.chat import RequestError
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.objective.prepare import TrainedPolicy, with_call_rewards
from agentrl.algorithms.preferences.turns import (
    corrections,
    reasked,
    turn_values,
    turns,
)
from agentrl.algorithms.presets.declare import Num, modifier
from agentrl.core import types
from agentrl.core.types import Group, Json, Reward, Rollout, Scope, Transition, float32, int32

TURN = f"transition:{types.TURN}"  # the reward that `add_turns` adds


def add_turns(groups: list[Group], policy: TrainedPolicy) -> list[Group]:
    """Add to every call a reward `turn`, the value of its turn (`turn_values`): a tool call is
    judged by what the user says about the answer that it led to. Calls of turns without a value get
    none."""
    rollouts = (rollout for group in groups for rollout in group.rollouts)
    values = {id: value for rollout in rollouts for id, value in _by_call(rollout)}
    return with_call_rewards(groups, TURN, values)


def _by_call(rollout: Rollout) -> Iterator[tuple[str, float]]:
    calls = rollout.transitions
    for turn, value in zip(turns(calls), turn_values(calls, rollout.rewards), strict=True):
        if value is not None:
            yield from ((calls[index].id, value) for index in turn)


log = logging.getLogger("agentrl.algorithm")
SHOWN = "transition:demonstrated"  # the reward of a demonstration's call


@dataclass(frozen=True, slots=True)
class Demonstrated:
    """1 at the tokens of demonstrations, missing elsewhere, [N]. The 1 is the weight of a token,
    psi, as in supervised fine-tuning."""

    reward: str = SHOWN

    def __call__(self, batch: Batch) -> Tensor:
        return rewards(batch, self.reward)[batch.token_transition]


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """Adds to each group a rollout for each answer that a user wanted: a correction, and with
    `asked_again`, where the user had to repeat a question, the second answer in place of the first.
    The log-probs of its tokens are the policy's before the update; it has no outcome."""

    asked_again: bool = True

    def __call__(self, groups: list[Group], policy: TrainedPolicy) -> list[Group]:
        shown = [[d for r in g.rollouts for d in self.of(r, policy)] for g in groups]
        added = [structs.replace(g, rollouts=s) for g, s in zip(groups, shown, strict=True)]
        added = scored(added, policy)
        return [
            structs.replace(g, rollouts=[*g.rollouts, *more.rollouts])
            for g, more in zip(groups, added, strict=True)
        ]

    def of(self, rollout: Rollout, policy: TrainedPolicy) -> Iterator[Rollout]:
        calls = rollout.transitions
        demonstrated = {index: corrected(calls[index], answer, policy)
                 for index, answer in corrections(calls, rollout.rewards)}  # fmt: skip
        for first, second in reasked(calls, rollout.rewards) if self.asked_again else ():
            demonstrated.setdefault(first, answered_as(calls[first], calls[second], policy))
        for index, call in demonstrated.items():
            if call is not None:
                yield _demonstration(rollout, call, index)


def answered_as(first: Transition, second: Transition, policy: TrainedPolicy) -> Transition | None:
    """The first call with the answer of the second; None if it cannot be trained."""
    call = structs.replace(first, completion=second.completion, answer=second.answer, finish="stop")
    usable = trainable(first, policy.name) and trainable(second, policy.name)
    return call if usable and policy.fits(len(call.prompt) + len(call.completion)) else None


def corrected(
    call: Transition, message: dict[str, Json], policy: TrainedPolicy
) -> Transition | None:
    """The call with `message` as its answer; None if it cannot be trained, or the chat template
    does not render the answer after the call's prompt."""
    if not trainable(call, policy.name) or policy.tokenizer is None:
        return None
    try:
        prompt = policy.chat.encode(call.messages, call.tools)
        messages = [*call.messages, message]
        conversation = policy.chat.encode(messages, call.tools, add_generation_prompt=False)
    except RequestError:
        return None
    answer, end = list(conversation[len(prompt) :]), policy.tokenizer.eos_token_id
    if conversation[: len(prompt)] != prompt or not policy.fits(len(call.prompt) + len(answer)):
        return None
    answer = answer[: answer.index(end) + 1] if end in answer else answer
    return structs.replace(call, completion=int32(answer), answer=message, finish="stop")


def _demonstration(rollout: Rollout, call: Transition, index: int) -> Rollout:
    id = f"{rollout.id}/shown/{index}"
    call = structs.replace(
        call, id=id, version=None, spans=[], logprobs=float32([0.0] * len(call.completion))
    )
    _, _, name = SHOWN.rpartition(":")
    mark = Reward(value=1.0, name=name, scope=Scope.TRANSITION, target=id, source=name)
    return structs.replace(rollout, id=id, rewards=[mark], transitions=[call])


def scored(groups: list[Group], policy: TrainedPolicy) -> list[Group]:
    """The groups with the policy's log-probs in place of the calls' own."""
    batch = build_batch(groups, reward_names=(), policy=policy.name)
    if not batch.n_tokens:
        return groups
    logprobs = policy.logprobs(batch).cpu()
    by_call = {
        id: float32(logprobs[batch.token_transition == index].tolist())
        for index, id in enumerate(batch.transitions)
    }
    return map_calls(groups, lambda call: structs.replace(call, logprobs=by_call[call.id]))


@modifier("corrections", prefix="corrections_")
def with_corrections(algo: Algo, *, weight: Num = 1.0, asked_again: bool = True) -> Algo:
    """Adds imitation of the answers that users wanted to the host's policy gradient: corrections
    and, where a user had to repeat a question, the second answer in place of the first. weight: of
    a demonstrated token, in units of advantage. As DAPG, arXiv 1709.10087."""
    return replace(
        algo,
        credit=weighted_sum((algo.credit, 1.0), (Demonstrated(), weight)),
        optional=(*algo.optional, SHOWN),
        prepare=(*algo.prepare, Demonstrations(asked_again)),
    )
