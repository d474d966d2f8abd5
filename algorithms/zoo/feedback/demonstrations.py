"""Answers that users asked for, as demonstrations beside the policy gradient."""

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
from agentrl.algorithms.objective.prepare import TrainedPolicy
from agentrl.algorithms.preferences.turns import corrections, reasked
from agentrl.algorithms.presets.declare import Num, modifier
from agentrl.types import Group, Json, Reward, Rollout, Scope, Transition, float32, int32

log = logging.getLogger("agentrl.algorithm")
SHOWN = "transition:demonstrated"  # the reward of a demonstration's call


@dataclass(frozen=True, slots=True)
class Demonstrated:
    """1 at the tokens of demonstrations, missing elsewhere, [N]: there psi is the token's weight,
    as in supervised fine-tuning."""

    reward: str = SHOWN

    def __call__(self, batch: Batch) -> Tensor:
        return rewards(batch, self.reward)[batch.token_transition]


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """Adds to each group a rollout for each answer that its user asked for: a correction, and with
    `asked_again` the answer to a question that had to be asked again, in the place of the first.
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
        found = {index: corrected(calls[index], said, policy)
                 for index, said in corrections(calls, rollout.rewards)}  # fmt: skip
        for first, second in reasked(calls, rollout.rewards) if self.asked_again else ():
            found.setdefault(first, answered_as(calls[first], calls[second], policy))
        for index, call in found.items():
            if call is not None:
                yield _demonstration(rollout, call, index)


def answered_as(first: Transition, second: Transition, policy: TrainedPolicy) -> Transition | None:
    """The first call with the answer of the second; None if it cannot be trained."""
    call = structs.replace(first, completion=second.completion, answer=second.answer, finish="stop")
    usable = trainable(first, policy.name) and trainable(second, policy.name)
    return call if usable and policy.fits(len(call.prompt) + len(call.completion)) else None


def corrected(call: Transition, said: dict[str, Json], policy: TrainedPolicy) -> Transition | None:
    """The call with the message `said` as its answer; None if it cannot be trained, or the chat
    template renders the answer in another place than after the call's prompt."""
    if not trainable(call, policy.name) or policy.tokenizer is None:
        return None
    try:
        before = policy.chat.encode(call.messages, call.tools)
        whole = policy.chat.encode([*call.messages, said], call.tools, add_generation_prompt=False)
    except RequestError:
        return None
    answer, end = list(whole[len(before) :]), policy.tokenizer.eos_token_id
    if whole[: len(before)] != before or not policy.fits(len(call.prompt) + len(answer)):
        return None
    answer = answer[: answer.index(end) + 1] if end in answer else answer
    return structs.replace(call, completion=int32(answer), answer=said, finish="stop")


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
    own = {
        id: float32(logprobs[batch.token_transition == index].tolist())
        for index, id in enumerate(batch.transitions)
    }
    return map_calls(groups, lambda call: structs.replace(call, logprobs=own[call.id]))


@modifier("corrections", prefix="corrections_")
def with_corrections(
    algo: Algo, *, weight: Num = 1.0, asked_again: bool = True, reward: str = SHOWN
) -> Algo:
    """Adds the imitation of answers that users asked for to the host's policy gradient:
    corrections, and answers to questions that were asked again, in the place of the first answer.
    weight: of a demonstrated token, in units of advantage. reward: marks calls of demonstrations;
    the default is added. As DAPG, arXiv 1709.10087."""
    credit = weighted_sum((algo.credit, 1.0), (Demonstrated(reward), weight))
    adding = (Demonstrations(asked_again),) if reward == SHOWN else ()
    return replace(
        algo,
        credit=credit,
        optional=(*algo.optional, reward),
        prepare=(*algo.prepare, *adding),
    )
