"""Rows through the model: micro-batches under a token budget, log-probs of action tokens only.

Rows of similar length share a right-padded micro-batch. Attention is causal and padding comes after
every real token, so it is inert, for recurrent decoders as well; a row's result does not depend on
the rows beside it. (One concatenated sequence under a block mask costs more: the mask is dense on
CPU, so attention grows with the square of the micro-batch.) Hidden states are reduced to action
positions before the language-model head, and the head runs in chunks: no [T, V] logits exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Linear
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from agentrl.algorithms.batch import Row
from agentrl.errors import PolicyError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_LOGITS = 2**25  # elements of one chunk of logits: 128 MiB in float32


def micro_batches(rows: Sequence[Row], token_budget: int) -> Iterator[list[int]]:
    """Indices of rows that go through the model together: each list, padded to its longest row,
    has at most `token_budget` tokens; a longer row goes alone."""
    micro: list[int] = []
    for index in sorted(range(len(rows)), key=lambda i: rows[i].tokens.numel()):
        if micro and (len(micro) + 1) * rows[index].tokens.numel() > token_budget:
            yield micro
            micro = []
        micro.append(index)
    if micro:
        yield micro


def forward_logprobs(model: PreTrainedModel, rows: Sequence[Row]) -> Tensor:
    """log pi(action | everything before it in its row) at each action's temperature.

    [n] in order of rows and actions, float32 (float64 for a float64 model), on the device of the
    model and differentiable in its weights."""
    device = model.device
    tokens_BL = pad_sequence([row.tokens for row in rows], batch_first=True)
    length = tokens_BL.shape[1]
    positions = torch.cat([row.actions + i * length for i, row in enumerate(rows)]).to(device)
    temperature = torch.cat([row.temperature for row in rows]).to(device)
    tokens_BL = tokens_BL.to(device)
    hidden_BLH = model.base_model(input_ids=tokens_BL, use_cache=False).last_hidden_state
    return _action_logprobs(
        model.get_output_embeddings(),
        hidden_BLH.flatten(0, 1)[positions - 1],  # the state before a token predicts it
        tokens_BL.flatten()[positions],
        temperature,
    )


def check_model(model: PreTrainedModel) -> None:
    """Raises PolicyError if the log-probs of `forward_logprobs` are not those of the model."""
    head = model.get_output_embeddings()
    tokens = torch.arange(4, device=model.device)[None]
    with torch.no_grad():
        hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        same = head is not None and torch.equal(
            head(hidden), model(input_ids=tokens, use_cache=False).logits
        )
    if not same:
        raise PolicyError(
            f"{type(model).__name__}: its logits are not the output of its language-model head "
            "alone (soft-capping or scaling after the head); choose a model without"
        )


def _action_logprobs(
    head: Linear, hidden_NH: Tensor, tokens_N: Tensor, temperature_N: Tensor
) -> Tensor:
    chunk = max(1, MAX_LOGITS // head.weight.shape[0])
    if len(tokens_N) <= chunk:
        return _score(head, hidden_NH, tokens_N, temperature_N)
    parts = zip(
        *(torch.split(column, chunk) for column in (hidden_NH, tokens_N, temperature_N)),
        strict=True,
    )
    # Recomputed in the backward pass, so that one chunk of logits is alive at a time.
    return torch.cat([checkpoint(_score, head, *part, use_reentrant=False) for part in parts])


def _score(head: Linear, hidden_NH: Tensor, tokens_N: Tensor, temperature_N: Tensor) -> Tensor:
    logits_NV = head(hidden_NH)
    if logits_NV.dtype != torch.float64:
        logits_NV = logits_NV.float()
    # In place: neither the head nor the division needs the undivided logits again.
    logits_NV = logits_NV.div_(temperature_N.to(logits_NV.dtype)[:, None])
    return -cross_entropy(logits_NV, tokens_N, reduction="none")
