"""Both sides of the comparison with TRL compute the same thing."""

from __future__ import annotations

import torch

from tests.benchmarks.learner import GROUP, SHAPES, batch_of, rows


def test_the_learner_gets_the_rows_and_actions_that_trl_gets() -> None:
    for shape in SHAPES.values():
        made = rows(shape, groups=2, vocabulary=512)
        batch = batch_of(made)
        assert len(batch.rows) == len(made) == 2 * GROUP
        for row, given in zip(batch.rows, made, strict=True):
            assert row.tokens.tolist() == given["prompt"] + given["completion"]
            sampled = torch.tensor([0] * len(given["prompt"]) + given["sampled"])
            assert torch.equal(row.actions, sampled.nonzero().flatten())
        assert batch.rewards["outcome"].tolist() == [row["advantage"] for row in made]
