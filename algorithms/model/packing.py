"""Forward passes over rows: packs under a token budget, log-probs of action tokens only.

A pack is a forest of rows as one sequence without padding: linear layers see every token once,
attention follows the branches. With `rows` nothing is shared between rows; with `trie` a common
prefix is one path, computed once, forward and backward. Rows are never split, and the result of a
row does not depend on the other rows of its pack. A row's last action and the tokens after it
predict nothing and are left out. Hidden states are reduced to action positions before the
language-model head (see `lm_head`).

In a forest equal prefixes are one path, and each distinct (prefix, token) is a node. Nodes are
numbered depth first, so a subtree is a range of numbers: "j is i or an ancestor of i" is
`j <= i < end[j]`, one number per node instead of a matrix.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module
from torch.nn.utils.rnn import pad_sequence

from agentrl.algorithms.data.batch import TokenRow
from agentrl.algorithms.model import attention
from agentrl.algorithms.model.inputs import inputs_of
from agentrl.algorithms.model.lm_head import action_logprobs
from agentrl.errors import PolicyError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Ids = NDArray[np.int64]
Packing = Literal["rows", "trie"]


@dataclass(frozen=True, slots=True)
class Pack:
    """Rows of one forward pass, as one sequence of T tokens without padding, with n actions. A
    token shared by several rows is present once, a shared action once per row."""

    tokens: Tensor  # int64 [T], distinct tokens, depth first; below 0: see `inputs`
    positions: Tensor  # int64 [T], depth in the branch
    end: Tensor  # int64 [T], key j is visible to query i iff j <= i < end[j]
    states: Tensor  # int64 [n], the packed token whose hidden state predicts each action
    actions: Tensor  # int64 [n], the predicted token
    temperature: Tensor  # float32 [n]
    index: Tensor  # int64 [n], index in the batch's token level


def pack_rows(
    rows: Sequence[TokenRow], packing: Packing, token_budget: int, unit: Tensor | None = None
) -> list[Pack]:
    """Pack every row once, with at most `token_budget` tokens per pack unless one unit is longer:
    few packs for `rows`, the fewest duplicate tokens for `trie`.

    `Pack.index` refers to the rows' actions concatenated in row order, as in a batch. unit: int64
    [R], ids of rows that must be in one pack; default: each row is a unit."""
    sequences = [row.tokens[: int(row.actions[-1])].numpy() for row in rows]
    if packing == "trie":
        order, shared = depth_first(sequences)
    else:
        order = sorted(range(len(rows)), key=lambda i: len(sequences[i]))
        shared = np.zeros(len(rows), np.int64)
    ids = np.arange(len(rows)) if unit is None or not len(unit) else unit.numpy()
    order, shared = _unit_by_unit(order, shared, ids, sequences, packing)
    lengths = np.array([len(sequences[i]) for i in order], np.int64)
    first = np.flatnonzero(np.diff(ids[order], prepend=-1))  # first row of each unit in `order`
    new = np.add.reduceat(lengths - shared, first) if len(first) else lengths
    bounds = np.append(first, len(order))
    offsets = np.cumsum(np.array([0, *(len(row.actions) for row in rows)], np.int64))
    packs = []
    ranges = token_budget_ranges(new + shared[first], shared[first], token_budget)
    for start, stop in ((bounds[a], bounds[b]) for a, b in ranges):
        chosen = order[start:stop]
        forest = build_forest([sequences[i] for i in chosen], shared[start:stop])
        own = [rows[i] for i in chosen]
        before = [row.actions.numpy() - 1 for row in own]
        states = [path[places] for path, places in zip(forest.paths, before, strict=True)]
        index = [np.arange(offsets[i], offsets[i + 1]) for i in chosen]
        packs.append(
            Pack(
                tokens=torch.from_numpy(forest.tokens),
                positions=torch.from_numpy(forest.depth),
                end=torch.from_numpy(forest.end),
                states=torch.from_numpy(np.concatenate(states)),
                actions=torch.cat([row.tokens[row.actions] for row in own]),
                temperature=torch.cat([row.temperature for row in own]),
                index=torch.from_numpy(np.concatenate(index)),
            )
        )
    return packs


def hidden_states(model: PreTrainedModel, pack: Pack) -> Tensor:
    """The last hidden state before each action, [n, H], on the model's device and differentiable in
    its weights.

    Installs the attention function of `attention`, which without a pack is SDPA; for a model that
    does not support it every branch is computed separately. Raises PolicyError for a row that is
    longer than the model's context."""
    limit, longest = attention.context_length(model), int(pack.positions.max()) + 1
    if limit and longest > limit:
        raise PolicyError(
            f"a row of {longest} tokens before its last action is longer than the context of model "
            f"type {model.config.model_type!r}, {limit} tokens: serve it with that context limit"
        )
    if incompatibility(model):
        return _padded_hidden_states(model, pack)
    attention.install(model)
    if model.device.type == "cuda":
        pack = whole_blocks(pack)
    decoder, read = _inputs(model, pack)
    hidden_TH: Tensor = decoder(
        **read,
        attention_mask=attention.UNUSED,
        use_cache=False,
        plan=attention.TreePlan(pack.end, pack.positions),
    ).last_hidden_state[0]
    return hidden_TH[pack.states.to(model.device)]


