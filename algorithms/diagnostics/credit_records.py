"""What a step made of each call, in the form in which the store keeps it with the step.

Gates are those of the first optimizer step that a token was in, where later ones have moved away
from the sampler on purpose. All numbers are kept as float32, once where a call's tokens agree.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from agentrl.algorithms.credit.core import CriticValues, GroupRelative, TokenKLPenalty, parts_of
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import owner, reduce_by, units
from agentrl.algorithms.data.state import RememberedColumn
from agentrl.algorithms.objective import core as objective
from agentrl.algorithms.objective.core import Algo, Terms
from agentrl.types import POLICY, Credit

COLUMNS = ("advantage", "gate", "weight", "psi")


@dataclass(slots=True)
class Ledger:
    """The credit of one step while it is made, by call."""

    policy: str = POLICY
    compared: dict[str, array[float]] = field(default_factory=dict)
    credits: dict[str, Credit] = field(default_factory=dict)

    def open(self, algo: Algo, batch: Batch) -> None:
        """Begin a step. `batch` is the whole of it: what is compared is computed on that."""
        self.compared = dict(zip(calls(batch), spans(batch, baselines(algo, batch)), strict=True))
        self.credits = {}

    def record(self, algo: Algo, part: Batch, terms: Terms, logprobs: Tensor) -> None:
        """One optimizer step, on the whole or a part. logprobs: of the policy before it, [N] or of
        the symbols [N, K]."""
        made = calls(part)
        if all(call in self.credits for call in made):
            return  # in an epoch after the first
        index = torch.arange(part.n_tokens)
        columns = (
            torch.where(terms.weight > 0, terms.advantage, torch.nan),
            objective.gate_product(algo, terms, logprobs),
            terms.weight,
            objective.psi(algo, terms, logprobs.double(), index),
        )
        numbers = zip(made, *(spans(part, [x]) for x in columns), strict=True)
        for call, advantage, gate, weight, psi in numbers:
            if call not in self.credits:
                self.credits[call] = Credit(
                    transition=call,
                    policy=self.policy,
                    advantage=advantage,
                    baseline=self.compared[call],
                    gate=gate,
                    weight=weight,
                    psi=psi,
                )

    def take(self) -> list[Credit]:
        """What the step made, for its commit."""
        return list(self.credits.values())


def calls(batch: Batch) -> list[str]:
    """Ids of the calls that have tokens, in token order."""
    found = torch.unique_consecutive(batch.token_transition).tolist()
    return [batch.transitions[call] for call in found]


def compares(part: object) -> bool:
    """Whether a record of a credit compares with something, says what to compare with, or takes
    something off."""
    return isinstance(part, CriticValues | RememberedColumn | TokenKLPenalty) or (
        isinstance(part, GroupRelative) and part.base != "none"
    )


def baselines(algo: Algo, batch: Batch) -> list[Tensor]:
    """What rewards are compared with, float64 [N] each: of every comparison of the credit, of every
    value that is remembered, of the critic, and the price of leaving the reference, in the order in
    which the record names them."""
    found = []
    for part in parts_of(algo.credit):
        if isinstance(part, GroupRelative) and compares(part):
            found.append(part.standard(batch)[1].baseline[owner(batch, part.level)])
        elif isinstance(part, CriticValues | TokenKLPenalty):
            found.append(part(batch))
        elif isinstance(part, RememberedColumn):
            found.append(part(batch)[owner(batch, part.level)])
    return found


def spans(batch: Batch, columns: Sequence[Tensor]) -> Iterator[array[float]]:
    """The numbers of each call in token order, float32: of one column after the other, each in full
    or, where it is the same for all tokens of the call in every column, once."""
    _, call, sizes = torch.unique_consecutive(
        batch.token_transition, return_inverse=True, return_counts=True
    )
    ends = sizes.cumsum(0)
    flat = [x.detach().cpu().float() for x in columns]
    changes = torch.zeros(sizes.numel(), dtype=torch.float64)
    for x in flat:
        differs = (x[1:] != x[:-1]) & ~(x[1:].isnan() & x[:-1].isnan())
        changes += reduce_by(differs & (call[1:] == call[:-1]), call[1:], sizes.numel())
    stops = torch.where(changes == 0, ends - sizes + 1, ends)
    whole = [array("f", x.numpy().tobytes()) for x in flat]  # slices of it are cheap
    for first, stop in zip((ends - sizes).tolist(), stops.tolist(), strict=True):
        made = array("f")
        for numbers in whole:
            made += numbers[first:stop]
        yield made


@dataclass(frozen=True, slots=True)
class Stored:
    """What the store has of a batch, float64 [N] per column; NaN = missing or not stored."""

    known: Tensor  # bool [N]: of calls that the step stored
    columns: dict[str, Tensor]
    compared: list[Tensor]


def read(algo: Algo, batch: Batch, credits: Mapping[str, Credit]) -> Stored:
    """Credit by transition, put back at the tokens of a batch. `compared` is empty where what was
    stored is not of as many comparisons as the algorithm makes."""
    kinds = sum(map(compares, parts_of(algo.credit)))
    n = batch.n_tokens
    known = torch.zeros(n, dtype=torch.bool)
    columns = {name: torch.full((n,), torch.nan, dtype=torch.float64) for name in COLUMNS}
    compared = [torch.full((n,), torch.nan, dtype=torch.float64) for _ in range(kinds)]
    for call in torch.unique(batch.token_transition).tolist():
        credit = credits.get(batch.transitions[call])
        if credit is None:
            continue
        at = batch.token_transition == call
        known |= at
        for name in COLUMNS:
            columns[name][at] = torch.tensor(getattr(credit, name), dtype=torch.float64)
        baseline = torch.tensor(credit.baseline, dtype=torch.float64)
        if kinds and baseline.numel() in (kinds, kinds * int(at.sum())):
            for x, part in zip(compared, baseline.view(kinds, -1), strict=True):
                x[at] = part
    return Stored(known, columns, compared)


def replayed(algo: Algo, batch: Batch, stored: Stored) -> Batch:
    """The batch with `memory`, `values` and `reference` as they were, at the units that have
    tokens; NaN elsewhere. Of a step that stored nothing, the reference is the sampler."""
    memory: dict[str, Tensor] = {}
    values, reference = batch.values, batch.behaviour.double()
    parts = filter(compares, parts_of(algo.credit))
    for part, x in zip(parts, stored.compared, strict=True):
        if isinstance(part, CriticValues):
            values = x
        elif isinstance(part, TokenKLPenalty) and stored.known.any():
            reference = batch.behaviour.double() - x / part.beta
        elif isinstance(part, RememberedColumn):
            at = owner(batch, part.level)
            size = units(batch, part.level, "all").numel()
            memory[part.name] = torch.full((size,), torch.nan, dtype=x.dtype)
            memory[part.name][at] = x
    return replace(batch, memory=memory, values=values, reference=reference)
