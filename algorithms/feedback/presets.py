"""What users say about answers: a reward of turns, demonstrations beside the policy gradient, and
distillation towards the policy that has seen what the user said."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec
from msgspec import structs
from torch import Tensor

from agentrl import types
from agentrl.algorithms.credit.core import rewards, weighted_sum
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import reduce_by
from agentrl.algorithms.data.merge import build_batch, map_calls, trainable
from agentrl.algorithms.model.chat import RequestError
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.objective.prepare import TrainedPolicy, with_call_rewards
from agentrl.algorithms.preferences.turns import corrections, last_said, reasked, turn_values, turns
from agentrl.algorithms.presets.declare import Cap, Num, modifier
from agentrl.types import Group, Json, Reward, Rollout, Scope, Transition, float32, int32

TURN = f"transition:{types.TURN}"  # the reward that `add_turns` adds


def add_turns(groups: list[Group], policy: TrainedPolicy) -> list[Group]:
    """Add to every call a reward `turn`, the mean of what is said about its turn: a tool call is
    judged by what the user says about the answer that it led to. Calls of turns about which nothing
    is said get none."""
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


TOLD = f"transition:{types.TOLD}"  # the reward that `add_told` adds
CORRECTED = "\n\n(The answer should have been: {text})"
ASKED_AGAIN = "\n\n(The user then said: {text})"


def add_told(groups: list[Group], policy: TrainedPolicy) -> list[Group]:
    """Add to every call of a turn that was corrected, or whose question was asked again, a reward
    `told`: the log-prob of its tokens if the user's message tells what the user said afterwards,
    less that if it does not, both by the policy before the update. Its gradient is minus that of
    KL(policy || policy that was told). Leaves out calls that then exceed the context."""
    told = {call.id: call for g in groups for row in g.rollouts for call in _told(row, policy)}
    if not told:
        return groups
    own = map_calls(groups, lambda call: call if call.id in told else None)
    new = map_calls(own, lambda call: told[call.id])
    plain, after = (_totals(some, policy) for some in (own, new))
    return with_call_rewards(groups, TOLD, {id: after[id] - plain[id] for id in after})


def _totals(groups: list[Group], policy: TrainedPolicy) -> dict[str, float]:
    """The log-prob of each call's completion, by the id of the call."""
    batch = build_batch(groups, reward_names=(), policy=policy.name)
    n = len(batch.transitions)
    total = reduce_by(policy.logprobs(batch).cpu(), batch.token_transition, n)
    return dict(zip(batch.transitions, total.tolist(), strict=True))


def _told(rollout: Rollout, policy: TrainedPolicy) -> Iterator[Transition]:
    """The calls of a rollout with prompts that tell what the user said about them."""
    calls, after = rollout.transitions, dict[int, str]()
    for first, second in reasked(calls, rollout.rewards):
        after[first] = ASKED_AGAIN.format(text=last_said(calls[second]))
    for index, better in corrections(calls, rollout.rewards):
        calls_tools = better.get("tool_calls")
        text = msgspec.json.encode(better).decode() if calls_tools else better.get("content") or ""
        after[index] = CORRECTED.format(text=text)
    for turn in turns(calls):
        text = next((after[index] for index in turn if index in after), "")
        for call in (calls[index] for index in turn if text):
            if trainable(call, policy.name) and call.repeats is None and len(call.completion):
                yield from _with_text(call, text, policy)


def _with_text(call: Transition, text: str, policy: TrainedPolicy) -> Iterator[Transition]:
    at = max((n for n, m in enumerate(call.messages) if m.get("role") == "user"), default=-1)
    content: Json = call.messages[at].get("content") if at >= 0 else None
    if not isinstance(content, str):
        return
    messages = [*call.messages]
    messages[at] = {**messages[at], "content": content + text}
    try:
        prompt = policy.chat.encode(messages, call.tools)
    except RequestError:
        return
    if policy.fits(len(prompt) + len(call.completion)):
        yield structs.replace(call, prompt=int32(prompt))


@dataclass(frozen=True, slots=True)
class ToldCredit:
    """The reward `told` of each token's call, within +- limit, [N]."""

    limit: float
    reward: str = TOLD

    def __call__(self, batch: Batch) -> Tensor:
        return rewards(batch, self.reward).clamp(-self.limit, self.limit)[batch.token_transition]


@modifier("self-distill", prefix="self_distill_")
def with_self_distillation(
    algo: Algo, *, beta: Num = 1.0, limit: Cap = 5.0, reward: str = TOLD
) -> Algo:
    """Adds distillation towards the policy itself after it has seen what the user said: reverse KL
    on the policy's own answers to what was corrected or asked again, no other model. `limit`: of
    the log-ratio of an answer in nats. arXiv 2601.19897, 2306.13649."""
    credit = weighted_sum((algo.credit, 1.0), (ToldCredit(limit, reward), beta))
    return replace(algo, credit=credit, optional=(*algo.optional, reward))
