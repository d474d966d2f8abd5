"""Inexact calls against what the template renders and what the learner says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.train.prepare import Retokenizer
from agentrl.core.types import Group, Reward, RolloutState, Sampling, Transition, float32, int32
from tests import factories

QUESTION = {"role": "user", "content": "What is the team of Ada Berg?"}


def inexact(id: str, **more: object) -> Transition:
    call = factories.call(
        id,
        (),
        (),
        sampling=Sampling(temperature=0.7),
        exact=False,
        messages=[QUESTION],
        answer={"role": "assistant", "content": "sales"},
    )
    return replace(call, **more)


def group(*calls: Transition) -> Group:
    return factories.group(factories.rollout(attempt="a", calls=calls, rewards=[Reward(value=1.0)]))


@pytest.fixture
def retokenizer(tiny_llama_dir: Path) -> Retokenizer:
    model, tokenizer = load_model(str(tiny_llama_dir), "float32", "cpu")
    return Retokenizer(tokenizer, TorchLearner(model, tokenizer))


def completed(retokenizer: Retokenizer, *calls: Transition) -> list[Transition]:
    (whole,) = retokenizer.complete([group(*calls)])
    return whole.rollouts[0].transitions


def test_ids_are_those_of_the_template_and_end_with_the_turn(retokenizer: Retokenizer) -> None:
    (call,) = completed(retokenizer, inexact("0"))
    decode = retokenizer.tokenizer.decode
    assert decode(call.prompt) == (
        "<|im_start|>user\nWhat is the team of Ada Berg?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert decode(call.completion) == "sales<|im_end|>"
    assert call.exact


@pytest.mark.parametrize("finish", ["length", "cut"])
def test_an_answer_cut_short_has_no_end_of_turn(retokenizer: Retokenizer, finish: str) -> None:
    (call,) = completed(retokenizer, inexact("0", finish=finish))
    assert retokenizer.tokenizer.decode(call.completion) == "sales"


def test_logprobs_are_the_learner_s_at_the_sampling_temperature(retokenizer: Retokenizer) -> None:
    calls = completed(retokenizer, inexact("0"), inexact("1", messages=[QUESTION, QUESTION]))
    batch = build_batch([group(*calls)])
    assert set(batch.transitions) == {"0", "1"}
    assert all(row.temperature.unique().tolist() == pytest.approx([0.7]) for row in batch.rows)
    expected = retokenizer.learner.logprobs(batch)
    assert batch.sampler_logprobs.tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert float(expected.max()) < 0.0


def test_a_call_that_repeats_another_stays_in_the_batch(retokenizer: Retokenizer) -> None:
    """It has no tokens to train, but trees of rollouts are told by it."""
    later = inexact("2", messages=[{"role": "user", "content": "And of Bo Dahl?"}])
    first, again, other = completed(retokenizer, inexact("0"), inexact("1", repeats="x"), later)
    assert (again.prompt, again.completion) == (first.prompt, first.completion)
    batch = build_batch([group(again, other)])
    assert batch.transitions == ["1", "2"]
    assert batch.transition_repeats.tolist() == [True, False]
    assert batch.n_tokens == len(other.completion)


def test_tool_calls_are_rendered(retokenizer: Retokenizer) -> None:
    function = {"name": "query", "arguments": '{"sql": "team"}'}
    answer = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    (call,) = completed(retokenizer, inexact("0", answer=answer))
    assert retokenizer.tokenizer.decode(call.completion) == (
        '<tool_call>\n{"name": "query", "arguments": {"sql": "team"}}\n</tool_call><|im_end|>'
    )


def test_what_cannot_be_rendered_or_is_not_ours_stays_inexact(retokenizer: Retokenizer) -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    calls = [
        inexact("image", messages=[image]),
        inexact("judge", policy="judge"),
        inexact("silent", answer=None),
    ]
    assert completed(retokenizer, *calls) == calls


def test_only_what_the_learner_can_read_and_judge_becomes_exact(retokenizer: Retokenizer) -> None:
    """Log-probs that nobody computed would say that every token was certain."""
    long = inexact("0", messages=[{"role": "user", "content": "a" * 3000}])
    beyond = replace(
        inexact("1"), exact=True, prompt=int32([1] * 600), completion=int32([1]),
        logprobs=float32([-1.0]),
    )  # fmt: skip
    retokenizer.context = 512
    calls = completed(retokenizer, long, beyond, inexact("2"))
    assert [call.exact for call in calls] == [False, True, True]
    assert all(p < 0 for p in calls[2].logprobs)
    whole = group(inexact("3"))
    failed = [replace(row, state=RolloutState.FAILED, rewards=[]) for row in whole.rollouts]
    (made,) = retokenizer.complete([replace(whole, rollouts=failed)])
    assert not made.rollouts[0].transitions[0].exact
    rewarded = [replace(row, rewards=[Reward(value=1.0, name="other")]) for row in failed]
    retokenizer.reward_names = ("other",)
    (made,) = retokenizer.complete([replace(whole, rollouts=rewarded)])
    assert all(p < 0 for p in made.rollouts[0].transitions[0].logprobs)
