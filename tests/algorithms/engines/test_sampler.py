from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from agentrl.algorithms.engines.embedded.engine import BLOCK, sample, top_logprobs, uniforms


def draw(logits: torch.Tensor, n: int, **settings: float) -> tuple[np.ndarray, np.ndarray]:
    """`n` samples of one distribution, as (tokens, log-probs)."""
    tokens, logprobs = sample(
        logits.expand(n, -1),
        np.full(n, settings.get("temperature", 1.0)),
        np.full(n, settings.get("top_p", 1.0)),
        np.full(n, int(settings.get("top_k", 0))),
        uniforms(np.arange(n, dtype=np.uint64), np.zeros(n, np.int64)),
    )
    return tokens.numpy(), logprobs.numpy()


def test_uniforms_depend_on_seed_and_counter_only() -> None:
    seeds = np.array([7, 7, 8], np.uint64)
    first = uniforms(seeds, np.array([0, 1, 0]))
    assert len(set(first)) == 3
    assert uniforms(seeds[1:2], np.array([1]))[0] == first[1]


def test_uniforms_fill_the_unit_interval() -> None:
    numbers = uniforms(np.arange(20_000, dtype=np.uint64), np.arange(20_000) % 7)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert np.abs(counts - 1000).max() < 150  # 5 standard deviations


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_distribution(temperature: float) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, float("-inf")]])
    tokens, logprobs = draw(logits, 20_000, temperature=temperature)
    expected = torch.softmax(logits[0] / temperature, -1).numpy()
    found = np.bincount(tokens, minlength=5) / len(tokens)
    np.testing.assert_allclose(found, expected, atol=0.02)
    assert found[4] == 0
    np.testing.assert_allclose(logprobs, np.log(expected[tokens]), atol=1e-5)


def test_temperature_zero_takes_the_most_likely_token() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    tokens, logprobs = draw(logits, 10, temperature=0.0)
    assert set(tokens) == {1}
    np.testing.assert_allclose(logprobs, torch.log_softmax(logits, -1)[0, 1].item(), atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_p": 0.1}, {0}),
        ({"top_p": 0.75}, {0, 1}),
        ({"top_p": 0.81}, {0, 1, 2}),
        ({"top_k": 2, "top_p": 0.6}, {0}),  # of 0.5 and 0.3, the first is 0.625
    ],
)
def test_filters_keep_what_they_should_and_leave_log_probs_alone(
    settings: dict[str, float], kept: set[int]
) -> None:
    probabilities = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    tokens, logprobs = draw(probabilities.log(), 4000, **settings)
    assert set(tokens) == kept
    np.testing.assert_allclose(np.exp(logprobs), probabilities[0].numpy()[tokens], rtol=1e-5)


def test_rows_with_different_settings_do_not_mix() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]]).repeat(3, 1)
    tokens, _ = sample(
        logits,
        np.array([0.0, 1.0, 1.0]),
        np.array([1.0, 1.0, 1.0]),
        np.array([0, 0, 1]),
        np.array([0.01, 0.01, 0.01]),
    )
    assert tokens.tolist() == [1, 0, 1]


@pytest.mark.parametrize("vocabulary", [2, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 77])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 7}])
def test_two_levels_find_the_token_of_one_sum(vocabulary: int, settings: dict[str, float]) -> None:
    torch.manual_seed(vocabulary)
    logits = (4 * torch.randn(1, vocabulary)).bfloat16()
    n, temperature = 3000, settings.get("temperature", 1.0)
    found, logprobs = draw(logits, n, **settings)
    exact = torch.log_softmax(logits[0].double() / temperature, -1)
    weights, order = exact.exp().sort(descending=True, stable=True)
    cumulative = weights.cumsum(0)
    weights[cumulative - weights >= settings.get("top_p", 1.0) * cumulative[-1]] = 0
    weights[int(settings.get("top_k", vocabulary)) :] = 0
    kept = torch.zeros_like(exact).scatter_(0, order, weights).cumsum(0)
    uniform = uniforms(np.arange(n, dtype=np.uint64), np.zeros(n, np.int64))
    expected = torch.searchsorted(kept, torch.from_numpy(uniform) * kept[-1], right=True)
    assert (found != expected.numpy()).sum() <= 1  # float32 moves a bound by 1e-7 of the sum
    np.testing.assert_allclose(logprobs, exact.numpy()[found], atol=2e-6)


def test_the_ends_of_the_interval_never_take_an_impossible_token() -> None:
    logits = torch.full((2, 3 * BLOCK + 5), float("-inf"))
    logits[:, [BLOCK + 3, 2 * BLOCK + 9]] = 0
    one = np.ones(2)
    last = np.array([0.0, 1 - 2.0**-53])
    tokens, logprobs = sample(logits, one, one, np.zeros(2, np.int64), last)
    assert tokens.tolist() == [BLOCK + 3, 2 * BLOCK + 9]
    np.testing.assert_allclose(logprobs.numpy(), np.log(0.5), rtol=1e-6)


def test_no_float64_of_the_vocabulary_is_made() -> None:
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and made.dtype == torch.float64:
                sizes.append(made.numel())
            return made

    with Watch():
        draw(torch.randn(1, 100 * BLOCK), 4)
    assert 0 < max(sizes) <= 4 * BLOCK


def test_the_likeliest_tokens_have_the_log_probs_of_sampled_ones() -> None:
    logits, one = torch.randn(3, 1000), np.ones(3)
    tokens, logprobs = sample(logits, 0 * one, one, np.zeros(3, np.int64), 0.5 * one)
    found = top_logprobs(logits, 0 * one, np.full(3, 2))
    assert [pairs[0][0] for pairs in found] == tokens.tolist()
    np.testing.assert_allclose([pairs[0][1] for pairs in found], logprobs.numpy(), atol=1e-6)
