"""The data of one optimizer batch: flat levels with parent links, no padding.

    token -> transition (a call) -> row -> rollout -> group

    observation -> row

A token is an *action* token (sampled by the policy). Prompts, tool results and template tokens
are context: they appear in `TokenRow.tokens`, never in the token level. An observation is a token
of what a tool or the environment answered to an action of the policy; it has a level of its own, so
nothing that is computed of tokens (ratios, KL, credit, averages) can see it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

_unknown = partial(torch.empty, 0, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One sequence for a forward pass: a call, or several calls merged by exact token prefix."""

    tokens: Tensor  # int64 [L], context and actions in order
    actions: Tensor  # int64 [A], positions of action tokens in `tokens`, ascending, each >= 1
    logprobs: Tensor  # float32 [A], behaviour log-probs at the sampling temperature
    temperature: Tensor  # float32 [A], > 0
    transition: Tensor  # int64 [A], index into Batch.transitions
    # int64 [O], positions of observations in `tokens`, ascending, each >= 1 and before the last
    # action.
    observed: Tensor = field(default_factory=_unknown)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows and level tables of one optimizer batch.

    N action tokens, O observations, S calls, R rows, U rollouts, K roles, M groups. Token columns
    concatenate the rows' action tokens in row order, columns of observations their observations.
    The calls of a rollout are contiguous and in call order. An unknown column is empty; comparing
    by it is an error.
    """

    rows: list[TokenRow]
    token_row: Tensor  # int64 [N]
    token_transition: Tensor  # int64 [N]
    sampler_logprobs: Tensor  # float32 [N], log-probs of the sampler
    transition_rollout: Tensor  # int64 [S]
    transition_role: Tensor  # int64 [S], index into `roles`
    row_rollout: Tensor  # int64 [R]
    rollout_group: Tensor  # int64 [U]
    # By reward reference (see merge.py), float64 at the level of its scope: rollouts [U], roles
    # of rollouts [U * K] or calls [S]; NaN = missing.
    rewards: dict[str, Tensor]
    roles: list[str]
    groups: list[str]  # ids [M]
    rollouts: list[str]  # ids [U]
    transitions: list[str]  # ids [S]
    # The number of the training step that trains it. Outside of a training step: of the step for
    # which its last group was planned.
    step: int = 0
    transition_state: Tensor = field(default_factory=_unknown)  # int64 [S], id of its state
    transition_action: Tensor = field(default_factory=_unknown)  # int64 [S], id of its answer
    transition_prompt: Tensor = field(default_factory=_unknown)  # int64 [S], id of prompt tokens
    # int64 [S], id of prompt and completion tokens: a node in the tree of rollouts.
    transition_node: Tensor = field(default_factory=_unknown)
    # bool [S]: replayed from another rollout's record. It has no tokens here: it is trained there.
    transition_repeats: Tensor = field(default_factory=_unknown)
    transition_truncated: Tensor = field(default_factory=_unknown)  # bool [S], by a token limit
    rollout_greedy: Tensor = field(default_factory=_unknown)  # bool [U], all at temperature 0
    values: Tensor = field(default_factory=_unknown)  # float64 [N], critic's, before each token
    reference: Tensor = field(default_factory=_unknown)  # float64 [N], reference log-probs
    # float64 [N], log-prob of each token given the privileged text, minus its log-prob without it;
    # NaN: there is no privileged text.
    told: Tensor = field(default_factory=_unknown)
    # int64 [N, K], tokens whose log-probs psi reads, the sampled one first.
    topk_tokens: Tensor = field(default_factory=_unknown)
    # int64 [R], ids: psi needs the log-probs of all rows of one id at once. Empty: rows are
    # independent.
    row_unit: Tensor = field(default_factory=_unknown)
    # Values of each `RememberedColumn`, by its name (state.py): float64, one per unit of its level.
    remembered: Mapping[str, Tensor] = field(default_factory=dict)
    # int64 [N], version of the policy that sampled each token; -1: unknown.
    token_version: Tensor = field(default_factory=_unknown)
    observation_row: Tensor = field(default_factory=_unknown)  # int64 [O]
    observation_source: Tensor = field(default_factory=_unknown)  # int64 [O], index into `sources`
    sources: list[str] = field(default_factory=list)  # names of tools, or roles of messages

    @property
    def n_tokens(self) -> int:
        return int(self.token_row.numel())

    @property
    def token_rollout(self) -> Tensor:
        return self.row_rollout[self.token_row]

    @property
    def token_group(self) -> Tensor:
        return self.rollout_group[self.token_rollout]

    def lag(self, version: int) -> Tensor:
        """Number of updates from the version of each token to `version`, int64 [N]; 0 if its
        version is unknown."""
        return torch.where(self.token_version < 0, 0, version - self.token_version)

    def too_old(self, oldest: int) -> Tensor:
        """Tokens of versions before `oldest`, bool [N]; not those of an unknown version."""
        return self.lag(oldest) > 0

    @property
    def transition_turn(self) -> Tensor:
        """Number of earlier calls in the rollout, int64 [S]."""
        position = torch.arange(len(self.transitions))
        first = torch.full((len(self.rollouts),), len(self.transitions))
        first = first.scatter_reduce(0, self.transition_rollout, position, "amin")
        return position - first[self.transition_rollout]

    def cut(self, rows: Tensor) -> tuple[Batch, Tensor]:
        """The batch with these rows only (int64 [r], ascending), and the indices int64 [n] of its
        tokens in this batch. The levels above rows keep all their units."""
        tokens = torch.isin(self.token_row, rows).nonzero().flatten()
        columns = (
            "sampler_logprobs",
            "token_transition",
            "token_version",
            "values",
            "reference",
            "told",
            "topk_tokens",
        )
        token_columns = {name: x for name in columns if len(x := getattr(self, name))}
        observations = torch.isin(self.observation_row, rows)
        batch = replace(
            self,
            rows=[self.rows[row] for row in rows.tolist()],
            token_row=torch.searchsorted(rows, self.token_row[tokens]),
            row_rollout=self.row_rollout[rows],
            row_unit=self.row_unit[rows] if len(self.row_unit) else self.row_unit,
            observation_row=torch.searchsorted(rows, self.observation_row[observations]),
            observation_source=self.observation_source[observations],
            **{name: x[tokens] for name, x in token_columns.items()},
        )
        return batch, tokens
