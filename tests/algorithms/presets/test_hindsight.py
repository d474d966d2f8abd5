"""Calls scored with their outcome told, against the learner on prompts written by hand."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from agentrl.algorithms.credit.calls import CallRewards
from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.objective.prepare import TrainedPolicy
from agentrl.algorithms.presets.process import HINDSIGHT, HindsightReturns, add_hindsight
from agentrl.algorithms.presets.registry import make
from agentrl.algorithms.train.prepare import Preprocessor
from agentrl.algorithms.train.step import Updater
from agentrl.core.config import AlgorithmConfig, RunConfig
from agentrl.core.types import Group, Reward
from tests import factories
from tests.algorithms.credit.test_calls import near
from tests.algorithms.worlds import Call, Play, world

QUESTION = {"role": "user", "content": "What is the team of Ada Berg?"}
TOLD = "\n\n(In the end, this attempt was rewarded with 0.5.)"


@pytest.fixture(scope="module")
def learner(tiny_llama_dir: Path) -> TorchLearner:
    return TorchLearner(*load_model(str(tiny_llama_dir), "float32", "cpu"))


@pytest.fixture(scope="module")
def policy(tiny_llama_dir: Path, learner: TorchLearner) -> TrainedPolicy:
    return TrainedPolicy(learner.logprobs, load_model(str(tiny_llama_dir), "float32", "cpu")[1])


def group(policy: TrainedPolicy, *, told: str = "", rewards: list[Reward]) -> Group:
    """One rollout of two calls, the second in a conversation that goes on."""
    assert policy.tokenizer
    encode = policy.tokenizer.encode
    conversations = [[QUESTION], [QUESTION, {"role": "assistant", "content": "?"}, QUESTION]]
    calls = []
    for index, messages in enumerate(conversations):
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        text = text.removesuffix("<|im_end|>\n") + f"{told}<|im_end|>\n<|im_start|>assistant\n"
        calls.append(
            factories.call(
                str(index),
                encode(text, add_special_tokens=False),
                encode("sales", add_special_tokens=False),
                index=index,
                messages=messages,
            )
        )
    rollout = factories.rollout(attempt="a", calls=calls, rewards=rewards)
    return factories.group(rollout)


def scores(groups: list[Group]) -> dict[str | None, float]:
    rewards = groups[0].rollouts[0].rewards
    return {reward.target: reward.value for reward in rewards if reward.name == "hindsight"}


def test_calls_are_scored_where_the_prompt_tells_the_outcome(policy: TrainedPolicy) -> None:
    known = [Reward(value=0.5)]
    found = scores(add_hindsight([group(policy, rewards=known)], policy))
    batch = build_batch([group(policy, told=TOLD, rewards=known)])
    logprobs = policy.logprobs(batch)
    for index, name in enumerate(batch.transitions):
        expected = logprobs[batch.token_transition == index].mean()
        assert found[name] == pytest.approx(float(expected), abs=1e-5)
    plain = build_batch([group(policy, rewards=known)])
    assert not torch.allclose(policy.logprobs(plain), logprobs)


def test_what_cannot_be_told_has_no_score(policy: TrainedPolicy) -> None:
    assert scores(add_hindsight([group(policy, rewards=[])], policy)) == {}
    whole = group(policy, rewards=[Reward(value=0.5)])
    first, second = whole.rollouts[0].transitions
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    for changed in ({"repeats": "x"}, {"messages": image}, {"policy": "judge"}, {"messages": []}):
        calls = [replace(first, **changed), second]
        rollout = replace(whole.rollouts[0], transitions=calls)
        assert set(scores(add_hindsight([replace(whole, rollouts=[rollout])], policy))) == {"1"}


def test_hcapo_reads_it(policy: TrainedPolicy) -> None:
    algo = make("hcapo", {})
    assert HINDSIGHT in algo.rewards
    groups = add_hindsight([group(policy, rewards=[Reward(value=0.5)])], policy)
    batch = build_batch(groups, reward_names=algo.rewards)
    assert not batch.rewards[HINDSIGHT].isnan().any()


def test_a_step_scores_what_its_algorithm_reads(
    learner: TorchLearner, policy: TrainedPolicy
) -> None:
    algo = make("hcapo", {})
    config = RunConfig(algorithm=AlgorithmConfig(preset="hcapo", group_size=1))
    updater = Updater(config, algo, learner, preprocessor=Preprocessor(tokenizer=policy.tokenizer))
    metrics = updater.update(0, [group(policy, rewards=[Reward(value=0.5)])])
    assert metrics["reward/transition:hindsight/frac_missing"] == 0.0


def test_a_full_context_has_no_room_for_the_outcome(policy: TrainedPolicy) -> None:
    made = group(policy, rewards=[Reward(value=0.5)])
    first, _ = group(policy, told=TOLD, rewards=[]).rollouts[0].transitions
    size = len(first.prompt) + len(first.completion)
    whole, short = (dataclasses.replace(policy, context=most) for most in (size, size - 1))
    assert set(scores(add_hindsight([made], whole))) == {"0"}
    assert scores(add_hindsight([made], short)) == {}


def test_whatever_reads_the_reward_brings_what_computes_it() -> None:
    """A preset outside the library that reads it needs no word in the training loop."""
    assert make("hcapo", {}).prepare == make("grpo+hcapo", {}).prepare == (add_hindsight,)
    assert make("gigpo", {"reward": HINDSIGHT}).prepare == (add_hindsight,)
    assert make("grpo", {}).prepare == ()


def test_hindsight() -> None:
    """D14: the second call looks less probable in hindsight, .7 of the mean, which counts .8."""
    looks = [math.log(1.3) * 5, math.log(0.7) * 5]
    calls = [Call(rewards={"h": look}) for look in looks]
    batch = world(Play(calls, outcome=1.0))
    near(HindsightReturns(CallRewards("transition:h"), gamma=0.5)(batch), [0.5 * 1.2, 0.8])
    lost = world(Play([*calls, Call()], outcome=1.0))
    near(HindsightReturns(CallRewards("transition:h"), gamma=1.0)(lost), [1.2, 0.8, 1.0])
