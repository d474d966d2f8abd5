"""Whether a tiny model has learned the format of what it imitates."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise

import torch
from transformers import PreTrainedModel

from agentrl.algorithms.data.batch import TokenRow
from agentrl.algorithms.model.forward import forward_logprobs
from agentrl.algorithms.model.packing import pack_rows

MOST_ROWS = 64  # conversations that are read
TOO_HIGH = 0.1  # nats per token; one that writes the format has a hundredth of that


def format_problem(model: PreTrainedModel, rows: Sequence[TokenRow]) -> str:
    """Why rollouts of the model will fail, to follow its loss in a sentence; "": they need not."""
    if (loss := format_loss(model, rows)) <= TOO_HIGH:
        return ""
    return (
        f"and of {loss:.2f} where they leave no choice, which is too high: it does not write"
        " their format. Give `imitator` more steps, or shorter and more similar conversations"
    )


@torch.no_grad()
def format_loss(model: PreTrainedModel, rows: Sequence[TokenRow]) -> float:
    """The mean loss, in nats, where conversations leave no choice: of tokens that alone follow the
    one before them, and of those that go on with what is copied, such as a name. 0 if none are."""
    rows = rows[:MOST_ROWS]
    written = [list(pairwise(row.tokens.tolist())) for row in rows]  # the pair at i ends at i + 1
    acted = [
        [pairs[at - 1] for at in row.actions.tolist()]
        for pairs, row in zip(written, rows, strict=True)
    ]
    often, before = Counter(chain(*acted)), Counter(first for first, _ in chain(*acted))
    settled = [
        often[pair] == before[pair[0]] > len(rows) / 2
        or (often[pair] < len(rows) / 10 and pair in pairs[: at - 1])
        for pairs, row in zip(written, rows, strict=True)
        for at in row.actions.tolist()
        for pair in [pairs[at - 1]]
    ]
    (pack,) = pack_rows(rows, "trie", sys.maxsize)
    losses = -forward_logprobs(model, pack)[torch.tensor(settled)[pack.index]]
    return float(losses.mean()) if len(losses) else 0.0
