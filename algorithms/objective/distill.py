"""Distillation over several tokens at every place: less noise than the sampled one alone gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LEAST_REST = 1e-6  # probability of all other tokens: below, it is what rounding leaves


@dataclass(frozen=True, slots=True)
class TopKDistillation:
    """beta times the divergence between teacher and policy over k tokens and one symbol for all the
    rest, without which the policy could leave the k tokens unseen. of: whose most probable tokens,
    beside the sampled one. "teacher": KL(teacher || policy); "policy", before the first update of
    the batch: KL(policy || teacher). GKD, arXiv 2306.13649."""

    k: int
    beta: float
    of: Literal["teacher", "policy"]

    def pull(self, p_K: Tensor, t_K: Tensor) -> Tensor:
        """-d beta KL / d p_K [n, K], float64, of log-probs of the policy and of the teacher."""
        with torch.enable_grad():
            leaf_K = p_K.detach().double().requires_grad_()
            policy, teacher = with_rest(leaf_K), with_rest(t_K.double())
            first, second = (teacher, policy) if self.of == "teacher" else (policy, teacher)
            loss = self.beta * (first.exp() * (first - second)).sum()
        return -torch.autograd.grad(loss, leaf_K)[0]


def with_rest(logprobs_K: Tensor) -> Tensor:
    """Log-probs [n, K + 1], the last that of all other tokens."""
    rest = (1 - logprobs_K.exp().sum(-1, keepdim=True)).clamp(min=LEAST_REST)
    return torch.cat((logprobs_K, rest.log()), -1)
