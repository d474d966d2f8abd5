"""A model of a few hundred parameters in float64 without any random number: each token's logits are
linear in the embeddings of the two tokens before it."""

from __future__ import annotations

import torch
from torch import Tensor

VOCABULARY, WIDTH = 24, 6


def wave(*shape: int, pace: float, shift: float = 0.0) -> Tensor:
    """Numbers between -1 and 1 without a pattern that matters, float64."""
    count = torch.arange(int(torch.tensor(shape).prod()), dtype=torch.float64)
    return torch.sin(count * pace + shift).reshape(shape)


class TinyModel:
    def __init__(self) -> None:
        self.embedding = wave(VOCABULARY, WIDTH, pace=1.7).requires_grad_()
        self.head = (0.8 * wave(WIDTH, VOCABULARY, pace=2.3, shift=0.4)).requires_grad_()

    @property
    def weights(self) -> list[Tensor]:
        return [self.embedding, self.head]

    def logits(self, tokens: list[int], actions: list[int]) -> Tensor:
        """Of the tokens at these positions, [A, V]."""
        before = torch.tensor([tokens[max(at - 1, 0)] for at in actions])
        earlier = torch.tensor([tokens[max(at - 2, 0)] for at in actions])
        hidden = self.embedding[before] + 0.5 * self.embedding[earlier]
        return hidden @ self.head

    def logprobs(
        self, tokens: list[int], actions: list[int], temperature: list[float] | None = None
    ) -> Tensor:
        """Of all tokens of the vocabulary at these positions, [A, V]."""
        logits = self.logits(tokens, actions)
        if temperature is not None:
            logits = logits / torch.tensor(temperature, dtype=torch.float64)[:, None]
        return logits.log_softmax(-1)

    def gradient(self) -> dict[str, object]:
        """The norm of the weights' gradient and its projections on fixed directions."""
        flat = torch.cat(
            [weight.grad.flatten() for weight in self.weights if weight.grad is not None]
        )
        directions = [wave(len(flat), pace=pace) for pace in (0.9, 1.3, 2.9)]
        return {"norm": float(flat.norm()), "along": [float(flat @ way) for way in directions]}
