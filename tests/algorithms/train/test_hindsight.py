"""Calls scored with their outcome told, against the learner on prompts written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.presets.catalogue import make
from agentrl.algorithms.presets.zoo.turns import HINDSIGHT
from agentrl.algorithms.train.preprocess import HindsightRewards, Preprocessor
from agentrl.algorithms.train.update import Updater
from agentrl.config import AlgorithmConfig, RunConfig
from agentrl.types import (
    Group,
    Reward,
    Transition,
    float32,
    int32,
)
from tests import factories

QUESTION = {"role": "user", "content": "What is the team of Ada Berg?"}
TOLD = "\n\n(In the end, this attempt was rewarded with 0.5.)"


@pytest.fixture
def hindsight(tiny_llama_dir: Path) -> HindsightRewards:
    model, tokenizer = load_model(str(tiny_llama_dir), "float32", "cpu")
    return HindsightRewards(tokenizer, TorchLearner(model, tokenizer))


def group(hindsight: HindsightRewards, *, told: str = "", rewards: list[Reward]) -> Group:
    """One rollout of two calls, the second in a conversation that goes on."""
    encode = hindsight.tokenizer.encode
    conversations = [[QUESTION], [QUESTION, {"role": "assistant", "content": "?"}, QUESTION]]
    calls = []
    for index, messages in enumerate(conversations):
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        text = text.removesuffix("<|im_end|>\n") + f"{told}<|im_end|>\n<|im_start|>assistant\n"
        calls.append(
            Transition(
                id=str(index), attempt="a", index=index, messages=messages,
                prompt=int32(encode(text, add_special_tokens=False)),
                completion=int32(encode("sales", add_special_tokens=False)),
                logprobs=float32([-1.0] * len(encode("sales", add_special_tokens=False))),
            )
        )  # fmt: skip
    rollout = factories.rollout(attempt="a", calls=calls, rewards=rewards)
    return Group(id="g", run="run", step=0, rollouts=[rollout])


def scores(groups: list[Group]) -> dict[str | None, float]:
    rewards = groups[0].rollouts[0].rewards
    return {reward.target: reward.value for reward in rewards if reward.name == "hindsight"}


def test_calls_are_scored_where_the_prompt_tells_the_outcome(hindsight: HindsightRewards) -> None:
    known = [Reward(value=0.5)]
    found = scores(hindsight.complete([group(hindsight, rewards=known)]))
    batch = build_batch([group(hindsight, told=TOLD, rewards=known)])
    logprobs = hindsight.learner.logprobs(batch)
    for index, name in enumerate(batch.transitions):
        expected = logprobs[batch.token_transition == index].mean()
        assert found[name] == pytest.approx(float(expected), abs=1e-5)
    plain = build_batch([group(hindsight, rewards=known)])
    assert not torch.allclose(hindsight.learner.logprobs(plain), logprobs)


def test_what_cannot_be_told_has_no_score(hindsight: HindsightRewards) -> None:
    assert scores(hindsight.complete([group(hindsight, rewards=[])])) == {}
    whole = group(hindsight, rewards=[Reward(value=0.5)])
    first, second = whole.rollouts[0].transitions
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    for changed in ({"repeats": "x"}, {"messages": image}, {"policy": "judge"}, {"messages": []}):
        calls = [replace(first, **changed), second]
        rollout = replace(whole.rollouts[0], transitions=calls)
        assert set(scores(hindsight.complete([replace(whole, rollouts=[rollout])]))) == {"1"}


def test_hcapo_reads_it(hindsight: HindsightRewards) -> None:
    algo = make("hcapo", {})
    assert HINDSIGHT in algo.rewards
    groups = hindsight.complete([group(hindsight, rewards=[Reward(value=0.5)])])
    batch = build_batch(groups, reward_names=algo.rewards)
    assert not batch.rewards[HINDSIGHT].isnan().any()


def test_a_step_scores_what_its_algorithm_reads(hindsight: HindsightRewards) -> None:
    algo = make("hcapo", {})
    config = RunConfig(algorithm=AlgorithmConfig(preset="hcapo", min_group=1))
    updater = Updater(config, algo, hindsight.learner, preprocessor=Preprocessor((hindsight,)))
    metrics = updater.update(0, [group(hindsight, rewards=[Reward(value=0.5)])])
    assert metrics["reward/transition:hindsight/frac_missing"] == 0.0


def test_a_call_that_fills_the_context_has_no_room_for_the_outcome(
    hindsight: HindsightRewards,
) -> None:
    made = group(hindsight, rewards=[Reward(value=0.5)])
    first, _ = group(hindsight, told=TOLD, rewards=[]).rollouts[0].transitions
    hindsight.context = len(first.prompt) + len(first.completion)
    assert set(scores(hindsight.complete([made]))) == {"0"}
    hindsight.context -= 1
    assert scores(hindsight.complete([made])) == {}
