"""Compare, on this hardware, log-probs and gradients of branches packed as a trie and as rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.algorithms.data.batch import TokenRow
from agentrl.algorithms.model.packing import (
    Packing,
    forward_logprobs,
    incompatibility,
    pack_rows,
)
from agentrl.config import PolicyConfig

PART_TOKENS = 16  # in a prefix and in a branch
BRANCHES = 4
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}  # of log-probs
QUANTIZED = {"4bit": 0.1, "8bit": 0.2}  # their kernels round, and 8bit depends on the batch


class TrieGap(NamedTuple):
    """The largest difference of log-probs, and the relative difference of the gradients; NaN if the
    computation failed, with the reason."""

    logprobs: float
    gradient: float
    reason: str = ""

    def __str__(self) -> str:
        differences = f"{self.logprobs:.1g} and gradients within {self.gradient:.1g}"
        return self.reason or f"log-probs within {differences} of separate rows"

    def within(self, policy: PolicyConfig) -> bool:
        """Whether the gap is within the tolerance of this policy."""
        allowed = tolerance(policy)
        return self.logprobs <= allowed and self.gradient <= 10 * allowed


def tolerance(policy: PolicyConfig) -> float:
    """Largest acceptable difference of a policy's log-probs between two ways to compute them."""
    return max(TOLERANCE[policy.dtype], QUANTIZED.get(policy.quantize, 0.0))


def trie_gap(model: PreTrainedModel) -> TrieGap | None:
    """Difference between trie and rows for branches of one prefix; None if `model` has no tries."""
    if incompatibility(model):
        return None
    size = len(model.get_input_embeddings().weight)
    tokens = ([*range(PART_TOKENS), *range(k, k + PART_TOKENS)] for k in range(1, 1 + BRANCHES))
    rows = [one_row([token % size for token in row], PART_TOKENS) for row in tokens]
    try:
        (found, gradient), (exact, wanted) = (_computed(model, rows, p) for p in ("trie", "rows"))
    except RuntimeError as error:  # a kernel that this hardware lacks
        return TrieGap(torch.nan, torch.nan, str(error).splitlines()[0])
    relative = float((gradient - wanted).norm() / wanted.norm())
    return TrieGap(float((found - exact).abs().max()), relative)


def one_row(tokens: list[int], prompt: int) -> TokenRow:
    """A row whose first `prompt` tokens are context and whose other tokens are actions."""
    actions = torch.arange(prompt, len(tokens))
    ones = torch.ones(len(actions))
    return TokenRow(torch.tensor(tokens), actions, ones, ones, torch.zeros_like(actions))


def _computed(
    model: PreTrainedModel, rows: list[TokenRow], packing: Packing
) -> tuple[Tensor, Tensor]:
    """Log-probs [n], and the gradient of their sum at the embeddings, which all layers affect."""
    (pack,), weight = pack_rows(rows, packing, 10**6), model.get_input_embeddings().weight
    before, weight.requires_grad = weight.requires_grad, True  # adapters freeze it
    try:
        logprobs = forward_logprobs(model, pack)
        (gradient,) = torch.autograd.grad(logprobs.sum(), weight)
    finally:
        weight.requires_grad = before
    return logprobs.detach()[pack.index.argsort()].float(), gradient.float()
