"""Pooling, weights, penalties and the plan of one optimizer step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from agentrl.algorithms.credit.core import GroupRelative
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.objective.core import (
    Algo,
    Average,
    Gate,
    KLPenalty,
    kl_gradient,
    kl_value,
    loss_coefficients,
    loss_terms,
    pool,
    weights,
)
from agentrl.algorithms.objective.ratios import Clip, GivenLogProbs, Truncate
from agentrl.core.errors import TrainingError

ROW = torch.tensor([0, 1, 1, 1, 2, 2])


def near(values: Tensor, expected: Sequence[float], within: float = 5e-7) -> bool:
    return values.tolist() == pytest.approx(list(expected), abs=within)


def three_rows(rewards: Sequence[float] = (1, 0), groups: Sequence[int] = (0, 0)) -> Batch:
    """Six tokens in three rows of one call each: rows 0, 1 of rollout 0, row 2 of rollout 1."""
    return Batch(
        rows=[],
        token_row=ROW,
        token_transition=ROW,
        sampler_logprobs=torch.tensor([-0.5, -1.0, -0.1, -2.0, -0.7, -0.3]),
        transition_rollout=torch.tensor([0, 0, 1]),
        transition_role=torch.tensor([0, 1, 1]),
        row_rollout=torch.tensor([0, 0, 1]),
        rollout_group=torch.tensor(groups),
        rewards={"outcome": torch.tensor(rewards, dtype=torch.float64)},
        roles=["a", "b"],
        groups=["g", "h"][: max(groups) + 1],
        rollouts=["x", "y"],
        transitions=["0", "1", "2"],
    )


def every(batch: Batch) -> Tensor:
    return torch.arange(batch.n_tokens)


# -- averages --------------------------------------------------------------------------------------


def test_a_filter_shrinks_the_denominator_a_flat_group_does_not() -> None:
    """A15 on two groups, of which the second is flat."""
    batch = Batch(
        rows=[], token_row=torch.arange(6), token_transition=torch.arange(6),
        sampler_logprobs=torch.zeros(6), transition_rollout=torch.arange(6),
        transition_role=torch.zeros(6).long(), row_rollout=torch.arange(6),
        rollout_group=torch.tensor([0, 0, 0, 0, 1, 1]),
        rewards={"outcome": torch.tensor([1.0, 0, 0, 0, 1, 1])}, roles=["a"],
        groups=["g", "h"], rollouts=list("abcdef"), transitions=list("abcdef"),
    )  # fmt: skip
    of_first = torch.tensor([True] * 4 + [False] * 2)
    kept, dropped = (
        loss_terms(Algo(GroupRelative(), agg=Average(("all",)), keep=keep), batch, GivenLogProbs())
        for keep in (None, lambda _: of_first)
    )
    assert near(kept.weight, [1 / 6] * 6)
    assert near(dropped.weight, [0.25] * 4 + [0, 0])
    assert near(dropped.advantage, [0.75, -0.25, -0.25, -0.25, 0, 0])


def test_units_without_a_kept_token_are_in_no_denominator() -> None:
    mask = torch.tensor([False, True, True, False, True, True])
    assert near(weights(ROW, mask=mask), [0, 0.25, 0.25, 0, 0.25, 0.25])
    assert near(weights(ROW, "sum", mask=mask), [0, 0.5, 0.5, 0, 0.5, 0.5])
    assert weights(ROW, mask=torch.zeros(6, dtype=torch.bool)).tolist() == [0] * 6


# -- pooling and correction ------------------------------------------------------------------------


def test_pool_gives_each_token_its_unit() -> None:
    lr = torch.tensor([0.5, 0.4, -0.1]).double()
    ids = torch.tensor([9, 9, 4])
    assert near(pool(lr, ids), [0.45, 0.45, -0.1])
    assert near(pool(lr, ids, "sum"), [0.9, 0.9, -0.1])
    assert near(pool(lr, ids, "amax"), [0.5, 0.5, -0.1])
    assert near(pool(lr, ids, "amin"), [0.4, 0.4, -0.1])
    assert pool(lr, None) is lr


# -- penalties -------------------------------------------------------------------------------------


def test_kl_values_and_coefficients() -> None:
    d = torch.tensor([math.log(2.0)]).double()
    for kind, value in [("k1", 0.693147), ("k2", 0.240227), ("k3", 0.193147), ("abs", 0.693147)]:
        assert near(kl_value(d, kind), [value])
        leaf = d.clone().requires_grad_()
        kl_value(leaf, kind).sum().backward()
        assert torch.equal(leaf.grad, kl_gradient(d, kind))


def test_penalty_of_drifted_tokens_stays_finite() -> None:
    d = torch.tensor([-1e4, 1e4]).double()
    for kind in ("k1", "k2", "k3", "abs"):
        assert kl_gradient(d, kind).isfinite().all()


# -- psi -------------------------------------------------------------------------------------------


def test_psi_has_dtype_of_its_input_and_no_graph() -> None:
    batch = three_rows()
    algo = Algo(GroupRelative(), (Gate(Clip()),))
    terms = loss_terms(algo, batch, GivenLogProbs(), fresh=True)
    result = loss_coefficients(
        algo, terms, batch.sampler_logprobs.clone().requires_grad_(), every(batch)
    )
    assert result.dtype == torch.float32
    assert not result.requires_grad


def test_first_step_on_a_batch_needs_no_old_log_probs() -> None:
    batch = three_rows()
    algo = Algo(GroupRelative(), (Gate(Clip(0.0, 0.0)), Gate(Truncate(0, 9), "old", "sampler")))
    p = batch.sampler_logprobs.double() + 0.3
    fresh = loss_coefficients(
        algo, loss_terms(algo, batch, GivenLogProbs(), fresh=True), p, every(batch)
    )
    assert torch.equal(
        fresh,
        loss_coefficients(algo, loss_terms(algo, batch, GivenLogProbs(old=p)), p, every(batch)),
    )


def test_credit_of_a_larger_batch_may_be_given() -> None:
    batch = three_rows()
    given = torch.tensor([1.0, 2, 3, 4, math.nan, math.nan])
    terms = loss_terms(
        Algo(GroupRelative(), agg=Average(("all",))), batch, GivenLogProbs(), advantage=given
    )
    assert near(terms.advantage, [1, 2, 3, 4, 0, 0])
    assert near(terms.weight, [0.25] * 4 + [0, 0])


# -- what is refused, what is skipped --------------------------------------------------------------


def test_a_missing_stream_is_refused_by_name() -> None:
    algo = Algo(GroupRelative(), (Gate(Clip()),), (KLPenalty("k3", 0.1),), name="mine")
    with pytest.raises(TrainingError, match=r"'mine', step 0, needs .* old policy, and there"):
        loss_terms(algo, three_rows(), GivenLogProbs(reference=torch.zeros(6)))
    with pytest.raises(TrainingError, match=r"needs 6 .* reference model, .* none"):
        loss_terms(algo, three_rows(), GivenLogProbs(), fresh=True)


def test_a_stream_of_other_tokens_is_refused_with_both_counts() -> None:
    algo = Algo(GroupRelative(), (Gate(Truncate(), "current", "sampler"),), name="mine")
    for behaviour, known in ((torch.zeros(0), "none"), (torch.zeros(4), "4")):
        batch = replace(three_rows(), sampler_logprobs=behaviour, step=3)
        with pytest.raises(
            TrainingError, match=rf"step 3, needs 6 .* sampler, and there are {known};"
        ):
            loss_terms(algo, batch, GivenLogProbs())


def test_non_finite_log_probs_are_refused_with_their_count() -> None:
    batch = three_rows()
    broken = replace(batch, sampler_logprobs=torch.tensor([0.0, math.nan, -math.inf, 0, 0, 0]))
    corrected = Algo(GroupRelative(), (Gate(Truncate(), "current", "sampler"),), name="mine")
    with pytest.raises(TrainingError, match=r"'mine', step 0, .*2 of 6 log-probs of the sampler"):
        loss_terms(corrected, broken, GivenLogProbs())
    algo = Algo(GroupRelative(), name="mine")
    terms = loss_terms(algo, broken, GivenLogProbs())  # does not read them
    assert loss_coefficients(algo, terms, torch.zeros(6), every(batch)).isfinite().all()
    with pytest.raises(TrainingError, match="1 of 2 log-probs of the current policy"):
        loss_coefficients(algo, terms, torch.tensor([0.0, math.nan]), torch.tensor([4, 5]))


def test_infinite_credit_is_refused() -> None:
    algo = Algo(lambda batch: torch.full((batch.n_tokens,), math.inf), name="mine")
    with pytest.raises(TrainingError, match="'mine', step 0: 6 of 6 advantages are infinite"):
        loss_terms(algo, three_rows(), GivenLogProbs())


@pytest.mark.parametrize(
    ("rewards", "words"),
    [((1, 1), "better or worse"), ((0, math.nan), "better or worse"), ([math.nan] * 2, "missing")],
)
def test_a_batch_without_a_lesson_says_so(rewards: Sequence[float], words: str) -> None:
    algo = Algo(GroupRelative(norm="std"))
    batch = three_rows(rewards)
    terms = loss_terms(algo, batch, GivenLogProbs())
    assert terms.skip is not None
    assert words in terms.skip
    assert loss_coefficients(algo, terms, torch.zeros(6), every(batch)).tolist() == [0] * 6


def test_a_penalty_is_a_lesson_of_its_own() -> None:
    algo = Algo(GroupRelative(), penalties=(KLPenalty("k2", 0.1, "sampler"),))
    assert loss_terms(algo, three_rows([1, 1]), GivenLogProbs()).skip is None
    assert loss_terms(algo, three_rows([1, 0]), GivenLogProbs()).skip is None


def test_everything_filtered_out_is_skipped() -> None:
    nothing = Algo(
        GroupRelative(), keep=lambda batch: torch.zeros(batch.n_tokens, dtype=torch.bool)
    )
    batch = three_rows()
    terms = loss_terms(nothing, batch, GivenLogProbs())
    assert "filtered out" in str(terms.skip)
    assert not terms.weight.any()


def test_a_batch_without_tokens_is_skipped() -> None:
    none = torch.empty(0, dtype=torch.int64)
    batch = replace(
        three_rows(), token_row=none, token_transition=none, sampler_logprobs=torch.empty(0)
    )
    terms = loss_terms(Algo(GroupRelative()), batch, GivenLogProbs())
    assert terms.skip == "the batch has no sampled tokens"


def test_missing_rewards_leave_the_denominators() -> None:
    batch = three_rows([1, math.nan])
    terms = loss_terms(
        Algo(GroupRelative(base="none"), agg=Average(("all",))), batch, GivenLogProbs()
    )
    assert near(terms.weight, [0.25] * 4 + [0, 0])
