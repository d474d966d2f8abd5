"""Calls under penalties and grammars are trained at the policy's own log-probs."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.train.prepare import Preprocessor, ProcessedScorer
from agentrl.core.types import Group, Reward, Sampling, Transition, float32, int32
from tests import factories


def call(id: str, **more: object) -> Transition:
    about = {"prompt": (1, 2, 3, 4 + int(id)), "completion": (5, 6), "index": int(id)}
    about["logprobs"] = float32([0.0, -9.0])  # a forced token, and one under a penalty
    return factories.call(id, **about | {"sampling": Sampling(temperature=0.7)} | more)


def group(*calls: Transition) -> Group:
    return factories.group(factories.rollout(attempt="a", calls=calls, rewards=[Reward(value=1.0)]))


@pytest.fixture
def learner(tiny_llama_dir: Path) -> TorchLearner:
    return TorchLearner(*load_model(str(tiny_llama_dir), "float32", "cpu"))


def test_processed_calls_have_the_learners_log_probs(learner: TorchLearner) -> None:
    forced = {"tool_choice": '"required"'}
    calls = [
        call("0", processors=forced),
        call("1"),
        call("2", processors={"min_p": "0.1"}, prompt=int32([1, 2, 3, 4, 5, 6, 7])),
        call("3", processors=forced, policy="other"),
    ]
    (done,), metrics = Preprocessor((ProcessedScorer(learner),)).process([group(*calls)])
    assert metrics["calls/processed"] == 2
    batch = build_batch([done])
    behaviour, expected = batch.sampler_logprobs, learner.logprobs(batch)
    own = batch.token_transition == batch.transitions.index("1")
    assert behaviour[own].tolist() == [0.0, -9.0]
    assert behaviour[~own].tolist() == pytest.approx(expected[~own].tolist(), abs=1e-5)
    assert done.rollouts[0].transitions[3] == calls[3]


def test_a_processed_call_that_cannot_be_read_or_trained_stays(learner: TorchLearner) -> None:
    bias = {"logit_bias": "{}"}
    calls = [
        call("0", processors=bias, prompt=int32([1] * 600)),
        call("1", processors=bias, repeats="x"),
        call("2", processors=bias, exact=False, logprobs=float32()),
    ]
    scorer = ProcessedScorer(learner, context=512)
    assert scorer.complete([group(*calls)]) == [group(*calls)]
