# ruff: noqa: E741  # w and l, as in the papers
"""More losses of pairs against their formulas, written here for one pair at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.errors import ConfigError
from tests.algorithms.preferences.test_completions import (
    One,
    batch_of,
    build,
    columns,
    current,
    d,
    log_s,
    one_by_one,
    packs_do_not_change_the_gradient,
    pairs,
    psi_is_minus_the_gradient_of,
)


def odds(mean: Tensor) -> Tensor:
    return mean - torch.log(1 - torch.exp(mean))


def exo(x: Tensor, e: float) -> Tensor:
    s = torch.sigmoid(x)
    return s * torch.log(s / (1 - e)) + (1 - s) * torch.log((1 - s) / e)


PUBLISHED: dict[str, Callable[[One, One], Tensor]] = {
    "cdpo": lambda w, l: -0.9 * log_s(0.1 * d(w, l)) - 0.1 * log_s(-0.1 * d(w, l)),
    "robust": lambda w, l: (-0.9 * log_s(0.1 * d(w, l)) + 0.1 * log_s(-0.1 * d(w, l))) / 0.8,
    "ipo": lambda w, l: (w.h / w.n - l.h / l.n - 5.0) ** 2,
    "hinge": lambda w, l: torch.clamp(1 - 0.1 * d(w, l), min=0),
    "simpo": lambda w, l: -log_s(2.0 * (w.S / w.n - l.S / l.n) - 1.0),
    "cpo": lambda w, l: -log_s(0.1 * (w.S - l.S)),
    "orpo": lambda w, l: -0.1 * log_s(odds(w.S / w.n) - odds(l.S / l.n)),
    "apo-zero": lambda w, l: 1 - torch.sigmoid(0.1 * w.h) + torch.sigmoid(0.1 * l.h),
    "apo-down": lambda w, l: torch.sigmoid(0.1 * w.h) + 1 - torch.sigmoid(0.1 * d(w, l)),
    "nca": lambda w, l: -log_s(0.1 * w.h) - 0.5 * log_s(-0.1 * w.h) - 0.5 * log_s(-0.1 * l.h),
    "bco": lambda w, l: -log_s(0.1 * w.h) - log_s(-0.1 * l.h),
    "exo": lambda w, l: exo(0.1 * d(w, l), 1e-3),
    "sppo": lambda w, l: (w.h - 5.0) ** 2 + (l.h + 5.0) ** 2,
    "dpo+nll": lambda w, l: -log_s(0.1 * d(w, l)),
    "aot": lambda w, l: w.S * math.nan,  # of all pairs at once: see its own test
}
IMITATES = {"cpo": 1.0, "orpo": 1.0, "dpo+nll": 1.0}


@pytest.mark.parametrize("name", sorted(PUBLISHED.keys() - {"aot"}))
def test_psi_is_minus_the_gradient_of_the_formula(name: str) -> None:
    psi_is_minus_the_gradient_of(name, PUBLISHED[name], IMITATES.get(name, 0.0))


def test_aot_compares_sorted_margins_of_all_pairs() -> None:
    batch = batch_of(pairs(4))
    p, q = columns(batch)
    leaf = p.clone().requires_grad_()
    sides = one_by_one(batch, leaf, q)
    now = sorted((w.S - l.S for w, l in sides), key=lambda x: float(x.detach()))
    then = sorted((w.q - l.q for w, l in sides), key=lambda x: float(x.detach()))
    loss = sum(-log_s(0.1 * (a - b)) for a, b in zip(now, then, strict=True)) / 4
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert torch.allclose(current(build("aot"), batch, p, q), -gradient, rtol=1e-9)


@pytest.mark.parametrize("name", ["aot", "simpo"])
def test_its_gradient_does_not_depend_on_how_rows_are_packed(
    name: str, tiny_llama_dir: Path
) -> None:
    packs_do_not_change_the_gradient(name, tiny_llama_dir)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("robust", {"label_smoothing": 0.5}, "< 0.5"),
        ("grpo+nll", {}, "is for losses of pairs"),
    ],
)
def test_an_option_that_nothing_reads_is_refused(name: str, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(name, **options)
