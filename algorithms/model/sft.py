"""Imitation: a model learns the assistant's turns of given conversations, before any reward.

It is the one loss with psi = 1/N on each of the N action tokens of a batch.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

import torch
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel

from agentrl.algorithms.data.batch import TokenRow
from agentrl.algorithms.model.cpu_threads import thread_tuner
from agentrl.algorithms.model.load import Tokenizer
from agentrl.algorithms.model.packing import forward_logprobs, pack_rows
from agentrl.errors import TrainingError
from agentrl.types import Json

Conversation = list[dict[str, Json]]  # chat messages


def rows_of(
    tokenizer: Tokenizer,
    conversations: Sequence[Conversation],
    tools: list[dict[str, Json]] | None = None,
) -> list[TokenRow]:
    """One row per conversation, its actions being what stands between `{% generation %}` and
    `{% endgeneration %}` in the chat template.

    Raises TrainingError when the template marks nothing as generated."""
    encoded = tokenizer.apply_chat_template(
        list(conversations), tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    rows = []
    for tokens, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True):
        actions = torch.tensor(mask).nonzero().flatten()
        if not actions.numel():
            raise TrainingError(
                "the chat template marks no assistant tokens: put {% generation %} and"
                " {% endgeneration %} around what the model writes"
            )
        ones = torch.ones(len(actions))
        rows.append(
            TokenRow(torch.tensor(tokens), actions, 0 * ones, ones, torch.zeros_like(actions))
        )
    return rows


def imitate(
    model: PreTrainedModel,
    rows: Sequence[TokenRow],
    *,
    steps: int,
    batch: int,
    lr: float,
    warmup: int = 20,
    betas: tuple[float, float] = (0.9, 0.98),
    seed: int = 0,
) -> float:
    """AdamW on random batches of `batch` rows, learning rate rising for `warmup` steps and falling
    linearly to zero. Returns the mean loss in nats per action token over the last tenth."""
    dice = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=betas, weight_decay=0.0, fused=True)
    threads = thread_tuner(model.num_parameters(), "imitation computes", torch.get_num_threads())
    losses = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min((step + 1) / warmup, 1 - step / steps)
        (pack,) = pack_rows(dice.sample(rows, batch), "trie", sys.maxsize)
        with threads.working(len(pack.tokens)):
            loss = -forward_logprobs(model, pack).mean()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)
