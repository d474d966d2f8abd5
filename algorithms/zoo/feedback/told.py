"""Distillation towards the policy that has seen what the user said about its answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec
from msgspec import structs
from torch import Tensor

from agentrl.algorithms.credit.core import rewards, weighted_sum
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import reduce_by
from agentrl.algorithms.data.merge import build_batch, map_calls, trainable
from agentrl.algorithms.model.chat import RequestError
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.objective.prepare import TrainedPolicy, with_call_rewards
from agentrl.algorithms.preferences.turns import corrections, last_said, reasked, turns
from agentrl.algorithms.presets.declare import Cap, Num, modifier
from agentrl.types import Group, Json, Rollout, Transition, int32

TOLD = "transition:told"  # the reward that `add_told` adds
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
