"""The rows of a batch as shards, one for each rank that computes different rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from agentrl.algorithms.data.batch import Batch, TokenRow
from agentrl.core.errors import PolicyError

NO_INTS, NO_FLOATS = torch.empty(0, dtype=torch.int64), torch.empty(0)
PADDING = TokenRow(torch.zeros(2, dtype=torch.int64), NO_INTS, NO_FLOATS, NO_FLOATS, NO_INTS)


@dataclass(frozen=True, slots=True)
class Shard:
    """The rows of one rank. Every rank has the same number; rows without actions are padding."""

    tokens: list[Tensor]  # int64 [L] each
    states: list[Tensor]  # int64 [A] each, the positions before the actions
    index: list[Tensor]  # int64 [A] each, positions in the batch's token level
    temperature: Tensor  # float32 [rows]
    token_budget: int  # tokens of one micro-batch, at least the longest row of any rank

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row that is not padding."""
        pairs = zip(self.tokens, self.states, strict=True)
        return [len(tokens) for tokens, states in pairs if len(states)]


def shards_of(batch: Batch, ranks: int, token_budget: int) -> list[Shard]:
    """The batch's rows, up to their last actions, on this number of ranks. Raises PolicyError for a
    row that was sampled at several temperatures."""
    budget = max([token_budget, *map(_length, batch.rows)])
    starts = [0, *accumulate(row.actions.numel() for row in batch.rows)]
    return [
        _shard([(PADDING, 0) if i < 0 else (batch.rows[i], starts[i]) for i in dealt], budget)
        for dealt in deal_rows(batch.rows, ranks)
    ]


def deal_rows(rows: Sequence[TokenRow], ranks: int) -> list[list[int]]:
    """Row indices for each rank: the same number, of similar total length; -1 is padding."""
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i].tokens))
    order += [-1] * (-len(rows) % ranks)
    hands: list[list[int]] = [[] for _ in range(ranks)]
    for turn in range(0, len(order), ranks):
        # Alternating direction, or the first rank would always get the longest row.
        in_turn = hands if turn // ranks % 2 == 0 else hands[::-1]
        for hand, row in zip(in_turn, order[turn : turn + ranks], strict=True):
            hand.append(row)
    return hands


def in_token_order(batch: Batch, shards: Sequence[Shard], parts: Sequence[Tensor]) -> Tensor:
    """Join the shards' results for their actions, float32 [N] in token order."""
    joined = torch.empty(batch.n_tokens)
    for shard, part in zip(shards, parts, strict=True):
        joined[torch.cat(shard.index)] = part
    return joined


def _shard(dealt: Sequence[tuple[TokenRow, int]], token_budget: int) -> Shard:
    """dealt: rows, each with the position of its first action in the batch's token level."""
    return Shard(
        tokens=[row.tokens[: _length(row)] for row, _ in dealt],
        states=[row.actions - 1 for row, _ in dealt],
        index=[torch.arange(start, start + len(row.actions)) for row, start in dealt],
        temperature=torch.tensor([_temperature(row) for row, _ in dealt]),
        token_budget=token_budget,
    )


def _length(row: TokenRow) -> int:
    """Tokens up to its last action."""
    return int(row.actions[-1]) + 1 if len(row.actions) else len(row.tokens)


def _temperature(row: TokenRow) -> float:
    temperatures = sorted(set(row.temperature.tolist()))
    if len(temperatures) > 1:
        raise PolicyError(
            "the verl learner computes a row at one temperature, and one was sampled at "
            f"{temperatures}; set learner.kind = 'torch', or one temperature for all calls of "
            "an agent"
        )
    return float(temperatures[0]) if temperatures else 1.0
