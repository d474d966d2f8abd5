"""What a user says, as rewards of turns, as demonstrations and as a teacher: against the learner on
prompts that are written by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from agentrl.algorithms.credit.told import TOLD
from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.data.state import AlgorithmState
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.objective.prepare import TrainedPolicy
from agentrl.algorithms.presets.feedback import SHOWN, Demonstrations, add_turns
from agentrl.algorithms.presets.registry import make
from agentrl.algorithms.presets.told import Telling
from agentrl.algorithms.train.prepare import Preprocessor
from agentrl.algorithms.train.step import Updater
from agentrl.core.config import AlgorithmConfig, RunConfig
from agentrl.core.types import Group, Reward, Rollout, Scope
from tests import factories

add_told = Telling("user")
ASKED = "Where is order 371?"
AGAIN = "No. Track order 371."
CALLED = {"role": "assistant", "content": "I return it."}
LOOKED_UP = {"role": "assistant", "content": "I look it up."}
RESULT = {"role": "tool", "content": "on its way", "tool_call_id": "c"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


# A call of a tool, the answer to the user, who asks again, and the answer to that.
CONVERSATIONS = [
    [user(ASKED)],
    [user(ASKED), CALLED, RESULT],
    [user(ASKED), CALLED, RESULT, CALLED, user(AGAIN)],
]
ANSWERS = ["return", "returned", "look"]


def policy_of(learner: TorchLearner, directory: Path) -> TrainedPolicy:
    return TrainedPolicy(learner.logprobs, load_model(str(directory), "float32", "cpu")[1])


@pytest.fixture(scope="module")
def policy(tiny_llama_dir: Path) -> TrainedPolicy:
    learner = TorchLearner(*load_model(str(tiny_llama_dir), "float32", "cpu"))
    return policy_of(learner, tiny_llama_dir)


def ids(policy: TrainedPolicy, text: str) -> list[int]:
    assert policy.tokenizer
    return list(policy.tokenizer.encode(text, add_special_tokens=False))


def written(messages: list[dict[str, Any]]) -> str:
    results = {"role": "user", "content": "<tool_response>\non its way\n</tool_response>"}
    shown = [results if m is RESULT else m for m in messages]
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in shown)
    return f"{text}<|im_start|>assistant\n"


def session(encoder: TrainedPolicy, *rewards: Reward, **changed: Any) -> Rollout:
    calls = [
        factories.call(
            str(n),
            ids(encoder, written(messages)),
            ids(encoder, said),
            index=n,
            messages=messages,
            answer={"role": "assistant", "content": said},
            started=float(n),
            **changed,
        )
        for n, (messages, said) in enumerate(zip(CONVERSATIONS, ANSWERS, strict=True))
    ]
    return factories.rollout("s", calls, [Reward(value=0.5), *rewards], attempt="a")


def about(call: int, value: float, name: str = "signal", note: str = "") -> Reward:
    return Reward(value=value, name=name, scope=Scope.TRANSITION, target=str(call), note=note)


ASKED_AGAIN = (about(1, 0.0), about(2, 1.0))
CORRECTION = about(1, 0.0, "correction", "It is on its way.")


def totals(policy: TrainedPolicy, prompts: list[str], answers: list[str]) -> list[float]:
    """Log-probs of answers after prompts, by the model itself."""
    calls = [
        factories.call(str(n), ids(policy, prompt), ids(policy, said), index=n)
        for n, (prompt, said) in enumerate(zip(prompts, answers, strict=True))
    ]
    batch = build_batch([factories.group(factories.rollout("x", calls, [Reward(value=1.0)]))])
    logprobs = policy.logprobs(batch)
    return [float(logprobs[batch.token_transition == n].sum()) for n in range(len(calls))]


def of_calls(group: Group, name: str) -> dict[str | None, float]:
    rewards = group.rollouts[0].rewards
    return {row.target: row.value for row in rewards if row.name == name}


def test_every_call_of_a_turn_has_what_is_said_about_its_answer(policy: TrainedPolicy) -> None:
    told = (about(1, 0.0), about(1, 1.0, "feedback"), about(2, 1.0))
    (found,) = add_turns([factories.group(session(policy, *told))], policy)
    assert of_calls(found, "turn") == {"0": 0.5, "1": 0.5, "2": 1.0}
    (found,) = add_turns([factories.group(session(policy, about(2, 0.25)))], policy)
    assert of_calls(found, "turn") == {"2": 0.25}


def shown(policy: TrainedPolicy, made: Rollout, **options: bool) -> list[Rollout]:
    (found,) = Demonstrations(**options)([factories.group(made)], policy)
    assert found.rollouts[0] == made
    return found.rollouts[1:]


def test_the_answer_to_a_repeated_question_replaces_the_first(policy: TrainedPolicy) -> None:
    (demonstration,) = shown(policy, session(policy, *ASKED_AGAIN))
    (call,) = demonstration.transitions
    assert list(call.prompt) == ids(policy, written([user(ASKED)]))
    assert list(call.completion) == ids(policy, "look")
    expected = totals(policy, [written([user(ASKED)])], ["look"])
    logprobs = torch.frombuffer(bytearray(call.logprobs), dtype=torch.float32)
    assert float(logprobs.sum()) == pytest.approx(expected[0], abs=1e-4)
    assert shown(policy, session(policy, *ASKED_AGAIN), asked_again=False) == []


@pytest.mark.parametrize(
    "said", [(), (about(1, 0.0),), (about(2, 1.0),), (about(1, 1.0), about(2, 1.0)),
             (about(1, 0.0), about(2, 0.0))],
)  # fmt: skip
def test_only_a_bad_then_good_answer_is_a_demonstration(
    policy: TrainedPolicy, said: tuple[Reward, ...]
) -> None:
    assert shown(policy, session(policy, *said)) == []
    assert of_calls(add_told([factories.group(session(policy, *said))], policy)[0], "told") == {}


def test_a_correction_replaces_the_call_it_is_about(policy: TrainedPolicy) -> None:
    (demonstration,) = shown(policy, session(policy, CORRECTION))
    (call,) = demonstration.transitions
    assert list(call.prompt) == ids(policy, written(CONVERSATIONS[1]))
    assert list(call.completion) == ids(policy, "It is on its way.<|im_end|>")


def test_what_the_policy_may_not_train_is_not_shown(policy: TrainedPolicy) -> None:
    for changed in ({"exact": False}, {"policy": "judge"}):
        for said in ((CORRECTION,), ASKED_AGAIN):
            assert shown(policy, session(policy, *said, **changed)) == []
    short = dataclasses.replace(policy, context=8)
    assert shown(short, session(policy, CORRECTION, *ASKED_AGAIN)) == []


@pytest.mark.parametrize(
    ("said", "text"),
    [((CORRECTION,), "\n\n(The answer should have been: It is on its way.)"),
     (ASKED_AGAIN, "\n\n(The user then said: No. Track order 371.)")],
)  # fmt: skip
def test_all_calls_of_a_turn_are_scored_by_what_followed(
    policy: TrainedPolicy, said: tuple[Reward, ...], text: str
) -> None:
    (found,) = add_told([factories.group(session(policy, *said))], policy)
    plain = [written(messages) for messages in CONVERSATIONS[:2]]
    told = [written([user(ASKED + text), *messages[1:]]) for messages in CONVERSATIONS[:2]]
    before, after = (totals(policy, prompts, ANSWERS[:2]) for prompts in (plain, told))
    expected = {str(n): a - b for n, (a, b) in enumerate(zip(after, before, strict=True))}
    assert of_calls(found, "told") == pytest.approx(expected, abs=1e-4)
    assert max(map(abs, expected.values())) > 1e-3


def test_its_gradient_is_that_of_the_divergence() -> None:
    """Over all answers of one token, weighted by their probability."""
    draw = torch.Generator().manual_seed(0)
    now, told = torch.randn(2, 7, generator=draw, dtype=torch.float64)
    leaf = now.clone().requires_grad_()
    p, q = leaf.log_softmax(-1), told.log_softmax(-1)
    (p.exp() * (p - q)).sum().backward()
    expected, leaf.grad = leaf.grad, None
    credit = (q - p).detach()
    (p.exp().detach() * credit * leaf.log_softmax(-1)).sum().backward()
    assert expected is not None
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, -expected)


def test_a_step_learns_from_all_of_it(tiny_llama_dir: Path) -> None:
    learner = TorchLearner(*load_model(str(tiny_llama_dir), "float32", "cpu"))
    policy = policy_of(learner, tiny_llama_dir)
    preset = "streams+ema+corrections+self-distill"
    options = {"streams": {"turn": {"scope": "transition", "gamma": 0.0}}}
    algo = make(preset, options)
    assert {SHOWN, TOLD} < set(algo.rewards)
    settings = AlgorithmConfig(preset=preset, options=options, group_size=1, lr=1e-2)
    updater = Updater(
        RunConfig(algorithm=settings), algo, learner, state=AlgorithmState(algo.remembered),
        preprocessor=Preprocessor(tokenizer=policy.tokenizer),
    )  # fmt: skip
    prompts = [written([user(ASKED)])] * 2
    before = totals(policy, prompts, ["look", "return"])
    made = factories.group(session(policy, *ASKED_AGAIN))
    updater.update(0, [made])
    after = totals(policy, prompts, ["look", "return"])
    assert after[0] > before[0] + 0.05
    assert after[0] - before[0] > after[1] - before[1]


def test_a_correction_may_be_the_json_of_a_whole_message(policy: TrainedPolicy) -> None:
    function = {"name": "look", "arguments": '{"order": "371"}'}
    called = {
        "role": "assistant",
        "content": "So.",
        "tool_calls": [{"type": "function", "function": function}],
    }
    said = about(0, 0.0, "correction", msgspec.json.encode(called).decode())
    (demonstration,) = shown(policy, session(policy, said))
    (call,) = demonstration.transitions
    assert policy.tokenizer
    text = policy.tokenizer.decode(call.completion)
    assert text.startswith("So.")
    assert '"look"' in text
    assert '{"order": "371"}' in text
    assert text.endswith("<|im_end|>")
