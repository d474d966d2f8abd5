"""Failed optimizer steps where no part keeps their batches."""

from __future__ import annotations

import math

import pytest
import torch

from agentrl.algorithms.objective.core import loss_terms
from agentrl.algorithms.objective.ratios import GivenLogProbs
from agentrl.algorithms.presets import registry
from agentrl.algorithms.train.metrics import BadSteps, Dump
from agentrl.core.errors import TrainingError
from tests.algorithms.learners.test_learner import make_batch


def test_without_a_part_failed_steps_are_counted_and_end_the_run() -> None:
    batch = make_batch()
    terms = loss_terms(registry.make("sft", {}), batch, GivenLogProbs(), fresh=True)
    unknown = torch.full((batch.n_tokens,), math.nan)
    failed = Dump(batch, terms, unknown, loss=math.nan, grad_norm=1.0)
    steps = BadSteps(limit=2)
    with pytest.warns(RuntimeWarning, match=r"gradient norm 1; it is skipped$"):
        steps.bad(3, 0, failed)
    with pytest.raises(TrainingError, match=r"in 2 consecutive optimizer steps\. Continue"):
        steps.bad(4, 0, failed)