def whole_blocks(pack: Pack) -> Pack:
    """The pack with branches of one unused token each, up to whole blocks of a GPU's kernel: see
    `attention.kernel_options`."""
    size, block = len(pack.end), attention.FLEX_BLOCK
    new = torch.arange(size, -(-size // block) * block)
    unused = torch.zeros_like(new)
    return replace(
        pack,
        tokens=torch.cat((pack.tokens, unused)),
        positions=torch.cat((pack.positions, unused)),
        end=torch.cat((pack.end, new + 1)),
    )


def _inputs(model: PreTrainedModel, pack: Pack) -> tuple[Module, dict[str, Any]]:
    """The decoder of a model, and a pack's tokens and positions for it."""
    if inputs := inputs_of(model):
        return inputs.of_pack(pack)
    if int(pack.tokens.min()) < 0:
        raise PolicyError(
            f"model type {model.config.model_type!r} reads text alone, and the calls have images; "
            "choose a model that reads images, such as the policy's"
        )
    ids, places = (x[None].to(model.device) for x in (pack.tokens, pack.positions))
    return model.base_model, {"input_ids": ids, "position_ids": places}


def forward_logprobs(model: PreTrainedModel, pack: Pack) -> Tensor:
    """log pi(action | all tokens before it in its row) at each action's temperature, [n].

    float32 (float64 for a float64 model), on the model's device, differentiable in its weights."""
    logprobs_n, _ = action_logprobs(
        model.get_output_embeddings(),
        hidden_states(model, pack),
        pack.actions.to(model.device),
        pack.temperature.to(model.device),
    )
    return logprobs_n


def incompatibility(model: PreTrainedModel) -> str | None:
    """`attention.incompatibility`, which also checks the device of the model."""
    if model.device.type not in ("cpu", "cuda"):
        return f"is on device {model.device.type!r}, for which there is no tree attention"
    return attention.incompatibility(model)


def _padded_hidden_states(model: PreTrainedModel, pack: Pack) -> Tensor:
    """`hidden_states` of branches in right-padded batches. Padding follows all real tokens and the
    model is causal, so it has no effect, for recurrent decoders either."""
    number = torch.arange(len(pack.end))
    leaves = (pack.end == number + 1).nonzero().flatten()
    # The first leaf at or after a token is in the token's subtree.
    branch = torch.searchsorted(leaves, pack.states)
    parts, order = [], []
    for micro in _micro_batches((pack.positions[leaves] + 1).tolist(), len(pack.tokens)):
        ends = leaves[micro][:, None]
        paths = [pack.tokens[path] for path in (number <= ends) & (pack.end > ends)]
        tokens_BL = pad_sequence(paths, batch_first=True).to(model.device)
        hidden_BLH = model.base_model(input_ids=tokens_BL, use_cache=False).last_hidden_state
        row, at = (branch == torch.tensor(micro)[:, None]).nonzero(as_tuple=True)
        parts.append(
            hidden_BLH[row.to(model.device), pack.positions[pack.states[at]].to(model.device)]
        )
        order.append(at)
    return torch.cat(parts)[torch.cat(order).argsort().to(model.device)]


def _micro_batches(lengths: Sequence[int], token_budget: int) -> Iterator[list[int]]:
    """Yield lists of indices of sequences of similar length. Each list, padded to its longest, has
    at most `token_budget` tokens, or a single sequence."""
    micro: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if micro and (len(micro) + 1) * lengths[index] > token_budget:
            yield micro
            micro = []
        micro.append(index)
    if micro:
        yield micro


def check_model(model: PreTrainedModel) -> None:
    """Raise PolicyError if `forward_logprobs` would not return the log-probs of the model."""
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
            "(soft-capping or scaling follows the head); choose a model without that"
        )


def supported_packing(model: PreTrainedModel, packing: Packing) -> Packing:
    """`packing`, or "rows" with a warning if the model does not support it."""
    reason = incompatibility(model)
    if reason and packing != "rows":
        warnings.warn(
            f"learner.packing = {packing!r}: model type {model.config.model_type!r} {reason}, so "
            "its branches are computed one by one, padded to the longest",
            stacklevel=3,
        )
        return "rows"
    return packing


@dataclass(frozen=True, slots=True)
class Forest:
    """Trees of token sequences: nodes in depth-first order, and the path of each sequence."""

    tokens: Ids  # [T]
    depth: Ids  # [T], roots: 0
    end: Ids  # [T], past the last node of the subtree
    paths: list[Ids]  # node of each token of each sequence


def depth_first(sequences: Sequence[Ids]) -> tuple[list[int], Ids]:
    """An order in which sequences with a common prefix are adjacent, and the length of the prefix
    that each shares with the one before it (the first: 0), int64 [n]."""
    keys = [sequence.tobytes() for sequence in sequences]  # any total order of tokens will do
    order = sorted(range(len(keys)), key=keys.__getitem__)
    shared = np.zeros(len(order), np.int64)
    for k in range(1, len(order)):
        shared[k] = common_prefix(sequences[order[k - 1]], sequences[order[k]])
    return order, shared


def _unit_by_unit(
    order: list[int], shared: Ids, ids: Ids, sequences: Sequence[Ids], packing: Packing
) -> tuple[list[int], Ids]:
    """Reorder with the rows of each unit adjacent; returns the order and shared prefix lengths."""
    rank: dict[int, int] = {}
    for i in order:
        rank.setdefault(int(ids[i]), len(rank))
    grouped = sorted(order, key=lambda i: rank[int(ids[i])])
    if grouped == order or packing == "rows":
        return grouped, shared
    prefixes = [common_prefix(sequences[a], sequences[b]) for a, b in pairwise(grouped)]
    return grouped, np.array([0, *prefixes], np.int64)


def common_prefix(a: Ids, b: Ids) -> int:
    """Length of the common prefix of two sequences."""
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size


def token_budget_ranges(lengths: Ids, shared: Ids, budget: int) -> list[tuple[int, int]]:
    """Split sequences into ranges [start, stop) of at most `budget` distinct tokens, or of a single
    sequence, with the fewest duplicate tokens, and among these the fewest ranges.

    A range duplicates only the prefix that its first sequence shares with the one before it, so the
    cost of a cut depends only on its position: shortest path over positions, O(n) numpy calls."""
    n = len(lengths)
    before = np.concatenate(([0], np.cumsum(lengths - shared)))  # new tokens before each position
    offset = before[:-1] - shared  # tokens of range [i, j) = before[j] - offset[i]
    cost = np.zeros(n + 1, np.int64)  # minimal cost of splitting the first j sequences ...
    start = np.zeros(n + 1, np.int64)  # ... and the start of the last range
    penalty = shared * (n + 1) + 1  # fewest tokens first, then fewest ranges
    first = 0  # start of the widest range that ends at j; never moves back
    for j in range(1, n + 1):
        while first < j - 1 and before[j] - offset[first] > budget:
            first += 1
        candidates = cost[first:j] + penalty[first:j]
        start[j] = first + int(candidates.argmin())
        cost[j] = candidates[start[j] - first]
    ranges, stop = [], n
    while stop:
        ranges.append((int(start[stop]), stop))
        stop = ranges[-1][0]
    return ranges[::-1]


def build_forest(sequences: Sequence[Ids], shared: Ids) -> Forest:
    """Build the forest of sequences in depth-first order. shared[k]: length of the prefix that
    sequence k shares with the one before it (0: a new tree); ignored for the first sequence."""
    shared = np.where(np.arange(len(shared)), shared, 0)
    size = sum(map(len, sequences)) - int(shared.sum())
    tokens, depth = np.empty(size, np.int64), np.empty(size, np.int64)
    end = np.full(size, size, np.int64)
    paths: list[Ids] = []
    path, first = np.empty(0, np.int64), 0
    for sequence, k in zip(sequences, shared.tolist(), strict=True):
        stop = first + len(sequence) - k
        end[path[k:]] = first  # the rest of the previous path ends here
        tokens[first:stop], depth[first:stop] = sequence[k:], np.arange(k, len(sequence))
        path = np.concatenate((path[:k], np.arange(first, stop)))
        paths.append(path)
        first = stop
    return Forest(tokens, depth, end, paths)
