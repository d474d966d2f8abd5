"""Distillation over several tokens per position, with less noise than the sampled token alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LEAST_REST = 1e-6  # probability of all other tokens; smaller values are rounding errors


@dataclass(frozen=True, slots=True)
class TopKDistillation:
    """beta times the KL divergence between teacher and policy over k tokens and one symbol for the
    rest, without which leaving the k tokens would cost nothing. The k tokens are the sampled one
    and the most probable ones of the teacher (of = "teacher": KL(teacher || policy)) or of the
    policy before the first update (of = "policy": KL(policy || teacher)). GKD, arXiv 2306.13649."""

    k: int
    beta: float
    of: Literal["teacher", "policy"]

    def pull(self, current_K: Tensor, teacher_K: Tensor) -> Tensor:
        """psi = -d beta KL / d current_K, float64. current_K, teacher_K: log-probs of policy and
        teacher, [n, K]."""
        with torch.enable_grad():
            leaf_K = current_K.detach().double().requires_grad_()
            policy, teacher = with_rest(leaf_K), with_rest(teacher_K.double())
            first, second = (teacher, policy) if self.of == "teacher" else (policy, teacher)
            loss = self.beta * (first.exp() * (first - second)).sum()
        return -torch.autograd.grad(loss, leaf_K)[0]


def with_rest(logprobs_K: Tensor) -> Tensor:
    """Log-probs [n, K + 1] with that of all other tokens appended."""
    rest = (1 - logprobs_K.exp().sum(-1, keepdim=True)).clamp(min=LEAST_REST)
    return torch.cat((logprobs_K, rest.log()), -1)
